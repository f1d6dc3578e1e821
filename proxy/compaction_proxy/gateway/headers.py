"""Decides which header fields the proxy forwards and which it drops. The functions change no state.

Header fields are lists of (name, value) pairs in the order in which they were sent. All names are in lower
case.
"""

from collections.abc import Iterable, Sequence

from compaction_proxy.core.errors import RequestRefusedError

# The control characters that no header field may contain: all except the tab (RFC 9110 §5.5).
_UNSENDABLE = bytes(code for code in range(128) if (code < 32 and code != 9) or code == 127)

Headers = list[tuple[bytes, bytes]]

HOP_HEADER = b"x-compaction-hop"
OWN_PREFIX = b"x-compaction"
EVENT_STREAM = b"text/event-stream"
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key"})

# The fields that are true only of the very bytes of the body that the client sent: its coding and digests.
BODY_FIELDS = frozenset({b"content-encoding", b"content-md5", b"content-digest", b"digest", b"repr-digest"})
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
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_FORWARDED_WITH_KEY = _NOT_FORWARDED | CREDENTIALS
_BODILESS_STATUSES = frozenset({204, 304})
_NOT_RETURNED = HOP_BY_HOP | {b"server", b"date"}
# A header field of responses. It asks a reverse proxy between this proxy and the client to forward each chunk
# of a stream without delay.
_UNBUFFERED = (b"x-accel-buffering", b"no")
# Content types that no browser shows as a page. A page of any other type, or without a type, could otherwise
# run scripts with the origin of the dashboard, and use the dashboard with the visitor's session.
_DATA_TYPES = frozenset({b"application/json", EVENT_STREAM, b"text/plain", b"application/octet-stream"})
_ISOLATED = (b"content-security-policy", b"sandbox")
# The values that the field `connection` has in nearly all requests. The proxy drops the header fields that
# these values name from every message, so it need not parse these values.
_USUAL_CONNECTION_VALUES = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close", b"upgrade", b""})


def extract_key(credential: bytes) -> bytes:
    """Returns the key in the value of a credential field, without a leading `Bearer`."""
    scheme, _, key = credential.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else credential.strip()


def get_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Returns the first value of a field, or None if there is none. `name` is in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def drop_fields(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    """Returns the header fields except those with these names."""
    return [field for field in headers if field[0] not in names]


def build_header_map(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns a mapping from the name of each field to its first value."""
    first = dict(headers)
    return first if len(first) == len(headers) else dict(reversed(headers))


def get_content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the declared length of a body in bytes, or None if it is missing or not a number."""
    value = get_header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def _add_connection_fields(
    names: frozenset[bytes], headers: Iterable[tuple[bytes, bytes]]
) -> frozenset[bytes]:
    """Returns `names`, and the names of the header fields that concern one connection only.

    The sender lists the names of these fields in the field `connection` (RFC 9110 §7.6.1).
    """
    values = [value for name, value in headers if name == b"connection"]
    if _USUAL_CONNECTION_VALUES.issuperset(values):
        return names
    return names.union(option.strip().lower() for value in values for option in value.split(b","))


def _has_own_field(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Returns whether any field name contains `x-compaction`. This is faster than a check of each name."""
    return b"\n".join([field[0] for field in headers]).find(OWN_PREFIX) >= 0


def _is_sendable(values: Iterable[bytes]) -> bool:
    """Returns whether no value holds a forbidden control character (`_UNSENDABLE`)."""
    joined = b"".join(values)
    return len(joined.translate(None, _UNSENDABLE)) == len(joined)


def to_upstream_headers(
    headers: Sequence[tuple[bytes, bytes]], *, api_key: str, hop_mark: str, key_field: bytes = b""
) -> Headers:
    """Returns the header fields for the upstream: most of the client's, and the proxy's `x-compaction-hop`.

    `host` and `content-length` are left out, because the HTTP engine derives them from the URL and the body
    that it sends. The control headers (`x-compaction*`) are left out, too. The fields `x-compaction-hop` of
    other installations stay, so that each installation can recognise a request that comes back to it.

    Args:
        headers: The client's header fields.
        api_key: The proxy's own key for the upstream, which replaces the client's; empty to keep the
            client's.
        hop_mark: The id of this installation, 16 hex digits: the value of its `x-compaction-hop`.
        key_field: The header field for the proxy's key; empty for the field in which the client sends its
            own.
    """
    dropped = _add_connection_fields(_NOT_FORWARDED_WITH_KEY if api_key else _NOT_FORWARDED, headers)
    forwarded = [field for field in headers if field[0] not in dropped]
    if _has_own_field(forwarded):
        forwarded = [
            (name, value)
            for name, value in forwarded
            if name == HOP_HEADER or not name.startswith(OWN_PREFIX)
        ]
    if api_key:
        forwarded.append(build_credential_field(headers, api_key, key_field))
    forwarded.append((HOP_HEADER, hop_mark.encode()))
    return forwarded


def build_credential_field(
    headers: Iterable[tuple[bytes, bytes]], api_key: str, key_field: bytes = b""
) -> tuple[bytes, bytes]:
    """Returns the header field with the proxy's own key for the upstream.

    Its name is `key_field`. If that is empty, it is the name of the field in which the client sends its own
    key. Azure, Anthropic and Google each expect a key in a field of their own. All other providers expect it
    as a bearer token (field `authorization`).
    """
    field_names = [key_field] if key_field else [key for key, _ in headers if key in CREDENTIALS]
    if not field_names or b"authorization" in field_names:
        return b"authorization", b"Bearer " + api_key.encode()
    return field_names[0], api_key.encode()


def _get_only_content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the content type in lower case and without parameters, or an empty value if it is not clear.

    Browsers use the last of several content types, which may be in one field, separated by commas.
    """
    values = [value for name, value in headers if name == b"content-type"]
    if len(values) != 1 or b"," in values[0]:
        return b""
    return values[0].partition(b";")[0].strip().lower()


def to_client_headers(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Returns the header fields for the client, made from those of the upstream. Duplicate fields are kept.

    - `server` and `date` are left out. The proxy's own server writes a new `date`.
    - `content-length` stays, because the body is relayed unchanged. With status 204 and 304 it is left out,
      because no body follows.
    - Fields whose names begin with `x-compaction` are left out. Only the proxy writes them.
    - Fields with control characters, and fields that concern only the connection to the upstream, are left
      out.
    - If the upstream does not say whether an event stream may be buffered, a field is added that forbids it.
    - A body that a browser may show as a page gets a field that isolates the page (`_ISOLATED`).
    """
    dropped = _add_connection_fields(_NOT_RETURNED, headers)
    if status in _BODILESS_STATUSES:
        dropped |= {b"content-length"}
    relayed = [field for field in headers if field[0] not in dropped]
    if _has_own_field(relayed):
        relayed = [field for field in relayed if not field[0].startswith(OWN_PREFIX)]
    if not _is_sendable([field[1] for field in relayed]):  # otherwise our server would refuse all fields
        relayed = [field for field in relayed if _is_sendable([field[1]])]
    kind = _get_only_content_type(relayed)
    is_data = kind in _DATA_TYPES or kind.startswith(b"audio/")
    if not is_data and status not in _BODILESS_STATUSES:
        relayed.append(_ISOLATED)
    if kind == EVENT_STREAM and get_header(headers, _UNBUFFERED[0]) is None:
        relayed.append(_UNBUFFERED)
    return relayed


def refuse_loop(headers: Iterable[tuple[bytes, bytes]], hop_mark: str) -> None:
    """Refuses a request that this installation has already forwarded.

    Raises:
        RequestRefusedError: With status 508 if a field `x-compaction-hop` holds `hop_mark`, the id of this
            installation.
    """
    mark = hop_mark.encode()
    if any(key == HOP_HEADER and value == mark for key, value in headers):
        raise RequestRefusedError(
            508, "The upstream of this proxy points back to the proxy itself.", "loop_detected"
        )
