"""Deafness to the offer of HTTP/2.

Some clients (Java's among them) offer an upgrade to h2c with every request to a plain address. A server may
ignore that, but the parser stops at it and loses the body. So the offer is taken out before the parser sees
it.
"""

import re

_REQUEST = re.compile(rb"[A-Z]+ [^\r\n]+ HTTP/1\.1\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
_SETTINGS = re.compile(rb"\r\nhttp2-settings:[^\r\n]*", re.IGNORECASE)
_CONNECTION = re.compile(rb"(\r\nconnection:)([^\r\n]*)", re.IGNORECASE)
_ABOUT_UPGRADE = frozenset({b"upgrade", b"http2-settings"})
# An offer further behind than this is nobody's; it would be answered like any other upgrade.
LOOKED_AT_BYTES = 16_384


def _kept(found: re.Match[bytes]) -> bytes:
    tokens = (token.strip() for token in found[2].split(b","))
    kept = b", ".join(token for token in tokens if token.lower() not in _ABOUT_UPGRADE)
    return found[1] + b" " + kept if kept else b""


def without_offer(data: bytes) -> bytes:
    """The beginning of a request without its offer of HTTP/2; anything else as it is."""
    end = data.find(b"\r\n\r\n", 0, LOOKED_AT_BYTES)
    if end < 0 or data.find(b"h2c", 0, end) < 0 or _REQUEST.match(data) is None:
        return data
    head = data[:end] + b"\r\n"
    if _UPGRADE.search(head) is None:
        return data
    head = _CONNECTION.sub(_kept, _SETTINGS.sub(b"", _UPGRADE.sub(b"", head)))
    return head[:-2] + data[end:]
