"""The way to an origin: TLS with certificates of one's own, proxies, and what is reached without them."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.gateway.client.proxies import ProxySettings, read_environment_proxies

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BASIC = b"proxy-authorization: Basic dTpwQHM="  # u:p@s


async def serve(script: Callable[..., Any], certificate: Path | None = None) -> tuple[asyncio.Server, int]:
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.start_server(script, "127.0.0.1", 0, ssl=context)
    return server, server.sockets[0].getsockname()[1]


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An origin; it echoes bodies of a declared length, and says `ok` to none."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body if body else OK)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


class Forward:
    """A proxy that makes tunnels; `heads` are what it was asked."""

    def __init__(self, refuse: bytes = b"") -> None:
        self.heads: list[bytes] = []
        self.refuse = refuse

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        method, target, _ = self.heads[-1].split(b" ", 2)
        if self.refuse or method != b"CONNECT":
            writer.write(self.refuse or OK)
            writer.close()
            return
        port = int(target.rpartition(b":")[2])
        there = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_a_certificate_of_ones_own_is_believed(
    engine: Any, ask: Any, whole: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server, port = await serve(answering, certificate)
    large = bytes(range(256)) * 8_192
    sender = engine()
    for body, answer in ((b"", b"ok"), (large, large), (b"x", b"x")):
        response = await sender.send(ask(port, body, origin=f"https://localhost:{port}"))
        assert await whole(response) == answer
    server.close()


async def test_a_certificate_of_nobodys_is_refused(engine: Any, ask: Any, certificate: Path) -> None:
    server, port = await serve(answering, certificate)
    with pytest.raises(httpx.ConnectError):
        await engine().send(ask(port, origin=f"https://localhost:{port}"))
    server.close()


async def test_a_certificate_for_another_name_is_refused(
    engine: Any, ask: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server, port = await serve(answering, certificate)
    with pytest.raises(httpx.ConnectError):
        await engine().send(ask(port, origin=f"https://a.localhost:{port}"))
    server.close()


@pytest.mark.parametrize("proxy_tls", [False, True], ids=["http proxy", "https proxy"])
async def test_https_goes_through_a_tunnel(
    engine: Any, ask: Any, whole: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch, proxy_tls: Any
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    forward = Forward()
    server, port = await serve(answering, certificate)
    proxy, proxy_port = await serve(forward, certificate if proxy_tls else None)
    url = f"http{'s' if proxy_tls else ''}://u:p%40s@localhost:{proxy_port}"
    sender = engine(proxies=ProxySettings({"https": url}, is_loopback_proxied=True))
    for body, answer in ((b"", b"ok"), (b"x" * 200_000, b"x" * 200_000)):
        response = await sender.send(ask(port, body, origin=f"https://localhost:{port}"))
        assert await whole(response) == answer
    assert len(forward.heads) == 1
    assert forward.heads[0].startswith(b"CONNECT localhost:%d HTTP/1.1\r\n" % port)
    assert BASIC.lower() in forward.heads[0].lower()
    await sender.aclose()
    server.close()
    proxy.close()


async def test_http_is_forwarded_with_the_whole_address(engine: Any, ask: Any, whole: Any) -> None:
    forward = Forward()
    proxy, proxy_port = await serve(forward)
    sender = engine(proxies=ProxySettings({"all": f"http://u:p%40s@127.0.0.1:{proxy_port}"}))
    assert await whole(await sender.send(ask(1, b"", "GET", origin="http://origin.example"))) == b"ok"
    assert forward.heads[0].startswith(b"GET http://origin.example/x HTTP/1.1\r\n")
    assert BASIC.lower() in forward.heads[0].lower()
    proxy.close()


async def test_a_proxy_that_refuses_is_named_as_the_one(engine: Any, ask: Any) -> None:
    proxy, proxy_port = await serve(Forward(b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n"))
    sender = engine(proxies=ProxySettings({"https": f"http://127.0.0.1:{proxy_port}"}))
    with pytest.raises(httpx.ProxyError):
        await sender.send(ask(1, origin="https://origin.example"))
    proxy.close()


@pytest.mark.parametrize(
    ("url", "through"),
    [
        (("https", "api.example.com", 443), "http://s:1"),
        (("http", "api.example.com", 80), "http://a:1"),
        (("https", "internal.example.com", 443), None),
        (("https", "deep.internal.example.com", 443), None),
        (("https", "notinternal.example.com", 443), "http://s:1"),
        (("https", "ported.example", 8443), None),
        (("https", "ported.example", 443), "http://s:1"),
        (("https", "10.1.2.3", 443), None),
        (("https", "11.1.2.3", 443), "http://s:1"),
        (("https", "fd00::1", 443), None),
        (("http", "127.0.0.1", 80), None),
        (("http", "::1", 80), None),
        (("http", "localhost", 80), None),
    ],
)
def test_what_the_environment_says_is_obeyed(
    url: tuple[str, str, int], through: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "s:1")
    monkeypatch.setenv("ALL_PROXY", "http://a:1")
    monkeypatch.setenv("NO_PROXY", "internal.example.com, ported.example:8443,10.0.0.0/8,fd00::/8")
    assert read_environment_proxies().get_proxy_url(*url) == through


def test_a_star_exempts_all() -> None:
    assert ProxySettings({"all": "http://a:1", "no": "*"}).get_proxy_url("http", "a.example", 80) is None
