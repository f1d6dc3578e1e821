"""Sends calls to summary models, with retries, an hourly budget, a circuit breaker and latency tracking."""

import asyncio
from collections import deque
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
from compaction_proxy.support.lru import BoundedDict

# After this many temporary failures in a row, a model gets no calls for a while.
MAX_FAILURES = 3
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
MAX_ENDPOINTS = 10_000
# Reasons of failures that do not pass by themselves: the key is refused, or the account is empty. One such
# failure is enough to stop the calls.
_LASTING = frozenset({"http-401", "http-402", "http-403"})
# Reasons of failures that may pass soon. All `http-5…` reasons belong to them as well.
_PASSING = frozenset({"http-408", "http-425", "http-429", "unreachable", "timeout"})


class SummaryEndpoint(NamedTuple):
    """A summary model at a URL, used by one tenant. Failures and durations are recorded for each of these."""

    tenant: str
    url: str
    model: str


@dataclass(slots=True)
class _FailureState:
    """The failures of a model, and the time until which it gets no calls.

    Attributes:
        failures: Number of failures since the last success.
        rest_s: Length of the latest rest, in seconds; 0 if the model has not had to rest since it last
            worked.
        resting_until: End of the rest, in seconds of the breaker's clock.
        is_probing: Whether calls are admitted after a rest, to find out if the model works again.
    """

    failures: int = 0
    rest_s: float = 0.0
    resting_until: float = 0.0
    is_probing: bool = False


def is_temporary_failure(reason: str) -> bool:
    """Returns whether a failure means that the model is unavailable for now, not that the call is wrong."""
    return reason in _PASSING or reason.startswith("http-5")


class SummaryBreaker:
    """Stops calls to a model that fails: a circuit breaker for each tenant and model.

    The breaker opens after three temporary failures in a row, or after one lasting failure such as a refused
    key. The model then gets no calls for 30 s. After this rest, the calls of one summary are admitted as a
    trial. If the trial fails, the next rest is twice as long, up to 600 s. The breaker remembers the 10,000
    models that failed last. Use it on one event loop only.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failure_states: BoundedDict[SummaryEndpoint, _FailureState] = BoundedDict(MAX_ENDPOINTS)

    @contextmanager
    def admit_calls(self, endpoint: SummaryEndpoint) -> Iterator[None]:
        """Admits the calls inside the block. After a rest, admits only one block at a time.

        Raises:
            SummaryError: `breaker-open`: the model rests, or another block is trying whether it works again.
        """
        trouble = self._failure_states.get(endpoint)
        if trouble is None or not trouble.rest_s:
            yield
            return
        if trouble.is_probing or self.is_open(endpoint):
            raise SummaryError("breaker-open")
        trouble.is_probing = True
        try:
            yield
        finally:
            trouble.is_probing = False

    def is_open(self, endpoint: SummaryEndpoint) -> bool:
        """Returns whether the model rests, so that it gets no calls."""
        trouble = self._failure_states.get(endpoint)
        return trouble is not None and self._clock() < trouble.resting_until

    @property
    def is_any_open(self) -> bool:
        """Whether any model rests, so that it gets no calls."""
        now = self._clock()
        return any(now < trouble.resting_until for trouble in self._failure_states.values())

    def record_outcome(self, endpoint: SummaryEndpoint, reason: str) -> None:
        """Records the outcome of a call. `reason` says why it failed; it is empty if the call was answered.

        The reason `garbage` is ignored, because it does not say whether the model is available. Every reason
        that is neither temporary nor lasting shows that the model is available, and clears its failures.
        """
        if reason in _LASTING or is_temporary_failure(reason):
            self._record_failure(endpoint, lasting=reason in _LASTING)
        elif reason != "garbage":
            self._failure_states.pop(endpoint, None)

    def _record_failure(self, endpoint: SummaryEndpoint, *, lasting: bool) -> None:
        trouble = self._failure_states[endpoint] = self._failure_states.get(endpoint) or _FailureState()
        trouble.failures += 1
        if self.is_open(endpoint):
            return  # the call had started before the breaker opened
        if lasting or trouble.rest_s or trouble.failures >= MAX_FAILURES:
            trouble.rest_s = min(max(FIRST_REST_S, 2 * trouble.rest_s), LONGEST_REST_S)
            trouble.resting_until = self._clock() + trouble.rest_s


# Weight of the newest call in the moving average of durations, 0..1.
NEWEST_SHARE = 0.3


class LatencyTracker:
    """Keeps a moving average of the duration of calls, in seconds, for each tenant and model."""

    def __init__(self) -> None:
        self._averages: BoundedDict[SummaryEndpoint, float] = BoundedDict(MAX_ENDPOINTS)

    def estimate_call_duration_s(self, endpoint: SummaryEndpoint) -> float | None:
        """Estimates the duration of the next call, in seconds; None if no call has been recorded."""
        return self._averages.get(endpoint)

    def record_duration(self, endpoint: SummaryEndpoint, seconds: float) -> None:
        """Records how long a call took until it was answered."""
        average = self._averages.get(endpoint, seconds)
        self._averages[endpoint] = average + NEWEST_SHARE * (seconds - average)

    def record_cancellation(self, endpoint: SummaryEndpoint, seconds: float) -> None:
        """Records a call that was cancelled after `seconds` without an answer.

        Ignores the call if `seconds` are fewer than the average, because they then say nothing about how long
        the complete call would have taken.
        """
        if seconds >= self._averages.get(endpoint, 0.0):
            self.record_duration(endpoint, seconds)


HOUR_S = 3_600.0
MAX_TENANTS = 10_000
# A call with more tokens than this counts as several calls: one for each started part of this many tokens.
CALL_TOKENS = 100_000


class CallBudget:
    """Limits the calls of each tenant in an hour. Remembers the 10,000 tenants that called last.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: BoundedDict[str, deque[float]] = BoundedDict(MAX_TENANTS)

    def book_call(self, tenant: str, calls_per_hour: int, tokens: int = 0) -> None:
        """Counts one call against the tenant's limit. A long call counts as several (`CALL_TOKENS`).

        A call that counts as several is admitted as long as at least one is left.

        Args:
            tenant: The tenant that makes the call.
            calls_per_hour: How many calls the tenant may make in an hour. With 0 there is no limit, and
                nothing is counted.
            tokens: Tokens that the call may take, prompt and answer together.

        Raises:
            SummaryError: `budget`: no call is left.
        """
        if not calls_per_hour:
            return
        now = self._clock()
        calls = self._calls[tenant] = self._calls.get(tenant, deque())
        while calls and calls[0] <= now - HOUR_S:
            calls.popleft()
        if len(calls) >= calls_per_hour:
            raise SummaryError("budget")
        calls.extend(repeat(now, max(1, ceil(tokens / CALL_TOKENS))))


MAX_ATTEMPTS = 3
FIRST_PAUSE_S = 0.2
# If a provider asks for a pause of more than this many seconds, the call is not repeated, and the summary
# fails.
LONGEST_PAUSE_S = 10.0
# If a call is cancelled after at least this share of its deadline, the model counts as too slow. If it is
# cancelled earlier, the client has probably left.
SLOW_SHARE = 0.5

Read = TypeVar("Read")
# Returns the price of a call in dollars; None if the price is unknown or not yet loaded. The arguments are
# the model, its URL, the number of prompt tokens, how many of these were cached, and the number of completion
# tokens.
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
        prompts: The last few different prompts, each shortened to a limited size.
    """

    calls: int = 0
    answered_calls: list[CallUsage] = field(default_factory=list)
    prompts: deque[SummaryPrompt] = field(default_factory=lambda: deque(maxlen=MAX_PROMPTS), compare=False)

    def record_call(self, call: SummaryCall) -> None:
        """Records a call that is about to be sent."""
        self.calls += 1
        prompt = build_bounded_prompt(
            call.model, CONTINUED if call.conversation else call.system, call.prompt
        )
        if prompt not in self.prompts:  # otherwise this is another attempt at the same call
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
    """The tenant that makes calls, its limit on calls, and the object that records their usage.

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
        """Whether any model rests after failures, so that it gets no calls."""
        return self._breaker.is_any_open

    def admit_calls(self, account: CallAccount, url: str, model: str) -> AbstractContextManager[None]:
        """Returns a context manager. Inside its block, this model may be called.

        Raises:
            SummaryError: `breaker-open`, when the block is entered: the model rests after failures.
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

        If the model is unavailable, asks to wait, or gives an unusable or empty answer, the call is repeated,
        up to three attempts in all. The pauses between them are random, and their upper limit doubles each
        time. The caller enforces the deadline by cancelling the call.

        Args:
            call: The call.
            account: The tenant that makes the call.
            parse_answer: Checks and converts the answer.
            tokens: Tokens that each attempt may take, prompt and answer together.

        Raises:
            SummaryError: The model or `parse_answer` failed, or the tenant has no calls left (`budget`).
        """
        for attempt in count(1):
            try:
                return await parse_answer(await self._call_once(call, account, tokens))
            except SummaryError as failed:
                pause_s = max(self._jitter() * FIRST_PAUSE_S * 2 ** (attempt - 1), failed.retry_after_s)
                is_open = self._breaker.is_open(SummaryEndpoint(account.tenant, call.url, call.model))
                is_last = attempt == MAX_ATTEMPTS or is_open or pause_s > LONGEST_PAUSE_S
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
            if self._clock() - started >= SLOW_SHARE * account.deadline_s:  # the model is too slow
                self._breaker.record_outcome(endpoint, "timeout")
            self.latency.record_cancellation(endpoint, self._clock() - started)
            raise
        self._breaker.record_outcome(endpoint, "")
        self.latency.record_duration(endpoint, self._clock() - started)
        account.usage.record_answer(call, answer)
        return answer


def _is_retryable(reason: str) -> bool:
    return is_temporary_failure(reason) or reason in {"garbage", "empty"}
