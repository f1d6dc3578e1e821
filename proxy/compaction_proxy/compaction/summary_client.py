"""One question to a summary model: tried again where that may help, within what its tenant may spend."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

from compaction_proxy.compaction.allowance import Allowance
from compaction_proxy.compaction.pace import Pace
from compaction_proxy.compaction.summary_breaker import Place, SummaryBreaker, passing
from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.recall.round_detail import CONTINUED, MAX_PROMPTS, Prompt, bounded_prompt

ATTEMPTS = 3
FIRST_PAUSE_S = 0.2
# A provider that wants to be left alone for longer is: the ladder goes on without a summary.
LONGEST_PAUSE_S = 10.0
# A call that was cancelled after this share of its deadline was cancelled because of it.
SLOW_SHARE = 0.5

Read = TypeVar("Read")
# Dollars that tokens of a model at a URL cost: those of a prompt, how many of them were cached, and those of
# an answer. None where no price is known, or none yet.
Price = Callable[[str, str, int, int, int], float | None]


def unpriced(_model: str, _url: str, _prompt: int, _cached: int, _completion: int) -> None:
    """No price is known."""


class Used(NamedTuple):
    """What one call took, as its answer's `usage` says."""

    model: str
    url: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Spent:
    """What calls have taken so far, whatever became of them.

    Attributes:
        calls: Calls made.
        used: What those took that were answered.
        prompts: What was asked, bounded; the last few, each once.
    """

    calls: int = 0
    used: list[Used] = field(default_factory=list)
    prompts: deque[Prompt] = field(default_factory=lambda: deque(maxlen=MAX_PROMPTS), compare=False)

    def begin(self, call: SummaryCall) -> None:
        """A call is made."""
        self.calls += 1
        prompt = bounded_prompt(call.model, CONTINUED if call.conversation else call.system, call.prompt)
        if prompt not in self.prompts:  # else it is another attempt
            self.prompts.append(prompt)

    def end(self, call: SummaryCall, answer: SummaryAnswer) -> None:
        """It was answered."""
        counts = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens
        self.used.append(Used(call.model, call.url, *counts))

    @property
    def prompt_tokens(self) -> int:
        """Input tokens of all calls."""
        return sum(each.prompt_tokens for each in self.used)

    @property
    def cached_tokens(self) -> int:
        """Those of them that were cached."""
        return sum(each.cached_tokens for each in self.used)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all calls."""
        return sum(each.completion_tokens for each in self.used)

    def cost_usd(self, price: Price) -> float | None:
        """What the answered calls cost, in dollars; None where the price of one is not known."""
        costs = [price(*each) for each in self.used]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None


@dataclass(frozen=True, slots=True)
class Account:
    """Who asks, and at whose cost.

    Attributes:
        tenant: Whose calls they are.
        calls_per_hour: How many of them there may be; 0: no bound.
        spent: Where they are booked.
        deadline_s: Seconds after which they are cancelled for their slowness; 0: not known.
    """

    tenant: str
    calls_per_hour: int
    spent: Spent
    deadline_s: float = 0.0


class Asking:
    """Asks, and remembers how that went.

    Args:
        model: Who answers.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
        jitter: A random number, 0..1.
    """

    def __init__(
        self,
        model: SummaryModel,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        jitter: Callable[[], float],
    ) -> None:
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._breaker = SummaryBreaker(clock)
        self._allowance = Allowance(clock)
        self.pace = Pace()

    @property
    def resting(self) -> bool:
        """Whether any model is being left alone right now."""
        return self._breaker.resting

    def admitted(self, account: Account, url: str, model: str) -> AbstractContextManager[None]:
        """Inside, this model may be asked.

        Raises:
            SummaryFailed: `breaker-open`.
        """
        return self._breaker.admitted(Place(account.tenant, url, model))

    async def ask(
        self,
        call: SummaryCall,
        account: Account,
        read: Callable[[SummaryAnswer], Awaitable[Read]],
        *,
        tokens: int,
    ) -> Read:
        """What `read` makes of the answer.

        Asked up to three times, with pauses of random length that double, where the model could not be had,
        was told to wait, or said nothing. The deadline is the caller's: a call that is cancelled counts as
        one that took too long. `tokens` is what each attempt may take, prompt and answer together.

        Raises:
            SummaryFailed: From the model, or from `read`; or `budget`.
        """
        for attempt in count(1):
            try:
                return await read(await self._once(call, account, tokens))
            except SummaryFailed as failed:
                pause_s = max(self._jitter() * FIRST_PAUSE_S * 2 ** (attempt - 1), failed.retry_after_s)
                rests = self._breaker.rests(Place(account.tenant, call.url, call.model))
                last = attempt == ATTEMPTS or rests or pause_s > LONGEST_PAUSE_S
                if last or not _may_pass(failed.reason):
                    raise
            await self._sleep(pause_s)
        raise AssertionError  # count never ends

    async def _once(self, call: SummaryCall, account: Account, tokens: int) -> SummaryAnswer:
        place = Place(account.tenant, call.url, call.model)
        self._allowance.take(account.tenant, account.calls_per_hour, tokens)
        account.spent.begin(call)
        started = self._clock()
        try:
            answer = await self._model.ask(call)
        except SummaryFailed as failed:
            self._breaker.note(place, failed.reason)
            raise
        except asyncio.CancelledError:
            if self._clock() - started >= SLOW_SHARE * account.deadline_s:  # else the client has left
                self._breaker.note(place, "timeout")
            self.pace.given_up(place, self._clock() - started)
            raise
        self._breaker.note(place, "")
        self.pace.took(place, self._clock() - started)
        account.spent.end(call, answer)
        return answer


def _may_pass(reason: str) -> bool:
    return passing(reason) or reason in {"garbage", "empty"}
