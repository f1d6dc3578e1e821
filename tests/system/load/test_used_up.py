"""More clients than there is room for: those over it are refused at once, and nothing is left of it."""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.proxy_processes import ProxyProcess, proxy_process
from tests.system.load.peers import ask, chat, note, running_upstream

FILES = 256
CLIENTS = 400
FULL = FILES * 0.6
RESTING_S = 1.0
PLACES = 20
SETTLE_LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def outcome(answer: bytes) -> str:
    """Its status; of a refusal, also its code and when to come back; `closed` if nothing was said."""
    if not answer:
        return "closed"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if status == "200":
        return status if body == b"ok" else "spoilt"
    retry = b"\r\nretry-after: 1" in head
    return f"{status} {json.loads(body)['error']['code']}{' later' if retry else ''}"


async def settled(running: ProxyProcess, most: int) -> None:
    """Wait until a process has so few files open."""
    async with asyncio.timeout(SETTLE_LIMIT_S):
        while running.open_files > most:  # noqa: ASYNC110 - it is about another process
            await asyncio.sleep(0.05)


async def test_with_no_file_left_clients_are_refused_and_it_neither_spins_nor_stays_so(
    tmp_path: Path,
) -> None:
    closing = chat(b"connection: close")
    async with (
        running_upstream() as upstream,
        proxy_process(tmp_path, upstream.port, prepare=few_files) as running,
    ):
        assert outcome(await ask(running.port, closing)) == "200"
        before = running.open_files
        upstream.go_on.clear()
        asking = [asyncio.create_task(ask(running.port, closing)) for _ in range(CLIENTS)]
        refused = 0
        async with asyncio.timeout(SETTLE_LIMIT_S):
            while refused + upstream.asked - 1 < CLIENTS:
                await asyncio.sleep(0.05)
                refused = sum(task.done() for task in asking)
        idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(CLIENTS)]
        async with asyncio.timeout(SETTLE_LIMIT_S):
            while running.open_files < FULL:  # noqa: ASYNC110 - it is about another process
                await asyncio.sleep(0.05)
        full = running.open_files
        used_s, began = running.cpu_s, time.monotonic()
        await asyncio.sleep(RESTING_S)
        share = (running.cpu_s - used_s) / (time.monotonic() - began)
        upstream.go_on.set()
        came = Counter(outcome(answer) for answer in await asyncio.gather(*asking))
        for _, writer in idle:
            writer.close()
        await settled(running, before + came["200"])  # connections to the upstream are kept
        after = await asyncio.gather(*(ask(running.port, closing) for _ in range(50)))
    note(f"\n{dict(came)} of {CLIENTS} with {FILES} files, {full} open; then {share:.0%} of a core")
    # How many are served depends on who comes first, clients or connections to the upstream.
    assert {"503 overloaded later", "closed"} <= set(came) <= {"200", "503 overloaded later", "closed"}
    assert share <= 0.2
    assert [outcome(answer) for answer in after] == ["200"] * 50
    assert "Traceback" not in running.errors.read_text()


async def test_it_takes_as_many_files_as_it_may(tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, 1_000))

    async with (
        running_upstream() as upstream,
        proxy_process(tmp_path, upstream.port, prepare=lower) as running,
    ):
        limits = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
    assert limits == (1_000, 1_000)


async def test_requests_beyond_the_places_are_told_to_come_back_and_the_others_are_served(
    tmp_path: Path,
) -> None:
    closing = chat(b"connection: close")
    async with (
        running_upstream() as upstream,
        proxy_process(tmp_path, upstream.port, max_in_flight=PLACES) as running,
    ):
        await ask(running.port, closing)
        upstream.go_on.clear()
        asking = [asyncio.create_task(ask(running.port, closing)) for _ in range(CLIENTS)]
        async with asyncio.timeout(SETTLE_LIMIT_S):
            while sum(task.done() for task in asking) < CLIENTS - PLACES:  # noqa: ASYNC110 - of many tasks
                await asyncio.sleep(0.01)
        alive = outcome(await ask(running.port, b"GET /livez HTTP/1.0\r\n\r\n"))
        upstream.go_on.set()
        came = Counter(outcome(answer) for answer in await asyncio.gather(*asking))
        asked = upstream.asked
        # A place is free again a moment after its answer is complete.
        after = [""]
        async with asyncio.timeout(SETTLE_LIMIT_S):
            while set(after) != {"200"}:
                answers = await asyncio.gather(*(ask(running.port, closing) for _ in range(PLACES)))
                after = [outcome(answer) for answer in answers]
    note(f"\n{dict(came)} of {CLIENTS} with {PLACES} places")
    assert came == {"200": PLACES, "503 overloaded later": CLIENTS - PLACES}
    assert asked == 1 + PLACES
    assert alive == "spoilt"  # answered, though with something else than the upstream's `ok`
