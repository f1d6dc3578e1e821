"""The use case over real parts: memory store, real counting, and a summary model that the test speaks for."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from proxy.adapters.memory_store import MemoryStore
from proxy.adapters.tiktoken_counter import TiktokenCounter
from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.compactor import Compactor
from proxy.compaction.fitting import Ask, Fit, Mode, Status
from proxy.compaction.instructions import instructions
from proxy.compaction.rounds import Rounds
from proxy.compaction.summarising import SummaryRoute
from proxy.compaction.view import Viewer
from proxy.config.model import Config, for_model
from proxy.counting import Counting
from proxy.dialects.chat import read
from proxy.dialects.overflow import Overflow
from proxy.errors import StoreUnavailable, SummaryFailed
from proxy.learning import Learning
from proxy.ports import SummaryAnswer, SummaryCall
from proxy.reading import Reading
from proxy.relay.identity import minted
from proxy.storage.records import Records

WINDOW = 4_000
ROUTE = SummaryRoute("http://summary.test/v1/chat/completions", {}, "cheap", 128_000)
COUNTER = TiktokenCounter(print)

JsonObject = dict[str, Any]


def ignored(_: StoreUnavailable) -> None:
    """Failures of a store that the test makes fail on purpose."""


@dataclass
class Summaries:
    """A summary model: answers in the order given, then the last one again."""

    answers: list[SummaryAnswer | SummaryFailed] = field(
        default_factory=lambda: [SummaryAnswer("### Work\nAll done.")]
    )
    calls: list[SummaryCall] = field(default_factory=list)
    hold: asyncio.Event | asyncio.Barrier | None = None

    async def ask(self, call: SummaryCall) -> SummaryAnswer:
        self.calls.append(call)
        if self.hold is not None:
            await self.hold.wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SummaryFailed):
            raise answer
        return answer


@dataclass
class Bench:
    compactor: Compactor
    rounds: Rounds
    summaries: Summaries
    reading: Reading
    learning: Learning

    async def fit(self, messages: list[JsonObject], **over: Any) -> Fit:
        return await self.compactor.fit(ask(messages, **over))


def make(summaries: Summaries, records: Records, clock: Callable[[], float] = lambda: 0.0) -> Bench:
    reading = Reading({"tiktoken": Counting(COUNTER)})
    learning = Learning(records)
    index = CheckpointIndex(records)
    rounds = Rounds(summaries, records, index, reading, clock=clock)
    compactor = Compactor(
        Viewer(reading, records, index, learning),
        rounds,
        reading,
        learning,
        instructions=instructions,
        minted=lambda tenant, prefix: minted(b"secret", tenant, prefix),
        ttl_s=60,
    )
    return Bench(compactor, rounds, summaries, reading, learning)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    records = Records(MemoryStore(), ignored)
    made = make(Summaries(), records)
    yield made
    await made.rounds.close()
    made.reading.close()
    await records.close()


def ask(messages: list[JsonObject], window: int = WINDOW, **over: Any) -> Ask:
    config = Config.model_validate({"models": {"gpt-*": {"window": window, **over.pop("model", {})}}})
    made = Ask(
        body=read(json.dumps({"model": "gpt-x", "messages": messages, "seed": 7}).encode()),
        model="gpt-x",
        tenant="t",
        conversation="c_1",
        origin="http://up.test:80",
        settings=for_model(config, "gpt-x"),
        mode=Mode.ACTIVE,
        trigger_tokens=None,
        routes=(ROUTE,),
        patience_s=None,
    )
    return replace(made, **over)


def talk(turns: int, words: int = 40, *, start: str = "Build it.") -> list[JsonObject]:
    """A conversation that ends with a user message; about twice `words` tokens a turn."""
    messages: list[JsonObject] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        said = start if turn == 0 else f"Step {turn}: " + "please look again " * (words // 3)
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": f"Done {turn}: " + "it works fine " * (words // 3)})
    return [*messages, {"role": "user", "content": "And now?"}]


def loop(steps: int) -> list[JsonObject]:
    """One user message and many tool calls."""
    messages: list[JsonObject] = [{"role": "user", "content": "Find the fault in the ledger."}]
    for step in range(steps):
        function = {"name": "read", "arguments": json.dumps({"path": f"src/{step}.py"})}
        call = {"id": f"call_{step % 3}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "line of code; " * 30})
    return messages


def forwarded(fit: Fit) -> list[JsonObject]:
    messages: list[JsonObject] = json.loads(fit.raw)["messages"]
    return messages


async def test_a_small_conversation_goes_on_as_the_very_bytes_that_came(bench: Bench) -> None:
    asked = ask(talk(2))
    fit = await bench.compactor.fit(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, bench.summaries.calls) == (Status.NONE, [])


async def test_a_long_one_is_compacted_and_the_next_request_reuses_the_same_bytes(bench: Bench) -> None:
    first = await bench.fit(talk(40))
    assert (first.report.status, first.report.round) == (Status.APPLIED, 1)
    grown = [*talk(40), {"role": "assistant", "content": "This."}, {"role": "user", "content": "Go on."}]
    second = await bench.fit(grown)
    assert (second.report.status, len(bench.summaries.calls)) == (Status.REUSED, 1)
    start = first.raw[: first.raw.rindex(b', "seed"') - 1]  # all of the first list but its closing bracket
    assert second.raw.startswith(start)
    assert forwarded(second)[1]["content"].startswith(
        "## Session Summary (Compaction Round 1)\n\n### Original Task"
    )


async def test_the_next_round_integrates_the_one_before(bench: Bench) -> None:
    bench.summaries.answers = [
        SummaryAnswer("### Work\nFirst record."),
        SummaryAnswer("### Work\nSecond record."),
    ]
    await bench.fit(talk(40))
    fit = await bench.fit(talk(80))
    assert (fit.report.status, fit.report.round) == (Status.APPLIED, 2)
    assert "## Previous Summary\n### Work\nFirst record." in bench.summaries.calls[1].prompt
    assert bench.summaries.calls[0].system == bench.summaries.calls[1].system
    [stand_in] = [each for each in forwarded(fit) if each["content"].startswith("## Session Summary")]
    assert stand_in["content"].startswith("## Session Summary (Compaction Round 2)")
    assert stand_in["content"].endswith("context from 1 previous compaction round.")


async def test_an_edited_message_makes_a_stored_summary_a_miss(bench: Bench) -> None:
    await bench.fit(talk(40))
    bench.summaries.answers = [SummaryFailed("http-500")]
    edited = talk(40)
    edited[5]["content"] = "Something else altogether. " * 10
    fit = await bench.fit(edited)
    assert not any("All done." in str(each["content"]) for each in forwarded(fit))


async def test_another_tenant_never_gets_the_summary(bench: Bench) -> None:
    await bench.fit(talk(40))
    fit = await bench.fit(talk(40), tenant="other", routes=())
    assert not any("All done." in str(each["content"]) for each in forwarded(fit))


async def test_a_branch_under_another_id_shares_what_its_ancestor_has_made(bench: Bench) -> None:
    await bench.fit(talk(40))
    fit = await bench.fit(talk(40), conversation="c_2")
    assert (fit.report.status, len(bench.summaries.calls)) == (Status.REUSED, 1)


async def test_without_any_id_the_conversation_is_found_and_its_id_carried_along(bench: Bench) -> None:
    first = await bench.fit(talk(40), conversation=None)
    second = await bench.fit(talk(42), conversation=None)
    assert (second.report.status, second.report.conversation) == (
        Status.REUSED,
        (await bench.fit(talk(44), conversation=None)).report.conversation,
    )
    assert second.report.conversation is not None
    assert first.report.conversation == second.report.conversation


async def test_requests_at_once_share_one_summary(bench: Bench) -> None:
    bench.summaries.hold = asyncio.Event()
    running = [asyncio.create_task(bench.fit(talk(40))) for _ in range(20)]
    while not bench.summaries.calls:  # noqa: ASYNC110 - the model is no event of ours
        await asyncio.sleep(0)
    bench.summaries.hold.set()
    fits = await asyncio.gather(*running)
    assert len(bench.summaries.calls) == 1
    assert len({fit.raw for fit in fits}) == 1


def other(messages: list[JsonObject]) -> list[JsonObject]:
    """The same conversation with other tool results."""
    results = {"content": "another line of code; " * 30}
    return [{**each, **results} if each["role"] == "tool" else each for each in messages]


async def test_other_tool_results_under_the_same_calls_never_get_the_summary(bench: Bench) -> None:
    bench.summaries.answers = [SummaryAnswer("### Work\nFirst."), SummaryAnswer("### Work\nSecond.")]
    await bench.fit(loop(60))
    fit = await bench.fit(other(loop(60)))
    assert (b"First." in fit.raw, b"Second." in fit.raw) == (False, True)
    again = await bench.fit([*other(loop(60)), {"role": "assistant", "content": "Found it."}])
    assert (again.report.status, len(bench.summaries.calls)) == (Status.REUSED, 2)


async def test_requests_at_once_with_other_tool_results_share_no_summary(bench: Bench) -> None:
    bench.summaries.answers = [SummaryAnswer("### Work\nFirst."), SummaryAnswer("### Work\nSecond.")]
    bench.summaries.hold = asyncio.Barrier(2)
    async with asyncio.timeout(5):
        first, second = await asyncio.gather(bench.fit(loop(60)), bench.fit(other(loop(60))))
    told = [(b"First." in fit.raw, b"Second." in fit.raw) for fit in (first, second)]
    assert sorted(told) == [(False, True), (True, False)]


async def test_above_the_limit_a_fault_of_ours_while_summarising_ends_in_a_cut(bench: Bench) -> None:
    bench.summaries.answers = []  # the summary model's own fault: IndexError
    fit = await bench.fit(talk(120))
    assert (fit.report.status, fit.report.reason) == (Status.APPLIED, "internal")
    assert fit.report.tokens_after is not None
    assert fit.report.tokens_after <= WINDOW


async def test_below_the_limit_a_failed_summary_forwards_what_came(bench: Bench) -> None:
    bench.summaries.answers = [SummaryFailed("http-500")]
    asked = ask(talk(40), window=4_600)
    fit = await bench.compactor.fit(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, fit.report.reason) == (Status.FAILED_OPEN, "http-500")


async def test_above_the_limit_it_is_cut_without_a_model(bench: Bench) -> None:
    bench.summaries.answers = [SummaryFailed("http-500")]
    fit = await bench.fit(talk(100))
    kept = forwarded(fit)
    assert (fit.report.status, fit.report.reason) == (Status.APPLIED, "http-500")
    assert (fit.report.tokens_after or 0) <= WINDOW
    assert kept[0] == talk(100)[0]
    assert kept[1] == talk(100)[1]  # the task
    assert kept[-1] == talk(100)[-1]


async def test_a_conversation_whose_summary_failed_is_left_alone_for_a_while() -> None:
    now = [0.0]
    records = Records(MemoryStore(), ignored)
    bench = make(Summaries(answers=[SummaryFailed("http-500")]), records, lambda: now[0])
    await bench.fit(talk(40))
    fit = await bench.fit(talk(41))
    assert (fit.report.reason, len(bench.summaries.calls)) == ("http-500", 1)
    now[0] = 31
    await bench.fit(talk(42))
    assert len(bench.summaries.calls) == 2


async def test_an_agent_loop_with_one_user_message_shrinks_around_it(bench: Bench) -> None:
    messages = loop(60)
    fit = await bench.fit(messages)
    kept = forwarded(fit)
    assert fit.report.status is Status.APPLIED
    assert kept[0] == messages[0]
    assert kept[1]["role"] == "assistant"
    assert "### Original Task" not in kept[1]["content"]
    assert kept[-10:] == messages[-10:]
    assert (fit.report.tokens_after or 0) < (fit.report.tokens_before or 0) / 3


async def test_a_tool_result_that_the_client_has_cleared_still_matches(bench: Bench) -> None:
    await bench.fit(loop(60))
    cleared = loop(64)
    for message in cleared[:80]:
        if message["role"] == "tool":
            message["content"] = "[cleared]"
    assert (await bench.fit(cleared)).report.status is Status.REUSED


async def test_going_back_to_where_the_last_user_message_is_covered_shows_that_message(bench: Bench) -> None:
    await bench.fit(talk(40))
    back = talk(40)[:60]  # ends with an answer; its last user message is inside the covered stretch
    fit = await bench.fit(back, routes=())
    assert back[59]["role"] == "user"
    assert forwarded(fit)[-1] == back[-1]


async def test_a_refused_request_is_made_shorter_than_the_limit_that_the_error_names(bench: Bench) -> None:
    asked = replace(ask(talk(100)), settings=for_model(Config(), "gpt-x"))
    sent = await bench.compactor.fit(asked)
    assert sent.report.status is Status.NONE
    refit = await bench.compactor.refit(asked, sent, Overflow("context", limit=3_000, used=9_000))
    assert refit is not None
    assert (refit.report.tokens_after or 0) <= 3_000
    assert refit.report.window == 3_000
    again = await bench.compactor.fit(asked)
    assert (again.report.window, again.report.status) == (3_000, Status.REUSED)


async def test_a_limit_that_the_request_itself_mentions_is_used_but_not_remembered(bench: Bench) -> None:
    messages = talk(100)
    messages[3]["content"] = "maximum context length is 3,000 tokens"  # an error may echo it
    asked = replace(ask(messages), settings=for_model(Config(), "gpt-x"))
    sent = await bench.compactor.fit(asked)
    refit = await bench.compactor.refit(asked, sent, Overflow("context", limit=3_000, used=9_000))
    assert refit is not None
    assert (refit.report.tokens_after or 0) <= 3_000
    assert (await bench.compactor.fit(asked)).report.window == 128_000


async def test_what_one_tenant_provokes_teaches_nothing_about_another(bench: Bench) -> None:
    asked = replace(ask(talk(100)), settings=for_model(Config(), "gpt-x"))
    sent = await bench.compactor.fit(asked)
    await bench.compactor.refit(asked, sent, Overflow("context", limit=3_000, used=9_000))
    other = await bench.compactor.fit(replace(asked, tenant="other"))
    assert (other.report.window, other.report.status) == (128_000, Status.NONE)


async def test_nothing_is_done_where_every_trigger_is_off(bench: Bench) -> None:
    asked = ask(talk(100), model={"compaction": {"trigger": 0}})
    fit = await bench.compactor.fit(asked)
    assert (fit.raw is asked.body.raw, fit.report.status) == (True, Status.NONE)
    assert await bench.compactor.refit(asked, fit, Overflow("context", limit=3_000, used=9_000)) is None


async def test_the_client_may_lower_the_trigger_but_not_raise_it(bench: Bench) -> None:
    lowered = await bench.fit(talk(20), trigger_tokens=500)
    raised = await bench.fit(talk(40), trigger_tokens=10**8)
    assert (lowered.report.status, raised.report.status) == (Status.APPLIED, Status.APPLIED)


async def test_shadow_reports_what_is_due_and_changes_nothing(bench: Bench) -> None:
    asked = ask(talk(40), mode=Mode.SHADOW)
    fit = await bench.compactor.fit(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, fit.report.reason, bench.summaries.calls) == (Status.SHADOW, "percent", [])


async def test_iterations_fire_every_eighth_and_not_on_every_request(bench: Bench) -> None:
    over = {"model": {"compaction": {"trigger": [{"iterations": 8}]}}, "window": 100_000}
    statuses = [(await bench.fit(talk(turns), **over)).report.status for turns in range(4, 28)]
    applied = [
        turns for turns, status in zip(range(4, 28), statuses, strict=True) if status is Status.APPLIED
    ]
    assert applied == [8, 16, 24]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (SummaryAnswer(""), "empty"),
        (SummaryAnswer("x", finish_reason="length"), "truncated"),
        (SummaryAnswer("x", finish_reason="content_filter"), "content-filter"),
        (SummaryAnswer("x", called_tools=True), "tool-calls"),
        (SummaryAnswer("x", refused=True), "refused"),
        (SummaryAnswer("word " * 12_000), "longer"),
    ],
)
async def test_an_unusable_summary_is_never_used(bench: Bench, answer: SummaryAnswer, reason: str) -> None:
    bench.summaries.answers = [answer]
    fit = await bench.fit(talk(100))
    assert (fit.report.status, fit.report.reason) == (Status.APPLIED, reason)
    assert not any("Session Summary" in str(each["content"]) for each in forwarded(fit))


async def test_a_store_that_fails_costs_no_summary_per_turn() -> None:
    class Broken(MemoryStore):
        async def read(self, keys: Any) -> Any:
            raise StoreUnavailable("store-failed")

        async def commit(self, claim: Any, also: Any = (), *, lease: Any = None) -> Any:
            raise StoreUnavailable("store-failed")

    records = Records(Broken(), ignored)
    bench = make(Summaries(), records)
    await bench.fit(talk(40))
    assert (await bench.fit(talk(41))).report.status is Status.REUSED
    assert len(bench.summaries.calls) == 1


async def test_strict_alternation_begins_with_a_user_message_and_alternates(bench: Bench) -> None:
    fit = await bench.fit(loop(60), model={"alternation": "strict"})
    roles = [each["role"] for each in forwarded(fit) if each["role"] in {"user", "assistant"}]
    plain = [role for role, after in zip(roles, [*roles[1:], ""], strict=True) if role != after]
    assert roles[0] == "user"
    assert len(plain) >= len(roles) - 5  # tool results stand between the assistant messages of the tail
