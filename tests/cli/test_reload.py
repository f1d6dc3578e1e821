"""SIGHUP: what the configuration says now holds for requests that come now, if it can be used."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.doubles.faulty_provider import Fault, FaultyProvider
from tests.helpers.proxy_processes import ProxyProcess, proxy_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
ASKED = {"model": "demo-agent", "messages": [{"role": "user", "content": f"Hello {n}."} for n in range(9)]}
ALONE = {"connection": "close"}
SOON_S = 60.0


def written(folder: Path, window: int, more: str = "") -> None:
    text = f"store: {{url: 'sqlite:///state.db'}}\nmodels: {{'demo-*': {{window: {window}}}}}\n{more}"
    (folder / "config.yaml").write_text(text, encoding="utf-8")


async def limit(client: httpx.AsyncClient) -> str | None:
    """The window that a request is told of."""
    answer = await client.post(
        "/v1/chat/completions", json=ASKED, headers={**ALONE, "x-compaction-trigger-tokens": "5"}
    )
    assert answer.status_code == 200
    found: str | None = answer.headers.get("x-compaction-context-limit")
    return found


async def told(running: ProxyProcess, name: str, number: int) -> list[dict[str, Any]]:
    """The log's lines of an event, once there are so many."""
    async with asyncio.timeout(SOON_S):
        while len(found := running.events(name)) < number:  # noqa: ASYNC110 - a file sets no event
            await asyncio.sleep(0.02)
    return found


async def taken(client: httpx.AsyncClient, value: str) -> None:
    """Ten requests in a row, each answered by any worker, are told the same."""
    async with asyncio.timeout(SOON_S):
        while [await limit(client) for _ in range(10)] != [value] * 10:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.02)


async def gauge(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics", headers=ALONE)).text
    [line] = [each for each in text.splitlines() if each.startswith("config_last_reload_successful ")]
    return float(line.split()[1])


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_changed_configuration_holds_from_the_next_request_on(tmp_path: Path, workers: int) -> None:
    written(tmp_path, 10_000)
    async with serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter()))) as upstream:
        port = int(upstream.rpartition(":")[2])
        async with (
            proxy_process(tmp_path, port, workers=workers) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
        ):
            await taken(client, "10000")
            written(tmp_path, 20_000, "server: {head_timeout_s: 99}\n")
            os.killpg(running.process.pid, signal.SIGHUP)  # as a terminal does: workers get it, too
            [line] = await told(running, "config.reloaded", 1)
            await taken(client, "20000")
            assert line["changed"] == ["models"]
            assert line["waiting_for_restart"] == ["server.head_timeout_s"]
            assert await gauge(client) == 1
            assert len(running.workers()) == (workers if workers > 1 else 0)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_configuration_that_makes_no_sense_is_refused_and_everything_goes_on(
    tmp_path: Path, workers: int
) -> None:
    written(tmp_path, 10_000)
    async with serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter()))) as upstream:
        port = int(upstream.rpartition(":")[2])
        async with (
            proxy_process(tmp_path, port, workers=workers) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
        ):
            written(tmp_path, 20_000, "compaction: {stratgy: full}\n")
            running.process.send_signal(signal.SIGHUP)
            [line] = await told(running, "config.not_reloaded", 1)
            assert [problem.rpartition("config.yaml")[2] for problem in line["problems"]] == [
                ":3:14: compaction.stratgy: unknown key, did you mean 'strategy'?"
            ]
            await taken(client, "10000")
            async with asyncio.timeout(SOON_S):
                while await gauge(client) != 0:  # noqa: ASYNC110 - of whichever worker is told last
                    await asyncio.sleep(0.02)
            written(tmp_path, 30_000)
            running.process.send_signal(signal.SIGHUP)
            await taken(client, "30000")
            assert await gauge(client) == 1


async def test_a_stream_that_is_under_way_is_not_disturbed(tmp_path: Path) -> None:
    written(tmp_path, 10_000)
    slow = {"*": Fault(chunk_s=0.1)}
    async with serve_embedded(FaultyProvider(DemoProviderSettings(CharacterCounter()), slow)) as upstream:
        port = int(upstream.rpartition(":")[2])
        async with (
            proxy_process(tmp_path, port) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**ASKED, "stream": True}) as stream,
        ):
            written(tmp_path, 20_000)
            running.process.send_signal(signal.SIGHUP)
            await told(running, "config.reloaded", 1)
            chunks = [chunk async for chunk in stream.aiter_bytes()]
            body = b"".join(chunks)
    assert len(chunks) > 5  # most of them came after it
    assert body.endswith(b"data: [DONE]\n\n")
