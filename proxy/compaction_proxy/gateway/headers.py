"""Decides which header fields are forwarded and which are dropped. All functions are pure.

Fields are (name, value) pairs in their order. Names from the server are in lower case, as ASGI has them.
Names from an upstream may be in any case.
"""

from collections.abc import Iterable, Sequence

from compaction_proxy.core.errors import RequestRefusedError

# The control characters that no field may hold: all except the tab (RFC 9110 §5.5).
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
# Asks a reverse proxy in front of us to pass on the chunks of a stream at once.
_UNBUFFERED = (b"x-accel-buffering", b"no")
# Values that `connection` has in nearly every request. None of them names a field.
_NAMES_NOTHING = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close", b"upgrade", b""})


def extract_key(credential: bytes) -> bytes:
    """Returns the key in a credential's value, which may begin with `Bearer`."""
    scheme, _, key = credential.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else credential.strip()


def get_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Returns the first value of a field, or None if there is none. `name` is in lower case."""
    for key, held in headers:
        if key == name or (len(key) == len(name) and key.lower() == name):
            return held
    return None


def drop_field(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> Headers:
    """Returns the fields without those of this name. All names are in lower case."""
    return [field for field in headers if field[0] != name]


def build_header_map(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the first value of every field by its name, for several look-ups. Names are in lower case."""
    first = dict(headers)
    return first if len(first) == len(headers) else dict(reversed(headers))


def get_content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the declared length of a body in bytes, or None if it is missing or not a number."""
    return parse_content_length(get_header(headers, b"content-length"))


def parse_content_length(declared: bytes | None) -> int | None:
    """Returns the value of a `content-length` in bytes, or None if it is missing or not a number."""
    return int(declared) if declared is not None and declared.isdigit() else None


def _parse_connection_options(values: Iterable[bytes]) -> frozenset[bytes]:
    """Returns the fields that the sender declared to concern this connection only (RFC 9110 §7.6.1)."""
    return frozenset(token.strip().lower() for held in values for token in held.split(b","))


def _is_sendable(values: Iterable[bytes]) -> bool:
    """Returns whether no value holds a forbidden control character. One search covers all values."""
    joined = b"".join(values)
    return len(joined.translate(None, _UNSENDABLE)) == len(joined)


def to_upstream_headers(
    headers: Sequence[tuple[bytes, bytes]], *, api_key: str, hop: str, key_field: bytes = b""
) -> Headers:
    """Returns the client's header fields as they are forwarded, with our hop mark appended.

    Host and content-length are left out, because they follow from the URL and the body that are really sent.
    Hop marks of other installations stay, so that a loop through several of them is noticed, too.

    Args:
        headers: The client's header fields.
        api_key: The proxy's own key for the upstream, which replaces the client's; empty to keep the
            client's.
        hop: The mark of this installation, 16 hex digits.
        key_field: The header field that carries our key; empty for the field in which the client shows its
            own.
    """
    dropped = _NOT_SENT_ON_WITH_KEY if api_key else _NOT_SENT_ON
    connection_values = [field[1] for field in headers if field[0] == b"connection"]
    if not _NAMES_NOTHING.issuperset(connection_values):
        dropped |= _parse_connection_options(connection_values)
    forwarded = [field for field in headers if field[0] not in dropped]
    if OWN_PREFIX in b"\n".join([field[0] for field in forwarded]):  # seldom true: one search decides
        forwarded = [
            (name, held) for name, held in forwarded if name == HOP_HEADER or not name.startswith(OWN_PREFIX)
        ]
    if api_key:
        forwarded.append(build_credential(headers, api_key, key_field))
    forwarded.append((HOP_HEADER, hop.encode()))
    return forwarded


def build_credential(
    headers: Iterable[tuple[bytes, bytes]], api_key: str, key_field: bytes = b""
) -> tuple[bytes, bytes]:
    """Returns the header field that carries our own key.

    The field is `key_field`, or the one in which the client shows its own key. Azure, Anthropic and Google
    take a key in a field of their own; all others take a bearer token.
    """
    field_names = [key_field] if key_field else [key for key, _ in headers if key in CREDENTIALS]
    if not field_names or b"authorization" in field_names:
        return b"authorization", b"Bearer " + api_key.encode()
    return field_names[0], api_key.encode()


def to_client_headers(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Returns the upstream's header fields as they go back to the client, every duplicate in its order.

    Our own server writes its own server and date. Content-length stays, because the bytes of the body stay.
    On a 304 it is left out, because it describes a body that is not sent, and the server would wait for that
    body. If the upstream does not say how an event stream may be buffered, the stream is marked not to be.
    """
    names = [field[0].lower() for field in headers]
    dropped = _NOT_SENT_BACK
    if b"connection" in names:
        connection_values = [
            field[1] for name, field in zip(names, headers, strict=True) if name == b"connection"
        ]
        if not _NAMES_NOTHING.issuperset(connection_values):
            dropped |= _parse_connection_options(connection_values)
    if status == 304:
        dropped |= {b"content-length"}
    relayed = [field for name, field in zip(names, headers, strict=True) if name not in dropped]
    if not _is_sendable([field[1] for field in relayed]):  # the server would refuse all fields
        relayed = [field for field in relayed if _is_sendable([field[1]])]
    if b"content-type" in names and _UNBUFFERED[0] not in names:
        kind = headers[names.index(b"content-type")][1]
        if kind.strip().lower().startswith(EVENT_STREAM):
            relayed.append(_UNBUFFERED)
    return relayed


def refuse_loop(headers: Iterable[tuple[bytes, bytes]], hop: str) -> None:
    """Raises `RequestRefusedError` (508) if the request has already been through this installation."""
    mark = hop.encode()
    if any(key == HOP_HEADER and held == mark for key, held in headers):
        raise RequestRefusedError(
            508, "This request came back to the proxy: its upstream leads to itself.", "loop_detected"
        )
