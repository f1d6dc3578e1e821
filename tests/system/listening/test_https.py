"""The proxy as a process that serves HTTPS."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
from pathlib import Path

import pytest

from tests.helpers.certificates import HOUR, self_signed
from tests.helpers.proxy_processes import command, proxy_process

GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
# An idle client that does not agree to the end of its connection would hold the process for 30 s.
END_S = 25.0
STORE_REASONS = {"store-busy", "store-timeout"}


def settings(folder: Path, certificate: bytes, key: bytes) -> dict[str, str]:
    """Environment variables of a proxy that serves HTTPS."""
    files = {"TLS_CERTIFICATE": certificate, "TLS_KEY": key}
    for name, held in files.items():
        (folder / name).write_bytes(held)
    return {f"COMPACTION_PROXY__SERVER__{name}": str(folder / name) for name in files}


def idle(port: int, context: ssl.SSLContext) -> tuple[ssl.SSLSocket, bytes]:
    """A client that has an answer and keeps its connection, and what it was told."""
    client = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
    client.settimeout(10)
    client.sendall(GET)
    return client, client.recv(1_000)


def plain(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=100) as client:
        client.sendall(GET)
        try:
            return client.recv(1_000)
        except ConnectionError:
            return b""


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_it_serves_https_and_ends_beside_idle_clients(workers: str, tmp_path: Path) -> None:
    environ = settings(tmp_path, *self_signed())
    context = ssl.create_default_context(cafile=tmp_path / "TLS_CERTIFICATE")
    certificate, key = tmp_path / "TLS_CERTIFICATE", tmp_path / "TLS_KEY"
    async with proxy_process(
        tmp_path, 9, workers=workers, tls_certificate=certificate, tls_key=key
    ) as running:
        client, said = await asyncio.to_thread(idle, running.port, context)
        spoken_plainly = await asyncio.to_thread(plain, running.port)
        silent = socket.create_connection(("127.0.0.1", running.port))
        url = {"COMPACTION_PROXY__SERVER__PORT": str(running.port)}
        health = await asyncio.to_thread(command, "health", tmp_path, **environ, **url)
        os.kill(running.process.pid, signal.SIGTERM)
        code = await asyncio.wait_for(running.process.wait(), END_S)
        errors = running.errors.read_text()
    client.close()
    silent.close()
    assert said.startswith(b"HTTP/1.1 200 ")
    assert spoken_plainly == b""
    assert health == (0, f"https://127.0.0.1:{running.port}: ready\n", "")
    assert (running.url, code) == (f"https://127.0.0.1:{running.port}", 0)
    events = [json.loads(line) for line in errors.splitlines()]
    # On a slow disk, the workers may wait for each other's new store file and serve without it.
    severe = [
        event for event in events if event["level"] != "info" and event.get("reason") not in STORE_REASONS
    ]
    assert severe == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_certificate_of_no_use_is_one_line_and_exit_code_2(workers: str, tmp_path: Path) -> None:
    environ = settings(tmp_path, *self_signed(begins=-2 * HOUR, ends=-HOUR))
    environ["COMPACTION_PROXY__SERVER__WORKERS"] = workers
    expired = f"server.tls_certificate: {tmp_path}/TLS_CERTIFICATE has expired\n"
    assert command("serve", tmp_path, **environ) == (2, "", expired)


def close_with(clients: list[socket.socket]) -> None:
    """Wait until the other side has closed all of them."""
    for client in clients:
        client.settimeout(END_S)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
        client.close()


async def test_a_handshake_that_does_not_come_to_its_end_takes_no_longer_than_a_head(tmp_path: Path) -> None:
    settings(tmp_path, *self_signed())
    certificate, key = tmp_path / "TLS_CERTIFICATE", tmp_path / "TLS_KEY"
    async with proxy_process(
        tmp_path, 9, tls_certificate=certificate, tls_key=key, head_timeout_s=1
    ) as running:
        before = running.open_files
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(50)]
        for client in clients[::2]:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a hello
        await asyncio.to_thread(close_with, clients)
        left = running.open_files - before
        context = ssl.create_default_context(cafile=certificate)
        client, said = await asyncio.to_thread(idle, running.port, context)
        client.close()
    assert (left, said[:12]) == (0, b"HTTP/1.1 200")
