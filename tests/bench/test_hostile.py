"""Hostile requests and faults at once find nothing wrong, and would be seen to."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
REQUESTS = 1_000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prlimit")


@pytest.mark.timeout(600)
def test_a_thousand_hostile_requests_find_nothing_wrong(tmp_path: Path) -> None:
    options = [f"--requests={REQUESTS}", "--seed=1", f"--corpus={tmp_path}", f"--data={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, BENCH / "hostile.py", *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, last = ended.stdout.splitlines()
    assert last.startswith(f"{REQUESTS:,} requests in ")
    assert last.endswith(
        "seed 1: 0 unnamed 5xx of ours, 0 missing answers, 0 errors of another shape, 0 foreign markers, "
        "0 altered bodies, 0 requests made longer, 0 faults in the log, 0 leaks, 0 dead proxies"
    )
    for what in ("forwarded", "summary calls", "faults: store", "faults: descriptors", "compacted"):
        assert f"\n{what}: " in f"\n{ended.stdout}"
    assert list(tmp_path.glob("*.http"))


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("hostile")


async def judge(
    hostile: Any, folder: Path, response: bytes, *, forwarded: bytes = b"{}", target: bytes = b"/v1/messages"
) -> list[str]:
    """The kinds of what is found wrong with a proxy that forwards this body and answers so."""
    provider = hostile.Provider(0)
    run = hostile.Run(0, folder, folder, provider, None)
    case = hostile.Case(7, 0, "whole", "whole", target, (), b"{}")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        visits = provider.waiting[b"7"]
        visits.bodies.append(forwarded)
        visits.answers.append(b"said")
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await run.ask(case, port)
    return [kind for kind, _ in run.wrong]


def respond(status: int, body: bytes, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d x" % status, b"content-length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


RELAYED = b"x-fate: whole"
SIZES_GROWN = (b"x-compaction-tokens-before: 7", b"x-compaction-tokens-after: 8")
OPENAI = b'{"error":{"message":"m","type":"t","code":"c"}}'
ANTHROPIC = b'{"type":"error",' + OPENAI[1:]


@pytest.mark.parametrize(
    ("response", "forwarded", "wrong"),
    [
        (respond(200, b"said", RELAYED), b"{}", []),
        (respond(200, b"sai", RELAYED), b"{}", ["altered"]),
        (respond(200, b"said", RELAYED), b"{ }", ["altered"]),
        (respond(200, b"said", RELAYED, b"x-compaction-status: applied"), b"{ }", []),
        (respond(200, b"said", RELAYED, *SIZES_GROWN), b"{}", ["longer"]),
        (respond(500, ANTHROPIC), b"{}", ["5xx"]),
        (respond(502, ANTHROPIC), b"{}", ["5xx"]),
        (respond(503, ANTHROPIC), b"{}", ["5xx"]),
        (respond(503, ANTHROPIC, b"retry-after: 1"), b"{}", []),
        (respond(400, OPENAI), b"{}", ["shape"]),
        (respond(400, ANTHROPIC.replace(b"m", b"kestrel01q")), b"{}", ["foreign", "shape"]),
        (respond(200, b"said", RELAYED)[:-1], b"{}", ["answer"]),
        (b"", b"{}", ["answer"]),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_an_answer_is_found_and_written_down(
    hostile: Any, tmp_path: Path, response: bytes, forwarded: bytes, wrong: list[str]
) -> None:
    assert await judge(hostile, tmp_path, response, forwarded=forwarded) == wrong
    assert (tmp_path / "wrong-0-7.http").exists() == bool(wrong)


async def test_the_upstream_finds_the_marker_of_another_tenant(hostile: Any, tmp_path: Path) -> None:
    scripted = importlib.import_module("tests.helpers.scripted_upstream")
    provider = hostile.Provider(0)
    fields = [(b"authorization", b"Bearer sk-kestrel01q"), (b"x-fate", b"whole")]
    async with scripted.upstream(provider) as server:
        for body in (b"kestrel01q", b"kestrel02q"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = [
                b"POST /v1/messages HTTP/1.1",
                b"x-case: 1",
                b"content-length: %d" % len(body),
                b"connection: close",
            ]
            writer.write(b"\r\n".join([*head, *map(b": ".join, fields)]) + b"\r\n\r\n" + body)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
    assert len(provider.foreign) == 1


def test_a_request_follows_from_its_seed_and_number(hostile: Any, tmp_path: Path) -> None:
    requests = importlib.import_module("hostile_requests")
    chats = requests.load_chats(tmp_path)
    one, other = (requests.CaseMaker(3, [b"/v1/messages\r\na: b\r\n\r\n{}"], chats) for _ in range(2))
    assert [one.make(number) for number in range(50)] == [other.make(number) for number in range(50)]
    raw = b"".join(each for each in requests.deliver(one.make(9)) if isinstance(each, bytes))
    assert set(hostile.MARKER.findall(raw)) == {requests.marker_of(one.make(9).tenant)}
