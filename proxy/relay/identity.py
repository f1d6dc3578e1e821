"""Who is asking, and which conversation it is: the ids that every store key is made of.

Identity only locates: what is stored under an id is applied only to messages whose digests match, so a wrong
or shared id costs a miss. No id shows the credential or the client's own id that it was made from. The rules
are DESIGN.md §5.2; a change here orphans everything stored.
"""

import hmac
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

Headers = Sequence[tuple[bytes, bytes]]

CREDENTIAL_HEADERS: Final = frozenset({"authorization", "api-key", "x-api-key", "x-goog-api-key"})

# Agents that run under one session id each hold a conversation of their own.
_LANES: Final = {"x-claude-code-session-id": "x-claude-code-agent-id"}
_MAX_ID_CHARACTERS: Final = 256
_DIGEST_CHARACTERS: Final = 24
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_VERSION: Final = b"\x01"


def _keyed(secret: bytes, *fields: bytes) -> str:
    """HMAC-SHA-256 over length-prefixed fields, as 64 hex digits."""
    prefixed = (len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(secret, _VERSION + b"".join(prefixed), "sha256").hex()


def origin(url: str) -> str:
    """Scheme, host and port of a URL, such as `https://api.openai.com:443`.

    Raises:
        ValueError: It is no absolute URL of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"not an absolute http or https URL: {parts.scheme}://{parts.hostname or ''}")
    port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def tenant(headers: Headers, secret: bytes, origin: str, mode: str) -> str:
    """Whose request it is, as 64 hex digits.

    Args:
        headers: The request's, as sent.
        secret: `server.secret`; replicas that share a store share it.
        origin: The upstream's, so that equal keys of two providers stay apart.
        mode: `credential`, `header:NAME` or `none` (`session.tenant`). Where nothing is sent that could tell
            tenants apart, all are one: anonymous.
    """
    if mode == "none":
        names: frozenset[str] = frozenset()
    elif mode.startswith("header:"):
        names = frozenset({mode.removeprefix("header:").strip().lower()})
    else:
        names = CREDENTIAL_HEADERS
    wanted = frozenset(name.encode("latin-1") for name in names)
    # Sorted, because the order of different headers means nothing (RFC 9110 §5.3).
    found = sorted((key.lower(), value) for key, value in headers if key.lower() in wanted and value.strip())
    kind = mode.partition(":")[0].encode() if found else b"anonymous"
    fields = (field for pair in found for field in pair)
    return _keyed(secret, b"tenant", kind, origin.encode(), *fields)


def _valid(value: bytes) -> bytes | None:
    """An id of 1 to 256 printable characters, stripped; None if it is none."""
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = value.decode("latin-1").strip()
    valid = 1 <= len(text) <= _MAX_ID_CHARACTERS and text.isprintable()
    return text.encode("utf-8") if valid else None


def _first_valid(headers: Headers, name: str) -> bytes | None:
    wanted = name.encode("latin-1")
    values = (_valid(value) for key, value in headers if key.lower() == wanted)
    return next(filter(None, values), None)


def named(secret: bytes, tenant: str, kind: str, *values: bytes) -> str:
    """The conversation that a source of ids gives `values`, as `c_` and 24 hex digits.

    `kind` is the source, such as a header's name: equal values of two sources are two conversations.
    """
    digest = _keyed(secret, b"conversation", tenant.encode(), kind.encode(), *values)
    return "c_" + digest[:_DIGEST_CHARACTERS]


def conversation(headers: Headers, names: Sequence[str], secret: bytes, tenant: str) -> str | None:
    """The conversation that the headers name: the first of `names` that holds a valid id decides.

    A valid id has 1 to 256 printable characters, white space around it aside. None if there is none.
    """
    for name in map(str.lower, names):
        value = _first_valid(headers, name)
        if value is not None:
            lane = _first_valid(headers, _LANES[name]) if name in _LANES else None
            return named(secret, tenant, name, value, *filter(None, [lane]))
    return None


def minted(secret: bytes, tenant: str, prefix_digest: bytes) -> str:
    """The id of a conversation that has none of its own, from the prefix with which it was first stored."""
    digest = _keyed(secret, b"minted", tenant.encode(), prefix_digest)
    return "c_" + digest[:_DIGEST_CHARACTERS]
