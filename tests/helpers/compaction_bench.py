"""The use case over real parts: real counting, a store, and a summary model that the test speaks for."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.directives import Directives, DirectiveStore
from compaction_proxy.compaction.feedback import RoundEffectiveness, UsageFeedback
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.price_triggers import GrowthTracker, PriceTriggers
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.round_builder import RoundBuilder
from compaction_proxy.compaction.round_coordinator import RoundCoordinator
from compaction_proxy.compaction.round_job import JobBuilder
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import CompactionMode, FitRequest, FitResult
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import Event
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.gateway.identity import mint_conversation_id
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.usage_baseline import UsageBaselineStore
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import EventHistory
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.usage import TokenUsage
from tests.helpers.summaries import put_as_asked

ROUTE = SummaryRoute("http://summary.test/v1/chat/completions", {}, "cheap", 128_000)
COUNTER = TiktokenCounter(print)
TTL_S = 3_600.0
# A round with `anchored` in a window of 16,000 tokens.
WINDOW = 16_000
USABLE = 12_000
SOFT = 7_470
TRIGGER = 9_000
HARD = 10_800
TARGET = 3_600
# What verification takes: it names nothing that the conversation does not hold.
RECORD = (
    "### A. Goal\n- the build is to be made to work\n"
    "### D. State of the work\n- the steps so far are done and it works fine"
)

RUN_MARK = re.compile(r"^=== RUN \d+ ===$", re.MULTILINE)

JsonObject = dict[str, Any]
Answer = SummaryAnswer | Exception


def priced(_model: str, _url: str, prompt: int, cached: int, completion: int) -> float:
    """A dollar a token, cached ones free, and two for each that is written."""
    return prompt - cached + 2.0 * completion


def ignored(_: StoreUnavailableError) -> None:
    """Failures of a store that the test makes fail on purpose."""


def mark(known: Directives) -> Directives:
    """Asks for a compaction with the next request."""
    return replace(known, compact=True)


def undo(checkpoint_id: bytes) -> Callable[[Directives], Directives]:
    """Undoes the compaction that made this checkpoint."""
    return lambda known: known.with_undone_round(checkpoint_id)


@dataclass
class Summaries:
    """A summary model: answers in the order given, then the last one again; of several runs each gets it.

    Attributes:
        answers: What it says.
        calls: What it was asked.
        hold: What it waits for before it answers.
        takes_s: How long an answer takes.
    """

    answers: list[Answer] = field(default_factory=lambda: [SummaryAnswer(RECORD)])
    calls: list[SummaryCall] = field(default_factory=list)
    hold: asyncio.Event | asyncio.Barrier | None = None
    takes_s: float = 0.0

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        self.calls.append(call)
        if self.hold is not None:
            await self.hold.wait()
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        marks = RUN_MARK.findall(call.prompt)
        if marks:
            return replace(answer, text="\n".join(f"{mark}\n{answer.text}" for mark in marks))
        return replace(answer, text=put_as_asked(answer.text, call.system, call.prompt))

    def release(self) -> None:
        """Let it answer."""
        assert isinstance(self.hold, asyncio.Event)
        self.hold.set()

    async def asked(self, count: int = 1) -> None:
        """Wait until it has been asked so often."""
        async with asyncio.timeout(100):
            while len(self.calls) < count:  # noqa: ASYNC110 - the model is no event of ours
                await asyncio.sleep(0.001)


@dataclass
class Bench:
    """One replica.

    Attributes:
        strategy: What its requests are treated with, unless they say otherwise.
        window: Of its model.
        now: What its clocks show, where they do not run by themselves.
        heard: The events that were announced.
    """

    compactor: Compactor
    rounds: RoundBuilder
    summaries: Summaries
    reading: MessageReader
    learning: ModelLimits
    history: EventHistory
    wishing: DirectiveStore
    effects: RoundEffectiveness
    observing: UsageFeedback
    records: RecordStore
    strategy: str
    window: int
    now: list[float]
    heard: list[Event]

    def ask(self, messages: list[JsonObject], **over: Any) -> FitRequest:
        return ask(messages, **{"strategy": self.strategy, "window": self.window, **over})

    async def fit(self, messages: list[JsonObject], **over: Any) -> FitResult:
        return await self.compactor.fit_request(self.ask(messages, **over))

    async def answered(
        self, messages: list[JsonObject], *, real: int | None = None, cached: int = 0, **over: Any
    ) -> FitResult:
        """A request with all that is done once the client has its answer; `real` is what was counted."""
        asked = self.ask(messages, **over)
        fit = await self.compactor.fit_request(asked)
        usage = (
            None
            if real is None
            else TokenUsage(prompt_tokens=real, completion_tokens=10, cached_tokens=cached)
        )
        await self.observing.learn_from_answer(asked, fit, usage)
        if fit.should_prepare:
            await self.compactor.prepare_round(asked)
        return fit

    async def settled(self) -> None:
        """Wait until no round is under way."""
        async with asyncio.timeout(100):
            while self.rounds.is_busy:  # noqa: ASYNC110 - rounds are no event of ours
                await asyncio.sleep(0.001)

    async def events(self, conversation: str = "c_1") -> list[Event]:
        return await self.history.list_events("t", conversation)


@asynccontextmanager
async def bench(
    summaries: Summaries | None = None,
    *,
    store: Store | None = None,
    strategy: str = "anchored",
    window: int = WINDOW,
    ticking: bool = False,
    pricing: PriceBook | None = None,
) -> AsyncIterator[Bench]:
    """A replica over a store.

    Args:
        summaries: Its summary model.
        store: What it shares with others; it has one of its own otherwise.
        strategy: What its requests are treated with.
        window: Of its model.
        ticking: Whether its clocks run, with the event loop's.
        pricing: What models cost; None: nobody knows.
    """
    loop = asyncio.get_running_loop()
    records = RecordStore(store or MemoryStore(clock=loop.time), ignored)
    now = [1_000.0]
    clock: Callable[[], float] = loop.time if ticking else lambda: now[0]
    model = summaries or Summaries()
    reading = MessageReader({"tiktoken": TokenScheduler(COUNTER)})
    index, history = CheckpointIndex(records), EventHistory(records, TTL_S)
    learning, anchors = ModelLimits(records), UsageBaselineStore(records)
    wishing, effects = DirectiveStore(records, TTL_S, clock=clock), RoundEffectiveness(clock)
    heard: list[Event] = []

    def announce(_: str, event: Event) -> None:
        heard.append(event)

    summarising = Summarizer(model, reading, price=priced, clock=clock, jitter=lambda: 0.0)
    rounds = RoundBuilder(summarising, records, index, history, reading, announce=announce, clock=clock)
    growth = GrowthTracker()
    aiming = PriceTriggers(pricing, growth) if pricing else None
    viewer = RequestLoader(reading, records, index, learning, anchors, wishing, aiming)
    ordering = JobBuilder(
        lambda tenant, prefix: mint_conversation_id(b"secret", tenant, prefix),
        TTL_S,
    )
    replacing = RoundCoordinator(viewer, rounds, reading, wishing, effects, ordering)
    observing = UsageFeedback(learning, anchors, effects, history, growth=growth, announce=announce)
    yield Bench(
        compactor=Compactor(viewer, replacing, reading, learning),
        rounds=rounds,
        summaries=model,
        reading=reading,
        learning=learning,
        history=history,
        wishing=wishing,
        effects=effects,
        observing=observing,
        records=records,
        strategy=strategy,
        window=window,
        now=now,
        heard=heard,
    )
    await rounds.close()
    await learning.close()
    await anchors.close()
    reading.close()
    if store is None:
        await records.close()


def ask(messages: list[JsonObject], window: int = WINDOW, **over: Any) -> FitRequest:
    """A request. `model` is a section for its model, `body` more members of it, the rest fields of `Ask`."""
    config = Config.model_validate({"models": {"gpt-*": {"window": window, **over.pop("model", {})}}})
    members = {"model": "gpt-x", "messages": messages, "seed": 7, **over.pop("body", {})}
    made = FitRequest(
        body=parse_body(json.dumps(members).encode(), CHAT),
        model="gpt-x",
        tenant="t",
        conversation="c_1",
        origin="http://up.test:80",
        settings=get_model_settings(config, "gpt-x"),
        mode=CompactionMode.ACTIVE,
        trigger_tokens=None,
        resolve_summary_routes=lambda: (ROUTE,),
        patience_s=None,
    )
    return replace(made, **over)


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def says(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


def talk(turns: int, words: int = 40, *, start: str = "Build it.") -> list[JsonObject]:
    """A conversation that ends with a user message; about twice `words` tokens a turn."""
    messages: list[JsonObject] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        said = start if turn == 0 else f"Step {turn}: " + "please look again " * (words // 3)
        messages.append(user(said))
        messages.append(says(f"Done {turn}: " + "it works fine " * (words // 3)))
    return [*messages, user("And now?")]


def called(step: int, result: str, path: str = "") -> list[JsonObject]:
    """A call and its result; ids come again."""
    function = {"name": "read", "arguments": json.dumps({"path": path or f"src/{step}.py"})}
    call = {"id": f"call_{step % 3}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def loop(steps: int, *, lines: int = 30, first: int = 0) -> list[JsonObject]:
    """One user message and many tool calls; about 4 tokens a line."""
    messages: list[JsonObject] = [user("Find the fault in the ledger.")]
    for step in range(first, steps):
        messages += called(step, f"{step}: " + "line of code; " * lines)
    return messages


def forwarded(fit: FitResult) -> list[JsonObject]:
    messages: list[JsonObject] = json.loads(fit.raw)["messages"]
    return messages


def prefix(fit: FitResult) -> bytes:
    """What was forwarded up to the list's end, without what closes it."""
    return fit.raw[: fit.raw.rindex(b', "seed"') - 1]
