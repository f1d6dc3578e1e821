"""Runs ASGI applications on listening sockets."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.shutdown import DrainTimeouts, GracefulServer
from compaction_proxy.gateway.server.sockets import BACKLOG, build_base_url, listen
from compaction_proxy.gateway.server.timeouts import ClientDeadlines

POLL_INTERVAL_S = 0.005
EMBEDDED_DRAIN = DrainTimeouts(drain_s=1.0)
DEFAULT_DEADLINES = ClientDeadlines()

Application = Callable[..., Any]


def _build_config(app: Application, ssl_context: ssl.SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="auto",  # uvloop where it is installed
        http=ServerConnection,
        ws="none",
        lifespan="on",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=True,  # the upstream's date is not relayed
        proxy_headers=False,
        backlog=BACKLOG,
        ssl_context_factory=None if ssl_context is None else lambda *_: ssl_context,
    )


def build_server(
    app: Application,
    drain_timeouts: DrainTimeouts,
    on_stopping: Callable[[int], None],
    *,
    force_on_second_signal: bool = True,
    deadlines: ClientDeadlines = DEFAULT_DEADLINES,
    ssl_context: ssl.SSLContext | None = None,
) -> GracefulServer:
    """Builds a server that stops on SIGINT and SIGTERM.

    Args:
        app: An ASGI application with a lifespan.
        drain_timeouts: How long the server waits for requests while it stops.
        on_stopping: Called when the server begins to stop, with the number of requests in progress.
        force_on_second_signal: Whether a second signal makes the server stop without waiting for responses.
        deadlines: How long clients may take to send a request or to take a response.
        ssl_context: The TLS settings. None serves plain HTTP.
    """
    return GracefulServer(
        _build_config(app, ssl_context),
        drain_timeouts,
        on_stopping,
        force_on_second_signal=force_on_second_signal,
        deadlines=deadlines,
    )


async def _serve_socket(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serves on a listening socket until somebody asks the server to stop.

    Raises:
        ProxyError: If the application failed to start.
    """
    try:
        await server.serve(sockets=[listener])
    except SystemExit:
        raise ProxyError("the application did not start; see the log") from None


async def run_server(server: uvicorn.Server, listener: socket.socket, on_started: Callable[[], None]) -> None:
    """Serves on a listening socket until somebody asks the server to stop.

    Args:
        server: The server to run.
        listener: The listening socket. This function closes it at the end.
        on_started: Called when the server begins to accept requests, unless somebody has asked it to stop
            before that.

    Raises:
        ProxyError: If the application failed to start.
    """
    serving = asyncio.create_task(_serve_socket(server, listener))
    try:
        while not (server.started or serving.done()):
            await asyncio.wait({serving}, timeout=POLL_INTERVAL_S)
        if server.started and not server.should_exit:
            on_started()
        await serving
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def serve_embedded(
    app: Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    deadlines: ClientDeadlines = DEFAULT_DEADLINES,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serves an application while the block runs. Yields the base URL when the server accepts requests.

    Raises:
        ConfigError: If the server cannot listen on the address.
        ProxyError: If the application failed to start.
    """
    listener = listen(host, port)
    server = GracefulServer(
        _build_config(app, ssl_context),
        EMBEDDED_DRAIN,
        lambda _: None,
        force_on_second_signal=False,
        deadlines=deadlines,
        is_embedded=True,
    )
    ready = asyncio.Event()
    serving = asyncio.create_task(run_server(server, listener, ready.set))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            yield build_base_url(listener, "http" if ssl_context is None else "https")
    finally:
        waiting.cancel()
        server.stop_soon()
        await serving
