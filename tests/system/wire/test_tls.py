"""The server's own TLS, with the certificate that clients must trust."""

import asyncio
import contextlib
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.gateway.server import build_tls_context, serve_embedded
from tests.helpers.certificates import HOUR, self_signed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    return written(tmp_path_factory.mktemp("tls"), "localhost", *self_signed())


def written(folder: Path, name: str, certificate: bytes, key: bytes) -> tuple[Path, Path]:
    files = folder / f"{name}.pem", folder / f"{name}-key.pem"
    for file, held in zip(files, (certificate, key), strict=True):
        file.write_bytes(held)
    return files


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme, and as many bytes as the query asks for."""
    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
        return
    body = scope["scheme"].encode() + b"x" * int(scope["query_string"] or b"0")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def said(port: int, request: bytes, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(request)
    try:
        async with asyncio.timeout(100):
            return await reader.read()
    except (ConnectionError, ssl.SSLError):
        return b""
    finally:
        writer.close()


async def test_who_trusts_the_certificate_is_answered_in_secret(files: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=files[0])
    async with serve_embedded(app, ssl_context=build_tls_context(*map(str, files))) as url:
        port = int(url.rpartition(":")[2])
        whole = await said(port, b"GET /?3000000 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", context)
        bad = await said(port, b"GET / HTTP/1.1\r\nhost a\r\n\r\n", context)
    assert url.startswith("https://127.0.0.1:")
    assert whole.count(b"x") == 3_000_000
    assert whole.rpartition(b"\r\n\r\n")[0].endswith(b"x\r\n0")
    assert b"\r\nhttps" in whole
    assert bad.startswith(b"HTTP/1.1 400 ")


async def test_who_speaks_plainly_to_it_gets_nothing_and_costs_nothing(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_embedded(app, ssl_context=build_tls_context(*map(str, files))) as url:
        caplog.clear()
        port = int(url.rpartition(":")[2])
        assert await said(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", None) == b""
        await asyncio.sleep(0.05)
        assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


async def test_who_speaks_tls_to_the_plain_port_is_refused_without_a_word_in_the_log(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_embedded(app) as url:
        caplog.clear()
        port = int(url.rpartition(":")[2])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context(cafile=files[0]))
        assert (await said(port, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", None)).endswith(
            b"http\r\n0\r\n\r\n"
        )
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


async def test_a_refusal_reaches_a_client_that_is_still_sending(files: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=files[0])
    async with serve_embedded(app, ssl_context=build_tls_context(*map(str, files))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 20000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                writer.write(b"x" * 100_000)
                await writer.drain()
        async with asyncio.timeout(100):
            assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


@pytest.mark.parametrize(
    ("begins", "ends", "why"), [(-2 * HOUR, -HOUR, "has expired"), (HOUR, 2 * HOUR, "is not valid yet")]
)
def test_a_certificate_out_of_its_time_is_a_problem_of_the_configuration(
    begins: timedelta, ends: timedelta, why: str, tmp_path: Path
) -> None:
    certificate, key = map(str, written(tmp_path, "old", *self_signed(begins=begins, ends=ends)))
    with pytest.raises(ConfigError) as raised:
        build_tls_context(certificate, key)
    assert str(raised.value) == f"server.tls_certificate: {certificate} {why}"


def test_files_of_no_use_are_a_problem_of_the_configuration(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = map(str, files)
    other = written(tmp_path, "other", *self_signed())
    locked = written(tmp_path, "locked", *self_signed(b"secret"))
    for wrong in ((certificate, str(other[1])), (str(locked[0]), str(locked[1])), (key, certificate)):
        with pytest.raises(ConfigError, match=r"server\.tls_key: the key must match server\.tls_certificate"):
            build_tls_context(*wrong)
    with pytest.raises(
        ConfigError, match=r"server\.tls_certificate, server\.tls_key: cannot read the file: No such"
    ):
        build_tls_context(str(tmp_path / "none.pem"), key)
