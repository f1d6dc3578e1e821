"""Getting summaries written: forms, portions, retries, the breaker, the allowance and what is used."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.compaction.message_reader import CountingOptions, MessageReader
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_client import HOUR_S, MAX_TENANTS, CallBudget
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    SummaryRequest,
    SummaryRoute,
    SummaryUsage,
    count_shown_characters,
    shrink_shape_to_fit,
    split_into_halves,
    split_into_portions,
)
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.strategies import ITERATIONS, SummaryShape
from compaction_proxy.core.summary.answer import PromptSection
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT, build_own_members, build_request_body

SHAPE = SummaryShape(prompt_name="chained", tokens=200, max_tokens=250)
GAUGE = CountingOptions("gpt-4o", "characters", CHAT)
CHEAP = SummaryRoute("https://api.openai.com/v1/chat/completions", {}, "cheap", 100_000)
OWN = replace(CHEAP, model="gpt-4o")
TEXT = "### Work\n- the port of the service was set to the value that the user asked for"
DONE = SummaryAnswer(TEXT, "stop", prompt_tokens=100, completion_tokens=20)


def says(text: str) -> Message:
    return Message(role="user", text=text)


def tool(text: str) -> tuple[Message, Message]:
    """A call and its result."""
    return (
        Message(role="assistant", calls=(MessageToolCall("a", "read", "{}"),)),
        Message(role="tool", text=text, answered_call_ids=("a",)),
    )


HELLO = (says("Set the port to 8443"), Message(role="assistant", text="It is set."))
BRIEF = SummaryRequest(
    shape=SHAPE,
    instructions="Write the record.",
    groups=(HELLO,),
    task="",
    earlier=(),
    language="",
    tokens=200,
    routes=(CHEAP,),
    counting_options=GAUGE,
    calibration_ratio=1.0,
    tenant="t",
    calls_per_hour=0,
    aligned=None,
)

pytestmark = pytest.mark.virtual_time

Answer = SummaryAnswer | SummaryError


@dataclass
class Model:
    """A summary model by the script: the last answer stands for all that follow.

    Attributes:
        answers: What it says, or a function of the call.
        calls: What it was asked.
        busiest: Most calls at the same time.
        takes_s: How long an answer takes.
        hangs: Whether none ever comes.
        asked: Called with each call.
    """

    answers: Sequence[Answer] | Callable[[SummaryCall], Answer] = (DONE,)
    calls: list[SummaryCall] = field(default_factory=list)
    busiest: int = 0
    takes_s: float = 0.0
    hangs: bool = False
    asked: Callable[[], None] = lambda: None
    _busy: int = 0

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        self.calls.append(call)
        self.asked()
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await (asyncio.Event().wait() if self.hangs else asyncio.sleep(self.takes_s))
        finally:
            self._busy -= 1
        answers = self.answers
        said = answers(call) if callable(answers) else answers[min(len(self.calls), len(answers)) - 1]
        if isinstance(said, SummaryError):
            raise said
        return said

    @property
    def models(self) -> list[str]:
        return [call.model for call in self.calls]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


@dataclass
class Written:
    """The texts of a summary, the model that wrote them, and what that took."""

    texts: tuple[str, ...]
    model: str
    usage: SummaryUsage = field(compare=False)


@dataclass
class Bench:
    model: Model
    clock: Clock
    summarising: Summarizer

    async def write(self, brief: SummaryRequest = BRIEF) -> "Written":
        usage = SummaryUsage()
        return Written(*await self.summarising.write_summary(replace(brief, usage=usage)), usage)

    async def reason(self, brief: SummaryRequest = BRIEF) -> str:
        with pytest.raises(SummaryError) as caught:
            await self.write(brief)
        return caught.value.reason


@pytest.fixture
def bench() -> Iterator[Bench]:
    reading = MessageReader({"characters": TokenScheduler(CharacterCounter())})
    model, clock = Model(), Clock()
    yield Bench(model, clock, Summarizer(model, reading, clock=clock, sleep=clock.sleep, jitter=lambda: 1.0))
    reading.close()


def failed(reason: str, **more: Any) -> SummaryError:
    return SummaryError(reason, **more)


# The transcript form.


async def test_one_call_with_instructions_and_data_gives_one_text(bench: Bench) -> None:
    assert await bench.write() == Written((TEXT,), "cheap", SummaryUsage())
    [call] = bench.model.calls
    assert "Set the port to 8443" in call.prompt
    assert (call.system, call.max_tokens, call.temperature, call.conversation) == (
        "Write the record.",
        250,
        0.0,
        None,
    )


async def test_the_cache_key_is_of_the_strategy_and_the_tenant_and_of_openai_only(bench: Bench) -> None:
    elsewhere = replace(CHEAP, url="https://api.example/v1/chat/completions")
    for brief in (BRIEF, replace(BRIEF, tenant="u"), replace(BRIEF, routes=(elsewhere,)), BRIEF):
        await bench.write(brief)
    first, other, none, again = (call.cache_key for call in bench.model.calls)
    assert none == ""
    assert first == again
    assert first.startswith("compaction-chained-")
    assert first != other
    assert len(first) <= 64


async def test_several_groups_share_one_call_and_get_a_text_each(bench: Bench) -> None:
    said = "=== RUN 1 ===\nThe first run set the port.\n=== RUN 2 ===\nThe second run tested it."
    bench.model.answers = [SummaryAnswer(said, "stop")]
    written = await bench.write(replace(BRIEF, groups=(HELLO, HELLO)))
    assert written.texts == ("The first run set the port.", "The second run tested it.")
    assert len(bench.model.calls) == 1


async def test_a_text_over_the_size_is_cut_where_the_strategy_cuts(bench: Bench) -> None:
    lines = "".join(f"- finding number {number} of the long list\n" for number in range(40))
    bench.model.answers = [SummaryAnswer(lines, "length")]
    brief = replace(BRIEF, shape=replace(ITERATIONS.summary or SHAPE, tokens=100, max_tokens=125), tokens=100)
    [text] = (await bench.write(brief)).texts
    assert lines.startswith(text + "\n")
    assert 200 < len(text) <= 400  # four characters a token


async def test_nobody_to_ask_is_no_model(bench: Bench) -> None:
    assert await bench.reason(replace(BRIEF, routes=())) == "no-model"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(DONE, text=""), "empty"),
        (replace(DONE, finish_reason="content_filter"), "content-filter"),
        (replace(DONE, called_tools=True), "tool-calls"),
        (replace(DONE, refused=True), "refused"),
        (replace(DONE, text="I'm sorry, but I can't help with that."), "refused"),
    ],
)
async def test_an_unusable_answer_is_never_used(bench: Bench, answer: SummaryAnswer, reason: str) -> None:
    bench.model.answers = [answer]
    assert await bench.reason() == reason
    assert len(bench.model.calls) == (3 if reason == "empty" else 1)


# Answers that are cut, or not in the form asked for.

SECTIONS = (
    PromptSection("### Done"),
    PromptSection("### Open"),
    PromptSection("### Next"),
    PromptSection("### Errors", is_optional=True),
)
SECTIONED = replace(BRIEF, shape=replace(SHAPE, sections=SECTIONS))
ITEM = "- the port of the service was set to the value that the user asked for"


def cut_after(*headings: str) -> SummaryAnswer:
    """An answer that was cut below the last of the headings."""
    text = "\n".join(f"{heading}\n{ITEM}" for heading in headings)
    return replace(DONE, text=f"{text}\n- and th", finish_reason="length")


async def test_a_cut_answer_is_used_up_to_its_last_whole_line_without_another_call(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=f"{TEXT}\n- and th", finish_reason="length")]
    assert (await bench.write()).texts == (TEXT,)
    assert len(bench.model.calls) == 1


async def test_what_was_cut_too_early_is_asked_for_once_more_in_half_the_size(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    written = await bench.write()
    assert (written.texts, written.usage.completion_tokens) == ((TEXT,), 40)
    sizes = ["At most 200 tokens", "At most 100 tokens"]
    assert [size in call.prompt for size, call in zip(sizes, bench.model.calls, strict=True)] == [True, True]
    assert [call.max_tokens for call in bench.model.calls] == [250, 250]


async def test_an_aligned_answer_that_was_cut_too_early_is_asked_for_once_more(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    assert [call.conversation is None for call in bench.model.calls] == [False, False]
    assert "At most 100 tokens" in bench.model.calls[1].prompt


async def test_an_answer_that_is_cut_twice_is_truncated_after_two_calls(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length")]
    assert await bench.reason() == "truncated"
    assert len(bench.model.calls) == 2


@pytest.mark.parametrize(
    "second",
    [failed("http-400"), replace(DONE, text="- th", finish_reason="length"), cut_after("### Done")],
    ids=["failed", "nothing", "less"],
)
async def test_the_first_answer_is_used_where_the_second_is_no_better(bench: Bench, second: Answer) -> None:
    bench.model.answers = [cut_after("### Done", "### Open"), second]
    [text] = (await bench.write(SECTIONED)).texts
    assert text == f"### Done\n{ITEM}\n\n### Open\n{ITEM}\n\n### Next\nNot recorded."
    assert len(bench.model.calls) == 2


async def test_the_second_answer_is_used_where_it_holds(bench: Bench) -> None:
    bench.model.answers = [cut_after("### Done", "### Open"), cut_after("### Done", "### Open", "### Next")]
    [text] = (await bench.write(SECTIONED)).texts
    assert text == "\n".join(f"{heading}\n{ITEM}" for heading in ("### Done", "### Open", "### Next"))


async def test_no_second_call_is_made_where_the_deadline_leaves_no_time_for_it(bench: Bench) -> None:
    def pass_time() -> None:
        bench.clock.now += 16

    bench.model.asked, bench.model.answers = pass_time, [cut_after("### Done", "### Open")]
    [text] = (await bench.write(replace(SECTIONED, deadline_s=30.0))).texts
    assert (text.endswith("### Next\nNot recorded."), len(bench.model.calls)) == (True, 1)


async def test_the_second_call_counts_towards_the_budget(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    assert await bench.reason(replace(BRIEF, calls_per_hour=1)) == "budget"


async def test_a_text_with_fewer_than_half_of_its_sections_is_garbage_after_one_call(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=f"### Done\n{ITEM}")]
    assert await bench.reason(SECTIONED) == "garbage"
    assert len(bench.model.calls) == 1


async def test_runs_that_cannot_be_told_apart_get_a_call_each(bench: Bench) -> None:
    bench.model.answers = lambda call: replace(
        DONE, text=f"The {len(call.prompt)} characters of this run were read and worked on."
    )
    written = await bench.write(replace(BRIEF, groups=(HELLO, (*HELLO, *HELLO), HELLO)))
    together, *alone = bench.model.calls
    assert "=== RUN 3 ===" in together.prompt
    texts = [f"The {len(call.prompt)} characters of this run were read and worked on." for call in alone]
    assert written.texts == tuple(texts)
    assert [call.max_tokens for call in alone] == [75, 125, 75]  # their shares, 60 tokens at least


async def test_at_most_twelve_runs_get_a_call_each_and_the_others_no_text(bench: Bench) -> None:
    written = await bench.write(replace(BRIEF, groups=(HELLO,) * 15))
    assert written.texts == (*(TEXT,) * 12, "", "", "")
    assert len(bench.model.calls) == 13


async def test_a_run_that_fails_alone_fails_the_round(bench: Bench) -> None:
    bench.model.answers = [DONE, replace(DONE, refused=True)]
    assert await bench.reason(replace(BRIEF, groups=(HELLO, HELLO))) == "refused"


async def test_aligned_runs_that_cannot_be_told_apart_are_read_from_transcripts(bench: Bench) -> None:
    written = await bench.write(replace(ALIGNED, groups=(HELLO, HELLO)))
    assert written.texts == (TEXT, TEXT)
    assert [call.conversation is None for call in bench.model.calls] == [False, True, True, True]


async def test_what_the_source_does_not_hold_is_refused_where_the_strategy_verifies(bench: Bench) -> None:
    said = "- see https://evil.example/x\n- pay 99,999.95 EUR to DE-77123-X"
    bench.model.answers = [SummaryAnswer(said, "stop")]
    brief = replace(BRIEF, shape=replace(SHAPE, is_verified=True))
    assert await bench.reason(brief) == "unfaithful"
    assert len(bench.model.calls) == 1


# Whom to ask.


async def test_an_unknown_model_is_followed_by_the_next_at_once(bench: Bench) -> None:
    bench.model.answers = [failed("unknown-model"), DONE]
    assert (await bench.write(replace(BRIEF, routes=(CHEAP, OWN)))).model == "gpt-4o"
    assert (bench.model.models, bench.clock.slept) == (["cheap", "gpt-4o"], [])


async def test_any_other_failure_is_not_tried_elsewhere(bench: Bench) -> None:
    bench.model.answers = [failed("http-400")]
    assert await bench.reason(replace(BRIEF, routes=(CHEAP, OWN))) == "http-400"
    assert bench.model.models == ["cheap"]


# Retries.


@pytest.mark.parametrize("reason", ["http-429", "http-500", "http-503", "unreachable", "garbage"])
async def test_what_may_pass_is_tried_three_times_with_pauses_that_double(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason), failed(reason), DONE]
    assert (await bench.write()).texts == (TEXT,)
    assert bench.clock.slept == [0.2, 0.4]


async def test_a_fourth_time_is_not_tried(bench: Bench) -> None:
    bench.model.answers = [failed("garbage")]
    assert await bench.reason() == "garbage"
    assert len(bench.model.calls) == 3


@pytest.mark.parametrize("reason", ["http-400", "http-401", "http-403"])
async def test_what_will_not_pass_is_tried_once(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason)]
    assert await bench.reason() == reason
    assert len(bench.model.calls) == 1


async def test_a_provider_is_left_alone_for_as_long_as_it_says(bench: Bench) -> None:
    bench.model.answers = [failed("http-429", retry_after_s=3.0), DONE]
    await bench.write()
    assert bench.clock.slept == [3.0]


async def test_a_provider_that_wants_too_long_a_pause_is_given_up(bench: Bench) -> None:
    bench.model.answers = [failed("http-429", retry_after_s=60.0), DONE]
    assert await bench.reason() == "http-429"
    assert bench.clock.slept == []


async def test_usage_counts_every_attempt_even_where_all_fail(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=""), failed("http-500"), replace(DONE, text="")]
    brief = replace(BRIEF, usage=SummaryUsage())
    with pytest.raises(SummaryError):
        await bench.summarising.write_summary(brief)
    spent = brief.usage
    assert (spent.calls, spent.prompt_tokens, spent.completion_tokens) == (3, 200, 40)


# The breaker.


async def broken(bench: Bench, brief: SummaryRequest = BRIEF) -> None:
    """Three failures in a row."""
    bench.model.answers = [failed("http-500")]
    assert await bench.reason(brief) == "http-500"
    bench.model.calls.clear()


async def test_after_three_failures_nobody_asks_for_half_a_minute(bench: Bench) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    bench.clock.now += 29
    assert await bench.reason() == "breaker-open"
    assert bench.model.calls == []
    bench.clock.now += 1
    assert (await bench.write()).texts == (TEXT,)
    assert (await bench.write()).texts == (TEXT,)


async def test_each_probe_that_fails_doubles_the_rest_up_to_ten_minutes(bench: Bench) -> None:
    await broken(bench)
    rests = []
    for _ in range(6):
        started = bench.clock.now
        while await bench.reason() == "breaker-open":
            bench.clock.now += 15
        rests.append(bench.clock.now - started)
    assert rests == pytest.approx([30, 60, 120, 240, 480, 600])
    assert len(bench.model.calls) == 6  # a probe is not tried again


async def test_one_probe_at_a_time(bench: Bench) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    bench.clock.now += 30
    results = await asyncio.gather(*(bench.write() for _ in range(3)), return_exceptions=True)
    reasons = [each.reason for each in results if isinstance(each, SummaryError)]
    assert (len(bench.model.calls), reasons) == (1, ["breaker-open"] * 2)


@pytest.mark.parametrize("reason", ["http-401", "http-403"])
async def test_a_refused_key_opens_the_breaker_at_once(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason)]
    assert [await bench.reason(), await bench.reason()] == [reason, "breaker-open"]


@pytest.mark.parametrize(
    "other",
    [
        replace(BRIEF, tenant="u"),
        replace(BRIEF, routes=(OWN,)),
        replace(BRIEF, routes=(replace(CHEAP, url="https://x/"),)),
    ],
)
async def test_one_tenant_s_trouble_with_one_model_is_no_other_s(bench: Bench, other: SummaryRequest) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    assert (await bench.write(other)).texts == (TEXT,)
    assert await bench.reason() == "breaker-open"


async def test_three_deadlines_in_a_row_open_the_breaker(bench: Bench) -> None:
    bench.model.hangs = True
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bench.write()
    assert await bench.reason() == "breaker-open"


async def test_a_probe_that_is_cut_off_leaves_room_for_the_next(bench: Bench) -> None:
    await broken(bench)
    bench.clock.now += 30
    bench.model.hangs = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.write()
    assert await bench.reason() == "breaker-open"
    bench.clock.now += 60
    bench.model.hangs, bench.model.answers = False, [DONE]
    assert (await bench.write()).texts == (TEXT,)


async def test_failures_with_answers_between_them_open_nothing(bench: Bench) -> None:
    down = failed("unreachable")
    bench.model.answers = [down, down, DONE, down, down, DONE]
    assert [(await bench.write()).texts for _ in range(2)] == [(TEXT,)] * 2


# The allowance.


async def test_a_tenant_over_its_budget_asks_no_more_within_the_hour(bench: Bench) -> None:
    brief = replace(BRIEF, calls_per_hour=2)
    await bench.write(brief)
    bench.clock.now += 600
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"
    await bench.write(replace(brief, tenant="u"))
    bench.clock.now += HOUR_S - 600
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"
    assert len(bench.model.calls) == 4


async def test_attempts_count_towards_the_budget(bench: Bench) -> None:
    bench.model.answers = [failed("garbage")]
    assert await bench.reason(replace(BRIEF, calls_per_hour=2)) == "budget"
    assert len(bench.model.calls) == 2


async def test_a_long_call_counts_as_several_so_that_tokens_are_bounded_too(bench: Bench) -> None:
    wide = replace(CHEAP, window=1_000_000)
    brief = replace(BRIEF, calls_per_hour=5, routes=(wide,), instructions="word " * 200_000)  # 250,000 tokens
    await bench.write(brief)
    await bench.write(brief)
    assert await bench.reason(replace(brief, instructions="")) == "budget"
    bench.clock.now += HOUR_S
    await bench.write(brief)
    assert len(bench.model.calls) == 3


async def test_a_long_aligned_call_counts_as_several(bench: Bench) -> None:
    long = AlignedConversation(parse_body(RAW, CHAT), (SYSTEM, replace(USER, tokens=250_000)))
    brief = replace(BRIEF, calls_per_hour=3, routes=(replace(OWN, window=1_000_000),), aligned=long)
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"


def test_the_memory_of_tenants_is_bounded() -> None:
    allowance = CallBudget(lambda: 0.0)
    for number in range(MAX_TENANTS + 5):
        allowance.book_call(str(number), 1)
    assert len(allowance._calls) == MAX_TENANTS


# How long it takes.


async def test_the_expected_time_is_that_of_answers_and_of_deadlines(bench: Bench) -> None:
    async def slow(seconds: float) -> None:
        def pass_time() -> None:
            bench.clock.now += seconds

        bench.model.asked = pass_time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 if bench.model.hangs else None):
                await bench.write()

    def expected(*routes: SummaryRoute, tenant: str = BRIEF.tenant) -> float | None:
        return bench.summarising.estimate_call_duration_s(replace(BRIEF, routes=routes, tenant=tenant))

    assert expected(CHEAP) is None
    await slow(2.0)
    assert expected(CHEAP, OWN) == pytest.approx(2.0)
    assert expected(OWN) is None
    assert expected() is None
    assert expected(CHEAP, tenant="another") is None
    bench.model.hangs = True
    await slow(12.0)
    assert expected(CHEAP) == pytest.approx(5.0)
    await slow(1.0)  # a client that left early says nothing
    assert expected(CHEAP) == pytest.approx(5.0)


# The aligned form.

RAW = (
    b'{"model":"gpt-4o","stream":true,"tools":[{"type":"function","function":{"name":"read"}}],'
    b'"messages":[{"role":"system","content":"Be kind."},{"role":"user","content":"Set the port to 8443"}]}'
)
SYSTEM = Message(role="system", text="Be kind.", raw=b'{"role":"system","content":"Be kind."}', tokens=10)
USER = replace(says("Set the port"), raw=b'{"role":"user","content":"Set the port to 8443"}', tokens=10)
ALIGNED = replace(BRIEF, routes=(OWN,), aligned=AlignedConversation(parse_body(RAW, CHAT), (SYSTEM, USER)))
NARROW = replace(ALIGNED, routes=(replace(OWN, window=1_000),))


def sent(call: SummaryCall) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(build_request_body(call, build_own_members(call)))
    return body


async def test_an_aligned_call_continues_the_conversation_itself(bench: Bench) -> None:
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    [call] = bench.model.calls
    body = sent(call)
    asked = body.pop("messages")
    assert asked[:2] == json.loads(RAW)["messages"]
    assert asked[2]["content"].startswith("Write the record.")
    assert body == {
        "model": "gpt-4o",
        "tools": json.loads(RAW)["tools"],
        "max_tokens": 250,
        "temperature": 0.0,
        "tool_choice": "none",
    }
    assert call.cache_key == ""


@pytest.mark.parametrize("reason", ["overflow", "http-400", "http-422"])
async def test_an_aligned_call_that_is_refused_falls_back_to_a_transcript(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason), DONE]
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    assert [call.conversation is None for call in bench.model.calls] == [False, True]


@pytest.mark.parametrize(
    "brief",
    [
        replace(NARROW, aligned=AlignedConversation(parse_body(RAW, CHAT), (replace(USER, tokens=800),))),
        replace(NARROW, aligned=AlignedConversation(parse_body(RAW, CHAT), (says("x" * 4_000),))),
        replace(ALIGNED, routes=(CHEAP,)),
    ],
    ids=["too large", "too large, uncounted", "another model"],
)
async def test_what_cannot_be_aligned_is_a_transcript(bench: Bench, brief: SummaryRequest) -> None:
    await bench.write(brief)
    assert [call.conversation for call in bench.model.calls] == [None]


async def test_an_aligned_call_that_fails_is_no_transcript(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, refused=True)]
    assert await bench.reason(ALIGNED) == "refused"
    assert len(bench.model.calls) == 1


# A summary model with a small window.

SMALL = replace(CHEAP, window=2_000)
LONG = tuple(
    message
    for number in range(40)
    for message in (says(f"Question {number}: " + "why? " * 40), *tool(f"Result {number} " + "line " * 60))
)


def size(call: SummaryCall) -> float:
    """Characters of a call as the counter `characters` counts them."""
    return (len(call.system) + len(call.prompt)) / 4 + call.max_tokens + 4


async def test_what_a_small_window_cannot_hold_is_read_in_portions(bench: Bench) -> None:
    def answer(call: SummaryCall) -> SummaryAnswer:
        return replace(DONE, text=f"- the part that holds {len(call.prompt)} characters was read")

    bench.model.answers, bench.model.takes_s = answer, 0.02
    written = await bench.write(
        replace(BRIEF, groups=(LONG,), routes=(SMALL,), earlier=("The round before.",))
    )
    *parts, last = bench.model.calls
    assert 3 <= len(parts) <= 12
    assert all(size(call) <= SMALL.window for call in bench.model.calls)
    assert bench.model.busiest == 2
    everything = "".join(call.prompt for call in parts)
    assert all(f"Question {number}:" in everything for number in range(40))
    assert all(f"Result {number} " in everything for number in range(40))
    assert ["The round before." in call.prompt for call in bench.model.calls] == [False] * len(parts) + [True]
    assert all(f"that holds {len(part.prompt)} characters" in last.prompt for part in parts)
    assert written.texts == (f"- the part that holds {len(last.prompt)} characters was read",)
    assert written.usage.prompt_tokens == 100 * len(bench.model.calls)


async def test_beyond_twelve_portions_the_middles_of_results_go_first(bench: Bench) -> None:
    huge = tuple(
        message
        for number in range(40)
        for message in (says(f"Question {number}?"), *tool(f"Result {number} " + "line " * 1_500))
    )
    await bench.write(replace(BRIEF, groups=(huge,), routes=(SMALL,)))
    assert len(bench.model.calls) <= 13
    everything = "".join(call.prompt for call in bench.model.calls)
    assert all(f"Question {number}?" in everything for number in range(40))


async def test_several_groups_are_divided_before_one_is(bench: Bench) -> None:
    def answer(call: SummaryCall) -> SummaryAnswer:
        runs = call.prompt.count("\n=== RUN ")
        found = [number for number in range(4) if f"Q{number}!" in call.prompt]
        named = [f"The run of question {number} was read." for number in found]
        marked = [f"=== RUN {at} ===\n{text}" for at, text in enumerate(named, 1)] if runs else named
        return SummaryAnswer("\n".join(marked), "stop")

    bench.model.answers = answer
    groups = tuple((says(f"Q{number}! " + "why? " * 500),) for number in range(4))
    written = await bench.write(replace(BRIEF, groups=groups, routes=(SMALL,)))
    assert written.texts == tuple(f"The run of question {number} was read." for number in range(4))
    assert all(size(call) <= SMALL.window for call in bench.model.calls)
    assert sum(call.max_tokens for call in bench.model.calls) <= 250


async def test_one_message_too_large_for_the_window_is_shown_in_part(bench: Bench) -> None:
    group = (says("Begin here. " + "and so on " * 5_000),)
    shape = replace(SHAPE, message_characters=90_000)
    await bench.write(replace(BRIEF, groups=(group,), routes=(SMALL,), shape=shape))
    [call] = bench.model.calls
    assert "Begin here." in call.prompt
    assert SMALL.window / 2 < size(call) <= SMALL.window


async def test_a_call_that_is_too_long_is_made_once_more_in_a_smaller_window(bench: Bench) -> None:
    bench.model.answers = [failed("overflow", limit=2_000), *([DONE] * 20)]
    await bench.write(replace(BRIEF, groups=(LONG,)))
    first, *rest = bench.model.calls
    assert size(first) > 2_000
    assert all(size(call) <= 0.7 * 2_000 for call in rest)


async def test_a_second_overflow_is_the_end(bench: Bench) -> None:
    bench.model.answers = [failed("overflow")]
    assert await bench.reason() == "overflow"
    assert len(bench.model.calls) == 2


@pytest.mark.parametrize(
    "brief",
    [
        replace(BRIEF, instructions="word " * 9_000, routes=(SMALL,)),
        replace(BRIEF, earlier=("word " * 9_000,), routes=(SMALL,)),
        replace(BRIEF, groups=(tuple(says("why? " * 9) for _ in range(3_000)),), routes=(SMALL,)),
        replace(BRIEF, routes=(replace(CHEAP, window=1),)),
    ],
    ids=["instructions", "earlier rounds", "too many messages", "no window at all"],
)
async def test_a_window_that_is_too_small_is_said_so_without_a_call(
    bench: Bench, brief: SummaryRequest
) -> None:
    assert await bench.reason(brief) == "summary-window"
    assert bench.model.calls == []


async def test_a_portion_that_fails_fails_the_whole(bench: Bench) -> None:
    bench.model.answers = [DONE, replace(DONE, refused=True), DONE]
    assert await bench.reason(replace(BRIEF, groups=(LONG,), routes=(SMALL,))) == "refused"
    assert len(bench.model.calls) == 2


async def test_an_answer_never_takes_more_than_a_quarter_of_the_window(bench: Bench) -> None:
    await bench.write(replace(BRIEF, routes=(replace(CHEAP, window=600),)))
    assert bench.model.calls[0].max_tokens <= 150


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(0, 5_000)), min_size=1, max_size=12
).map(
    lambda drawn: tuple(
        message
        for role, length in drawn
        for message in (tool("x" * length) if role == "tool" else (Message(role=role, text="x" * length),))
    )
)


@given(MESSAGES, st.integers(100, 20_000))
def test_portions_are_the_messages_in_order_on_unit_edges(messages: tuple[Message, ...], room: int) -> None:
    cut = list(split_into_portions(messages, SHAPE, room))
    assert tuple(message for portion in cut for message in portion) == messages
    assert not any(portion[0].answered_call_ids for portion in cut)
    assert all(count_shown_characters(portion, SHAPE) <= room or len(portion) <= 2 for portion in cut)


@given(MESSAGES, st.integers(100, 40_000))
def test_a_narrowed_shape_shows_no_more_than_there_is_room_for(
    messages: tuple[Message, ...], room: int
) -> None:
    shape = shrink_shape_to_fit(messages, SHAPE, room)
    least = replace(SHAPE, tool_characters=40, message_characters=40)
    assert count_shown_characters(messages, shape) <= max(room, count_shown_characters(messages, least))
    if count_shown_characters(messages, SHAPE) <= room:
        assert count_shown_characters(messages, shape) == count_shown_characters(messages, SHAPE)


@given(st.lists(MESSAGES, min_size=2, max_size=6))
def test_halves_are_all_groups_in_order(groups: list[tuple[Message, ...]]) -> None:
    first, second = split_into_halves(groups, SHAPE)
    assert (*first, *second) == tuple(groups)
    assert first
    assert second


async def given_up(bench: Bench, after_s: float) -> None:
    """One call that is cancelled after so many seconds, by the bench's clock."""
    bench.model.hangs = True
    asking = asyncio.create_task(bench.write(replace(BRIEF, deadline_s=30.0)))
    while not bench.model.calls or asking.done():  # noqa: ASYNC110 - the model is no event of ours
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)
    bench.clock.now += after_s
    asking.cancel()
    await asyncio.wait({asking})
    bench.model.hangs = False
    bench.model.calls.clear()


async def test_clients_that_leave_early_close_no_model_to_others(bench: Bench) -> None:
    for _ in range(5):
        await given_up(bench, 2.0)
    assert (await bench.write()).texts == (TEXT,)


async def test_deadlines_that_pass_close_a_model_for_a_while(bench: Bench) -> None:
    for _ in range(3):
        await given_up(bench, 30.0)
    assert await bench.reason() == "breaker-open"
