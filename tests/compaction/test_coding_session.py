"""A long coding session turn by turn, T = 64,000: stable prefixes, few calls, no waiting once warm."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.compaction.types import CompactionStatus, FitResult
from tests.helpers.compaction_bench import Bench, Summaries, bench, prefix

pytestmark = pytest.mark.virtual_time

TRIGGER = 64_000
WINDOW = 128_000
MOST_REQUESTS = 300
# A model that takes 20 s where a request waits 8 s at most.
TAKES_S = 20.0
BLOCK_S = 8.0


@pytest.fixture(scope="module")
def requests(shared: Path) -> list[list[dict[str, Any]]]:
    """The lists that a client would send: evenly spread over the session, growing."""
    lines = (shared / "data" / "conversations" / "coding_pi.jsonl").read_text().splitlines()
    messages: list[dict[str, Any]] = max((json.loads(line)["messages"] for line in lines), key=len)
    ends = [
        end
        for end in range(1, len(messages) + 1)
        if messages[end - 1]["role"] in {"user", "tool"}
        and (end == len(messages) or messages[end]["role"] == "assistant")
    ]
    return [messages[:end] for end in ends[:MOST_REQUESTS]]


async def replayed(
    made: Bench, requests: list[list[dict[str, Any]]], gap_s: float
) -> list[tuple[FitResult, float]]:
    """Each request's fit, and how long it waited in seconds of the loop's clock."""
    clock = asyncio.get_running_loop().time
    section = {"compaction": {"trigger": [{"tokens": TRIGGER}], "max_block_s": BLOCK_S}}
    found = []
    for messages in requests:
        asked = made.ask(messages, model=section)
        started_s = clock()
        fit = await made.compactor.fit_request(asked)
        found.append((fit, clock() - started_s))
        if fit.should_prepare:
            await made.compactor.prepare_round(asked)
        if gap_s:
            await made.settled()
    return found


async def test_between_compactions_the_prefix_is_stable_and_calls_are_few(
    requests: list[list[dict[str, Any]]],
) -> None:
    async with bench(window=WINDOW) as made:
        fits = [fit for fit, _ in await replayed(made, requests, gap_s=1)]
    over = sum((fit.report.tokens_before or 0) >= TRIGGER for fit in fits)
    assert over > 20
    for before, after in pairwise(fits):
        if (
            after.report.status is not CompactionStatus.APPLIED
            and after.report.checkpoint_id == before.report.checkpoint_id
        ):
            assert after.raw.startswith(prefix(before))
    moved = [after for before, after in pairwise(fits) if not after.raw.startswith(prefix(before))]
    assert {fit.report.status for fit in moved} <= {CompactionStatus.APPLIED}
    assert len(made.summaries.calls) <= max(1, over / 5)
    assert max(fit.report.tokens_after or 0 for fit in fits) <= WINDOW
    assert CompactionStatus.FAILED_OPEN not in {fit.report.status for fit in fits}


@pytest.mark.parametrize("warm", [True, False])
async def test_a_slow_summary_model_stalls_nobody(
    requests: list[list[dict[str, Any]]], *, warm: bool
) -> None:
    async with bench(Summaries(takes_s=TAKES_S), window=WINDOW, ticking=True) as made:
        found = await replayed(made, requests, gap_s=float(warm))
    waited = [seconds for _, seconds in found]
    assert max(waited) <= BLOCK_S
    assert max(fit.report.tokens_after or 0 for fit, _ in found) <= WINDOW
    assert CompactionStatus.FAILED_OPEN not in {fit.report.status for fit, _ in found}
    if warm:
        assert "deadline" not in {fit.report.reason for fit, _ in found}
