"""The connections to one origin: those that wait for a request, and all there are."""

import asyncio

from compaction_proxy.gateway.client.connection import Connection


class Pool:
    """Connections of one origin. Nobody ever waits here: who finds none makes one.

    Args:
        idle_expiry_s: Seconds after which a connection that waits is closed.
    """

    def __init__(self, idle_expiry_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_expiry_s = idle_expiry_s
        self._idle: list[Connection] = []  # the one that served last is at the end
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self) -> Connection | None:
        """The connection that served last, None if there is none that is young enough."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if self._loop.time() - connection.idle_since <= self._idle_expiry_s:
            return connection
        connection.close()
        return None  # the others have waited for longer

    def keep(self, connection: Connection) -> None:
        """A connection has served and may serve again."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_expiry_s, self._close_expired)

    def add(self, connection: Connection) -> None:
        """A connection stands; it is closed if the pool is."""
        self._all.add(connection)
        if self._closed:
            connection.close()

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_expired(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - self._idle_expiry_s
        expired = [connection for connection in self._idle if connection.idle_since <= oldest]
        for connection in expired:
            connection.close()
        if self._idle:
            due = self._idle[0].idle_since + self._idle_expiry_s
            self._sweep = self._loop.call_at(due, self._close_expired)

    def close(self) -> None:
        """Close every connection, whatever is under way on it."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.fail()
