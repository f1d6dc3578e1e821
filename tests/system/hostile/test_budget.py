"""Whoever forces summaries forces no more than the allowance: from then on requests go on without one."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

ALLOWED = 20
AT_ONCE = 10
TRIGGER_TOKENS = 1_000
TEXT = "- the parts of the service were read one after the other\n- all of them start as expected"
TOLD = "Part %d reads its settings and opens its port when it starts, as it should. "


def edited(number: int, steps: int = 8) -> list[dict[str, str]]:
    """A conversation whose first message has been changed once more, so that no round of another fits it."""
    talk = [
        {"role": role, "content": text}
        for step in range(steps)
        for role, text in (("assistant", (TOLD % step) * 8), ("user", f"And part {step + 1}?"))
    ]
    return [{"role": "user", "content": f"Look at the service, please, attempt {number}."}, *talk]


async def asked(client: Any, number: int, strategy: str, key: str = "sk-greedy") -> Any:
    return await client.post(
        "/v1/chat/completions",
        json={"model": "gpt-4o", "messages": edited(number)},
        headers={
            "authorization": f"Bearer {key}",
            "x-compaction-strategy": strategy,
            "x-compaction-trigger-tokens": str(TRIGGER_TOKENS),
        },
    )


@pytest.mark.parametrize(
    ("strategy", "status"), [("anchored", "applied"), ("chained", "failed-open")], ids=["anchored", "chained"]
)
async def test_edits_that_force_summaries_cost_no_more_than_the_allowance_and_no_answer(
    before: Any, provider: Any, strategy: str, status: str, pytestconfig: pytest.Config
) -> None:
    summaries: list[str] = []

    def written(prompt: str) -> str:
        summaries.append(prompt)
        return TEXT

    provider.summary = written
    count = 500 if pytestconfig.getoption("--runslow") else 50
    answers: list[Any] = []
    async with before(summary={"model": "summary-small", "calls_per_hour": ALLOWED}) as client:
        for start in range(0, count, AT_ONCE):
            numbers = range(start, start + AT_ONCE)
            answers += await asyncio.gather(*(asked(client, number, strategy) for number in numbers))
        greedy = len(summaries)
        other = await asked(client, 0, strategy, key="sk-modest")
    told = Counter(
        (each.status_code, each.headers["x-compaction-status"], each.headers.get("x-compaction-reason"))
        for each in answers
    )
    assert told == {(200, "applied", None): ALLOWED, (200, status, "budget"): count - ALLOWED}
    assert (greedy, len(summaries)) == (ALLOWED, ALLOWED + 1)
    assert other.headers["x-compaction-status"] == "applied"
    came = [json.dumps(edited(number)) for number in range(count)]
    went = [json.dumps(json.loads(body)["messages"]) for body in provider.bodies]
    assert all(len(each) <= max(map(len, came)) for each in went)
    assert len(set(went) & set(came)) == (count - ALLOWED if status == "failed-open" else 0)
