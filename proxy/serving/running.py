"""Listening sockets, and applications run on them."""

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn

from proxy.errors import ConfigError, ProxyError
from proxy.serving.connection import Connection
from proxy.serving.deadlines import Deadlines, sweep
from proxy.serving.graceful import Foreground, Patience

BACKLOG = 2_048
POLL_S = 0.005
# Whether the kernel spreads connections over sockets that share a port. Others give all to one of them.
PORT_IS_SPREAD = sys.platform == "linux"

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


def tls(certificate: str, key: str) -> ssl.SSLContext:
    """What is needed to serve TLS (1.2 and up).

    Args:
        certificate: File of the certificate in PEM, and of those that lead to a known authority.
        key: File of its private key in PEM, without a password.

    Raises:
        ConfigError: They cannot be read, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        why = (error.reason or "unreadable").replace("_", " ").lower()
        raise ConfigError(f"server.tls_key: no key without a password to server.tls_certificate: {why}") from None
    except OSError as error:
        raise ConfigError(f"server.tls_certificate: cannot be read: {error.strerror}") from None
    return context


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
    return Foreground(_settings(app, context=context), patience, told, insistent=insistent, deadlines=deadlines)


def _shared(family: int, address: tuple[str, int] | tuple[int, bytes]) -> socket.socket:
    """A socket on a port that others have, too, which does not listen yet."""
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return _undelayed(bound)


def _undelayed(bound: socket.socket) -> socket.socket:
    """The socket, whose connections send without waiting for acknowledgements (Nagle).

    asyncio, unlike uvloop, sees to that only where a socket names its protocol, which ours do not; on a
    connection that is used again an answer of two writes would take 40 ms.
    """
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def listen(host: str, port: int, *, spread: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        host: Address or name; empty: every address of this machine.
        port: TCP port.
        spread: Share the port with other such sockets; the kernel spreads connections over those that
            listen, and this one does when it is served. Only where `PORT_IS_SPREAD`.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if spread:
            return _shared(family, address[:2])
        return _undelayed(socket.create_server(address[:2], family=family, backlog=BACKLOG))
    except OSError as error:
        # Python adds the address to the system's words; the name service has negative numbers of its own.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"server.port: cannot listen on {host}:{port}: {why}") from None


def base_url(bound: socket.socket, scheme: str = "http") -> str:
    """The URL under which a listening socket is reached from this machine."""
    host, port = bound.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"


async def _serve(running: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until told to end. A lifespan that fails ends this, not the process."""
    try:
        await running.serve(sockets=[bound])
    except SystemExit:
        raise ProxyError("the application did not start; the log says why") from None


async def run(running: uvicorn.Server, bound: socket.socket, started: Callable[[], None]) -> None:
    """Serve on a listening socket until told to end; `started` is called once requests are accepted.

    Raises:
        ProxyError: The application's lifespan failed to start.
    """
    serving = asyncio.create_task(_serve(running, bound))
    try:
        while not (running.started or serving.done()):
            await asyncio.wait({serving}, timeout=POLL_S)
        if running.started:
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
