"""A summarizer over a scripted summary model, on a clock that passes only while somebody sleeps."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from compaction_proxy.compaction.message_reader import CountingOptions, MessageReader
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    SummaryRequest,
    SummaryRoute,
    SummaryUsage,
)
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT

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

RAW = (
    b'{"model":"gpt-4o","stream":true,"tools":[{"type":"function","function":{"name":"read"}}],'
    b'"messages":[{"role":"system","content":"Be kind."},{"role":"user","content":"Set the port to 8443"}]}'
)
SYSTEM = Message(role="system", text="Be kind.", raw=b'{"role":"system","content":"Be kind."}', tokens=10)
USER = replace(says("Set the port"), raw=b'{"role":"user","content":"Set the port to 8443"}', tokens=10)
ALIGNED = replace(BRIEF, routes=(OWN,), aligned=AlignedConversation(parse_body(RAW, CHAT), (SYSTEM, USER)))

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


@contextmanager
def summary_bench() -> Iterator[Bench]:
    reading = MessageReader({"characters": TokenScheduler(CharacterCounter())})
    model, clock = Model(), Clock()
    yield Bench(model, clock, Summarizer(model, reading, clock=clock, sleep=clock.sleep, jitter=lambda: 1.0))
    reading.close()


def failed(reason: str, **more: Any) -> SummaryError:
    return SummaryError(reason, **more)
