"""Real conversations, grown request by request past what their provider takes, go on as if nothing were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JsonObject = dict[str, Any]
# Rows of each file in the usual run: the first few and the largest ones would tell the same.
FEW = {"bfcl_multi_turn": 4, "coding_aider": 2, "coding_openhands": 1, "coding_sweagent": 4, "memory_qa": 1}
FEW_STEPS = 4


def rows(path: Path) -> list[JsonObject]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def conversations(shared: Path) -> dict[str, list[JsonObject]]:
    folder = shared / "data" / "conversations"
    return {path.stem: rows(path) for path in sorted(folder.glob("*.jsonl")) if path.stem != "short_chat"}


async def replayed(
    proxied: Any, scripted: Any, steps: list[Any], *, limited: Callable[[int], None] | None = None
) -> list[str]:
    """What was wrong with the answers to these steps.

    Each is asked twice, under a model name of its own: the first time the proxy learns the window from the
    refusal, the second time it knows it.
    """
    wrong: list[str] = []
    async with proxied(scripted.url) as client:
        for number, step in enumerate(steps):
            if limited is not None:
                limited(step.limit())
            model = f"replay-{number}"
            for stream in (number % 2 == 0, number % 2 == 1):
                scripted.forget()
                answer = await client.post(
                    "/v1/chat/completions",
                    json=step.body(model, stream=stream),
                    headers={
                        "x-fake-context-limit": str(step.limit()),
                        "x-session-id": step.name.partition(" ")[0],
                    },
                )
                if answer.status_code != 200:
                    if step.possible():
                        wrong.append(f"{step.name}: {answer.status_code} {answer.text[:200]}")
                    continue
                [*_, last] = scripted.log(model)
                wrong += [f"{step.name}: {each}" for each in step.wrongs(last["body"]["messages"])]
    return wrong


async def test_some_conversations_go_on_past_their_window(
    shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    chosen = [row for name, found in conversations(shared).items() for row in found[: FEW.get(name, 3)]]
    steps = [
        step for row in chosen if len(row["messages"]) < 500 for step in replaying.steps_of(row, FEW_STEPS)
    ]
    assert len(steps) > 50
    assert await replayed(proxied, scripted, steps) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    name: str, shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    steps = [step for row in conversations(shared)[name] for step in replaying.steps_of(row)]
    assert await replayed(proxied, scripted, steps) == []


async def test_a_summary_model_with_the_same_window_does_not_stop_them(
    shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    chosen = [found[-1] for found in conversations(shared).values() if len(found[-1]["messages"]) < 300]
    steps = [step for row in chosen for step in replaying.steps_of(row, FEW_STEPS)]

    def limited(tokens: int) -> None:
        scripted.control(summary={"context_limit": tokens})

    assert await replayed(proxied, scripted, steps, limited=limited) == []
