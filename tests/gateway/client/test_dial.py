"""How connections come about, however slowly, and what is left of one that is given up: nothing."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.proxies import ProxySettings

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
STAGES = ("name", "connection", "TLS", "tunnel", "TLS within a tunnel")


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - it is about sockets, which set no event
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port of 127.0.0.2 where connections wait for ever."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()[1]


@contextlib.contextmanager
def resolving(*addresses: str) -> Iterator[None]:
    """A name leads to these addresses; with none it is looked up as long as the block lasts."""
    real = asyncio.get_running_loop().getaddrinfo
    over = asyncio.Event()

    async def found(host: Any, port: Any, **options: Any) -> Any:
        if host not in {"a.example", b"a.example"}:
            return await real(host, port, **options)
        if not addresses:
            await over.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    with mock.patch.object(asyncio.get_running_loop(), "getaddrinfo", found):
        yield
    over.set()


@contextlib.asynccontextmanager
async def stalled(stage: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """An origin that is never reached, and the engine's options."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if stage == "TLS within a tunnel":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ESTABLISHED)
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    tunnelled = {"proxies": ProxySettings({"https": f"http://{here}"})}
    with deaf_port() as deaf, resolving():
        yield {
            "name": ("http://a.example", {}),
            "connection": (f"http://127.0.0.2:{deaf}", {}),
            "TLS": (f"https://{here}", {}),
            "tunnel": ("https://b.example", tunnelled),
            "TLS within a tunnel": ("https://b.example", tunnelled),
        }[stage]
    server.close()


@pytest.mark.parametrize("stage", STAGES)
async def test_giving_up_before_the_connection_stands_leaves_nothing(
    engine: Any, ask: Any, stage: str
) -> None:
    async with stalled(stage) as (origin, options):
        sender = engine(**options)
        files, tasks = open_files(), asyncio.all_tasks()
        for pause_s in (0, 0, 0.001, 0.05):
            sending = [asyncio.create_task(sender.send(ask(1, origin=origin))) for _ in range(5)]
            await asyncio.sleep(pause_s)
            for each in sending:
                each.cancel()
            ended = await asyncio.gather(*sending, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * 5
        await eventually(lambda: open_files() <= files)
    await eventually(lambda: asyncio.all_tasks() <= tasks)


@pytest.mark.virtual_time
@pytest.mark.parametrize("stage", STAGES)
async def test_each_step_to_a_connection_counts_into_its_time(engine: Any, ask: Any, stage: str) -> None:
    async with stalled(stage) as (origin, options):
        files, sender = open_files(), engine(**options)
        async with asyncio.timeout(100):
            with pytest.raises(httpx.ConnectTimeout):
                await sender.send(ask(1, origin=origin, connect_timeout_s=0.05, silence_timeout_s=60.0))
        await eventually(lambda: open_files() <= files)


async def test_where_one_address_is_deaf_another_answers(engine: Any, ask: Any, whole: Any) -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        writer.close()

    with deaf_port() as port, resolving("127.0.0.2", "127.0.0.1"):
        server = await asyncio.start_server(answering, "127.0.0.1", port)
        files, sender = open_files(), engine()
        async with asyncio.timeout(100):
            assert await whole(await sender.send(ask(1, origin=f"http://a.example:{port}"))) == b"ok"
        await eventually(lambda: open_files() == files + 2)  # both ends of the one that answered
        await sender.aclose()
        await eventually(lambda: open_files() == files)
        server.close()


async def test_where_one_address_refuses_another_answers(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(OK)

    async with wire.running_upstream(script) as upstream:
        with resolving("127.0.0.2", "127.0.0.1"):
            async with asyncio.timeout(100):
                origin = f"http://a.example:{upstream.port}"
                assert await whole(await engine().send(ask(1, origin=origin))) == b"ok"


async def test_connections_that_end_before_they_are_used_are_forgotten(ask: Any) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    sender = NativeEngine()
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    origin = f"http://a.example:{server.sockets[0].getsockname()[1]}"
    with resolving("127.0.0.1", "127.0.0.2"):
        for _ in range(20):
            with pytest.raises(httpx.TransportError):
                await sender.send(ask(1, origin=origin))
    assert [len(origin.pool._all) for origin in sender._origins.values()] == [0]
    server.close()
    await sender.aclose()


@pytest.mark.virtual_time
@pytest.mark.parametrize("does", ["speaks", "ends", "is reset"])
async def test_an_origin_that_acts_before_it_is_asked_breaks_nothing(
    engine: Any, ask: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """With TLS 1.2 what it does comes in the same piece as the end of the handshake."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate)
    secured.maximum_version = ssl.TLSVersion.TLSv1_2

    async def origin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if does == "speaks":
            writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        elif does == "ends":
            writer.close()
        else:
            writer.transport.abort()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        there = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ESTABLISHED)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(origin, "127.0.0.1", 0, ssl=secured)
    port = server.sockets[0].getsockname()[1]
    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    for proxies in (ProxySettings(), ProxySettings({"https": url}, is_loopback_proxied=True)):
        with contextlib.suppress(httpx.TransportError):  # or an answer of 408
            sender = engine(proxies=proxies)
            await (await sender.send(ask(port, origin=f"https://localhost:{port}"))).aclose()
        await sender.aclose()
    await asyncio.sleep(0.02)
    server.close()
    proxy.close()
    assert failures == []


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
    writer.close()


async def test_closing_the_engine_ends_what_is_under_way(wire: Any, engine: Any, ask: Any) -> None:
    arrived = asyncio.Semaphore(0)

    async def script(exchange: Any) -> None:
        if exchange.body == b"body":
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        else:
            arrived.release()
        await exchange.reader.read()
        exchange.writer.close()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.001)

    async def asking(body: Any) -> None:
        response = await sender.send(ask(upstream.port, body, silence_timeout_s=None))
        try:
            while await response.read():
                arrived.release()
        finally:
            await response.aclose()

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        bodies: list[Any] = [b"head", b"body", endless(), b"body", endless()]
        tasks = [asyncio.create_task(asking(body)) for body in bodies]
        async with asyncio.timeout(100):
            for _ in bodies:
                await arrived.acquire()
            await sender.aclose()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {isinstance(error, httpx.TransportError) for error in ended} == {True}, ended
        await eventually(lambda: upstream.open_sockets == 0)
        with pytest.raises(httpx.ConnectError):
            await sender.send(ask(upstream.port))


async def test_what_is_written_goes_out_at_once(wire: Any, ask: Any, whole: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(OK)

    sender = NativeEngine()
    async with wire.running_upstream(script) as upstream:
        await whole(await sender.send(ask(upstream.port)))
        (origin,) = sender._origins.values()
        (connection,) = origin.pool._all
        bound = connection._transport.get_extra_info("socket")
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await sender.aclose()
