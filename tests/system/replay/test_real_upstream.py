"""Conversations with a real llama.cpp server, grown past its window, on each wire."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.wires.registry import WIRES
from tests.helpers.wires.chat import CHAT
from tests.helpers.wires.messages import MESSAGES
from tests.helpers.wires.responses import RESPONSES
from tests.helpers.wires.talks import Step, Talk, Turn, Use, requests
from tests.helpers.wires.wire import Wire

WINDOW = 2_048
# The first start installs the server.
START_S = 180.0
ANSWER_TOKENS = 16
TURNS = 14
# How far 95 of 100 estimates may be from what the server counted, once a round was made, and any of them.
# What is removed may cost more a token than what is left: that is learned round by round.
USUAL_ERROR = 0.05
WORST_ERROR = 0.10
# How far the estimate of a request may be that a new round went into, where a model without sense wrote the
# summary: no count of its text is known yet. A bound of the proxy's lets what is new be wrong by as much.
NEW_TEXT_ERROR = 0.15
MOST_REQUESTS = 100

PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
# How a whole stream ends.
ENDINGS = {"chat": "data: [DONE]", "responses": '"type":"response.completed"', "messages": "message_stop"}
# Where it says what it counted.
PROMPT = {
    "chat": ("prompt_tokens",),
    "responses": ("input_tokens",),
    "messages": ("input_tokens", "cache_read_input_tokens"),
}
# Tools called one after another and at once, more than twice what the window holds.
WORK = Talk(
    tuple(Turn(30, steps=(Step(20, (Use(120), Use(60))), Step(5, (Use(150),)), Step(40))) for _ in range(8))
)

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


def prompt_tokens(wire: Wire, answer: httpx.Response) -> int:
    """What the server counted for a request, whether it streamed the answer or not."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    usages = [usage for each in told for usage in _usages(each)]
    return max((sum(usage.get(name) or 0 for name in PROMPT[wire.name]) for usage in usages), default=0)


def _usages(event: Any) -> Sequence[dict[str, int]]:
    within = [event, event.get("response") or {}, event.get("message") or {}]
    return [each["usage"] for each in within if each.get("usage")]


@pytest.mark.parametrize("summary", ["same", "none"])
@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(
            each,
            id=each.name,
            marks=pytest.mark.skipif(each.name not in WIRES, reason="this wire is not spoken"),
        )
        for each in (CHAT, RESPONSES, MESSAGES)
    ],
)
async def test_work_with_tools_goes_on_past_the_window(
    wire: Wire, summary: str, llama: str, proxied: Any
) -> None:
    path = f"/v1/{PATHS[wire.name]}"
    headers = {"content-type": "application/json", "x-session-id": "s-1"}
    answers = []
    async with proxied(llama, summary={"model": summary}) as client:
        for number, held in enumerate(requests(WORK)):
            more: dict[str, Any] = {wire.output: ANSWER_TOKENS, "stream": number % 2 == 0}
            if number % 2 == 0 and wire is CHAT:
                more["stream_options"] = {"include_usage": True}
            raw = wire.sent(WORK, held, **more).raw
            answers.append(await client.post(path, content=raw, headers=headers, timeout=120))
        direct = await client.post(f"{llama}{path}", content=raw, headers=headers, timeout=120)
    assert direct.status_code == 400
    assert [each.status_code for each in answers] == [200] * len(answers), answers[-1].text
    assert all(ENDINGS[wire.name] in each.text for each in answers[::2])
    counted = [prompt_tokens(wire, each) for each in answers]
    assert 0 < min(counted) <= max(counted) <= WINDOW
    told = [each.headers for each in answers]
    statuses = [each["x-compaction-status"] for each in told]
    assert {"applied", "reused"} <= {*statuses} <= {"none", "scheduled", "applied", "reused"}
    rounds = [int(each["x-compaction-round"]) for each in told if "x-compaction-round" in each]
    assert (rounds, rounds[-1] >= 3) == (sorted(rounds), True)
    late = told[len(told) // 2 :]
    assert {each["x-compaction-context-limit"] for each in late} == {str(WINDOW)}
    assert all(int(each["x-compaction-tokens-before"]) > WINDOW for each in late)
    errors = [
        int(each["x-compaction-tokens-after"]) / size - 1
        for each, size in zip(late, counted[len(told) // 2 :], strict=True)
    ]
    limits = [NEW_TEXT_ERROR if each["x-compaction-status"] == "applied" else WORST_ERROR for each in late]
    assert all(abs(error) <= limit for error, limit in zip(errors, limits, strict=True)), errors
