"""Sends comments in an event stream that is silent for long, so that the connection stays open.

Load balancers, tunnels and some clients close a connection on which nothing has come for a minute, but a
model may think for longer. A comment is a line that begins with a colon. It is no event, and clients skip it.
A comment may be sent only at the beginning of the stream or between two events. The proxy inserts no comment
into a compressed body, or into a body whose length is declared.
"""

import asyncio
from typing import Final, Self

from starlette.types import Message, Send

from compaction_proxy.gateway.headers import EVENT_STREAM, build_header_map

COMMENT: Final = b": keep-alive\n\n"
# If the last bytes of a stream so far are one of these sequences, the stream is between two events. Each
# sequence consists of the end of a line and the end of an empty line. CR LF CR is not in the list, because an
# LF that belongs to it may still follow.
EVENT_BOUNDARIES: Final = (b"\n\n", b"\n\r\n", b"\r\r")
BOUNDARY_BYTES: Final = 3

_BODY: Final = "http.response.body"


def can_take_comments(head: Message) -> bool:
    """Returns whether comments may be inserted into the body that follows this `http.response.start`."""
    fields = build_header_map(head.get("headers", ()))
    plain = fields.get(b"content-encoding", b"").strip().lower() in {b"", b"identity"}
    kind = fields.get(b"content-type", b"").strip().lower()
    return plain and kind.startswith(EVENT_STREAM) and b"content-length" not in fields


class KeepaliveChannel:
    """An ASGI send channel that adds comments to an event stream while the stream is silent.

    Use it as a context manager. It sends no comment before the header fields of the response, after the end
    of the response, or after the context has ended.

    Args:
        send: The client's ASGI send channel.
        silence_s: Seconds of silence after which a comment is sent, if the stream is between two events.
    """

    __slots__ = ("_comments", "_heard_at", "_lock", "_send", "_silence_s", "_tail")

    def __init__(self, send: Send, silence_s: float) -> None:
        self._send = send
        self._silence_s = silence_s
        self._lock = asyncio.Lock()  # held while a message or a comment is sent
        self._comments: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._tail = EVENT_BOUNDARIES[0]  # a comment may also be sent at the beginning

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._comments is not None:
            self._comments.cancel()

    async def __call__(self, message: Message) -> None:
        """Passes an ASGI message to `send`.

        If the message begins an event stream, starts a task that sends comments while the stream is silent.
        """
        async with self._lock:
            if self._comments is not None and not message.get("more_body", False):
                self._comments.cancel()
            await self._send(message)
            self._heard_at = asyncio.get_running_loop().time()
            self._tail = (self._tail + message.get("body", b"")[-BOUNDARY_BYTES:])[-BOUNDARY_BYTES:]
        if message["type"] != _BODY and can_take_comments(message):
            self._comments = asyncio.create_task(self._send_comments())

    async def _send_comments(self) -> None:
        """Sends a comment whenever the stream is silent for `silence_s` seconds between two events.

        Ends only when the task is cancelled.
        """
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._heard_at + self._silence_s - clock())
            if clock() >= self._heard_at + self._silence_s:
                self._heard_at = clock()
                if not self._lock.locked() and self._tail.endswith(EVENT_BOUNDARIES):
                    async with self._lock:
                        await self._send({"type": _BODY, "body": COMMENT, "more_body": True})
