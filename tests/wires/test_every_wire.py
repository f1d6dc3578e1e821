"""What holds of any conversation on every wire, for every strategy, as its requests come one after another.

What is forwarded is judged by what providers say of their wires (`wrongs`), and not by our dialects.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.compaction.types import CompactionStatus, FitResult
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.registry import WIRES
from tests.helpers.compaction_bench import bench, user
from tests.helpers.wires.chat import CHAT
from tests.helpers.wires.messages import MESSAGES
from tests.helpers.wires.responses import RESPONSES
from tests.helpers.wires.talks import (
    TALKS,
    Moment,
    Step,
    Talk,
    Told,
    Turn,
    Use,
    bound,
    last_said,
    moments,
    requests,
)
from tests.helpers.wires.wire import JsonObject, Sent, Wire, elements_of

FULL_RUN = settings.get_current_profile_name() == "full"
UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    max_examples=200 if FULL_RUN else 4,
)
pytestmark = pytest.mark.timeout(3_600 if FULL_RUN else 120)

# In tokens: what a talk of a few turns runs past.
WINDOWS = st.sampled_from((1_500, 2_500, 4_000))
TRIGGERS = st.sampled_from((None, 400, 900))
# Of the requests of a talk, so many of the last.
MOST_REQUESTS = 16
# Why a round is not made that is of no use; anything else would be a fault of ours.
OF_THE_SUMMARY = frozenset({"longer"})
UNTOUCHED = frozenset({CompactionStatus.NONE, CompactionStatus.SCHEDULED})

every_wire = pytest.mark.parametrize(
    "wire",
    [
        pytest.param(
            wire,
            id=wire.name,
            marks=pytest.mark.skipif(wire.name not in WIRES, reason="this wire is not spoken"),
        )
        for wire in (CHAT, RESPONSES, MESSAGES)
    ],
)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request, and what was forwarded in its place."""

    wire: Wire
    strategy: str
    held: list[Moment]
    sent: Sent
    fit: FitResult

    @property
    def got(self) -> JsonObject:
        """What was forwarded."""
        found: JsonObject = json.loads(self.fit.raw)
        return found

    @property
    def listed(self) -> list[JsonObject]:
        """The messages that were forwarded."""
        found: list[JsonObject] = self.got[self.wire.array]
        return found

    @property
    def came(self) -> list[JsonObject]:
        """The messages that came."""
        return [json.loads(each) for each in self.sent.elements]

    @property
    def changed(self) -> bool:
        """Whether anything was changed."""
        return self.fit.raw != self.sent.raw


async def _answers(wire: Wire, talk: Talk, strategy: str, window: int, trigger: int | None) -> list[Answer]:
    """What becomes of the last requests of a talk."""
    dialect = WIRES[wire.name]
    reader = IncrementalReader(bytes(KEY_BYTES), dialect)
    answers = []
    async with bench(strategy=strategy, window=window) as made:
        first = replace(made.ask([user("")]), trigger_tokens=trigger)
        for held in list(requests(talk))[-MOST_REQUESTS:]:
            sent = wire.sent(talk, held, **{wire.output: 100})
            body = reader.read(sent.raw, "t", "c_1")
            assert body.messages == parse_body(sent.raw, dialect).messages
            asked = replace(first, body=body)
            fit = await made.compactor.fit_request(asked)
            await made.observing.learn_from_answer(asked, fit, None)
            if fit.should_prepare:
                await made.compactor.prepare_round(asked)
                await made.settled()
            answers.append(Answer(wire, strategy, held, sent, fit))
    return answers


# What must hold of every answer


def nothing_failed(answer: Answer) -> None:
    report = answer.fit.report
    assert report.status is not CompactionStatus.FAILED_OPEN or report.reason in OF_THE_SUMMARY, report
    assert not (report.status in UNTOUCHED and answer.changed), report


def only_the_array_differs(answer: Answer) -> None:
    raw, sent = answer.fit.raw, answer.sent
    assert raw.startswith(sent.head)
    assert raw.endswith(sent.tail)
    assert json.loads(raw)


def a_provider_takes_what_was_changed(answer: Answer) -> None:
    if answer.changed:
        assert list(answer.wire.wrongs(answer.got)) == []


def it_is_no_larger(answer: Answer) -> None:
    report = answer.fit.report
    assert (report.tokens_after or 0) <= (report.tokens_before or 0)
    assert len(answer.fit.raw) <= len(answer.sent.raw)


def instructions_are_as_they_came(answer: Answer) -> None:
    privileged = answer.wire.privileged
    theirs = privileged(answer.came)
    kept = privileged(answer.listed)
    stand_ins = answer.strategy == "split" and answer.fit.report.round is not None
    assert [each for each in kept if each in theirs or not stand_ins] == theirs
    elements = elements_of(answer.fit.raw, answer.sent)
    assert {each for each in answer.sent.elements if json.loads(each) in theirs} <= set(elements)


def the_user_s_last_words_are_there(answer: Answer) -> None:
    last = last_said(answer.held).text
    texts = answer.wire.user_texts(answer.listed)
    moved = answer.strategy == "full" and any(text.endswith(last) for text in texts)
    assert last in texts or moved


def a_list_ends_as_it_did_where_nobody_waits_for_results(answer: Answer) -> None:
    last = answer.came[-1]
    if last.get("role") == "assistant":
        assert answer.listed[-1] == last


def thoughts_are_whole_or_gone(answer: Answer) -> None:
    if not answer.wire.signs:
        return
    text = json.dumps(answer.listed)
    for group in bound(answer.held):
        assert len({f'"{each}' in text or f'"{each}"'.replace('"', '\\"') in text for each in group}) == 1, (
            group
        )


def thoughts_are_as_they_came(answer: Answer) -> None:
    came = set(_thoughts(answer.came))
    assert set(_thoughts(answer.listed)) <= came


def _thoughts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("type") in {"thinking", "reasoning"}:
            yield json.dumps(value, sort_keys=True)
        for each in value.values():
            yield from _thoughts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _thoughts(each)


ALWAYS: tuple[Callable[[Answer], None], ...] = (
    nothing_failed,
    only_the_array_differs,
    a_provider_takes_what_was_changed,
    it_is_no_larger,
    instructions_are_as_they_came,
    the_user_s_last_words_are_there,
    a_list_ends_as_it_did_where_nobody_waits_for_results,
    thoughts_are_whole_or_gone,
    thoughts_are_as_they_came,
)


def what_a_round_wrote_stays(before: Answer, after: Answer) -> None:
    """The next request begins with the very bytes of this one; where marks move, with the same content."""
    one, other = before.fit, after.fit
    same = one.report.checkpoint_id and one.report.checkpoint_id == other.report.checkpoint_id
    if not same or one.compacted_messages is None or other.compacted_messages is None:
        return
    if before.wire.marked:
        assert _unmarked(after.listed)[: len(before.listed)] == _unmarked(before.listed)
    else:
        assert other.raw.startswith(one.raw[: len(one.raw) - len(before.sent.tail)])


def _unmarked(value: Any) -> Any:
    """The value without marks; a text is the same as one block of it."""
    if isinstance(value, list):
        return [_unmarked(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {key: _unmarked(each) for key, each in value.items() if key != "cache_control"}
    if isinstance(made.get("content"), str) and "role" in made:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


@every_wire
@every_strategy
@UNHURRIED
@given(talk=TALKS, window=WINDOWS, trigger=TRIGGERS)
def test_every_answer_is_as_it_should_be(
    wire: Wire, strategy: str, talk: Talk, window: int, trigger: int | None
) -> None:
    answers = asyncio.run(_answers(wire, talk, strategy, window, trigger))
    for answer in answers:
        for holds in ALWAYS:
            holds(answer)
    for before, after in pairwise(answers):
        what_a_round_wrote_stays(before, after)


LONG = Talk(tuple(Turn(30, steps=(Step(5, (Use(120), Use(60)), reasoned=True), Step(40))) for _ in range(14)))


@every_wire
@every_strategy
def test_a_long_talk_is_compacted_again_and_again(wire: Wire, strategy: str) -> None:
    answers = asyncio.run(_answers(wire, LONG, strategy, 4_000, 2_000))
    statuses = [answer.fit.report.status for answer in answers]
    assert {*statuses} <= {
        CompactionStatus.APPLIED,
        CompactionStatus.REUSED,
        CompactionStatus.SCHEDULED,
        CompactionStatus.NONE,
    }
    assert statuses.count(CompactionStatus.APPLIED) >= 2
    # A strategy without summaries keeps so many messages that it makes a round each time.
    assert CompactionStatus.REUSED in statuses or STRATEGIES[strategy].summary is None
    assert len(answers[-1].fit.raw) < 0.8 * len(answers[-1].sent.raw)
    assert max(answer.fit.report.tokens_after or 0 for answer in answers) <= 4_000


def _digests(wire: Wire, talk: Talk, held: Sequence[Moment]) -> list[bytes]:
    dialect = WIRES[wire.name]
    found = [dialect.parse_message(each) for each in parse_body(wire.sent(talk, held).raw, dialect).messages]
    return [each.digest for each in found if not each.is_privileged]


@every_wire
@UNHURRIED
@given(talk=TALKS)
def test_a_wire_s_messages_are_those_of_chat(wire: Wire, talk: Talk) -> None:
    plain = _plain(talk)
    held = [each for each in moments(plain) if not isinstance(each, Told)]
    assert _digests(wire, plain, held) == _digests(CHAT, plain, held)


def _plain(talk: Talk) -> Talk:
    """The talk without what not every wire can say."""
    turns = [
        replace(
            turn,
            pictured=False,
            unanswered=0,
            steps=tuple(
                replace(
                    step,
                    searched=False,
                    # behind the last results of a turn it would be one message with the next question
                    reminded=step.reminded and step is not turn.steps[-1],
                    uses=tuple(replace(use, custom=False, pictured=False) for use in step.uses),
                )
                for step in turn.steps
            ),
        )
        for turn in talk.turns
    ]
    return replace(talk, turns=tuple(turns), reused=False)
