"""Requests that ask for the same round at once: what it shall be is worked out once, not once for each."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.compaction.round_planning import RoundDraft, RoundPlanner, _compute_ledger_tokens
from compaction_proxy.core.planner import PlanConstraints
from compaction_proxy.core.strategies import ScaledLimit
from tests.helpers.compaction_bench import bench, talk

TURNS = 93
# Requests that were sent at once have all asked by then, in seconds.
TOGETHER_S = 0.3


@dataclass
class Noted:
    """How many messages each request had that a round was worked out for; whether it has begun."""

    lengths: list[int] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What is worked out from now on."""
    made = Noted()

    draft = RoundPlanner._draft_fitting_round

    async def noting(planner: RoundPlanner, view: RequestView, *, allow_small: bool) -> RoundDraft | None:
        made.lengths.append(len(view.messages))
        made.begun.set()
        await asyncio.sleep(TOGETHER_S)
        return await draft(planner, view, allow_small=allow_small)

    monkeypatch.setattr(RoundPlanner, "_draft_fitting_round", noting)
    return made


@pytest.mark.virtual_time
async def test_fifty_requests_at_once_share_one_draft(noted: Noted) -> None:
    async with bench() as made:
        fits = await asyncio.gather(*(made.fit(talk(TURNS), trigger_tokens=8_000) for _ in range(50)))
    assert noted.lengths == [len(talk(TURNS))]
    assert len({fit.raw for fit in fits}) == 1


@pytest.mark.virtual_time
async def test_branches_at_once_share_no_draft(noted: Noted) -> None:
    branches = [talk(TURNS, start=f"Build it, way {number}.") for number in range(3)]
    async with bench() as made:
        await asyncio.gather(*(made.fit(branch, conversation=None) for branch in branches))
    assert noted.lengths == [len(branch) for branch in branches]


@pytest.mark.virtual_time
async def test_a_draft_goes_on_for_the_others_when_the_first_to_ask_leaves(noted: Noted) -> None:
    async with bench() as made:
        running = [asyncio.create_task(made.fit(talk(TURNS), trigger_tokens=8_000)) for _ in range(3)]
        await noted.begun.wait()
        running[0].cancel()
        fits = await asyncio.gather(*running[1:])
    assert noted.lengths == [len(talk(TURNS))]
    assert [fit.report.round for fit in fits] == [1, 1]


@pytest.mark.parametrize(
    ("target", "fixed", "tokens"),
    [
        (None, 0, 20_000),  # without a target, nothing limits it
        (80_000, 1_000, 20_000),  # the target leaves room for all of it
        (45_000, 5_000, 14_000),  # what the target leaves beside the tail (20,000) and the summary (6,000)
        (40_000, 30_000, 8_000),  # 40 % of the full limit where the target leaves less
        (40_000, 59_000, 6_800),  # what 80 % of the free tokens leave beside tail and summary
        (40_000, 99_000, 2_000),  # never less than a tenth
    ],
)
def test_a_ledger_leaves_the_tail_its_room(target: int | None, fixed: int, tokens: int) -> None:
    view: Any = SimpleNamespace(
        plan_constraints=PlanConstraints(100_000, target, 100_000, fixed),
        policy=SimpleNamespace(keep=SimpleNamespace(tail=ScaledLimit(20_000, 1.0))),
        checkpoint=None,
    )
    assert _compute_ledger_tokens(view, ScaledLimit(20_000, 0.25)) == tokens
