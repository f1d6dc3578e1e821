"""A server that ends without cutting an answer, and that nobody can keep from ending."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvicorn

from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.timeouts import SWEEP_S, Deadlines, close_overdue_connections

TICK_S = 0.1
# Told to end, a request whose head or body is still on its way gets this long, in seconds.
ARRIVAL_TIMEOUT_S = 0.5
# Over TLS a closed connection waits for its client to agree, for 30 s; here for this long, in seconds.
CLOSE_TIMEOUT_S = 2.0
# What a request does when its client has the answer gets this long, in seconds.
TASKS_TIMEOUT_S = 1.0
# The application's own closing gets this long, in seconds, and less if the end is insisted on.
APPLICATION_CLOSE_TIMEOUT_S = 5.0
FORCED_CLOSE_TIMEOUT_S = 0.5
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class DrainTimeouts:
    """How long a server that was told to end waits.

    Attributes:
        accept_s: Seconds in which it still accepts requests, while it already says that it is ending.
        drain_s: Seconds that requests under way get after that.
    """

    accept_s: float = 0.0
    drain_s: float = 120.0


@dataclass(slots=True)
class DrainReport:
    """What came of requests and connections once the server was told to end.

    Attributes:
        finished: Requests answered to their end.
        dropped: Connections closed on which no complete request had come, idle ones among them.
        cut: Connections closed in the middle of an answer, or before it.
    """

    finished: int = 0
    dropped: int = 0
    cut: int = 0


def _has_pending_response(connection: ServerConnection) -> bool:
    """Whether a whole request has come on a connection, whose answer has not reached its end."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return False
    return cycle.response_started or not cycle.more_body or bool(connection.waiting)


def _abort_if_flushed(connection: ServerConnection) -> None:
    """Wait no longer for a client that has been sent everything."""
    if not connection.transport.get_write_buffer_size():
        connection.transport.abort()


class GracefulServer(uvicorn.Server):
    """A server that ends without cutting an answer, and that nobody can keep from ending.

    Told to end, it first goes on for a while: every new request finds `stopping` in the state of its scope,
    so that health checks can say no, and its answer says `connection: close`. Then it stops listening, drops
    connections that never sent a whole request, waits for the answers under way, and lets the application
    close. uvicorn by itself would wait for half a request for ever, or end every answer with an error.

    Args:
        config: uvicorn's.
        drain_timeouts: How long it waits.
        on_stopping: Called when it begins to end, with the number of requests under way.
        force_on_second_signal: Whether a second signal means that it must end at once.
        deadlines: How long clients may take to send a request.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain_timeouts: DrainTimeouts,
        on_stopping: Callable[[int], None],
        *,
        force_on_second_signal: bool,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(config)
        self._deadlines = deadlines
        self._drain_timeouts = drain_timeouts
        self._on_stopping = on_stopping
        self._force_on_second_signal = force_on_second_signal
        self._answered_before = 0
        self.drain_report = DrainReport()

    def stop(self, *, now: bool = False) -> None:
        """Begin to end; with `now`, wait for nobody. May be called from any thread."""
        self.should_exit = True
        self.force_exit = self.force_exit or now

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's
        """A signal has come."""
        self.stop(now=self._force_on_second_signal and self.should_exit)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM, for good: none may kill the process while it closes."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections. A TLS handshake gets as long as a head.

        uvicorn has no setting for that: it is asked to serve no socket, and what it would do is done here.
        """
        await super().startup(sockets=[])
        self.started = False
        loop, context = asyncio.get_running_loop(), self.config.ssl
        connection = partial(ServerConnection, self.config, self.server_state, self.lifespan.state)
        limit_s = None if context is None else self._deadlines.head_s
        for bound in sockets or []:
            self.servers.append(
                await loop.create_server(
                    connection,
                    sock=bound,
                    ssl=context,
                    backlog=self.config.backlog,
                    ssl_handshake_timeout=limit_s,
                )
            )
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Look over the connections now and then. Whether to end."""
        if counter % round(SWEEP_S / TICK_S) == 0:
            now = asyncio.get_running_loop().time()
            close_overdue_connections(self.server_state.connections, self._deadlines, now)
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serve until told to end, and then as long as requests are still accepted."""
        await super().main_loop()
        self.lifespan.state["stopping"] = True
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        self._answered_before = self.server_state.total_requests
        self._on_stopping(sum(map(_has_pending_response, self._list_connections())))
        ticks = 0
        while ticks * TICK_S < self._drain_timeouts.accept_s and not self.force_exit:
            await self.on_tick(ticks)
            await asyncio.sleep(TICK_S)
            ticks += 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for the answers under way, cut what is left, and close the application."""
        for server in self.servers:
            server.close()
        for bound in sockets or []:
            bound.close()
        await self._drain_connections()
        for connection in self._list_connections():
            self.drain_report.cut += 1
            connection.transport.abort()
        self.drain_report.finished = self.server_state.total_requests - self._answered_before
        await self._wait_for_tasks()
        await self._close_application()

    def _list_connections(self) -> list[ServerConnection]:
        return [held for held in self.server_state.connections if isinstance(held, ServerConnection)]

    async def _drain_connections(self) -> None:
        """Wait for the answers under way, and drop connections that nobody needs."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        closed: dict[ServerConnection, float] = {}
        while (
            self._list_connections()
            and not self.force_exit
            and clock() - begun < self._drain_timeouts.drain_s
        ):
            for connection in self._list_connections():
                if not connection.transport.is_closing():
                    self._close_when_answered(connection, is_late=clock() - begun >= ARRIVAL_TIMEOUT_S)
                elif clock() - closed.setdefault(connection, clock()) >= CLOSE_TIMEOUT_S:
                    _abort_if_flushed(connection)
            await asyncio.sleep(TICK_S)

    def _close_when_answered(self, connection: ServerConnection, *, is_late: bool) -> None:
        """Let a connection end with its answer, or now if there is nothing to wait for.

        Args:
            connection: What is still open.
            is_late: Whether a request that is not whole yet has had its time.
        """
        cycle = connection.cycle
        if connection.hung_up:
            if is_late:
                connection.transport.close()
        elif cycle is not None and _has_pending_response(connection):
            cycle.keep_alive = False
        elif is_late or (cycle is not None and cycle.response_complete):
            self.drain_report.dropped += 1
            connection.transport.close()

    async def _wait_for_tasks(self) -> None:
        """Wait for what requests do when their clients have left or have the answer."""
        for limit_s in (TASKS_TIMEOUT_S, TICK_S):
            tasks = set(self.server_state.tasks)
            if not tasks:
                return
            _, late = await asyncio.wait(tasks, timeout=limit_s)
            for task in late:
                task.cancel()

    async def _close_application(self) -> None:
        """Let the application close what it has opened; it cannot keep the process for ever."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        closing = asyncio.create_task(self.lifespan.shutdown())
        while (
            clock() - begun < (FORCED_CLOSE_TIMEOUT_S if self.force_exit else APPLICATION_CLOSE_TIMEOUT_S)
            and not closing.done()
        ):
            await asyncio.wait({closing}, timeout=TICK_S)
        closing.cancel()
