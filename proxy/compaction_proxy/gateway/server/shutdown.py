"""A server that lets responses in progress end before it stops, within a time limit."""

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
from compaction_proxy.gateway.server.timeouts import (
    SWEEP_INTERVAL_S,
    ClientDeadlines,
    close_overdue_connections,
)

TICK_S = 0.1
# How often the server looks whether a response in progress has ended, while it stops.
DRAIN_POLL_S = 0.02
# While the server stops, it waits this many seconds for requests that are still arriving. Then it closes
# their connections.
ARRIVAL_TIMEOUT_S = 0.5
# Over TLS, asyncio waits up to 30 s for the client to confirm that the connection closes. This server waits
# only this many seconds.
CLOSE_TIMEOUT_S = 2.0
# While the server stops, work that goes on after the response of a request may take this many seconds. Then
# the server cancels it.
TASKS_TIMEOUT_S = 1.0
# The most seconds that the application's shutdown may take. After that, the server stops even if the shutdown
# is not complete.
APPLICATION_CLOSE_TIMEOUT_S = 5.0
# The most seconds that the application's shutdown may take if the server must not wait for responses.
FORCED_CLOSE_TIMEOUT_S = 0.5
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class DrainTimeouts:
    """How long a server waits after somebody has asked it to stop.

    Attributes:
        accept_s: Seconds for which the server still accepts requests, while its health checks fail and its
            responses say `connection: close`.
        drain_s: Seconds after that in which the server still answers requests in progress.
    """

    accept_s: float = 0.0
    drain_s: float = 120.0


@dataclass(slots=True)
class DrainReport:
    """What happened to requests and connections after somebody had asked the server to stop.

    Attributes:
        finished: Number of requests that the server answered completely.
        dropped: Number of connections that the server closed because they had no complete request. Idle
            connections count, too.
        cut: Number of connections that the server closed before their responses were complete.
    """

    finished: int = 0
    dropped: int = 0
    cut: int = 0


def _should_await_response(connection: ServerConnection) -> bool:
    """Returns whether the connection has a request that the server should still answer before it stops.

    Such a request is complete, or its response has begun. In both cases, its response is not complete yet.
    """
    cycle = connection.newest_cycle
    if cycle is None or cycle.response_complete:
        return False
    return cycle.response_started or not cycle.more_body or bool(connection.waiting_cycles)


def _abort_if_flushed(connection: ServerConnection) -> None:
    """Closes a connection now, without waiting for its client, if all data has been sent."""
    if not connection.transport.get_write_buffer_size():
        connection.transport.abort()


class GracefulServer(uvicorn.Server):
    """A server that completes the responses in progress before it stops, within a time limit.

    When somebody asks it to stop, it first accepts requests for `DrainTimeouts.accept_s` more seconds. In
    this time, each new request has `stopping` in the state of its scope, so that health checks can fail, and
    each response says `connection: close`. Then the server stops listening, closes connections without a
    complete request, waits for the responses in progress, and lets the application shut down. uvicorn alone
    would wait for an incomplete request forever or, if it is forced to exit, cut off all responses.

    Args:
        config: uvicorn's configuration.
        drain_timeouts: How long the server waits while it stops.
        on_stopping: Called when the server begins to stop, with the number of requests in progress.
        force_on_second_signal: Whether a second signal makes the server stop without waiting for responses.
        deadlines: How long clients may take to send a request or to take a response.
        is_embedded: Whether the server belongs to a program that handles signals itself. Such a server looks
            for overdue connections at every tick, because it has few.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain_timeouts: DrainTimeouts,
        on_stopping: Callable[[int], None],
        *,
        force_on_second_signal: bool,
        deadlines: ClientDeadlines,
        is_embedded: bool = False,
    ) -> None:
        super().__init__(config)
        self._is_embedded = is_embedded
        self._sweep_ticks = 1 if is_embedded else round(SWEEP_INTERVAL_S / TICK_S)
        self._stop_requested = asyncio.Event()
        self._deadlines = deadlines
        self._drain_timeouts = drain_timeouts
        self._on_stopping = on_stopping
        self._force_on_second_signal = force_on_second_signal
        self._answered_before = 0
        self.drain_report = DrainReport()

    def stop(self, *, now: bool = False) -> None:
        """Makes the server stop; with `now`, without waiting for responses. May be called from any thread."""
        self.should_exit = True
        self.force_exit = self.force_exit or now

    def stop_soon(self) -> None:
        """Makes the server stop, and does not wait for its next tick. Call it in the event loop's thread."""
        self.stop()
        self._stop_requested.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature of a signal handler
        """Makes the server stop when a signal arrives.

        After a second signal, the server does not wait for responses if `force_on_second_signal` is set.
        """
        self.stop(now=self._force_on_second_signal and self.should_exit)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs handlers for SIGINT and SIGTERM, unless the server is embedded.

        The handlers stay installed after the context has ended, so that no signal kills the process while it
        shuts down.
        """
        for number in () if self._is_embedded else (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application and accepts connections.

        A TLS handshake may take at most `ClientDeadlines.head_s` seconds.

        uvicorn has no setting that limits the handshake. So this method starts uvicorn without sockets, and
        itself creates an asyncio server for each socket.
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
        """Closes connections that exceed a deadline. Returns whether the server must stop.

        `main_loop` calls this method every `TICK_S` seconds. Unless the server is embedded, the method looks
        at the connections only every `SWEEP_INTERVAL_S` seconds.
        """
        if counter % self._sweep_ticks == 0:
            now = asyncio.get_running_loop().time()
            close_overdue_connections(self.server_state.connections, self._deadlines, now)
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serves until somebody asks the server to stop, and `DrainTimeouts.accept_s` seconds longer."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stop_requested.wait()
        self.lifespan.state["stopping"] = True
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        self._answered_before = self.server_state.total_requests
        self._on_stopping(sum(map(_should_await_response, self._list_connections())))
        ticks = 0
        while ticks * TICK_S < self._drain_timeouts.accept_s and not self.force_exit:
            await self.on_tick(ticks)
            await asyncio.sleep(TICK_S)
            ticks += 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, waits for responses, closes all connections, and shuts the application down."""
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
        """Waits for responses in progress, and closes the connections that have none."""
        clock = asyncio.get_running_loop().time
        started_at = clock()
        closing_since: dict[ServerConnection, float] = {}
        while (
            self._list_connections()
            and not self.force_exit
            and clock() - started_at < self._drain_timeouts.drain_s
        ):
            for connection in self._list_connections():
                if not connection.transport.is_closing():
                    self._close_when_answered(connection, is_late=clock() - started_at >= ARRIVAL_TIMEOUT_S)
                elif clock() - closing_since.setdefault(connection, clock()) >= CLOSE_TIMEOUT_S:
                    _abort_if_flushed(connection)
            await asyncio.sleep(DRAIN_POLL_S)

    def _close_when_answered(self, connection: ServerConnection, *, is_late: bool) -> None:
        """Lets a connection end after the response in progress. Without such a response, closes it.

        If a request may still be arriving, or the client may still be reading the last response, the method
        closes the connection only if `is_late`.

        Args:
            connection: A connection that is still open.
            is_late: Whether the server has waited for incomplete requests for `ARRIVAL_TIMEOUT_S` seconds.
        """
        cycle = connection.newest_cycle
        if connection.has_hung_up:
            if is_late:
                connection.transport.close()
        elif cycle is not None and _should_await_response(connection):
            cycle.keep_alive = False
        elif is_late or (cycle is not None and cycle.response_complete):
            self.drain_report.dropped += 1
            connection.transport.close()

    async def _wait_for_tasks(self) -> None:
        """Waits for work that goes on after a client has left or has its response.

        After `TASKS_TIMEOUT_S` seconds, the server cancels the work that has not ended.
        """
        for limit_s in (TASKS_TIMEOUT_S, TICK_S):
            tasks = set(self.server_state.tasks)
            if not tasks:
                return
            _, late = await asyncio.wait(tasks, timeout=limit_s)
            for task in late:
                task.cancel()

    async def _close_application(self) -> None:
        """Lets the application shut down, with a time limit so that the process ends in any case."""
        clock = asyncio.get_running_loop().time
        start = clock()
        closing = asyncio.create_task(self.lifespan.shutdown())
        while (
            clock() - start < (FORCED_CLOSE_TIMEOUT_S if self.force_exit else APPLICATION_CLOSE_TIMEOUT_S)
            and not closing.done()
        ):
            await asyncio.wait({closing}, timeout=TICK_S)
        closing.cancel()
