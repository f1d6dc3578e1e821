"""Which header fields go on, and which end here. Pure; fields are (name, value) pairs in their order.

Names from the server are in lower case, as ASGI has them; names from an upstream may be in any case.
"""

import re
from collections.abc import Iterable, Sequence

from proxy.errors import RequestRefused

# Control characters but the tab, which no field may hold (RFC 9110 §5.5).
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

Headers = list[tuple[bytes, bytes]]

HOP_HEADER = b"x-compaction-hop"
OWN_PREFIX = b"x-compaction"
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
_NOT_SENT_BACK = HOP_BY_HOP | {b"server", b"date"}


def value(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a field, or None. `name` is in lower case."""
    return next((held for key, held in headers if key.lower() == name), None)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The declared length of a body in bytes; None if there is none, or if it is no number."""
    declared = value(headers, b"content-length")
    return int(declared) if declared is not None and declared.isdigit() else None


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Fields that the sender declared to be about this connection only (RFC 9110 §7.6.1)."""
    return frozenset(
        token.strip().lower()
        for key, held in headers
        if key.lower() == b"connection"
        for token in held.split(b",")
    )


def to_upstream(headers: Sequence[tuple[bytes, bytes]], *, api_key: str, hop: str) -> Headers:
    """The client's header fields as they go on, with our hop mark appended.

    Host and content-length are left out: they follow from the URL and the body that are really sent. Hop
    marks of other installations stay, so that a circle through several of them is noticed too.

    Args:
        headers: The client's.
        api_key: The proxy's own key for the upstream, which replaces the client's; empty to keep theirs.
        hop: The mark of this installation, 16 hex digits.
    """
    dropped = _NOT_SENT_ON | _named_in_connection(headers)
    if api_key:
        dropped |= CREDENTIALS
    kept = [
        (key, held)
        for key, held in headers
        if key not in dropped and (key == HOP_HEADER or not key.startswith(OWN_PREFIX))
    ]
    if api_key:
        kept.append(credential(headers, api_key))
    kept.append((HOP_HEADER, hop.encode()))
    return kept


def credential(headers: Iterable[tuple[bytes, bytes]], api_key: str) -> tuple[bytes, bytes]:
    """The header field that shows our own key, in the form in which the client showed its own.

    Azure, Anthropic and Google take a key of theirs in a field of its own; everybody else as a bearer token.
    """
    shown = [key for key, _ in headers if key in CREDENTIALS]
    if not shown or b"authorization" in shown:
        return b"authorization", b"Bearer " + api_key.encode()
    return shown[0], api_key.encode()


def to_client(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The upstream's header fields as they go back, every duplicate in its order.

    The server in front of us writes its own server and date. Content-length stays, because the bytes do,
    except on a 304, where it speaks of a body that is not sent and the server would wait for it.
    """
    dropped = _NOT_SENT_BACK | _named_in_connection(headers)
    if status == 304:
        dropped |= {b"content-length"}
    return [
        (key, held)
        for key, held in headers
        if key.lower() not in dropped and _UNSENDABLE.search(held) is None  # the server would refuse it all
    ]


def refuse_loop(headers: Iterable[tuple[bytes, bytes]], hop: str) -> None:
    """Raise `RequestRefused` (508) if the request has been through this installation before."""
    mark = hop.encode()
    if any(key == HOP_HEADER and held == mark for key, held in headers):
        raise RequestRefused(
            508, "This request came back to the proxy: its upstream leads to itself.", "loop_detected"
        )
