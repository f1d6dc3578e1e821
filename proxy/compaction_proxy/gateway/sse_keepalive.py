"""Sends comments in the long silences of an event stream, so that nobody closes the connection.

Load balancers, tunnels and some clients close a connection on which nothing has come for a minute, but a
model may think for longer. A comment (a line that begins with a colon) is no event, and clients skip it. A
comment may be sent only at the beginning of the stream or between two events. No comment is inserted into a
compressed body, or into a body whose length was declared.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.types import Message, Send

from compaction_proxy.gateway.headers import EVENT_STREAM, build_header_map

COMMENT: Final = b": keep-alive\n\n"
# A stream that ends with one of these byte sequences is between two events. Each one consists of the end of a
# line and the end of an empty line. CR LF CR is missing, because an LF that belongs to it may still follow.
EVENT_BOUNDARIES: Final = (b"\n\n", b"\n\r\n", b"\r\r")
BOUNDARY_BYTES: Final = 3

_BODY: Final = "http.response.body"


@contextmanager
def send_keepalives(send: Send, silence_s: float) -> Iterator[Send]:
    """Yields a client's ASGI channel on which an event stream is never silent for longer than `silence_s`.

    No comment is sent before the head of the answer, after its end, or once the context is left.
    """
    channel = _KeepaliveChannel(send, silence_s)
    try:
        yield channel
    finally:
        channel.close()


def can_take_comments(head: Message) -> bool:
    """Returns whether comments may be inserted into the body that follows this `http.response.start`."""
    fields = build_header_map(head.get("headers", ()))
    plain = fields.get(b"content-encoding", b"").strip().lower() in {b"", b"identity"}
    kind = fields.get(b"content-type", b"").strip().lower()
    return plain and kind.startswith(EVENT_STREAM) and b"content-length" not in fields


class _KeepaliveChannel:
    """Passes ASGI messages on to the client, and sends a comment when the stream is silent for too long.

    A stream has one timer, which messages do not reset. If the timer fires before the silence has lasted long
    enough, it is set again for the rest of the time.
    """

    __slots__ = ("_busy", "_comment", "_heard_at", "_loop", "_send", "_silence_s", "_tail", "_timer")

    def __init__(self, send: Send, silence_s: float) -> None:
        self._send = send
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._tail = EVENT_BOUNDARIES[0]  # a comment may also be sent at the beginning
        self._busy = False

    async def __call__(self, message: Message) -> None:
        """Passes an ASGI message on to the client."""
        if self._timer is None:
            await self._send(message)
            if message["type"] != _BODY and can_take_comments(message):
                self._heard_at = self._loop.time()
                self._schedule_check()
            return
        if not message.get("more_body", False):
            self._stop_timer()
        self._busy = True
        if self._comment is not None:
            await self._comment  # a comment is being sent: the message must follow it
        await self._send(message)
        self._busy = False
        self._heard_at = self._loop.time()
        body = message.get("body", b"")
        self._tail = (
            body[-BOUNDARY_BYTES:] if len(body) >= BOUNDARY_BYTES else (self._tail + body)[-BOUNDARY_BYTES:]
        )

    def close(self) -> None:
        """Stops all comments, even one that is being sent."""
        self._stop_timer()
        if self._comment is not None:
            self._comment.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_check(self) -> None:
        self._timer = self._loop.call_at(self._heard_at + self._silence_s, self._check_silence)

    def _check_silence(self) -> None:
        """Sends a comment if the stream has been silent for long enough, and schedules the next check."""
        now = self._loop.time()
        if now >= self._heard_at + self._silence_s:
            self._heard_at = now
            if not self._busy and self._comment is None and self._tail.endswith(EVENT_BOUNDARIES):
                self._comment = self._loop.create_task(self._send_comment())
        self._schedule_check()

    async def _send_comment(self) -> None:
        try:
            await self._send({"type": _BODY, "body": COMMENT, "more_body": True})
        finally:
            self._comment = None
