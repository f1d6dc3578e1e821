"""The proxy on a path instead of a port."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.gateway.server import listen_on_unix_path, remove_socket_on_exit
from tests.helpers.proxy_processes import command, proxy_process

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """Answers everything with ok; gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def stale(path: Path) -> None:
    """What a process leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_it_serves_its_owner_and_group_on_a_path_until_it_ends(workers: str, tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    stale(path)
    environ = {
        "COMPACTION_PROXY__SERVER__UNIX_SOCKET": str(path),
        "COMPACTION_PROXY__SERVER__WORKERS": workers,
    }
    async with (
        upstream() as port,
        proxy_process(tmp_path, port, unix_socket=path, workers=workers) as running,
    ):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            chat = await client.post("/v1/chat/completions", json=CHAT)
            admin = await client.get("/admin/conversations")
        mode = stat.S_IMODE(path.stat().st_mode)
        health = await asyncio.to_thread(command, "health", tmp_path, **environ)
        os.kill(running.process.pid, signal.SIGTERM)
        code = await asyncio.wait_for(running.process.wait(), 30)
        errors = running.errors.read_text()
    assert (running.url, chat.text, mode) == (f"unix:{path}", "ok", 0o660)
    assert health == (0, f"unix:{path}: ready\n", "")
    assert (code, path.exists(), "Traceback" in errors) == (0, False, False)
    # Whoever stands before the socket, such as a web server, speaks for anybody.
    assert (admin.status_code, json.loads(admin.text)["error"]["code"]) == (403, "admin_key_required")


def test_health_says_that_nobody_listens_on_a_path(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    environ = {"COMPACTION_PROXY__SERVER__UNIX_SOCKET": str(path)}
    assert command("health", tmp_path, **environ)[:2] == (
        1,
        f"unix:{path}: no server is running there; run `compaction-proxy serve`, or set `--url`\n",
    )


def test_a_socket_on_which_somebody_listens_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    with listen_on_unix_path(str(path)):
        done = command("serve", tmp_path, COMPACTION_PROXY__SERVER__UNIX_SOCKET=str(path))
        assert path.is_socket()
    assert done == (2, "", f"server.unix_socket: cannot listen on {path}: Address already in use\n")


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError) as raised:
        listen_on_unix_path(str(path))
    assert str(raised.value) == f"server.unix_socket: cannot listen on {path}: File exists"
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 120, "AF_UNIX path too long"), ("none/a", "No such file or directory")]
)
def test_a_path_of_no_use_is_said_in_one_line(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        listen_on_unix_path(str(tmp_path / name))
    assert str(raised.value) == f"server.unix_socket: cannot listen on {tmp_path / name}: {why}"


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    first = listen_on_unix_path(str(path))
    with remove_socket_on_exit(first):
        first.close()  # it takes nothing more, and answers what it has taken
        second = listen_on_unix_path(str(path))
    with remove_socket_on_exit(second), second, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()
