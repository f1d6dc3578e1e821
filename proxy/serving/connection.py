"""uvicorn's HTTP/1.1 connection, which says when its client leaves, and is deaf to the offer of HTTP/2.

Some clients (Java's among them) offer an upgrade to h2c with every request to a plain address. A server may
ignore that, but the parser under uvicorn stops at it and loses the body. So the offer is taken out before the
parser sees it.

An application learns of a client that left only while it waits for more from it, which takes a task for each
request. Here it may leave a function instead, in the scope's extensions.
"""

import asyncio
import re
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_REQUEST = re.compile(rb"[A-Z]+ [^\r\n]+ HTTP/1\.1\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
_SETTINGS = re.compile(rb"\r\nhttp2-settings:[^\r\n]*", re.IGNORECASE)
_CONNECTION = re.compile(rb"(\r\nconnection:)([^\r\n]*)", re.IGNORECASE)
_ABOUT_UPGRADE = frozenset({b"upgrade", b"http2-settings"})
# An offer further behind than this is nobody's; it would be answered as uvicorn does.
LOOKED_AT_BYTES = 16_384


def _kept(found: re.Match[bytes]) -> bytes:
    tokens = (token.strip() for token in found[2].split(b","))
    kept = b", ".join(token for token in tokens if token.lower() not in _ABOUT_UPGRADE)
    return found[1] + b" " + kept if kept else b""


def without_offer(data: bytes) -> bytes:
    """The beginning of a request without its offer of HTTP/2; anything else as it is."""
    end = data.find(b"\r\n\r\n", 0, LOOKED_AT_BYTES)
    if end < 0 or _REQUEST.match(data) is None:
        return data
    head = data[:end] + b"\r\n"
    if _UPGRADE.search(head) is None:
        return data
    head = _CONNECTION.sub(_kept, _SETTINGS.sub(b"", _UPGRADE.sub(b"", head)))
    return head[:-2] + data[end:]


# Where in a scope's extensions an application finds how to be told that the client has left: a function that
# takes what is to be called then, or None to be told no more.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"


class Connection(HttpToolsProtocol):
    """A connection on which requests that offer h2c are read like any other.

    Attributes:
        begun: When it was opened, or the head of its newest request began to come, on the loop's clock.
        heard: When anything came from the client, on the loop's clock.
    """

    begun = 0.0
    heard = 0.0
    _lost = False
    _departure: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self.begun = self.heard = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was cut off."""
        super().connection_lost(exc)
        self._lost = True
        if self._departure is not None:
            self._departure()

    def data_received(self, data: bytes) -> None:
        """Read what has arrived."""
        self.heard = self.loop.time()
        cycle: RequestResponseCycle | None = self.cycle
        waiting = cycle is None or cycle.response_complete
        if waiting and data.find(b"h2c", 0, LOOKED_AT_BYTES) >= 0:
            data = without_offer(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The head of a request begins."""
        super().on_message_begin()
        if self.cycle is not None:
            self.begun = self.heard
        self.scope["extensions"] = {DEPARTURE: {NOTICE: self.tell_departure}}

    def tell_departure(self, departure: Callable[[], None] | None) -> None:
        """Call `departure` when the client leaves, soon if it already has; None: nobody any more.

        Requests of a connection are served one after the other, so there is one who wants to know.
        """
        self._departure = departure
        if departure is None:
            return
        if self._lost:
            self.loop.call_soon(departure)
        elif not self.pipeline:
            self.flow.resume_reading()  # who does not read does not notice
