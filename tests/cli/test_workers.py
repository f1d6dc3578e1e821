"""Metrics of several workers: whoever is asked answers for all, those that have died among them."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.helpers.proxy_processes import ProxyProcess, proxy_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
ASKED = {"model": "demo-agent", "messages": [{"role": "user", "content": "Hello."}]}
# Each request on a connection of its own, so that the kernel gives it to any worker.
ALONE = {"connection": "close"}


async def asked(client: httpx.AsyncClient, times: int) -> None:
    for _ in range(times):
        answer = await client.post("/v1/chat/completions", json=ASKED, headers=ALONE)
        assert answer.status_code == 200


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Requests, connections to the store in use, and configurations, as one of the workers tells it."""
    text = (await client.get("/metrics", headers=ALONE)).text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    names = ("compaction_requests_total", "compaction_overhead_seconds_count", "build_info")
    return {name: sum(each.value for each in samples if each.name == name) for name in names}


async def settled(client: httpx.AsyncClient, requests: int) -> None:
    """Two answers in a row say that there were so many; a worker needs up to a second to count."""
    expected = {
        "compaction_requests_total": requests,
        "compaction_overhead_seconds_count": requests,
        "build_info": 1,
    }
    async with asyncio.timeout(60):
        while [await counted(client), await counted(client)] != [expected, expected]:  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.05)


def folders(temporary: Path) -> list[str]:
    return sorted(each.name.rpartition("-")[0] for each in temporary.iterdir())


async def killed(running: ProxyProcess) -> None:
    """One worker is killed, and another has taken its place."""
    first, second = running.workers()
    os.kill(first, signal.SIGKILL)
    while set(running.workers()) <= {first, second}:  # noqa: ASYNC110 - it is about other processes
        await asyncio.sleep(0.02)


async def test_a_worker_that_is_killed_takes_nothing_of_what_was_counted_with_it(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter()))) as upstream,
        proxy_process(
            tmp_path,
            int(upstream.rpartition(":")[2]),
            "--workers",
            "2",
            environ={"TMPDIR": str(temporary)},
        ) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30, trust_env=False) as client,
    ):
        await asked(client, 20)
        await settled(client, 20)
        assert folders(temporary) == ["compaction-proxy-metrics"]
        [folder] = temporary.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        await killed(running)
        await asked(client, 10)
        await settled(client, 30)
        assert len(list(folder.glob("counter_*.db"))) == 2  # who takes a place takes its files, too
        await running.end()
    assert folders(temporary) == []
