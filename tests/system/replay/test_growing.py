"""Real conversations, grown request by request past what their provider takes, go on as if nothing were."""

from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.core.strategies import DEFAULT_STRATEGY, STRATEGIES

# Rows of each file in the usual run: the first few and the largest ones would tell the same.
FEW = {"bfcl_multi_turn": 4, "coding_aider": 2, "coding_openhands": 1, "coding_sweagent": 4, "memory_qa": 1}
FEW_STEPS = 4


def some(shared: Path, replaying: Any, *, of_each: int | None = None) -> list[Any]:
    """Steps of a few conversations of every file."""
    chosen = [
        row
        for name, found in replaying.conversations(shared).items()
        for row in found[: of_each or FEW.get(name, 3)]
        if len(row["messages"]) < 500
    ]
    return [step for row in chosen for step in replaying.steps_of(row, FEW_STEPS)]


async def test_some_conversations_go_on_past_their_window(
    shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    replay = await replaying.replayed(proxied, scripted, some(shared, replaying))
    assert "\n".join(replay.wrong) == ""
    assert (replay.requests > 100, replay.rounds > replay.requests / 2) == (True, True), replay


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != DEFAULT_STRATEGY])
async def test_some_conversations_go_on_under_every_strategy(
    strategy: str, shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    replay = await replaying.replayed(
        proxied, scripted, some(shared, replaying, of_each=1), strategy=strategy
    )
    assert "\n".join(replay.wrong) == ""
    assert replay.rounds > 5, replay


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name",
    [
        "bfcl_multi_turn",
        "coding_aider",
        "coding_openhands",
        "coding_pi",
        "coding_sweagent",
        "memory_qa",
        "tau_airline",
    ],
)
async def test_every_conversation_goes_on_past_its_window(
    name: str, strategy: str, shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    steps = [step for row in replaying.conversations(shared)[name] for step in replaying.steps_of(row)]
    replay = await replaying.replayed(proxied, scripted, steps, strategy=strategy)
    assert "\n".join(replay.wrong) == ""


async def test_a_summary_model_with_the_same_window_does_not_stop_them(
    shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    chosen = [
        found[-1] for found in replaying.conversations(shared).values() if len(found[-1]["messages"]) < 300
    ]
    steps = [step for row in chosen for step in replaying.steps_of(row, FEW_STEPS)]

    def limited(tokens: int) -> None:
        scripted.control(summary={"context_limit": tokens})

    replay = await replaying.replayed(proxied, scripted, steps, limited=limited)
    assert "\n".join(replay.wrong) == ""
