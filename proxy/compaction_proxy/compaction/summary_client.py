"""One call of a summary model: retries, hourly budget, circuit breaker, and how long it takes."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from math import ceil
from typing import NamedTuple, TypeVar

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.recall.round_detail import CONTINUED, MAX_PROMPTS, SummaryPrompt, build_bounded_prompt

FAILURES = 3
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
MAX_HELD = 10_000
# Reasons that waiting does not mend within a few calls: the key is refused, or the account is empty.
_LASTING = frozenset({"http-401", "http-402", "http-403"})
_PASSING = frozenset({"http-408", "http-425", "http-429", "unreachable", "timeout"})


class SummaryEndpoint(NamedTuple):
    """A summary model as one tenant sees it."""

    tenant: str
    url: str
    model: str


@dataclass(slots=True)
class _FailureState:
    """What is known of a model that fails; `until` is on the clock, `rest_s` 0 while it is still asked."""

    failures: int = 0
    rest_s: float = 0.0
    until: float = 0.0
    is_probed: bool = False


def is_passing_failure(reason: str) -> bool:
    """Whether a failure says that the model cannot be had just now, rather than something of the call."""
    return reason in _PASSING or reason.startswith("http-5")


class SummaryBreaker:
    """Opens after three failures of that kind in a row, or after one refused key; then it rests.

    The first rest is 30 s, and twice the last one, up to 600 s, where the one probe that follows fails. For
    use on one event loop; the 10,000 newest troubles are remembered.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failure_states: OrderedDict[SummaryEndpoint, _FailureState] = OrderedDict()

    @contextmanager
    def admit_calls(self, place: SummaryEndpoint) -> Iterator[None]:
        """Calls inside are let through: all of them, or, after a rest, those of one piece of work.

        Raises:
            SummaryFailed: `breaker-open`.
        """
        trouble = self._failure_states.get(place)
        if trouble is None or not trouble.rest_s:
            yield
            return
        if trouble.is_probed or self.is_open(place):
            raise SummaryError("breaker-open")
        trouble.is_probed = True
        try:
            yield
        finally:
            trouble.is_probed = False

    def is_open(self, place: SummaryEndpoint) -> bool:
        """Whether the model is to be left alone right now."""
        trouble = self._failure_states.get(place)
        return trouble is not None and self._clock() < trouble.until

    @property
    def is_any_open(self) -> bool:
        """Whether any model is being left alone right now."""
        now = self._clock()
        return any(now < trouble.until for trouble in self._failure_states.values())

    def record_outcome(self, place: SummaryEndpoint, reason: str) -> None:
        """Learn from a call: its reason of failure, or "" if it was answered.

        What is garbage says nothing of the model behind it; any other answer shows that it is there.
        """
        if reason in _LASTING or is_passing_failure(reason):
            self._record_failure(place, lasting=reason in _LASTING)
        elif reason != "garbage":
            self._failure_states.pop(place, None)

    def _record_failure(self, place: SummaryEndpoint, *, lasting: bool) -> None:
        trouble = self._failure_states.setdefault(place, _FailureState())
        self._failure_states.move_to_end(place)
        while len(self._failure_states) > MAX_HELD:
            self._failure_states.popitem(last=False)
        trouble.failures += 1
        if self.is_open(place):
            return  # a call that was under way already
        if lasting or trouble.rest_s or trouble.failures >= FAILURES:
            trouble.rest_s = min(max(FIRST_REST_S, 2 * trouble.rest_s), LONGEST_REST_S)
            trouble.until = self._clock() + trouble.rest_s


# Weight of the newest call in the average.
NEWEST_SHARE = 0.3


class LatencyTracker:
    """A moving average for each model of how long a call takes, in seconds."""

    def __init__(self) -> None:
        self._averages: OrderedDict[SummaryEndpoint, float] = OrderedDict()

    def estimate_call_s(self, place: SummaryEndpoint) -> float | None:
        """What the next call may be expected to take; None if nothing is known."""
        return self._averages.get(place)

    def record_duration(self, place: SummaryEndpoint, seconds: float) -> None:
        """A call was answered after so long."""
        known = self._averages.get(place, seconds)
        self._averages[place] = known + NEWEST_SHARE * (seconds - known)
        self._averages.move_to_end(place)
        while len(self._averages) > MAX_HELD:
            self._averages.popitem(last=False)

    def record_cancellation(self, place: SummaryEndpoint, seconds: float) -> None:
        """A call had no answer yet after so long: it would have taken at least that."""
        if seconds >= self._averages.get(place, 0.0):
            self.record_duration(place, seconds)


HOUR_S = 3_600.0
MAX_TENANTS = 10_000
# Tokens of a call that counts as one; each further so many count as one more.
CALL_TOKENS = 100_000


class CallBudget:
    """Counts each tenant's calls of the last hour; the 10,000 tenants that called last are remembered.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: OrderedDict[str, deque[float]] = OrderedDict()

    def book_call(self, tenant: str, calls_per_hour: int, tokens: int = 0) -> None:
        """Book one call.

        Args:
            tenant: Whose it is.
            calls_per_hour: How many the tenant may make; 0: no bound, and nothing is booked. The last one may
                be a long one.
            tokens: What it may take, prompt and answer together.

        Raises:
            SummaryFailed: `budget`; there is none left.
        """
        if not calls_per_hour:
            return
        now = self._clock()
        calls = self._calls.setdefault(tenant, deque())
        self._calls.move_to_end(tenant)
        while len(self._calls) > MAX_TENANTS:
            self._calls.popitem(last=False)
        while calls and calls[0] <= now - HOUR_S:
            calls.popleft()
        if len(calls) >= calls_per_hour:
            raise SummaryError("budget")
        calls.extend(repeat(now, max(1, ceil(tokens / CALL_TOKENS))))


ATTEMPTS = 3
FIRST_PAUSE_S = 0.2
# A provider that wants to be left alone for longer is: the ladder goes on without a summary.
LONGEST_PAUSE_S = 10.0
# A call that was cancelled after this share of its deadline was cancelled because of it.
SLOW_SHARE = 0.5

Read = TypeVar("Read")
# Dollars that tokens of a model at a URL cost: those of a prompt, how many of them were cached, and those of
# an answer. None where no price is known, or none yet.
PriceLookup = Callable[[str, str, int, int, int], float | None]


def lookup_no_price(_model: str, _url: str, _prompt: int, _cached: int, _completion: int) -> None:
    """No price is known."""


class CallUsage(NamedTuple):
    """What one call took, as its answer's `usage` says."""

    model: str
    url: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class SummaryUsage:
    """What calls have taken so far, whatever became of them.

    Attributes:
        calls: Calls made.
        answered_calls: What those took that were answered.
        prompts: What was asked, bounded; the last few, each once.
    """

    calls: int = 0
    answered_calls: list[CallUsage] = field(default_factory=list)
    prompts: deque[SummaryPrompt] = field(default_factory=lambda: deque(maxlen=MAX_PROMPTS), compare=False)

    def record_call(self, call: SummaryCall) -> None:
        """A call is made."""
        self.calls += 1
        prompt = build_bounded_prompt(
            call.model, CONTINUED if call.conversation else call.system, call.prompt
        )
        if prompt not in self.prompts:  # else it is another attempt
            self.prompts.append(prompt)

    def record_answer(self, call: SummaryCall, answer: SummaryAnswer) -> None:
        """It was answered."""
        counts = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens
        self.answered_calls.append(CallUsage(call.model, call.url, *counts))

    @property
    def prompt_tokens(self) -> int:
        """Input tokens of all calls."""
        return sum(each.prompt_tokens for each in self.answered_calls)

    @property
    def cached_tokens(self) -> int:
        """Those of them that were cached."""
        return sum(each.cached_tokens for each in self.answered_calls)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all calls."""
        return sum(each.completion_tokens for each in self.answered_calls)

    def compute_cost_usd(self, price: PriceLookup) -> float | None:
        """What the answered calls cost, in dollars; None where the price of one is not known."""
        costs = [price(*each) for each in self.answered_calls]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None


@dataclass(frozen=True, slots=True)
class CallAccount:
    """Who asks, and at whose cost.

    Attributes:
        tenant: Whose calls they are.
        calls_per_hour: How many of them there may be; 0: no bound.
        usage: Where they are booked.
        deadline_s: Seconds after which they are cancelled for their slowness; 0: not known.
    """

    tenant: str
    calls_per_hour: int
    usage: SummaryUsage
    deadline_s: float = 0.0


class SummaryClient:
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
        self._budget = CallBudget(clock)
        self.latency = LatencyTracker()

    @property
    def has_resting_model(self) -> bool:
        """Whether any model is being left alone right now."""
        return self._breaker.is_any_open

    def admit_calls(self, account: CallAccount, url: str, model: str) -> AbstractContextManager[None]:
        """Inside, this model may be asked.

        Raises:
            SummaryFailed: `breaker-open`.
        """
        return self._breaker.admit_calls(SummaryEndpoint(account.tenant, url, model))

    async def call_model(
        self,
        call: SummaryCall,
        account: CallAccount,
        parse_answer: Callable[[SummaryAnswer], Awaitable[Read]],
        *,
        tokens: int,
    ) -> Read:
        """What `parse_answer` makes of the answer.

        Asked up to three times, with pauses of random length that double, where the model could not be had,
        was told to wait, or said nothing. The deadline is the caller's: a call that is cancelled counts as
        one that took too long. `tokens` is what each attempt may take, prompt and answer together.

        Raises:
            SummaryFailed: From the model, or from `parse_answer`; or `budget`.
        """
        for attempt in count(1):
            try:
                return await parse_answer(await self._call_once(call, account, tokens))
            except SummaryError as failed:
                pause_s = max(self._jitter() * FIRST_PAUSE_S * 2 ** (attempt - 1), failed.retry_after_s)
                rests = self._breaker.is_open(SummaryEndpoint(account.tenant, call.url, call.model))
                last = attempt == ATTEMPTS or rests or pause_s > LONGEST_PAUSE_S
                if last or not _is_retryable(failed.reason):
                    raise
            await self._sleep(pause_s)
        raise AssertionError  # count never ends

    async def _call_once(self, call: SummaryCall, account: CallAccount, tokens: int) -> SummaryAnswer:
        place = SummaryEndpoint(account.tenant, call.url, call.model)
        self._budget.book_call(account.tenant, account.calls_per_hour, tokens)
        account.usage.record_call(call)
        started = self._clock()
        try:
            answer = await self._model.request_summary(call)
        except SummaryError as failed:
            self._breaker.record_outcome(place, failed.reason)
            raise
        except asyncio.CancelledError:
            if self._clock() - started >= SLOW_SHARE * account.deadline_s:  # else the client has left
                self._breaker.record_outcome(place, "timeout")
            self.latency.record_cancellation(place, self._clock() - started)
            raise
        self._breaker.record_outcome(place, "")
        self.latency.record_duration(place, self._clock() - started)
        account.usage.record_answer(call, answer)
        return answer


def _is_retryable(reason: str) -> bool:
    return is_passing_failure(reason) or reason in {"garbage", "empty"}
