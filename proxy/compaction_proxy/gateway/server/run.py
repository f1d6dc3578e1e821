"""Applications run on listening sockets."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn

from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.server.connection import Connection
from compaction_proxy.gateway.server.shutdown import Foreground, Patience
from compaction_proxy.gateway.server.sockets import BACKLOG, base_url, listen
from compaction_proxy.gateway.server.timeouts import Deadlines, sweep

POLL_S = 0.005
DEADLINES = Deadlines()

Application = Callable[..., Any]


class _Embedded(uvicorn.Server):
    """A server that leaves the process's signals alone, and looks over its connections ten times a second."""

    def __init__(self, config: uvicorn.Config, deadlines: Deadlines) -> None:
        super().__init__(config)
        self._deadlines = deadlines

    async def on_tick(self, counter: int) -> bool:
        """Look over the connections. Whether to end."""
        sweep(self.server_state.connections, self._deadlines, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _settings(
    app: Application, grace_s: int | None = None, context: ssl.SSLContext | None = None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="auto",  # uvloop where it is installed
        http=Connection,
        ws="none",
        lifespan="on",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=True,  # ours: the upstream's is not relayed
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=grace_s,
        ssl_context_factory=None if context is None else lambda *_: context,
    )


def server(
    app: Application,
    patience: Patience,
    told: Callable[[int], None],
    *,
    insistent: bool = True,
    deadlines: Deadlines = DEADLINES,
    context: ssl.SSLContext | None = None,
) -> Foreground:
    """A server for the foreground, which ends on SIGINT and SIGTERM.

    Args:
        app: An ASGI application with a lifespan.
        patience: How long it waits for requests when it ends.
        told: Called when it begins to end, with the number of requests under way.
        insistent: Whether a second signal ends it at once.
        deadlines: How long clients may take to send a request.
        context: Serves TLS; None: plain HTTP.
    """
    return Foreground(
        _settings(app, context=context), patience, told, insistent=insistent, deadlines=deadlines
    )


async def _serve(running: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until told to end. A lifespan that fails ends this, not the process."""
    try:
        await running.serve(sockets=[bound])
    except SystemExit:
        raise ProxyError("the application did not start; the log says why") from None


async def run(running: uvicorn.Server, bound: socket.socket, started: Callable[[], None]) -> None:
    """Serve on a listening socket until told to end.

    Args:
        running: The server.
        bound: The socket; it is closed in the end.
        started: Called once requests are accepted; never if it is told to end before that.

    Raises:
        ProxyError: The application's lifespan failed to start.
    """
    serving = asyncio.create_task(_serve(running, bound))
    try:
        while not (running.started or serving.done()):
            await asyncio.wait({serving}, timeout=POLL_S)
        if running.started and not running.should_exit:
            started()
        await serving
    finally:
        bound.close()


@contextlib.asynccontextmanager
async def served(
    app: Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    deadlines: Deadlines = DEADLINES,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve an application while the block runs; yields its base URL once it accepts requests.

    Raises:
        ConfigError: The address cannot be listened on.
        ProxyError: The application's lifespan failed to start.
    """
    bound = listen(host, port)
    running = _Embedded(_settings(app, grace_s=1, context=context), deadlines)
    ready = asyncio.Event()
    serving = asyncio.create_task(run(running, bound, ready.set))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            yield base_url(bound, "http" if context is None else "https")
    finally:
        waiting.cancel()
        running.should_exit = True
        await serving
