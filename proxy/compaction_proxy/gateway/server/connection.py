"""Reads HTTP/1.1 requests from one client connection of uvicorn's server, and sends the responses in order.

The HTTP head of a request is its request line and its header fields.
"""

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

# If more bytes of a body than this wait for the application, the connection stops reading from the socket.
MAX_UNREAD_BYTES = 65_536
# If a request is answered before its body is complete, the connection reads the rest of the body and drops
# it, but at most this many bytes. If more come, the connection closes.
MAX_DROPPED_BYTES = 262_144
# The most requests of one connection that may wait until earlier requests are answered. If more come, the
# connection reads nothing more, and closes after it has answered the waiting requests.
MAX_WAITING_REQUESTS = 100

# An application finds the method `set_departure_callback` at `scope["extensions"][DEPARTURE][NOTICE]`. With
# it, the application sets a function that the connection calls when the client disconnects. The function at
# `HAS_LEFT` beside it returns whether the client has disconnected already.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"
HAS_LEFT = "has_left"


class ServerConnection(asyncio.Protocol):
    """Serves one client connection, from its opening to its end.

    If the client sends several requests without waiting for the responses, the connection answers them one
    after the other. A cycle is an object that handles one request and its response. The HTTP head of a
    request is its request line and its header fields.

    Args:
        config: uvicorn's configuration.
        server_state: uvicorn's state, shared by all connections.
        app_state: The state that the application's lifespan set for its requests.

    Attributes:
        phase_started_at: The time of the latest of three events: the connection was opened, the HTTP head of
            a further request began to arrive, or the wait before the close began. In seconds of the event
            loop's clock.
        last_activity_at: The time when data last came from the client or a response was last completed, in
            seconds of the event loop's clock.
        newest_cycle: The newest request whose HTTP head is complete; None before the first.
        waiting_cycles: The requests whose HTTP heads are complete and that wait until earlier ones are
            answered.
        is_reading_head: Whether an HTTP head has begun to arrive and is not complete.
        is_reading_paused: Whether reading from the socket is paused.
        is_writing_paused: Whether writing is paused because the client does not read fast enough.
        has_hung_up: Whether the connection will soon be closed. Until then, it sends nothing more and drops
            all data that arrives.
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
        self.newest_cycle: RequestResponseCycle | None = None
        self.waiting_cycles: deque[RequestResponseCycle] = deque()
        self.is_reading_head = False
        self.is_reading_paused = self.is_writing_paused = self.has_hung_up = False
        self.transport: asyncio.Transport
        self._app = config.loaded_app
        self._state = server_state
        self._connections: set[Any] = server_state.connections
        self._app_state = app_state
        self._parser = RequestParser(self)
        self._scope: Scope = {}
        self._active_cycle: RequestResponseCycle | None = None
        self._writable: asyncio.Event | None = None
        self._departure_callback: Callable[[], None] | None = None
        self._client_gone = self._stopped_reading = False
        self._dropped_bytes = self._unsent_bytes = 0
        self._last_taken_at = 0.0
        self._default_headers: tuple[object, bytes, bool] = (None, b"", False)

    # Methods that the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers a new connection."""
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
            "extensions": {DEPARTURE: {NOTICE: self.set_departure_callback, HAS_LEFT: self.has_client_left}},
        }

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cleans up after the connection was closed by either side."""
        self._client_gone = True
        self._connections.discard(self)
        self._disconnect_cycles()
        self.resume_writing()
        if self._departure_callback is not None:
            self._departure_callback()
        self._parser.close()
        # These objects also refer to the connection. If the references stayed, only the garbage collector
        # could free the objects, and it seldom runs.
        self._scope, self.newest_cycle, self._active_cycle = {}, None, None

    def data_received(self, data: bytes) -> None:
        """Parses the data that has arrived."""
        self.last_activity_at = self.loop.time()
        if self.has_hung_up or self._stopped_reading or self.transport.is_closing():
            return
        error = self._parser.feed_data(data)
        if error is not None:
            self._refuse_after_pending(error)

    def pause_writing(self) -> None:
        """Makes calls of `drain` wait, because the client takes no more data for now."""
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        """Ends the wait of calls of `drain`, because the client takes data again."""
        self.is_writing_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    # Methods that the parser calls.

    def on_head_started(self) -> None:
        """Records that the HTTP head of a request (its request line and header fields) begins to arrive.

        Stops reading if `MAX_WAITING_REQUESTS` requests already wait.
        """
        self.is_reading_head = True
        self._dropped_bytes = 0
        if len(self.waiting_cycles) >= MAX_WAITING_REQUESTS:
            self._stop_reading()
        if self.newest_cycle is not None:
            self.phase_started_at = self.last_activity_at

    def on_head_received(self, head: RequestHead) -> None:
        """Starts to serve a request whose request line and header fields have arrived.

        If earlier requests are not answered yet, the request first waits until they are.
        """
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
        previous, self.newest_cycle = self.newest_cycle, cycle
        if previous is None or previous.response_complete:
            self._start_cycle(cycle)
        else:
            self.waiting_cycles.append(cycle)
            self.pause_reading()

    def on_body_received(self, piece: bytes) -> None:
        """Passes a part of the body to its request, or drops it if the request is already answered."""
        cycle = self.newest_cycle
        if self._stopped_reading:
            return
        if cycle is None or cycle.response_complete:
            self._dropped_bytes += len(piece)
            if self._dropped_bytes > MAX_DROPPED_BYTES and not self.has_hung_up:
                self._linger_before_close()
        elif cycle.feed_body(piece) > MAX_UNREAD_BYTES:
            self.pause_reading()

    def on_request_received(self) -> None:
        """Records that the newest request is complete."""
        if self.newest_cycle is not None and not self._stopped_reading:
            self.newest_cycle.feed_eof()

    def _refuse_after_pending(self, error: RequestRefusedError) -> None:
        """Refuses invalid input with an error.

        If complete requests that came before it still wait for their responses, the connection sends no
        error. Instead it stops reading, and ends after these responses.
        """
        if self.waiting_cycles and self.waiting_cycles[-1].more_body:
            self.waiting_cycles.pop()
        last = self.waiting_cycles[-1] if self.waiting_cycles else self._active_cycle
        if last is None or last.response_complete or last.more_body:
            self.refuse_request(error)
        else:
            self._stop_reading()

    def _stop_reading(self) -> None:
        """Stops reading. The connection ends after the requests that were read are answered."""
        self._stopped_reading = True
        last = self.waiting_cycles[-1] if self.waiting_cycles else self._active_cycle
        if last is not None:
            last.keep_alive = False
        self.pause_reading()

    # Methods that the requests call (`cycle.ConnectionProtocol`).

    def encode_default_headers(self) -> tuple[bytes, bool]:
        """Returns the header lines that every response has, and whether one is `connection: close`."""
        fields = self._state.default_headers  # a new list each second, made by uvicorn
        known, block, closes = self._default_headers
        if known is not fields:
            block, closes = encode_header_lines(fields), (b"connection", b"close") in fields
            self._default_headers = fields, block, closes
        return block, closes

    async def drain(self) -> None:
        """Waits until the client takes data again. Does not wait if writing is not paused."""
        if self.is_writing_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Stops reading from the socket."""
        if not self.is_reading_paused:
            self.is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads from the socket again, if reading is paused."""
        if self.is_reading_paused:
            self.is_reading_paused = False
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        """Starts the next waiting request after a response was sent completely."""
        self._state.total_requests += 1
        self.last_activity_at = self.loop.time()
        if self.has_hung_up or self.transport.is_closing():
            return
        if self.waiting_cycles:
            self._start_cycle(self.waiting_cycles.popleft())
        if not self.waiting_cycles:
            self.resume_reading()

    def _start_cycle(self, cycle: RequestResponseCycle) -> None:
        self._active_cycle = cycle
        task = self.loop.create_task(cycle.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def set_departure_callback(self, callback: Callable[[], None] | None) -> None:
        """Sets the function that the connection calls when the client disconnects; None removes it.

        If the client has already disconnected, the event loop calls `callback` after this method returns. One
        callback is enough, because the requests of a connection are served one after the other.
        """
        self._departure_callback = callback
        if callback is not None and self._client_gone:
            self.loop.call_soon(callback)
        elif callback is not None and not self.waiting_cycles:
            self.resume_reading()  # while reading is paused, the client's departure goes unnoticed

    def has_client_left(self) -> bool:
        """Returns whether the client has disconnected."""
        return self._client_gone

    # Methods that the server calls.

    def measure_stuck_s(self, now: float) -> float:
        """Returns for how many seconds the client has taken none of the data that waits for it.

        Returns 0 if no data waits. Each call compares the size of the write buffer with its size at the
        previous call, so the server must call this method often. `now` is the time in seconds of the event
        loop's clock.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent_bytes or not unsent:
            self._unsent_bytes, self._last_taken_at = unsent, now
        return now - self._last_taken_at

    def shutdown(self) -> None:
        """Closes the connection after the newest request is answered.

        Closes it now if every request is already answered, or if `has_hung_up` is set.
        """
        if self.has_hung_up:
            self.transport.close()
        for cycle in (self._active_cycle, self.newest_cycle):
            if cycle is not None:
                cycle.keep_alive = False
        if self.newest_cycle is None or self.newest_cycle.response_complete:
            self.transport.close()

    def refuse_request(self, error: RequestRefusedError) -> None:
        """Ends the connection. First sends an error, unless a response has begun and is incomplete."""
        if (
            self._active_cycle is None
            or self._active_cycle.response_complete
            or not self._active_cycle.response_started
        ):
            self.transport.write(encode_refusal(error, self.encode_default_headers()[0]))
        self._disconnect_cycles()
        self._linger_before_close()

    def hang_up(self) -> None:
        """Ends the connection. If a request is still arriving, first waits and drops what arrives."""
        if self._stopped_reading or (self.newest_cycle is not None and self.newest_cycle.more_body):
            self._linger_before_close()
        else:
            self.transport.close()

    def _linger_before_close(self) -> None:
        """Sends nothing more, but leaves the connection open so that the client can read the response.

        If the socket were closed while it holds unread data from the client, the client could lose the
        response. `timeouts.close_overdue_connections` closes the connection after `ClientDeadlines.linger_s`
        seconds. If the transport cannot close only its sending side (as with TLS), the whole connection
        closes now.
        """
        self.has_hung_up = True
        self.phase_started_at = self.loop.time()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    def _disconnect_cycles(self) -> None:
        self.waiting_cycles.clear()
        for cycle in (self._active_cycle, self.newest_cycle):
            if cycle is not None:
                cycle.mark_disconnected()
