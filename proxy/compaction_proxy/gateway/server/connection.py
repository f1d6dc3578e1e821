"""An HTTP/1.1 connection of uvicorn's server: requests in, one answer after the other out."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.server.cycle import RequestResponseCycle, encode_header_lines, encode_refusal
from compaction_proxy.gateway.server.parser import RequestHead, RequestParser

if TYPE_CHECKING:
    from starlette.types import Scope

# Bytes of a body that wait for the application until no more is taken from the socket.
UNREAD_BYTES = 65_536
# Of a body whose request is answered already so many bytes are dropped, then the connection ends.
DROPPED_BYTES = 262_144
# Requests that wait for an answer before them, at most.
MAX_WAITING = 1_000

# Where in a scope's extensions an application finds `Connection.tell_departure`.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"


class ServerConnection(asyncio.Protocol):
    """A connection from its beginning to its end. Who asks before an answer is out waits for it.

    Args:
        config: uvicorn's.
        server_state: What the server knows of all connections.
        app_state: What the application's lifespan left for its requests.

    Attributes:
        begun: When it was opened, or the head of its newest request began to come, on the loop's clock.
        heard: When anything came from the client, or its answer was out, on the loop's clock.
        cycle: The newest request, from the end of its head on.
        waiting: Whole heads whose turn has not come.
        heading: Whether a head has begun to come and not ended.
        paused: Whether nothing is taken from the socket.
        blocked: Whether the client takes nothing more for now.
        hung_up: Whether nothing more is said on it, and what comes is dropped.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.phase_started_at = self.last_activity_at = 0.0
        self.cycle: RequestResponseCycle | None = None
        self.waiting: deque[RequestResponseCycle] = deque()
        self.is_reading_head = False
        self.paused = self.blocked = self.hung_up = False
        self.transport: asyncio.Transport
        self._app = config.loaded_app
        self._state = server_state
        self._connections: set[Any] = server_state.connections
        self._app_state = app_state
        self._parser = RequestParser(self)
        self._scope: Scope = {}
        self._active: RequestResponseCycle | None = None
        self._writable: asyncio.Event | None = None
        self._departure: Callable[[], None] | None = None
        self._client_gone = self._stopped_reading = False
        self._dropped = self._unsent = 0
        self._last_taken_at = 0.0
        self._default_headers: tuple[object, bytes, bool] = (None, b"", False)

    # The loop's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.transport = transport  # type: ignore[assignment]
        self.phase_started_at = self.last_activity_at = self.loop.time()
        self._connections.add(self)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": get_local_addr(self.transport),
            "client": get_remote_addr(self.transport),
            "scheme": "https" if is_ssl(self.transport) else "http",
            "root_path": "",
            "extensions": {DEPARTURE: {NOTICE: self.set_departure_callback}},
        }

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's
        """The client has left, or was cut off."""
        self._client_gone = True
        self._connections.discard(self)
        self._disconnect_cycles()
        self.resume_writing()
        if self._departure is not None:
            self._departure()
        self._parser.close()
        self._scope, self.cycle, self._active = {}, None, None  # which hold this: the collector comes seldom

    def data_received(self, data: bytes) -> None:
        """Read what has arrived."""
        self.last_activity_at = self.loop.time()
        if self.hung_up or self._stopped_reading or self.transport.is_closing():
            return
        error = self._parser.feed_data(data)
        if error is not None:
            self._refuse_after_pending(error)

    def pause_writing(self) -> None:
        """The client takes nothing more for now."""
        self.blocked = True

    def resume_writing(self) -> None:
        """The client takes more."""
        self.blocked = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    # The parser's calls.

    def on_head_started(self) -> None:
        """The head of a request begins."""
        self.is_reading_head = True
        self._dropped = 0
        if len(self.waiting) >= MAX_WAITING:
            self._stop_reading()
        if self.cycle is not None:
            self.phase_started_at = self.last_activity_at

    def on_head_received(self, head: RequestHead) -> None:
        """The head has come: the request begins, or waits for its turn."""
        self.is_reading_head = False
        if self._stopped_reading:
            return
        scope = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.fields,
            "state": self._app_state.copy(),
        }
        cycle = RequestResponseCycle(
            self, scope, keep_alive=head.keep_alive, expects_continue=head.expects_continue
        )
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._start_cycle(cycle)
        else:
            self.waiting.append(cycle)
            self.pause_reading()

    def on_body_received(self, piece: bytes) -> None:
        """A part of the body has come; of a request that is answered already it is left out."""
        cycle = self.cycle
        if self._stopped_reading:
            return
        if cycle is None or cycle.response_complete:
            self._dropped += len(piece)
            if self._dropped > DROPPED_BYTES and not self.hung_up:
                self._linger_before_close()
        elif cycle.feed_body(piece) > UNREAD_BYTES:
            self.pause_reading()

    def on_request_received(self) -> None:
        """A request has come to its end."""
        if self.cycle is not None and not self._stopped_reading:
            self.cycle.feed_eof()

    def _refuse_after_pending(self, error: RequestRefusedError) -> None:
        """What has come cannot be read: end the connection once all before it are answered."""
        if self.waiting and self.waiting[-1].more_body:
            self.waiting.pop()
        last = self.waiting[-1] if self.waiting else self._active
        if last is None or last.response_complete or last.more_body:
            self.refuse_request(error)
        else:
            self._stop_reading()

    def _stop_reading(self) -> None:
        """Hear nothing more, and end with the answers to what was heard."""
        self._stopped_reading = True
        last = self.waiting[-1] if self.waiting else self._active
        if last is not None:
            last.keep_alive = False
        self.pause_reading()

    # The requests' calls (`cycle.Wire`).

    def encode_default_headers(self) -> tuple[bytes, bool]:
        """Header lines that every answer carries, and whether they announce the connection's end."""
        fields = self._state.default_headers  # a new list each second
        known, block, closes = self._default_headers
        if known is not fields:
            block, closes = encode_header_lines(fields), (b"connection", b"close") in fields
            self._default_headers = fields, block, closes
        return block, closes

    async def drain(self) -> None:
        """Wait while the client takes nothing more."""
        if self.blocked:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Take nothing more from the socket."""
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Take more from the socket."""
        if self.paused:
            self.paused = False
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        """An answer has gone out to its end: whoever waits is next."""
        self._state.total_requests += 1
        self.last_activity_at = self.loop.time()
        if self.hung_up or self.transport.is_closing():
            return
        if self.waiting:
            self._start_cycle(self.waiting.popleft())
        if not self.waiting:
            self.resume_reading()

    def _start_cycle(self, cycle: RequestResponseCycle) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def set_departure_callback(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when the client leaves, soon if it already has; None: nobody any more.

        Requests of a connection are served one after the other, so there is one who wants to know.
        """
        self._departure = callback
        if callback is not None and self._client_gone:
            self.loop.call_soon(callback)
        elif callback is not None and not self.waiting:
            self.resume_reading()  # who does not read does not notice

    # The server's calls.

    def measure_stuck_s(self, now: float) -> float:
        """For how long, by the loop's clock, the client has taken nothing of what waits for it. Ask often."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._last_taken_at = unsent, now
        return now - self._last_taken_at

    def shutdown(self) -> None:
        """Let the connection end with its answer, or now if there is nothing to wait for."""
        if self.hung_up:
            self.transport.close()
        for cycle in (self._active, self.cycle):
            if cycle is not None:
                cycle.keep_alive = False
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def refuse_request(self, error: RequestRefusedError) -> None:
        """End the connection with an error of ours; where an answer has begun, it is cut instead."""
        if self._active is None or self._active.response_complete or not self._active.response_started:
            self.transport.write(encode_refusal(error, self.encode_default_headers()[0]))
        self._disconnect_cycles()
        self._linger_before_close()

    def hang_up(self) -> None:
        """Nothing more is said here. Of a request that is still coming the rest is dropped."""
        if self._stopped_reading or (self.cycle is not None and self.cycle.more_body):
            self._linger_before_close()
        else:
            self.transport.close()

    def _linger_before_close(self) -> None:
        """Close once the client had time to read: closing on unread bytes would take the answer back."""
        self.hung_up = True
        self.phase_started_at = self.loop.time()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    def _disconnect_cycles(self) -> None:
        self.waiting.clear()
        for cycle in (self._active, self.cycle):
            if cycle is not None:
                cycle.mark_disconnected()
