"""A chat with a real llama.cpp server, grown past its window."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WINDOW = 2_048
# The first start installs the server.
START_S = 180.0
ANSWER_TOKENS = 16
TURNS = 14
# How far 95 of 100 estimates may be from what the server counted, once a round was made, and any of them.
# What is removed may cost more a token than what is left: that is learned round by round.
USUAL_ERROR = 0.05
WORST_ERROR = 0.10
MOST_REQUESTS = 100

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def llama(shared: Path, model_server: Any) -> Iterator[str]:
    start = shared / "tools" / "real_upstream" / "start.sh"
    with model_server(lambda port: [start, str(port), str(WINDOW), "2"], START_S) as url:
        yield url


@pytest.mark.parametrize("summary", ["same", "none"])
async def test_a_chat_goes_on_past_the_window(summary: str, llama: str, proxied: Any) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Remember order A-7731, then count the apples."},
    ]
    statuses = []
    sent = []
    async with proxied(llama, summary={"model": summary}) as client:
        for turn in range(TURNS):
            body = {
                "model": "tiny-random",
                "messages": messages,
                "max_tokens": ANSWER_TOKENS,
                "stream": turn % 2 == 0,
            }
            answer = await client.post("/v1/chat/completions", json=body, timeout=120)
            statuses.append(answer.status_code)
            sent.append(answer.headers.get("x-compaction-status"))
            messages += [
                {"role": "assistant", "content": f"{turn} apples. " * 30},
                {"role": "user", "content": f"Here are {turn} more apples, red and green ones. " * 12},
            ]
        direct = await client.post(
            f"{llama}/v1/chat/completions", json={**body, "messages": messages}, timeout=120
        )
    assert direct.status_code == 400
    assert statuses == [200] * TURNS
    assert sent[-1] in {"applied", "reused"}


async def test_estimates_hold_after_compactions(llama: str, shared: Path, proxied: Any) -> None:
    path = shared / "data" / "conversations" / "memory_qa.jsonl"
    messages = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["messages"]
    ends = [k + 1 for k, each in enumerate(messages) if each["role"] == "user"][:MOST_REQUESTS]
    errors: list[float] = []
    first: list[float] = []
    async with proxied(
        llama, summary={"model": "none"}, models={"tiny-random": {"window": WINDOW}}
    ) as client:
        for end in ends:
            body = {"model": "tiny-random", "messages": messages[:end], "max_tokens": ANSWER_TOKENS}
            answer = await client.post("/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            made = answer.headers.get("x-compaction-status") == "applied"
            counted = answer.json()["usage"]["prompt_tokens"]
            error = int(answer.headers.get("x-compaction-tokens-after", 0)) / counted - 1
            if made or first:
                (first if made else errors).append(error)
    shown = [" ".join(f"{each:+.1%}" for each in found) for found in (first, errors)]
    figures = f"{len(first)} rounds: {shown[0]}; {len(errors)} further requests: {shown[1]}"
    print(figures)  # noqa: T201 - shown by `pytest -s`
    assert len(first) >= 3, figures
    ordered = sorted(map(abs, [*first, *errors]))
    assert ordered[int(0.95 * len(ordered))] <= USUAL_ERROR, figures
    assert ordered[-1] <= WORST_ERROR, figures
