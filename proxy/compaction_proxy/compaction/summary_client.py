"""Sends calls to summary models.

A call that fails temporarily is repeated. The number of calls of each tenant per hour is limited. A model
that has failed several times gets no calls for a while. The module also measures how long calls take.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from math import ceil
from typing import NamedTuple, TypeVar

from compaction_proxy.compaction.summary_request import CallUsage, SummaryRequest, SummaryRoute
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.recall.round_detail import CONTINUED, build_bounded_prompt
from compaction_proxy.support.lru import BoundedDict

# After this many temporary failures in a row, a model gets no calls for `FIRST_REST_S` seconds. If the next
# call after this rest fails as well, the rest is twice as long, up to `LONGEST_REST_S` seconds. Failures of
# at most `MAX_ENDPOINTS` endpoints are remembered. If there are more, the endpoint that was called longest
# ago is forgotten.
MAX_FAILURES = 3
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
MAX_ENDPOINTS = 10_000
# Reasons of failures that last until a person removes the cause: the key is refused, or the account is empty.
# After one such failure, the model gets no calls for a while.
_LASTING = frozenset({"http-401", "http-402", "http-403"})
# Reasons of failures that will probably end by themselves. Failures whose reason begins with `http-5` count
# as such failures, too.
_PASSING = frozenset({"http-408", "http-425", "http-429", "unreachable", "timeout"})
# Weight of the newest call in the moving average of the durations of calls, 0..1.
NEWEST_SHARE = 0.3


class SummaryEndpoint(NamedTuple):
    """A summary model at a URL, as used by one tenant.

    The failures and the durations of calls are recorded for each endpoint separately.
    """

    tenant: str
    url: str
    model: str


@dataclass(slots=True)
class _EndpointState:
    """The failures and the call durations of one endpoint.

    After several failures, the endpoint gets no calls for some time. This time is called a rest.

    Attributes:
        failures: Number of temporary and lasting failures since the last success.
        rest_s: Length of the latest rest, in seconds; 0 if there was no rest since the last success.
        resting_until: End of the latest rest, in seconds of `SummaryClient`'s clock.
        is_probing: Whether calls are now being made after a rest, to find out whether the model works again.
        average_s: Moving average of the duration of calls, in seconds; None before the first call.
    """

    failures: int = 0
    rest_s: float = 0.0
    resting_until: float = 0.0
    is_probing: bool = False
    average_s: float | None = None


def is_temporary_failure(reason: str) -> bool:
    """Returns whether a failure with this reason means that the model is temporarily unavailable."""
    return reason in _PASSING or reason.startswith("http-5")


HOUR_S = 3_600.0
MAX_TENANTS = 10_000
# A long call counts as several calls: one for every 100,000 tokens of prompt and response, rounded up.
CALL_TOKENS = 100_000


class CallBudget:
    """Limits the number of summary calls of each tenant per hour.

    Remembers the calls of at most `MAX_TENANTS` tenants. If there are more, forgets the tenant whose last
    call is the oldest.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: BoundedDict[str, deque[float]] = BoundedDict(MAX_TENANTS)

    def book_call(self, tenant: str, calls_per_hour: int, tokens: int = 0) -> None:
        """Counts one call towards the tenant's limit. A long call counts as several calls (`CALL_TOKENS`).

        A long call is allowed even if only one call is left.

        Args:
            tenant: The tenant that makes the call.
            calls_per_hour: How many calls the tenant may make per hour; 0 for no limit.
            tokens: Largest size of prompt and response together, in tokens.

        Raises:
            SummaryError: If no call is left (reason `budget`).
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
# If the provider asks for a pause of more than this many seconds (header `Retry-After`), the call is not
# repeated, and the summary fails.
LONGEST_PAUSE_S = 10.0
# If a call is cancelled after at least this share of the time allowed for the summary, the cancellation
# counts as a failure of the model, which was too slow. If the call is cancelled earlier, the client has
# probably disconnected, and the model has not failed.
SLOW_SHARE = 0.5

Read = TypeVar("Read")


class SummaryClient:
    """Calls summary models, and records their failures and the duration of calls.

    After three temporary failures in a row, or after one lasting failure such as a refused key, a model gets
    no calls from the tenant for 30 s. After this rest, the calls for one summary are allowed as a trial. If
    the trial fails, the next rest is twice as long, up to 600 s. Use an instance on one event loop only.

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
        self._budget = CallBudget(clock)
        self._states: BoundedDict[SummaryEndpoint, _EndpointState] = BoundedDict(MAX_ENDPOINTS)

    @property
    def has_resting_model(self) -> bool:
        """Whether there is a model that currently gets no calls because it has failed."""
        now = self._clock()
        return any(now < state.resting_until for state in self._states.values())

    def estimate_call_duration_s(self, endpoint: SummaryEndpoint) -> float | None:
        """Estimates the duration of the next call, in seconds; None if no call has been recorded."""
        state = self._states.get(endpoint)
        return state.average_s if state else None

    @contextmanager
    def admit_calls(self, tenant: str, route: SummaryRoute) -> Iterator[None]:
        """Checks whether the model of the route may be called inside the `with` block.

        During a rest, which follows failures of the model, no calls are allowed. After the rest, only one
        block is allowed at a time, until a call has succeeded.

        Raises:
            SummaryError: If the calls are not allowed (reason `breaker-open`).
        """
        state = self._states.get(SummaryEndpoint(tenant, route.url, route.model))
        if state is None or not state.rest_s:
            yield
            return
        if state.is_probing or self._clock() < state.resting_until:
            raise SummaryError("breaker-open")
        state.is_probing = True
        try:
            yield
        finally:
            state.is_probing = False

    async def call_model(
        self,
        call: SummaryCall,
        summary_request: SummaryRequest,
        parse_answer: Callable[[SummaryAnswer], Awaitable[Read]],
        *,
        tokens: int,
    ) -> Read:
        """Calls the model and returns the result of `parse_answer`.

        If the model is temporarily unavailable, or if its response is empty or lacks the required form, the
        call is repeated, up to three attempts in all. It is not repeated if the model gets no calls for a
        while because of its failures. The pauses between the attempts are random, and their upper limit
        doubles each time. A pause is at least as long as the provider asks for. The caller enforces the
        deadline by cancelling the call.

        Args:
            call: The call.
            summary_request: The summary request to which the call belongs. Its `usage` is updated.
            parse_answer: Checks and converts the response.
            tokens: Largest size of prompt and response of each attempt together, in tokens.

        Raises:
            SummaryError: If the model or `parse_answer` fails, or if the tenant has no calls left (reason
                `budget`).
        """
        endpoint = SummaryEndpoint(summary_request.tenant, call.url, call.model)
        state = self._states[endpoint] = self._states.get(endpoint) or _EndpointState()
        attempt = 0
        while True:
            attempt += 1
            try:
                return await parse_answer(await self._call_once(call, summary_request, state, tokens))
            except SummaryError as failed:
                pause_s = max(self._jitter() * FIRST_PAUSE_S * 2 ** (attempt - 1), failed.retry_after_s)
                is_open = self._clock() < state.resting_until
                is_retryable = is_temporary_failure(failed.reason) or failed.reason in {"garbage", "empty"}
                if attempt == MAX_ATTEMPTS or is_open or pause_s > LONGEST_PAUSE_S or not is_retryable:
                    raise
            await self._sleep(pause_s)

    async def _call_once(
        self, call: SummaryCall, summary_request: SummaryRequest, state: _EndpointState, tokens: int
    ) -> SummaryAnswer:
        self._budget.book_call(summary_request.tenant, summary_request.calls_per_hour, tokens)
        usage = summary_request.usage
        usage.calls += 1
        opening = CONTINUED if call.conversation else call.system
        prompt = build_bounded_prompt(call.model, opening, call.prompt)
        if prompt not in usage.prompts:  # otherwise this is another attempt at the same call
            usage.prompts.append(prompt)
        started = self._clock()
        try:
            answer = await self._model.request_summary(call)
        except SummaryError as failed:
            self._record_outcome(state, failed.reason)
            raise
        except asyncio.CancelledError:
            seconds = self._clock() - started
            if seconds >= SLOW_SHARE * summary_request.deadline_s:  # the model is too slow
                self._record_outcome(state, "timeout")
            # The complete call would have taken longer than `seconds`. So `seconds` enters the average only
            # if it is not below the average.
            if seconds >= (state.average_s or 0.0):
                _record_duration(state, seconds)
            raise
        self._record_outcome(state, "")
        _record_duration(state, self._clock() - started)
        counts = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens
        usage.answered_calls.append(CallUsage(call.model, call.url, *counts))
        return answer

    def _record_outcome(self, state: _EndpointState, reason: str) -> None:
        """Records the outcome of a call. `reason` says why the call failed; it is empty after a success.

        A temporary or lasting failure is counted and may start a rest, during which the model gets no calls.
        The reason `garbage` is ignored, because it does not show whether the model is available. Any other
        reason shows that the model is available, so its failures are cleared.
        """
        if reason not in _LASTING and not is_temporary_failure(reason):
            if reason != "garbage":
                state.failures, state.rest_s, state.resting_until = 0, 0.0, 0.0
            return
        state.failures += 1
        if self._clock() < state.resting_until:
            return  # the call had started before the rest began
        if reason in _LASTING or state.rest_s or state.failures >= MAX_FAILURES:
            state.rest_s = min(max(FIRST_REST_S, 2 * state.rest_s), LONGEST_REST_S)
            state.resting_until = self._clock() + state.rest_s


def _record_duration(state: _EndpointState, seconds: float) -> None:
    average_s = seconds if state.average_s is None else state.average_s
    state.average_s = average_s + NEWEST_SHARE * (seconds - average_s)
