"""Decides which paths the proxy serves itself, and to which URL it relays requests for other paths."""

import re
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from starlette.types import Scope

from compaction_proxy.core.errors import RequestRefusedError

_BACKSLASH = re.compile(rb"\\|%5c", re.IGNORECASE)
_DOTS = re.compile(rb"(?:\.|%2e){2}", re.IGNORECASE)
# The number of levels by which each of these segments changes the depth of a path. Every other segment adds
# one level.
_DEPTHS = {"": 0, ".": 0, "..": -1}
_DEPLOYMENT = re.compile(rb"/deployments/([^/]+)/chat/completions\Z")

# The proxy serves `COMPACT_PATH` and `MCP_PATH` itself. It checks requests for these paths in the same way as
# relayed requests. For example, it checks their client keys.
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
# Path of the dashboard. A browser that visits the start page is redirected to it (`is_start_page_visit`).
DASHBOARD_PATH = "/ui"
# The most results that each `lru_cache` in this module keeps. The number is small, because a path may have
# many kilobytes.
MAX_PATHS = 64


@lru_cache(maxsize=MAX_PATHS)
def find_deployment(raw_path: bytes) -> str | None:
    """Returns the model that an Azure path names (`/deployments/MODEL/…`), or None for any other path."""
    match = _DEPLOYMENT.search(raw_path)
    return unquote(match[1].decode("latin-1")) if match else None


def replace_deployment(raw_path: bytes, model: str) -> bytes:
    """Returns an Azure path with `model` in place of its model. Any other path is returned unchanged."""
    match = _DEPLOYMENT.search(raw_path)
    if match is None:
        return raw_path
    return raw_path[: match.start(1)] + quote(model, safe="").encode() + raw_path[match.end(1) :]


def _is_outside_base(path: bytes) -> bool:
    """Returns whether a path leads out of the base URL if the upstream resolves its `..` segments.

    Some servers ignore what follows a `;` in a segment, so `..;x` counts as `..`.
    """
    depth = 0
    for segment in unquote(path.decode("latin-1")).split("/"):
        depth += _DEPTHS.get(segment.partition(";")[0], 1)
        if depth < 0:
            return True
    return False


@lru_cache(maxsize=MAX_PATHS)
def is_own_path(path: str, base_path: str = "") -> bool:
    """Returns whether the proxy serves a path itself and never relays it.

    Args:
        path: The decoded path. The routes of the proxy's own application use this form, too.
        base_path: The path with which all of the proxy's own paths begin, such as `/compaction`; empty for
            the root.
    """
    if base_path:
        if not path.startswith(base_path):
            return False
        path = path[len(base_path) :]
    return path in OWN_PATHS or (path[:1] == "/" and path[1:].partition("/")[0] in OWN_TREES)


def is_start_page_visit(scope: Scope, base_path: str = "") -> bool:
    """Returns whether a request is that of a browser for the start page.

    The start page is the path `/`, or `base_path` with or without a slash at its end. A browser asks for it
    with the method GET, and its header field `Accept` names `text/html`. SDKs and command-line tools do not
    name this media type, so the proxy relays their requests for the same path.
    """
    if scope["method"] != "GET" or scope["path"] not in (base_path, f"{base_path}/"):
        return False
    accepted = b",".join([value for name, value in scope["headers"] if name == b"accept"])
    return any(part.partition(b";")[0].strip().lower() == b"text/html" for part in accepted.split(b","))


def _split_base_url(base_url: str) -> tuple[str, bytes]:
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/").encode()


@lru_cache(maxsize=MAX_PATHS)
def join_upstream_url(base_url: str, raw_path: bytes, query: bytes) -> tuple[str, bytes]:
    """Returns where a client's request goes: the upstream's origin, and the path with the query.

    The client's path is appended to the path of the base URL. If the base URL ends in the segment `v1`, and
    the client's path begins with this segment, the result contains it only once. Nothing is decoded or
    encoded: `%2F` stays `%2F`.

    Args:
        base_url: `upstream.base_url`; a trailing slash makes no difference.
        raw_path: The path as the client wrote it.
        query: The query as the client wrote it, without `?`; empty for none.

    Raises:
        RequestRefusedError: With status 400 if the path would lead out of the base URL, or contains a
            backslash, which some servers treat as a slash.
    """
    if _BACKSLASH.search(raw_path) is not None:
        raise RequestRefusedError(400, "The path contains a backslash.", "invalid_path")
    origin, prefix = _split_base_url(base_url)
    if prefix.endswith(b"/v1") and (raw_path == b"/v1" or raw_path.startswith(b"/v1/")):
        raw_path = raw_path[3:]
    if raw_path[:1] not in {b"/", b""} or (_DOTS.search(raw_path) is not None and _is_outside_base(raw_path)):
        raise RequestRefusedError(400, "The path is outside the base URL of the upstream.", "invalid_path")
    target = prefix + raw_path or b"/"
    return origin, target + b"?" + query if query else target
