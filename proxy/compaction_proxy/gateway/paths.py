"""Which requests are whose, and where they go. Pure; DESIGN.md §5.1."""

import re
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from compaction_proxy.core.errors import RequestRefusedError

_DOTS = re.compile(rb"(?:\.|%2e){2}", re.IGNORECASE)
# What a segment adds to the depth of a path, if not one.
_DEPTHS = {"": 0, ".": 0, "..": -1}
_DEPLOYMENT = re.compile(rb"/deployments/([^/]+)/chat/completions\Z")

# Ours, but for whom requests are relayed.
COMPACT_PATH = "/v1/compact"
MCP_PATH = "/mcp"
OWN_PATHS = frozenset(
    {
        "/livez",
        "/readyz",
        "/healthz",
        "/health",
        "/health/liveliness",
        "/health/liveness",
        "/health/readiness",
        "/metrics",
        COMPACT_PATH,
    }
)
OWN_TREES = frozenset({"admin", "ui", "mcp"})


def find_deployment(raw_path: bytes) -> str | None:
    """The model that an Azure path names, or None."""
    found = _DEPLOYMENT.search(raw_path)
    return unquote(found[1].decode("latin-1")) if found else None


def replace_deployment(raw_path: bytes, model: str) -> bytes:
    """The path with another model where Azure names it; any other path as it is."""
    found = _DEPLOYMENT.search(raw_path)
    if found is None:
        return raw_path
    return raw_path[: found.start(1)] + quote(model, safe="").encode() + raw_path[found.end(1) :]


def _is_outside_base(path: bytes) -> bool:
    """Whether a path, once dots are resolved as the upstream may, is none below where it is appended to."""
    depth = 0
    for segment in unquote(path.decode("latin-1")).split("/"):
        depth += _DEPTHS.get(segment, 1)
        if depth < 0:
            return True
    return False


def is_own_path(path: str, base_path: str = "") -> bool:
    """Whether a path is served by us and never relayed.

    Args:
        path: The decoded path, because that is what our own routes are matched by.
        base_path: Where ours live instead of the root, such as `/compaction`; empty for the root.
    """
    if base_path:
        if not path.startswith(base_path):
            return False
        path = path[len(base_path) :]
    return path in OWN_PATHS or (path[:1] == "/" and path[1:].partition("/")[0] in OWN_TREES)


@lru_cache(maxsize=64)
def _split_base_url(base_url: str) -> tuple[str, bytes]:
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/").encode()


def join_upstream_url(base_url: str, raw_path: bytes, query: bytes) -> tuple[str, bytes]:
    """Where a client's request goes: the upstream's origin, and the request target.

    The client's path is appended to the base's. If the base ends in a segment `v1` and the path starts with
    one, it is taken once. Nothing is decoded or encoded: `%2F` stays `%2F`.

    Args:
        base_url: `upstream.base_url`; a trailing slash makes no difference.
        raw_path: The path as the client wrote it.
        query: The query as the client wrote it, without `?`; empty for none.

    Raises:
        RequestRefused: 400, the path would leave the base.
    """
    origin, prefix = _split_base_url(base_url)
    if prefix.endswith(b"/v1") and (raw_path == b"/v1" or raw_path.startswith(b"/v1/")):
        raw_path = raw_path[3:]
    if raw_path[:1] not in {b"/", b""} or (_DOTS.search(raw_path) is not None and _is_outside_base(raw_path)):
        raise RequestRefusedError(400, "The path leaves what the proxy relays to.", "invalid_path")
    target = prefix + raw_path or b"/"
    return origin, target + b"?" + query if query else target
