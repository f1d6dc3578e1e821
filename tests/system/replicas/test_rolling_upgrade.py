"""Two versions side by side on one Redis server, as while an upgrade rolls out, or is rolled back.

The other version is this one with another number in its envelopes: neither can read what the other wrote.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.storage.envelope import VERSION

# Totals are written once a second; two replicas, each at its own time.
WRITTEN_AFTER_S = 2.5


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Makes a replica one of the next version."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import compaction_proxy.storage.envelope as envelope\nenvelope.VERSION = {VERSION + 1}\n"
    )
    root = Path(__file__).resolve().parents[3]
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}


def kind(key: bytes) -> bytes:
    return key.partition(b"}:")[2].partition(b":")[0]


def values(server: Any) -> dict[bytes, bytes]:
    """The records in Redis."""
    keys = [key for key in server.admin.scan_iter() if server.admin.type(key) == b"string"]
    return {key: server.admin.get(key) for key in keys if b"{" in key and b"#" not in key}


def lines(server: Any) -> dict[bytes, list[bytes]]:
    """The lists in Redis."""
    keys = [key for key in server.admin.scan_iter() if server.admin.type(key) == b"list"]
    return {key: server.admin.lrange(key, 0, -1) for key in keys}


@dataclass
class Scene:
    replicated: Any
    upstream: Any
    server: Any
    start: Any

    async def ask(self, replica: Any, name: str, messages: int = 61) -> str:
        content = self.replicated.body(self.replicated.conversation(name, messages))
        answer = await replica.ask(content, **{"x-session-id": name})
        assert answer.status_code == 200, answer.text
        return f"{answer.headers['x-compaction-status']} {answer.headers.get('x-compaction-reason', '')}"


@asynccontextmanager
async def scene(replicated: Any, environ: dict[str, str]) -> AsyncIterator[Scene]:
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):

        async def start(*, newer: bool) -> Any:
            return await replicas.start(url, server.url, **(environ if newer else {}))

        yield Scene(replicated, upstream, server, start)


def reasons(replica: Any) -> set[str]:
    return {event["reason"] for event in replica.events("store.failed")}


@pytest.mark.parametrize(
    "newer_first",
    [pytest.param(True, id="newer first"), pytest.param(False, id="older first", marks=pytest.mark.slow)],
)
async def test_what_another_version_has_written_is_a_miss_and_is_never_overwritten(
    replicated: Any, environ: dict[str, str], *, newer_first: bool
) -> None:
    async with scene(replicated, environ) as here:
        first, other = await asyncio.gather(here.start(newer=newer_first), here.start(newer=not newer_first))
        assert await here.ask(first, "c") == "applied "
        await asyncio.sleep(WRITTEN_AFTER_S)
        before, listed = values(here.server), lines(here.server)
        version = VERSION + newer_first
        assert {value[0] for value in before.values()} == {version}
        assert {kind(key) for key in before} >= {b"checkpoint", b"archive", b"conversation", b"tenant"}

        told = [await here.ask(other, "c", messages) for messages in (61, 63, 65)]
        assert [await here.ask(first, "c", messages) for messages in (63, 65)] == ["reused "] * 2
        await asyncio.sleep(WRITTEN_AFTER_S)
        after, listed_after = values(here.server), lines(here.server)
        fresh = await here.start(newer=newer_first)
        found = await here.ask(fresh, "c", 67)

    assert told == ["applied ", "reused ", "reused "]
    assert {key: after[key][0] for key in before} == dict.fromkeys(before, version)
    frozen = [key for key in before if kind(key) in {b"checkpoint", b"archive"}]
    assert {key: after[key] for key in frozen} == {key: before[key] for key in frozen}
    assert {key: listed_after[key][: len(there)] for key, there in listed.items()} == listed
    assert found == "reused "
    assert "store-unreadable" in reasons(other)
