"""How near we come to what a provider really counted: a coding session, replayed beside its own figures.

Its usage names the index of each answer in the session as it was recorded; answers that said nothing have
been taken out of the messages since, so the answers are first matched with the figures by their sizes.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.compaction.message_reader import CountingOptions, MessageReader
from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.message import Message
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.usage_baseline import (
    UsageBaselineStore,
    build_baseline,
    build_baseline_key,
    predict_tokens,
    predict_upper_bound,
)
from compaction_proxy.storage.keys import get_conversation_root
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.wires.chat.wire import CHAT

P95_ERROR = 0.02
LEAST_REQUESTS = 400
# What matching an answer costs that is not among the messages, beside one that is: by their logarithms.
MISSING_COST = 3.0
EVEN_TOKENS = 20
PLACE = build_baseline_key("https://up.test:443", "m")


@dataclass(frozen=True)
class Call:
    """One request of the session.

    Attributes:
        length: Messages that it had.
        estimate: Our count of it, tokens.
        actual: The provider's.
    """

    length: int
    estimate: int
    actual: int


def matched(usage: list[list[int]], messages: tuple[Message, ...]) -> tuple[int | None, ...]:
    """For each row of usage the index of the answer that it is about, None for one taken out since."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    gone = usage[-1][0] - answers[-1]
    ways: dict[int, tuple[float, tuple[int | None, ...]]] = {1: (0.0, ())}
    for recorded, _, _, output in usage:
        further: dict[int, tuple[float, tuple[int | None, ...]]] = {}
        for before, (cost, found) in ways.items():
            last = max((each for each in found if each is not None), default=-1)
            steps: list[tuple[int, float, int | None]] = [(before + 1, cost + MISSING_COST, None)]
            for shift in range(before, gone + 1):
                index = recorded - shift
                if last < index and messages[index].role == "assistant":
                    ratio = (output + EVEN_TOKENS) / (messages[index].tokens + EVEN_TOKENS)
                    steps.append((shift, cost + abs(math.log(ratio)), index))
            for shift, now, at in steps:
                if shift <= gone and now < further.get(shift, (math.inf, ()))[0]:
                    further[shift] = (now, (*found, at))
        ways = further
    return ways[gone][1]


def calls(row: dict[str, Any], messages: tuple[Message, ...], overhead: int) -> Iterator[Call]:
    sums = [0, *accumulate(message.tokens for message in messages)]
    for (_, actual, *_), at in zip(row["real_usage"], matched(row["real_usage"], messages), strict=True):
        if at is not None:
            yield Call(at, sums[at] + overhead, actual)


def p95(errors: list[float]) -> float:
    return sorted(errors)[int(0.95 * len(errors))]


@pytest.fixture
def session(shared: Path) -> dict[str, Any]:
    path = shared / "data" / "conversations" / "coding_pi.jsonl"
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    return row


async def test_an_anchored_estimate_is_within_two_percent_from_the_third_request_on(
    session: dict[str, Any],
) -> None:
    reading = MessageReader({"tiktoken": TokenScheduler(TiktokenCounter(print))})
    gauge = CountingOptions(session["model"], "tiktoken", CHAT)
    messages = await reading.decode_messages(
        [json.dumps(each).encode() for each in session["messages"]], gauge
    )
    overhead = await reading.count_overhead([json.dumps(session["tools"])], gauge)
    reading.close()
    prefixes = compute_prefix_digests(messages)
    root = get_conversation_root(prefixes)
    assert root is not None
    anchors = UsageBaselineStore(RecordStore(MemoryStore(), print))
    await anchors.load_baselines("t", root)
    calibration = Calibration.build_prior(session["model"])
    errors, plain, low = [], [], 0
    for number, call in enumerate(calls(session, messages, overhead)):
        known = prefixes[: call.length]
        anchor = anchors.peek_deepest("t", root, known, PLACE)
        if number >= 2:
            assert anchor is not None
            errors.append(abs(predict_tokens(anchor, call.estimate, calibration) / call.actual - 1))
            plain.append(abs(calibration.predict_tokens(call.estimate) / call.actual - 1))
            low += predict_upper_bound(anchor, call.estimate, calibration) < (1 - P95_ERROR) * call.actual
        calibration = calibration.add_observation(call.estimate, call.actual)
        made = build_baseline(known, PLACE, call.estimate, call.actual)
        if made is not None:
            anchors.record_baseline("t", root, made)
    figures = f"{len(errors)} requests, p95 {p95(errors):.2%}, without anchors {p95(plain):.2%}, {low} low"
    print(figures)  # noqa: T201 - shown by `pytest -s`
    assert len(errors) >= LEAST_REQUESTS
    assert p95(errors) <= P95_ERROR, figures
    assert p95(errors) < p95(plain), figures
    assert low == 0, figures
