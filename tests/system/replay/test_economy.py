"""What a coding session costs with a provider that caches prefixes, beside never compacting it."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded

SESSION = Path("data", "conversations", "coding_pi.jsonl")
# Thousand uncached input tokens, as ../shared/tools/economy.py prints them.
PRINTED = re.compile(r"(\d+) requests, .* summary calls (\d+), .* = (\d+), failed (\d+)")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def cost(shared: Path, proxy: str, upstream: str) -> tuple[int, int]:
    """What the session costs, and how many of its requests failed."""
    command = [shared / "tools" / "economy.py", proxy, upstream, shared / SESSION]
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    )
    print(ran.stdout)  # noqa: T201 - shown by `pytest -s`
    found = PRINTED.search(ran.stdout)
    assert found is not None, ran.stdout
    return int(found[3]), int(found[4])


@pytest.mark.parametrize(("trigger_tokens", "most"), [(48_000, 0.45), (24_000, 0.30)])
async def test_compacting_costs_far_less_than_never_compacting(
    trigger_tokens: int, most: float, shared: Path, scripted: Any
) -> None:
    never, _ = await cost(shared, scripted.url, scripted.url)
    scripted.reset()
    config = Config.model_validate(
        {
            "upstream": {"base_url": f"{scripted.url}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": "summary"},
            "compaction": {"trigger": [{"tokens": trigger_tokens}]},
        }
    )
    async with serve_embedded(create_app(config)) as url:
        compacted, failed = await cost(shared, url, scripted.url)
    assert (failed, compacted / never <= most) == (0, True), f"{compacted} of {never}"
