"""Which header fields go on, and which end here. Pure; fields are (name, value) pairs in their order.

Names from the server are in lower case, as ASGI has them; names from an upstream may be in any case.
"""

from collections.abc import Iterable, Sequence

from compaction_proxy.core.errors import RequestRefusedError

# Control characters but the tab, which no field may hold (RFC 9110 §5.5).
_UNSENDABLE = bytes(code for code in range(128) if (code < 32 and code != 9) or code == 127)

Headers = list[tuple[bytes, bytes]]

HOP_HEADER = b"x-compaction-hop"
OWN_PREFIX = b"x-compaction"
EVENT_STREAM = b"text/event-stream"
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key"})

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_SENT_ON = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_SENT_ON_WITH_KEY = _NOT_SENT_ON | CREDENTIALS
_NOT_SENT_BACK = HOP_BY_HOP | {b"server", b"date"}
# Asks whoever stands before us to hand on what comes of a stream at once.
_UNBUFFERED = (b"x-accel-buffering", b"no")
# What `connection` says of nearly every request, and what names no field.
_NAMES_NOTHING = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close", b"upgrade", b""})


def extract_key(credential: bytes) -> bytes:
    """The key in a credential's value, which may have `Bearer` before it."""
    scheme, _, key = credential.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else credential.strip()


def get_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a field, or None. `name` is in lower case."""
    for key, held in headers:
        if key == name or (len(key) == len(name) and key.lower() == name):
            return held
    return None


def drop_field(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> Headers:
    """Returns the fields but for those of this name, which is in lower case, as theirs are."""
    return [field for field in headers if field[0] != name]


def build_header_map(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The first value of every field, for whoever asks for several; names are in lower case already."""
    first = dict(headers)
    return first if len(first) == len(headers) else dict(reversed(headers))


def get_content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The declared length of a body in bytes; None if there is none, or if it is no number."""
    return parse_content_length(get_header(headers, b"content-length"))


def parse_content_length(declared: bytes | None) -> int | None:
    """What a `content-length` says, in bytes; None if there is none, or if it is no number."""
    return int(declared) if declared is not None and declared.isdigit() else None


def _parse_connection_options(values: Iterable[bytes]) -> frozenset[bytes]:
    """Fields that the sender declared to be about this connection only (RFC 9110 §7.6.1)."""
    return frozenset(token.strip().lower() for held in values for token in held.split(b","))


def _is_sendable(values: Iterable[bytes]) -> bool:
    """Whether no value holds what no field may hold: one look at all of them together."""
    joined = b"".join(values)
    return len(joined.translate(None, _UNSENDABLE)) == len(joined)


def to_upstream_headers(
    headers: Sequence[tuple[bytes, bytes]], *, api_key: str, hop: str, key_field: bytes = b""
) -> Headers:
    """The client's header fields as they go on, with our hop mark appended.

    Host and content-length are left out: they follow from the URL and the body that are really sent. Hop
    marks of other installations stay, so that a circle through several of them is noticed too.

    Args:
        headers: The client's.
        api_key: The proxy's own key for the upstream, which replaces the client's; empty to keep theirs.
        hop: The mark of this installation, 16 hex digits.
        key_field: The field that shows our key; empty: as the client shows its own.
    """
    dropped = _NOT_SENT_ON_WITH_KEY if api_key else _NOT_SENT_ON
    about = [field[1] for field in headers if field[0] == b"connection"]
    if not _NAMES_NOTHING.issuperset(about):
        dropped |= _parse_connection_options(about)
    kept = [field for field in headers if field[0] not in dropped]
    if OWN_PREFIX in b"\n".join([field[0] for field in kept]):  # seldom: one search tells
        kept = [(name, held) for name, held in kept if name == HOP_HEADER or not name.startswith(OWN_PREFIX)]
    if api_key:
        kept.append(build_credential(headers, api_key, key_field))
    kept.append((HOP_HEADER, hop.encode()))
    return kept


def build_credential(
    headers: Iterable[tuple[bytes, bytes]], api_key: str, key_field: bytes = b""
) -> tuple[bytes, bytes]:
    """The header field that shows our own key: `key_field`, or the one in which the client showed its own.

    Azure, Anthropic and Google take a key of theirs in a field of its own; everybody else as a bearer token.
    """
    shown = [key_field] if key_field else [key for key, _ in headers if key in CREDENTIALS]
    if not shown or b"authorization" in shown:
        return b"authorization", b"Bearer " + api_key.encode()
    return shown[0], api_key.encode()


def to_client_headers(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The upstream's header fields as they go back, every duplicate in its order.

    The server in front of us writes its own server and date. Content-length stays, because the bytes do,
    except on a 304, where it speaks of a body that is not sent and the server would wait for it. An event
    stream of which the upstream does not say how it may be buffered is marked not to be.
    """
    names = [field[0].lower() for field in headers]
    dropped = _NOT_SENT_BACK
    if b"connection" in names:
        about = [field[1] for name, field in zip(names, headers, strict=True) if name == b"connection"]
        if not _NAMES_NOTHING.issuperset(about):
            dropped |= _parse_connection_options(about)
    if status == 304:
        dropped |= {b"content-length"}
    kept = [field for name, field in zip(names, headers, strict=True) if name not in dropped]
    if not _is_sendable([field[1] for field in kept]):  # the server would refuse all of them
        kept = [field for field in kept if _is_sendable([field[1]])]
    if b"content-type" in names and _UNBUFFERED[0] not in names:
        kind = headers[names.index(b"content-type")][1]
        if kind.strip().lower().startswith(EVENT_STREAM):
            kept.append(_UNBUFFERED)
    return kept


def refuse_loop(headers: Iterable[tuple[bytes, bytes]], hop: str) -> None:
    """Raise `RequestRefusedError` (508) if the request has been through this installation before."""
    mark = hop.encode()
    if any(key == HOP_HEADER and held == mark for key, held in headers):
        raise RequestRefusedError(
            508, "This request came back to the proxy: its upstream leads to itself.", "loop_detected"
        )
