"""A conversation of very many rules costs time in proportion to its length, and holds up nobody else."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

SIZE = 20_000
# Processor seconds that one step may keep the event loop. The whole work on so many rules takes several.
MOST_HELD_S = 0.25
# Growth of the processor time for four times as many rules; sixteen if it grew with their square.
MOST_GROWTH = 10
# What a further message may cost of what the first request cost.
FURTHER_SHARE = 0.25
# A figure that is too large by chance is so once; one that is too large for a reason is so every time.
ATTEMPTS = 3
# Rules that the ledger quotes (docs/strategies.md).
QUOTED_RULES = 500
SUMMARY = (
    "## Goal\nThe user lays down rules for deployments before reviews.\n\n"
    "## State\nThe rules are known, and nothing else has been done so far."
)

Message = dict[str, str]
FURTHER = {"role": "user", "content": "Never sleep before review."}
# Only a hang takes so long; a busy machine takes several times what a quiet one does.
REQUEST_LIMIT_S = 600.0
pytestmark = pytest.mark.timeout(1_800)
_marks = count(1)


def word(number: int) -> str:
    """A word of its own for each number, without digits."""
    syllables = ""
    for _ in range(4):
        syllables += "bcdfghjklmnpqrstvwxz"[number % 20] + "aeiou"[number // 20 % 5]
        number //= 100
    return syllables


def rule(number: int) -> str:
    return f"Never deploy {word(number)} before review."


def talk(rules: int, *, distinct: bool = True) -> list[Message]:
    """A conversation of its own in which a user lays down so many rules."""
    task = {"role": "user", "content": f"Set up deployment {next(_marks)}."}
    return [task, *({"role": "user", "content": rule(k if distinct else 0)} for k in range(rules))]


def send(client: httpx.Client, messages: list[Message], **headers: str) -> httpx.Response:
    body = json.dumps({"model": "m", "messages": messages})
    answer = client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json", **headers}
    )
    assert answer.status_code == 200
    return answer


def is_summary_call(body: Any) -> bool:
    return len(body["messages"]) == 2 and body["messages"][0]["role"] == "system"


def answer_with_summaries(request: Received) -> Reply:
    if request.method == "GET":
        return Reply(status=404)
    return chat_reply(request, SUMMARY if is_summary_call(request.json()) else "ok")


def answer_without_summaries(request: Received) -> Reply:
    if request.method == "GET" or is_summary_call(request.json()):
        return Reply(status=404 if request.method == "GET" else 500)
    return chat_reply(request)


# Without a summary there is less to do, so that is part of the full run only.
@pytest.fixture(
    params=[
        pytest.param(answer_with_summaries, id="summaries"),
        pytest.param(answer_without_summaries, id="no-summaries", marks=pytest.mark.slow),
    ]
)
def proxy(request: pytest.FixtureRequest, tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    provider.answer = request.param
    with run_proxy(tmp_path, provider.url, watched_loop=True) as running:
        yield running


# Repeated rules never held the loop, so they are part of the full run only.
rules_of_both_kinds = pytest.mark.parametrize(
    "distinct",
    [pytest.param(True, id="distinct"), pytest.param(False, id="repeated", marks=pytest.mark.slow)],
)


def measure_least(measure: Callable[[], float], enough: float) -> float:
    """Returns the least of some measurements; makes no further one once one is small enough."""
    least = measure()
    for _ in range(ATTEMPTS - 1):
        if least <= enough:
            break
        least = min(least, measure())
    return least


@rules_of_both_kinds
def test_a_conversation_of_very_many_rules_does_not_hold_the_event_loop(
    proxy: Proxy, *, distinct: bool
) -> None:
    def measure_hold() -> float:
        messages = talk(SIZE, distinct=distinct)
        with proxy.watch_loop() as held:
            send(client, messages)
            send(client, [*messages, FURTHER])
        return max(held, default=0.0)

    with proxy.client(timeout=REQUEST_LIMIT_S) as client:
        held_s = measure_least(measure_hold, MOST_HELD_S)
    assert held_s <= MOST_HELD_S


@rules_of_both_kinds
def test_the_processor_time_does_not_grow_with_the_square_of_the_rules(
    proxy: Proxy, *, distinct: bool
) -> None:
    def measure_cost(messages: list[Message]) -> float:
        proxy.wait_for_quiet()
        before = proxy.cpu_s
        send(client, messages)
        proxy.wait_for_quiet()
        return proxy.cpu_s - before

    def measure_both(size: int) -> float:
        messages = talk(size, distinct=distinct)
        first_s, further_s = measure_cost(messages), measure_cost([*messages, FURTHER])
        shares.append(further_s / first_s)
        return first_s + further_s

    shares: list[float] = []
    with proxy.client(timeout=REQUEST_LIMIT_S) as client:
        send(client, talk(1))
        quarter_s = measure_both(SIZE // 4)
        cost_s = measure_least(partial(measure_both, SIZE), MOST_GROWTH * quarter_s)
    assert cost_s < MOST_GROWTH * quarter_s
    assert shares[-1] < FURTHER_SHARE, shares


def test_pins_labelled_rules_and_the_newest_rules_survive_among_very_many(
    proxy: Proxy, provider: Provider
) -> None:
    messages = talk(10_000)
    messages.insert(1, {"role": "user", "content": "RULE: Never paint the harbour green."})
    with proxy.client(timeout=REQUEST_LIMIT_S) as client:
        answer = send(client, messages, **{"x-compaction-pin": "Answer in Welsh."})
    assert answer.headers["x-compaction-status"] == "applied"
    sent = [request.body.decode() for request in provider.received if request.method == "POST"][-1]
    assert "Never paint the harbour green." in sent
    assert "Answer in Welsh." in sent
    kept = [k for k in range(10_000) if rule(k) in sent]
    assert kept == list(range(kept[0], 10_000))  # the newest, none left out between them
    in_ledger = len(re.findall(r"- Never deploy \w+ before review\.", sent))
    assert in_ledger == QUOTED_RULES - 2
    assert "rules-lost" not in proxy.log_path.read_text()


def test_a_round_that_could_not_be_made_is_made_once_the_conversation_has_grown(
    tmp_path: Path, provider: Provider
) -> None:
    provider.answer = answer_without_summaries
    rules = [
        f"Never deploy {' or '.join(word(k * 7 + j) for j in range(12))} before review." for k in range(500)
    ]
    messages = [{"role": "user", "content": "\n".join(rules[k : k + 20])} for k in range(0, len(rules), 20)]
    text = (
        "The worker reads the next job from the queue and writes its result into the table of reports. " * 70
    )
    window = {"models": {"*": {"window": 40_000}}}
    with run_proxy(tmp_path, provider.url, window) as running, running.client() as client:
        send(client, messages)
        for step in range(15):
            messages.append({"role": "user", "content": f"What do you say to text {step}?\n{text}"})
            messages.append({"role": "assistant", "content": f"Fine, {step}."})
        messages.append({"role": "user", "content": "Go on."})
        answer = send(client, messages)
    sent = [request.body.decode() for request in provider.received if request.method == "POST"][-1]
    assert answer.headers["x-compaction-status"] == "applied"
    assert [rule for rule in rules if rule not in sent] == []


def test_a_round_that_cannot_succeed_is_not_tried_again_with_every_message(
    tmp_path: Path, provider: Provider
) -> None:
    provider.answer = answer_without_summaries
    long_rule = "Never deploy {} before review of {}."
    messages = [
        {"role": "user", "content": long_rule.format(word(k), " ".join(word(k * 31 + j) for j in range(30)))}
        for k in range(400)
    ]
    reasons = []
    window = {"models": {"*": {"window": 16_000}}}
    with run_proxy(tmp_path, provider.url, window) as running, running.client() as client:
        for step in range(6):
            messages.append({"role": "user", "content": f"Never sleep in {word(step)}."})
            reasons.append(send(client, messages).headers.get("x-compaction-reason"))
        forced = send(client, messages, **{"x-compaction": "force"})
    assert reasons[-3:] == ["paused"] * 3, reasons
    assert forced.headers.get("x-compaction-reason") != "paused"
