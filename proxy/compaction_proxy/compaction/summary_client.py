"""Sends calls to summary models, with retries, an hourly budget, a circuit breaker and latency tracking."""

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
# Reasons that waiting for a few calls does not resolve: the key is refused, or the account is empty.
_LASTING = frozenset({"http-401", "http-402", "http-403"})
_PASSING = frozenset({"http-408", "http-425", "http-429", "unreachable", "timeout"})


class SummaryEndpoint(NamedTuple):
    """A summary model as one tenant uses it."""

    tenant: str
    url: str
    model: str


@dataclass(slots=True)
class _FailureState:
    """The failures of a model, and until when it rests.

    `until` is a time on the breaker's clock. `rest_s` is 0 while the model is still called.
    """

    failures: int = 0
    rest_s: float = 0.0
    until: float = 0.0
    is_probed: bool = False


def is_passing_failure(reason: str) -> bool:
    """Returns whether a failure means that the model is unavailable for now, not that the call is wrong."""
    return reason in _PASSING or reason.startswith("http-5")


class SummaryBreaker:
    """Stops calls to a model that fails: a circuit breaker for each tenant and model.

    It opens after three temporary failures in a row, or after one lasting failure such as a refused key. Then
    the model rests. The first rest takes 30 s. After it, one probe is let through. If the probe fails, the
    next rest is twice as long, up to 600 s. The breaker is for use on one event loop, and remembers the
    10,000 models that failed last.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failure_states: OrderedDict[SummaryEndpoint, _FailureState] = OrderedDict()

    @contextmanager
    def admit_calls(self, place: SummaryEndpoint) -> Iterator[None]:
        """Lets the calls inside the block through; after a rest, only those of one block at a time.

        Raises:
            SummaryError: `breaker-open`.
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
        """Returns whether the model is currently left alone."""
        trouble = self._failure_states.get(place)
        return trouble is not None and self._clock() < trouble.until

    @property
    def is_any_open(self) -> bool:
        """Whether any model is currently left alone."""
        now = self._clock()
        return any(now < trouble.until for trouble in self._failure_states.values())

    def record_outcome(self, place: SummaryEndpoint, reason: str) -> None:
        """Records the outcome of a call: its reason of failure, or "" if it was answered.

        The reason `garbage` is ignored, as it says nothing about the model. Any other answer shows that the
        model is available.
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
            return  # the call had started before the breaker opened
        if lasting or trouble.rest_s or trouble.failures >= FAILURES:
            trouble.rest_s = min(max(FIRST_REST_S, 2 * trouble.rest_s), LONGEST_REST_S)
            trouble.until = self._clock() + trouble.rest_s


# Weight of the newest call in the moving average.
NEWEST_SHARE = 0.3


class LatencyTracker:
    """Tracks a moving average of the duration of calls, per model, in seconds."""

    def __init__(self) -> None:
        self._averages: OrderedDict[SummaryEndpoint, float] = OrderedDict()

    def estimate_call_s(self, place: SummaryEndpoint) -> float | None:
        """Estimates the duration of the next call, in seconds; None if nothing is known."""
        return self._averages.get(place)

    def record_duration(self, place: SummaryEndpoint, seconds: float) -> None:
        """Records how long a call took until it was answered."""
        average = self._averages.get(place, seconds)
        self._averages[place] = average + NEWEST_SHARE * (seconds - average)
        self._averages.move_to_end(place)
        while len(self._averages) > MAX_HELD:
            self._averages.popitem(last=False)

    def record_cancellation(self, place: SummaryEndpoint, seconds: float) -> None:
        """Records a call that was cancelled without an answer. It would have taken at least `seconds`."""
        if seconds >= self._averages.get(place, 0.0):
            self.record_duration(place, seconds)


HOUR_S = 3_600.0
MAX_TENANTS = 10_000
# Up to this many tokens, a call counts as one; each further part of this size counts as one more.
CALL_TOKENS = 100_000


class CallBudget:
    """Counts each tenant's calls of the last hour, and remembers the 10,000 tenants that called last.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: OrderedDict[str, deque[float]] = OrderedDict()

    def book_call(self, tenant: str, calls_per_hour: int, tokens: int = 0) -> None:
        """Books one call.

        Args:
            tenant: The tenant that makes the call.
            calls_per_hour: How many calls the tenant may make in an hour; 0 for no limit, and then nothing is
                booked. The last call may be one that counts several times.
            tokens: Tokens that the call may take, prompt and answer together.

        Raises:
            SummaryError: `budget`: no call is left.
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
# If a provider asks for a longer pause, the ladder goes on without a summary.
LONGEST_PAUSE_S = 10.0
# A call that was cancelled after at least this share of its deadline counts as too slow.
SLOW_SHARE = 0.5

Read = TypeVar("Read")
# Returns the price in dollars of a call of a model at a URL, from its prompt tokens, how many of them were
# cached, and its completion tokens. None if no price is known, or not yet.
PriceLookup = Callable[[str, str, int, int, int], float | None]


def lookup_no_price(_model: str, _url: str, _prompt: int, _cached: int, _completion: int) -> None:
    """Returns None for every call: no price is known."""


class CallUsage(NamedTuple):
    """The tokens of one call, from the `usage` of its answer."""

    model: str
    url: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class SummaryUsage:
    """The usage of summary calls so far, whether or not they succeeded.

    Attributes:
        calls: Number of calls made.
        answered_calls: The usage of the calls that were answered.
        prompts: The last few distinct prompts, each bounded in size.
    """

    calls: int = 0
    answered_calls: list[CallUsage] = field(default_factory=list)
    prompts: deque[SummaryPrompt] = field(default_factory=lambda: deque(maxlen=MAX_PROMPTS), compare=False)

    def record_call(self, call: SummaryCall) -> None:
        """Records that a call is made."""
        self.calls += 1
        prompt = build_bounded_prompt(
            call.model, CONTINUED if call.conversation else call.system, call.prompt
        )
        if prompt not in self.prompts:  # a repeated prompt is another attempt of the same call
            self.prompts.append(prompt)

    def record_answer(self, call: SummaryCall, answer: SummaryAnswer) -> None:
        """Records the usage of a call that was answered."""
        counts = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens
        self.answered_calls.append(CallUsage(call.model, call.url, *counts))

    @property
    def prompt_tokens(self) -> int:
        """Input tokens of all answered calls."""
        return sum(each.prompt_tokens for each in self.answered_calls)

    @property
    def cached_tokens(self) -> int:
        """Input tokens of all answered calls that were cached."""
        return sum(each.cached_tokens for each in self.answered_calls)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all answered calls."""
        return sum(each.completion_tokens for each in self.answered_calls)

    def compute_cost_usd(self, price: PriceLookup) -> float | None:
        """Computes the cost of the answered calls in dollars; None if the price of any call is unknown."""
        costs = [price(*each) for each in self.answered_calls]
        known_costs = [cost for cost in costs if cost is not None]
        return sum(known_costs) if len(known_costs) == len(costs) else None


@dataclass(frozen=True, slots=True)
class CallAccount:
    """The tenant that makes calls, its limit, and where its usage is recorded.

    Attributes:
        tenant: The tenant that makes the calls.
        calls_per_hour: How many calls the tenant may make in an hour; 0 for no limit.
        usage: Records the calls.
        deadline_s: Seconds after which slow calls are cancelled; 0 if unknown.
    """

    tenant: str
    calls_per_hour: int
    usage: SummaryUsage
    deadline_s: float = 0.0


class SummaryClient:
    """Calls summary models, and tracks their failures and latency.

    Args:
        model: Sends a single call.
        clock: Returns monotonic seconds.
        sleep: Waits for a number of seconds.
        jitter: Returns a random number, 0..1.
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
        """Whether any model is currently left alone."""
        return self._breaker.is_any_open

    def admit_calls(self, account: CallAccount, url: str, model: str) -> AbstractContextManager[None]:
        """Returns a context manager inside which this model may be called.

        Raises:
            SummaryError: `breaker-open`.
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
        """Calls the model and returns the result of `parse_answer`.

        A call is tried up to three times, with random pauses that double, if the model was unavailable, asked
        to wait, or gave an unusable or empty answer. The caller sets the deadline: a call that is cancelled
        counts as too slow. `tokens` is what each attempt may take, prompt and answer together.

        Raises:
            SummaryError: From the model or from `parse_answer`, or `budget`.
        """
        for attempt in count(1):
            try:
                return await parse_answer(await self._call_once(call, account, tokens))
            except SummaryError as failed:
                pause_s = max(self._jitter() * FIRST_PAUSE_S * 2 ** (attempt - 1), failed.retry_after_s)
                is_open = self._breaker.is_open(SummaryEndpoint(account.tenant, call.url, call.model))
                is_last = attempt == ATTEMPTS or is_open or pause_s > LONGEST_PAUSE_S
                if is_last or not _is_retryable(failed.reason):
                    raise
            await self._sleep(pause_s)
        raise AssertionError  # `count` never ends

    async def _call_once(self, call: SummaryCall, account: CallAccount, tokens: int) -> SummaryAnswer:
        endpoint = SummaryEndpoint(account.tenant, call.url, call.model)
        self._budget.book_call(account.tenant, account.calls_per_hour, tokens)
        account.usage.record_call(call)
        started = self._clock()
        try:
            answer = await self._model.request_summary(call)
        except SummaryError as failed:
            self._breaker.record_outcome(endpoint, failed.reason)
            raise
        except asyncio.CancelledError:
            if self._clock() - started >= SLOW_SHARE * account.deadline_s:  # otherwise the client has left
                self._breaker.record_outcome(endpoint, "timeout")
            self.latency.record_cancellation(endpoint, self._clock() - started)
            raise
        self._breaker.record_outcome(endpoint, "")
        self.latency.record_duration(endpoint, self._clock() - started)
        account.usage.record_answer(call, answer)
        return answer


def _is_retryable(reason: str) -> bool:
    return is_passing_failure(reason) or reason in {"garbage", "empty"}
