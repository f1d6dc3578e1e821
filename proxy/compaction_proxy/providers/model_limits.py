"""Learns the limits of models from the upstream's errors and from the usage that its responses report.

There is one `LearnedLimits` object per tenant, upstream origin and model. Each process keeps it in memory,
and the store keeps it for a day, so that a restart does not cause the same error again. Tenants do not share
an object: errors and token counts depend on what a tenant sends, and one tenant must not influence the limits
of another.

Replicas (proxy processes with the same store) learn from each other. If the process uses limits that it last
read from the store `REFRESH_INTERVAL_S` ago or earlier, a background task reads the stored limits again and
merges them into those in memory. No request waits for this task. The merged limits have the calibration with
the most observations, the smallest unexpired window from an error, and the window that was discovered last.
"""

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import structlog

from compaction_proxy.providers.calibration import MAX_RATIO, Calibration
from compaction_proxy.providers.silent_truncation import (
    MIN_JUDGED_TOKENS,
    AnsweredRequest,
    infer_window,
    judge_answer,
)
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.storage.keys import discovered_windows_key, model_limits_key
from compaction_proxy.storage.records import BackgroundTasks, Fields, RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED, UPSTREAM_TRUNCATES
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.support.offload import run_short_work

# If an upstream refuses requests as too long without naming a limit, the proxy assumes that the limit is this
# share of the size of the smallest refused request.
REFUSED_SHARE = 0.9


class LearnedLimits(NamedTuple):  # one is built per response; a dataclass takes four times as long
    """Limits that were learned for one model at one upstream.

    Fields that end in `_until` are times in seconds since the epoch.

    Attributes:
        calibration: The ratio of the upstream's token counts to the proxy's estimates.
        window: Smallest context window that an error named, or that the proxy inferred from truncations which
            the upstream did not report, in tokens; None if there is none.
        window_until: When `window` expires.
        discovered_window: Context window that the upstream gave when the proxy last asked for it, in tokens;
            None if it gave none.
        asked_until: When `discovered_window` expires. Until then, the proxy does not ask the upstream again.
        accepted_tokens: Size of the newest request that the upstream accepted although it exceeded the known
            window, in tokens as the upstream counts; 0 if there was none.
        accepted_until: When `accepted_tokens` expires.
        adds_output_until: Until this time, the proxy assumes that the upstream counts the requested output
            tokens against the context window. 0 if it assumes the contrary.
        lacks_compaction_until: Until this time, the proxy assumes that the upstream does not know input items
            of type `compaction_trigger`, by which clients ask for a compaction. 0 if it assumes the contrary.
        refused_estimate: Size of the smallest request that the upstream refused as too long with an error
            that names no limit, in uncalibrated tokens; 0 if there was none.
        refused_until: When `refused_estimate` expires.
        accepted_estimate: Size of the largest request that the upstream accepted, in uncalibrated tokens; 0
            if there was none.
        accepted_estimate_until: When `accepted_estimate` expires.
    """

    calibration: Calibration
    window: int | None = None
    window_until: float = 0.0
    discovered_window: int | None = None
    asked_until: float = 0.0
    accepted_tokens: int = 0
    accepted_until: float = 0.0
    adds_output_until: float = 0.0
    lacks_compaction_until: float = 0.0
    refused_estimate: int = 0
    refused_until: float = 0.0
    accepted_estimate: int = 0
    accepted_estimate_until: float = 0.0

    @property
    def adds_output(self) -> bool:
        """Whether the upstream counts the requested output tokens against the context window.

        `ModelLimits` sets `adds_output_until` to 0 when it expires.
        """
        return self.adds_output_until > 0

    def get_effective_window(self, model: str, configured: int | None) -> int:
        """Returns the context window from which budgets are computed, in tokens.

        Without a configured window, the result is the attribute `window`, or the result of `get_base_window`
        if `window` is None. With a configured window, the result is the smaller of it and `window`. If
        `limit_estimate` is not 0, the result is at most this limit, calibrated to the upstream's count
        (ADR 0009).

        Args:
            model: Name of the model, for the shipped table.
            configured: The configured window, in tokens; None if none is configured.
        """
        window = self.window or (self.get_base_window(model) if configured is None else configured)
        if configured is not None:
            window = min(configured, window)
        limit = self.limit_estimate
        return min(window, self.calibration.predict_tokens(limit)) if limit else window

    @property
    def limit_estimate(self) -> int:
        """Returns the limit inferred from refusals that name no limit, in uncalibrated tokens; 0 without any.

        The limit is `REFUSED_SHARE` of the size of the smallest refused request, but at least the size of the
        largest accepted request.
        """
        if not self.refused_estimate:
            return 0
        return max(int(REFUSED_SHARE * self.refused_estimate), self.accepted_estimate)

    @property
    def is_limited(self) -> bool:
        """Whether a limit was learned from an error, or from truncations that the upstream did not report."""
        return self.window is not None or self.refused_estimate > 0

    def with_refused_estimate(self, estimate: int, until: float) -> Self:
        """Returns the limits after the upstream has refused a request without naming a limit.

        If the upstream has accepted a request of at least `estimate` tokens before, its limit must have
        become lower since. The `accepted_estimate` of the returned limits is then 0. If the upstream has
        refused a smaller request before, `refused_estimate` stays the size of that request.

        Args:
            estimate: Size of the refused request, in uncalibrated tokens.
            until: When this refusal expires, in seconds since the epoch.
        """
        if self.accepted_estimate >= estimate:
            cleared = self._replace(accepted_estimate=0, accepted_estimate_until=0.0)
        else:
            cleared = self
        smallest = min(estimate, self.refused_estimate or estimate)
        return cleared._replace(refused_estimate=smallest, refused_until=until)

    def with_accepted_estimate(self, estimate: int, until: float) -> Self:
        """Returns the limits after the upstream has accepted a request.

        If the upstream has accepted a larger request before, returns this object unchanged. Otherwise,
        `accepted_estimate` becomes `estimate`. If `estimate` is also at least `refused_estimate`, the
        upstream's limit must have become higher, so `refused_estimate` becomes 0.

        Args:
            estimate: Size of the accepted request, in uncalibrated tokens.
            until: When this acceptance expires, in seconds since the epoch.
        """
        if estimate < self.accepted_estimate:
            return self
        known = self._replace(accepted_estimate=estimate, accepted_estimate_until=until)
        if not self.refused_estimate or estimate < self.refused_estimate:
            return known
        return known._replace(refused_estimate=0, refused_until=0.0)

    def get_base_window(self, model: str) -> int:
        """Returns the discovered context window, or else the context window in the shipped table, in tokens.

        If the upstream has accepted a request larger than this window, returns the size of that request.
        """
        return max(self.discovered_window or get_known_window(model), self.accepted_tokens)


def merge_limits(ours: LearnedLimits, theirs: LearnedLimits, now: float) -> LearnedLimits:
    """Merges the limits that two processes have learned. `now` is the time in seconds since the epoch.

    Takes over sizes of refused and accepted requests only if they have not expired. The merged `window` is
    the smallest `window` that has not expired and is at least the merged `accepted_tokens`. It is None if
    there is no such window.
    """
    calibration = max(ours.calibration, theirs.calibration, key=lambda each: each.observations)
    newer = max(ours, theirs, key=lambda each: each.accepted_until)
    accepted, since = newer.accepted_tokens if newer.accepted_until > now else 0, newer.accepted_until
    believed = [
        each for each in (ours, theirs) if each.window and each.window_until > now and each.window >= accepted
    ]
    nothing = LearnedLimits(calibration)
    narrower = min(believed, key=lambda each: (each.window or 0, -each.window_until), default=nothing)
    later = max(ours, theirs, key=lambda each: each.asked_until)
    together = LearnedLimits(
        calibration,
        narrower.window,
        narrower.window_until,
        later.discovered_window,
        later.asked_until,
        accepted,
        since,
        max(ours.adds_output_until, theirs.adds_output_until),
        max(ours.lacks_compaction_until, theirs.lacks_compaction_until),
    )
    return _add_sizes(together, (ours, theirs), now)


def _add_sizes(limits: LearnedLimits, parts: Sequence[LearnedLimits], now: float) -> LearnedLimits:
    """Returns `limits` with the unexpired sizes of refused and accepted requests in `parts`.

    Applies the sizes in the order of their expiry, because a newer size may contradict an older one.
    """
    sizes = [(each.refused_until, False, each.refused_estimate) for each in parts]
    sizes += [(each.accepted_estimate_until, True, each.accepted_estimate) for each in parts]
    for until, is_accepted, estimate in sorted(sizes):
        if estimate and until > now:
            add = limits.with_accepted_estimate if is_accepted else limits.with_refused_estimate
            limits = add(estimate, until)
    return limits


def to_fields(learned: LearnedLimits) -> dict[str, object]:
    """Returns the limits as JSON values, for the store."""
    return {
        "window": learned.window,
        "until": learned.window_until,
        "calibration": learned.calibration.to_dict(),
        "discovered": learned.discovered_window,
        "asked_until": learned.asked_until,
        "accepted": learned.accepted_tokens,
        "accepted_until": learned.accepted_until,
        "adds_output_until": learned.adds_output_until,
        "lacks_compaction_until": learned.lacks_compaction_until,
        "refused_estimate": learned.refused_estimate,
        "refused_until": learned.refused_until,
        "accepted_estimate": learned.accepted_estimate,
        "accepted_estimate_until": learned.accepted_estimate_until,
    }


def from_fields(fields: Mapping[str, Any]) -> LearnedLimits:
    """Restores the limits that `to_fields` wrote in this version or an earlier one.

    A number of tokens that is not a positive integer counts as missing.

    Raises:
        KeyError: If `calibration` or one of its numbers, `window` or `until` is missing.
        ValueError, TypeError, OverflowError: If another number cannot be converted, or is impossible here.
    """
    return LearnedLimits(
        Calibration.from_dict(fields["calibration"]),
        _as_tokens(fields["window"]),
        float(fields["until"]),
        _as_tokens(fields.get("discovered")),
        float(fields.get("asked_until", 0.0)),
        _as_tokens(fields.get("accepted")) or 0,
        float(fields.get("accepted_until", 0.0)),
        float(fields.get("adds_output_until", 0.0)),
        float(fields.get("lacks_compaction_until", 0.0)),
        _as_tokens(fields.get("refused_estimate")) or 0,
        float(fields.get("refused_until", 0.0)),
        _as_tokens(fields.get("accepted_estimate")) or 0,
        float(fields.get("accepted_estimate_until", 0.0)),
    )


def _as_tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


# Lifetime in seconds of all learned limits for which `INFERRED_TTL_S` does not apply. Limits expire because a
# provider may serve another model under the same name later.
LIMITS_TTL_S = 86_400.0
# Maximum number of combinations of tenant, upstream origin and model whose limits stay in memory. If there
# are more, the process forgets the limits that it added first.
MAX_MODELS = 4_096
# The proxy stores a calibration again only if its mean (a logarithm) differs from the stored mean by at least
# this much.
SAVE_STEP = 0.02
# Shortest time between two writes of a calibration, in seconds. Without this limit, the first responses of a
# model would each cause a write.
SAVE_INTERVAL_S = 5.0
# The drift of a model is the learned logarithm of a ratio: the upstream's count of the first request after a
# compaction, divided by the proxy's prediction of this count. After each compaction,
# `learn_post_compaction_factor` adds the observed logarithm, multiplied by `DRIFT_WEIGHT`, to the drift. The
# absolute value of the drift is at most `MAX_DRIFT`.
DRIFT_WEIGHT = 0.5
MAX_DRIFT = 0.15
# If the last read of a model's stored limits is at least this many seconds ago, the proxy reads them again,
# because another replica may have changed them.
REFRESH_INTERVAL_S = 10.0
# Maximum number of conversations whose last answered request stays in memory, for `judge_answer`. If there
# are more, the process forgets the request that it stored longest ago.
MAX_THREADS = 4_096
# Lifetime of an inferred context window, and of the size of a refused or accepted request, in seconds. After
# this time, the proxy no longer shortens requests because of them, so the next large request shows whether
# the upstream still has this limit.
INFERRED_TTL_S = 3_600.0
# Maximum number of context windows that the store keeps for `list_discovered_windows`. If there are more, it
# drops the oldest.
MAX_LISTED_WINDOWS = 100
# Maximum number of requests per model that stay in memory for `infer_window`. These are requests for which
# the upstream reported far fewer tokens than expected (`judge_answer`). If there are more, the process
# forgets the oldest.
MAX_LOW_COUNTS = 8

# The fields of `LearnedLimits` that `_drop_expired_limits` resets. Each row has the name of the field, the
# name of the field with the time of its expiry, and the value that the field gets at that time.
_EXPIRING_FIELDS = (
    ("window", "window_until", None),
    ("discovered_window", "asked_until", None),
    ("accepted_tokens", "accepted_until", 0),
    ("adds_output_until", "adds_output_until", 0.0),
    ("refused_estimate", "refused_until", 0),
    ("accepted_estimate", "accepted_estimate_until", 0),
)

_log = structlog.get_logger()


def _drop_expired_limits(limits: LearnedLimits, now: float) -> tuple[LearnedLimits, float]:
    """Returns the limits without those that have expired at `now`, and the time when the next one expires.

    The time is in seconds since the epoch, and infinite if no limit is left that expires. The returned limits
    also have no `window` if it would be smaller than an accepted request.
    """
    expired: dict[str, Any] = {}
    next_expiry = math.inf
    for name, until_name, value in _EXPIRING_FIELDS:
        if getattr(limits, name):
            until = getattr(limits, until_name)
            if until <= now:
                expired[name] = value
            else:
                next_expiry = min(next_expiry, until)
    limits = limits._replace(**expired) if expired else limits
    if limits.window and limits.window < limits.accepted_tokens:
        limits = limits._replace(window=None)
    return limits, next_expiry


@dataclass(slots=True)
class _KnownModel:
    """What this process remembers about a model. Times are in monotonic seconds unless stated otherwise.

    Attributes:
        limits: The learned limits.
        unexpired: The learned limits without those that have expired; None if they must be computed again.
        unexpired_until: When the next limit in `unexpired` expires, in seconds since the epoch.
        read_at: When the limits were last read from the store; minus infinity if they never were.
        stored_mean: The mean of the stored calibration; infinite if none is stored.
        saved_at: When the limits were last stored because of a changed calibration.
        largest_count: The largest number of prompt tokens that a response has reported.
        low_answers: The newest requests for which the upstream reported far fewer tokens than the proxy had
            counted.
    """

    limits: LearnedLimits
    unexpired: LearnedLimits | None = None
    unexpired_until: float = 0.0
    read_at: float = -math.inf
    stored_mean: float = math.inf
    saved_at: float = -math.inf
    largest_count: int = 0
    low_answers: deque[AnsweredRequest] = field(default_factory=lambda: deque(maxlen=MAX_LOW_COUNTS))


class ModelLimits:
    """Keeps the learned limits of all models. Use the object on one event loop only.

    Args:
        records: Store for the learned limits.
        now: Returns the seconds since the epoch.
        clock: Returns monotonic seconds.

    Attributes:
        changes: Number of times that a learned limit on the size of requests has changed, for all models
            together.
    """

    def __init__(
        self,
        records: RecordStore,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changes = 0
        self._records = records
        self._now = now
        self._clock = clock
        self._known: BoundedDict[str, _KnownModel] = BoundedDict(MAX_MODELS)
        self._drifts: BoundedDict[str, float] = BoundedDict(MAX_MODELS)  # see `DRIFT_WEIGHT`
        self._accepted_bytes: BoundedDict[str, int] = BoundedDict(MAX_MODELS)  # see `record_accepted_bytes`
        self._last: BoundedDict[tuple[str, str | bytes], AnsweredRequest] = BoundedDict(MAX_THREADS)
        self._discoveries = BackgroundTasks()

    async def get(self, tenant: str, origin: str, model: str) -> LearnedLimits:
        """Returns the unexpired learned limits of a model.

        Waits for the store only if this process has no limits of the model in memory.
        """
        return await self._get_by_key(model_limits_key(tenant, origin, model), model)

    async def _get_by_key(self, key: str, model: str) -> LearnedLimits:
        if key in self._known:
            self._refresh_in_background(key, model)
        else:
            await self._load_from_store(key, model)
        return self._peek_limits(key, model)

    def peek_effective_window(self, tenant: str, origin: str, model: str, configured: int | None) -> int:
        """Returns `LearnedLimits.get_effective_window` for the limits in memory, in tokens. Never waits.

        If the limits are not in memory, or were last read from the store at least `REFRESH_INTERVAL_S`
        seconds ago, also starts a background task that reads them.
        """
        key = model_limits_key(tenant, origin, model)
        self._refresh_in_background(key, model)
        return self._peek_limits(key, model).get_effective_window(model, configured)

    def is_known(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether this process has the limits of a model in memory."""
        return model_limits_key(tenant, origin, model) in self._known

    def peek_calibration(self, tenant: str, origin: str, model: str) -> Calibration:
        """Returns the model's calibration in memory, or else `Calibration.build_prior`. Never waits."""
        return self._peek_limits(model_limits_key(tenant, origin, model), model).calibration

    def get_post_compaction_factor(self, tenant: str, origin: str, model: str) -> float:
        """Returns the learned ratio of counted to predicted tokens of the first request after a compaction.

        Returns 1.0 if nothing was learned. The ratio can differ from 1, because the proxy's estimates are too
        low for some kinds of text and too high for others, and a compaction changes the kinds of text in a
        request.
        """
        return math.exp(self._drifts.get(model_limits_key(tenant, origin, model), 0.0))

    def learn_post_compaction_factor(
        self, tenant: str, origin: str, model: str, estimate: int, actual: int
    ) -> None:
        """Uses the counts of one request to update the result of `get_post_compaction_factor`.

        The request is the first one of its conversation after a compaction.

        Args:
            tenant: Tenant of the request.
            origin: Origin of the upstream.
            model: Requested model.
            estimate: Predicted size of this request, in tokens.
            actual: The upstream's count of this request, in tokens.
        """
        key = model_limits_key(tenant, origin, model)
        drift = self._drifts.get(key, 0.0) + DRIFT_WEIGHT * math.log(max(1, actual) / max(1, estimate))
        self._drifts[key] = max(-MAX_DRIFT, min(MAX_DRIFT, drift))

    async def learn_window(
        self, tenant: str, origin: str, model: str, window: int, ttl_s: float = LIMITS_TTL_S
    ) -> None:
        """Learns a context window that an error named, or that `infer_window` returned.

        If an unexpired smaller window was learned before, keeps that window. In both cases, the window
        expires `ttl_s` seconds from now.

        Args:
            tenant: Tenant of the request.
            origin: Origin of the upstream.
            model: Requested model.
            window: The context window, in tokens.
            ttl_s: Lifetime of the window, in seconds.
        """
        known = await self.get(tenant, origin, model)
        smaller = min(window, known.window or window)
        known = known._replace(window=smaller, window_until=self._now() + ttl_s)
        # If the upstream accepted a request larger than `smaller` before, its limit has become lower. The
        # size of that request must therefore no longer raise the context window.
        if known.accepted_tokens > smaller:
            known = known._replace(accepted_tokens=smaller, accepted_until=self._now() + LIMITS_TTL_S)
        await self._remember_and_save(model_limits_key(tenant, origin, model), model, known)

    def record_accepted_bytes(self, tenant: str, origin: str, model: str, size_bytes: int) -> None:
        """Records the size of an accepted request body whose tokens the proxy did not count.

        Keeps the largest of these sizes for `learn_refused`, in memory only.
        """
        key = model_limits_key(tenant, origin, model)
        if size_bytes > self._accepted_bytes.get(key, 0):
            self._accepted_bytes[key] = size_bytes

    async def learn_refused(
        self, tenant: str, origin: str, model: str, estimate: int, size_bytes: int
    ) -> None:
        """Learns that the upstream refused a request as too long with an error that names no limit.

        If the largest accepted request that `record_accepted_bytes` recorded is smaller than `size_bytes`,
        also learns the size of that accepted request in tokens. To convert this size from bytes, the method
        assumes that the accepted request had as many tokens per byte as the refused request.

        Args:
            tenant: Tenant of the request.
            origin: Origin of the upstream.
            model: Requested model.
            estimate: The proxy's uncalibrated count of the forwarded request, in tokens. If the calibrated
                count is below `MIN_JUDGED_TOKENS`, the method ignores the refusal, because no model has so
                small a context window.
            size_bytes: Size of the forwarded body, in bytes.
        """
        known = await self.get(tenant, origin, model)
        if known.calibration.predict_tokens(estimate) < MIN_JUDGED_TOKENS:
            return
        key = model_limits_key(tenant, origin, model)
        until = self._now() + INFERRED_TTL_S
        accepted_bytes = self._accepted_bytes.pop(key, 0)
        if accepted_bytes < size_bytes:
            known = known.with_accepted_estimate(accepted_bytes * estimate // size_bytes, until)
        await self._remember_and_save(key, model, known.with_refused_estimate(estimate, until))

    async def learn_accepted(self, tenant: str, origin: str, model: str, estimate: int) -> None:
        """Learns that the upstream accepted and completely read a request.

        Args:
            tenant: Tenant of the request.
            origin: Origin of the upstream.
            model: Requested model.
            estimate: The proxy's uncalibrated count of the forwarded request, in tokens.
        """
        key = model_limits_key(tenant, origin, model)
        known = await self._get_by_key(key, model)
        accepted = known.with_accepted_estimate(estimate, self._now() + INFERRED_TTL_S)
        if accepted is known:
            return
        self._remember_limits(key, accepted)
        if accepted.limit_estimate != known.limit_estimate:
            await self._save_to_store(key, model)

    async def is_limited(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether a limit of the model was learned (`LearnedLimits.is_limited`)."""
        return (await self.get(tenant, origin, model)).is_limited

    async def learn_that_output_counts(self, tenant: str, origin: str, model: str) -> None:
        """Learns that the upstream counts the requested output tokens against the context window.

        The caller knows this from an error in which the upstream adds the requested output tokens to the
        input tokens.
        """
        known = await self.get(tenant, origin, model)
        learned = known._replace(adds_output_until=self._now() + LIMITS_TTL_S)
        await self._remember_and_save(model_limits_key(tenant, origin, model), model, learned)

    def adds_output(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether the upstream counts the requested output tokens against the context window.

        Uses only the limits in memory and never waits.
        """
        return self._peek_limits(model_limits_key(tenant, origin, model), model).adds_output

    async def learn_lacks_compaction(self, tenant: str, origin: str, model: str) -> None:
        """Learns that the upstream does not know input items of type `compaction_trigger`.

        Clients such as Codex ask for a compaction with such an item.
        """
        known = await self.get(tenant, origin, model)
        learned = known._replace(lacks_compaction_until=self._now() + LIMITS_TTL_S)
        await self._remember_and_save(model_limits_key(tenant, origin, model), model, learned)

    async def lacks_compaction(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether the upstream does not know input items of type `compaction_trigger`.

        Returns False if `learn_lacks_compaction` was not called for the model within `LIMITS_TTL_S`.
        """
        return (await self.get(tenant, origin, model)).lacks_compaction_until > self._now()

    async def learn_token_count(
        self, tenant: str, origin: str, model: str, estimate: int, actual: int
    ) -> None:
        """Updates the calibration with the uncalibrated estimate of a request and the upstream's count."""
        key = model_limits_key(tenant, origin, model)
        await self._update_calibration(key, model, await self._get_by_key(key, model), estimate, actual)

    async def _update_calibration(
        self, key: str, model: str, known: LearnedLimits, estimate: int, actual: int
    ) -> None:
        calibration = known.calibration.add_observation(estimate, actual)
        if calibration is not known.calibration:
            self._remember_limits(key, known._replace(calibration=calibration))
        entry = self._known[key]
        has_moved = abs(calibration.mean - entry.stored_mean) >= SAVE_STEP
        if has_moved and self._clock() - entry.saved_at >= SAVE_INTERVAL_S:
            entry.saved_at = self._clock()
            await self._save_to_store(key, model)

    async def learn_answer(
        self,
        tenant: str,
        origin: str,
        model: str,
        answer: AnsweredRequest,
        *,
        thread: str | bytes | None,
        find_mentioned_numbers: Callable[[], Container[int]],
        is_window_configured: bool = False,
    ) -> bool:
        """Learns from the usage in a response.

        Returns whether the upstream truncates requests without reporting an error.

        A token count is low if `silent_truncation.judge_answer` returns `low` for it. The result can be True
        only after several low counts, because `silent_truncation.infer_window` needs several.

        Args:
            tenant: Tenant of the request.
            origin: Origin of the upstream.
            model: Model that wrote the reply.
            answer: Token counts of the request and its response.
            thread: Id of the conversation, or its root (the digest of its first messages), to find the
                conversation's previous request. None if there is neither, or if the conversation's requests
                do not continue each other.
            find_mentioned_numbers: Returns the numbers that the text of the request contains. The method
                ignores a low count or an inferred window that is equal to such a number. It calls the
                function only if the count is low, in a thread.
            is_window_configured: Whether the configuration sets the context window. This method then learns
                no smaller window, because only an error may lower a configured window.
        """
        key = model_limits_key(tenant, origin, model)
        known = await self._get_by_key(key, model)
        last = self._replace_last_answer(key, thread, answer)
        entry = self._known[key]
        entry.largest_count = max(entry.largest_count, answer.prompt)
        verdict = judge_answer(answer, last, known.calibration)

        async def is_mentioned(number: int) -> bool:
            return await run_short_work(lambda: number in find_mentioned_numbers())

        if verdict == "low" and not await is_mentioned(answer.prompt):
            if last and last.prompt == answer.prompt and not entry.low_answers:
                entry.low_answers.append(last)
            entry.low_answers.append(answer)
            window = infer_window(entry.low_answers, entry.largest_count)
            if window is None or await is_mentioned(window):
                return False
            if known.window is None or window < known.window:
                counts = {"tokens_estimated": answer.estimate, "tokens_counted": answer.prompt}
                _log.warning(UPSTREAM_TRUNCATES, model=model, **counts)
            if not is_window_configured:
                await self.learn_window(tenant, origin, model, window, INFERRED_TTL_S)
            return True
        if verdict == "whole":
            known = await self._learn_larger_window(key, model, known, answer)
            await self._update_calibration(key, model, known, answer.estimate, answer.prompt)
            await self.learn_accepted(tenant, origin, model, answer.estimate)
        return False

    def start_discovery(
        self, tenant: str, origin: str, model: str, discover_window: Callable[[], Awaitable[int | None]]
    ) -> bool:
        """Starts a background task that asks the upstream for the context window of a model.

        Does nothing if the upstream was asked within the last day. Returns False if the task could not be
        started, because too many run already.
        """
        key = model_limits_key(tenant, origin, model)
        entry = self._known.get(key)
        if entry is not None and entry.limits.asked_until > self._now():
            return True
        return self._discoveries.start_once(
            key, lambda: self._run_discovery(key, origin, model, discover_window)
        )

    async def list_discovered_windows(self, *origins: str, for_s: float = 0.0) -> dict[str, int]:
        """Returns the context windows that upstreams have reported in the last day, in tokens, by model.

        Contains what any process has learned that shares the store. It is empty if the store cannot be read.
        Leaves out those that expire within `for_s` seconds. If several upstreams have a model of one name,
        the result has the window of the last of them.
        """
        windows: dict[str, int] = {}
        for origin in dict.fromkeys(origins):
            for line in await self._records.read_tail(discovered_windows_key(origin), MAX_LISTED_WINDOWS):
                model, window, until = line.get("model"), _as_tokens(line.get("window")), line.get("until")
                is_valid = isinstance(until, float) and until > self._now() + for_s
                if isinstance(model, str) and window and is_valid:
                    windows[model] = window
        return windows

    async def close(self) -> None:
        """Cancels all background tasks of `start_discovery`, and waits for them to end."""
        await self._discoveries.close()

    def _replace_last_answer(
        self, key: str, thread: str | bytes | None, answer: AnsweredRequest
    ) -> AnsweredRequest | None:
        """Stores a request as the last request of its conversation. Returns the one stored before, or None.

        If both requests have the same token count, the older one stays stored. A later request is then
        compared with the first request that had this count, so that growth in many small steps is noticed.
        If `thread` is None, stores nothing and returns None.
        """
        if thread is None:
            return None
        last = self._last.get((key, thread))
        self._last[key, thread] = last if last and last.prompt == answer.prompt else answer
        return last

    async def _learn_larger_window(
        self, key: str, model: str, known: LearnedLimits, answer: AnsweredRequest
    ) -> LearnedLimits:
        """Learns the size of an accepted request that exceeds the known context window.

        Learns nothing if the upstream's count is more than `MAX_RATIO` times the proxy's estimate, because
        such a count must be wrong. Returns the limits that are known afterwards.
        """
        if not (known.window or known.get_base_window(model)) < answer.prompt <= MAX_RATIO * answer.estimate:
            return known
        self._known[key].low_answers.clear()
        until = self._now() + LIMITS_TTL_S
        larger = known._replace(accepted_tokens=answer.prompt, accepted_until=until)
        await self._remember_and_save(key, model, larger)
        return self._peek_limits(key, model)

    async def _run_discovery(
        self, key: str, origin: str, model: str, discover_window: Callable[[], Awaitable[int | None]]
    ) -> None:
        if key not in self._known:
            await self._load_from_store(key, model)
            if self._known[key].limits.asked_until > self._now():
                return
        window = None
        with suppress_and_report(_log_failed_discovery):
            window = await discover_window()
        known = self._known[key].limits if key in self._known else _build_unknown(model)
        until = self._now() + LIMITS_TTL_S
        discovered = known._replace(discovered_window=window, asked_until=until)
        await self._remember_and_save(key, model, discovered)
        # Every tenant has the window asked for. A line for each would drop other models from the list.
        if window is not None and window != (
            await self.list_discovered_windows(origin, for_s=LIMITS_TTL_S / 2)
        ).get(model):
            line = {"model": model, "window": window, "until": until}
            await self._records.append_line(
                discovered_windows_key(origin), line, ttl_s=LIMITS_TTL_S, max_lines=MAX_LISTED_WINDOWS
            )

    def _refresh_in_background(self, key: str, model: str) -> None:
        """Starts a background task that reads the stored limits.

        Does nothing if the limits were last read less than `REFRESH_INTERVAL_S` seconds ago.
        """
        if key not in self._known or self._clock() - self._known[key].read_at >= REFRESH_INTERVAL_S:
            self._records.background_tasks.start_once(key, lambda: self._load_from_store(key, model))

    async def _load_from_store(self, key: str, model: str) -> None:
        """Merges the stored limits of a model into those in memory.

        If the store has no limits of the model or cannot be read, those in memory stay as they are. If there
        are none in memory either, adds those of a model about which nothing was learned.
        """
        [fields] = await self._records.get_many([key], bypass_cache=True)
        limits = theirs = _parse_stored(fields, model)
        if key in self._known:  # looked up after the wait, in which the process may have learned more
            limits = merge_limits(self._known[key].limits, theirs, self._now())
        self._remember_limits(key, limits)
        entry = self._known[key]
        entry.read_at = self._clock()
        entry.stored_mean = math.inf if fields is None else theirs.calibration.mean

    def _peek_limits(self, key: str, model: str) -> LearnedLimits:
        """Returns the unexpired limits in memory.

        If the model has no limits in memory, returns those of a model about which nothing was learned.
        """
        entry = self._known.get(key)
        if entry is None:
            return _build_unknown(model)
        now = self._now()
        if entry.unexpired is None or entry.unexpired_until <= now:
            entry.unexpired, entry.unexpired_until = _drop_expired_limits(entry.limits, now)
        return entry.unexpired

    def _remember_limits(self, key: str, learned: LearnedLimits) -> None:
        entry = self._known.get(key)
        before, after = (
            (limits.window, limits.discovered_window, limits.adds_output, limits.limit_estimate)
            for limits in (entry.limits if entry else _build_unknown(""), learned)
        )
        if before != after:
            self.changes += 1
        if entry is None:
            self._known[key] = _KnownModel(learned)
        else:
            entry.limits, entry.unexpired = learned, None

    async def _remember_and_save(self, key: str, model: str, learned: LearnedLimits) -> None:
        self._remember_limits(key, learned)
        await self._save_to_store(key, model)

    async def _save_to_store(self, key: str, model: str) -> None:
        """Merges the stored limits into those in memory, and stores the result.

        The merge keeps what other replicas have stored.
        """
        await self._load_from_store(key, model)
        entry = self._known[key]
        entry.stored_mean = entry.limits.calibration.mean
        await self._records.overwrite(key, to_fields(entry.limits), ttl_s=LIMITS_TTL_S)


def _build_unknown(model: str) -> LearnedLimits:
    """Returns the limits of a model about which nothing was learned."""
    return LearnedLimits(Calibration.build_prior(model))


def _parse_stored(fields: Fields | None, model: str) -> LearnedLimits:
    """Restores stored limits.

    If `fields` is None or damaged, returns the limits of a model about which nothing was learned.
    """
    with suppress(KeyError, ValueError, TypeError, OverflowError):
        if fields is not None:
            return from_fields(fields)
    return _build_unknown(model)


def _log_failed_discovery(error: BaseException) -> None:
    _log.warning(RESPONSE_NOT_OBSERVED, error=type(error).__name__)
