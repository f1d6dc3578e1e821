"""What an upstream teaches about its models: the true window from its errors, the true count from its usage.

Where it tells its window for the asking, that is taken too, and where it cuts a request in silence, its count
gives the window away.

One record per tenant, upstream origin and model, held in the process and kept in the store for a day, so that
a restart does not have to run into the same error again. Per tenant, because errors echo requests and counts
follow them: what one tenant's requests provoke must not shape another's.

Replicas learn from each other: behind a request now and then, which does not wait for it, the record is read
again. What counts is the ratio of whoever has seen most answers, the smallest window that an error named, and
the latest that was told.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, Self

import structlog

from compaction_proxy.providers.calibration import MAX_RATIO, Calibration
from compaction_proxy.providers.silent_truncation import (
    LEAST_SIZE_TOKENS,
    AnsweredRequest,
    infer_window,
    judge_answer,
)
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.storage.keys import model_limits_key
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import NOT_OBSERVED, UPSTREAM_TRUNCATES

# The limit that follows from a refusal without a number, as a share of the smallest refused size.
REFUSED_SHARE = 0.9


class LearnedLimits(NamedTuple):  # made for each answer: a dataclass costs four times as much
    """What is known of one model at one upstream.

    Attributes:
        calibration: How the upstream's count relates to ours.
        window: Largest input that an error named or a silent cut gave away, in tokens; None if none did.
        until: When the window is no longer believed, in seconds since the epoch.
        discovered: The window that the upstream told when it was asked; None if it told none.
        asked_until: When it may be asked again, in seconds since the epoch.
        accepted: The largest input that it answered, if that was more than was known; else 0.
        accepted_until: When that is no longer believed, in seconds since the epoch.
        adds_output_until: Until when the upstream is believed to count the output asked for, too, in seconds
            since the epoch; 0: it is not.
        lacks_compaction_until: Until when the upstream is believed not to answer a compaction trigger, in
            seconds since the epoch; 0: it is not.
        refused_estimate: The smallest request that was refused as too long without a number, in counted
            tokens before calibration; 0 if none was.
        refused_until: When that is no longer believed, in seconds since the epoch.
        accepted_estimate: The largest request that was answered, in the same unit; 0 if none was.
        accepted_estimate_until: When that is no longer believed, in seconds since the epoch.
    """

    calibration: Calibration
    window: int | None = None
    until: float = 0.0
    discovered: int | None = None
    asked_until: float = 0.0
    accepted: int = 0
    accepted_until: float = 0.0
    adds_output_until: float = 0.0
    lacks_compaction_until: float = 0.0
    refused_estimate: int = 0
    refused_until: float = 0.0
    accepted_estimate: int = 0
    accepted_estimate_until: float = 0.0

    @property
    def adds_output(self) -> bool:
        """Whether the upstream refuses a prompt that exceeds the window together with its output."""
        return self.adds_output_until > 0

    def get_effective_window(self, model: str, configured: int | None) -> int:
        """The window to reckon with, in tokens (DESIGN.md §5.5).

        An error may make the configured one smaller (ADR 0009). What was answered makes a discovered or
        shipped one larger, never a configured one.
        """
        window = self.window or (self.get_base_window(model) if configured is None else configured)
        if configured is not None:
            window = min(configured, window)
        limit = self.limit_estimate
        return min(window, self.calibration.predict_tokens(limit)) if limit else window

    @property
    def limit_estimate(self) -> int:
        """The limit that follows from refusals without a number, before calibration; 0 if there were none.

        It is a share of the smallest refused size, and never under the largest accepted one.
        """
        if not self.refused_estimate:
            return 0
        return max(int(REFUSED_SHARE * self.refused_estimate), self.accepted_estimate)

    @property
    def is_limited(self) -> bool:
        """Whether an error or a silent cut has made the window smaller."""
        return self.window is not None or self.refused_estimate > 0

    def add_refused(self, estimate: int, until: float) -> Self:
        """Returns what is known after a refusal without a number.

        Where so much was accepted before, the upstream takes less than it did, and the newer word counts.
        """
        if self.accepted_estimate >= estimate:
            cleared = self._replace(accepted_estimate=0, accepted_estimate_until=0.0)
        else:
            cleared = self
        smallest = min(estimate, self.refused_estimate or estimate)
        return cleared._replace(refused_estimate=smallest, refused_until=until)

    def add_accepted(self, estimate: int, until: float) -> Self:
        """Returns what is known after an answer; the refusal of a request that is no larger is forgotten."""
        if estimate < self.accepted_estimate:
            return self
        known = self._replace(accepted_estimate=estimate, accepted_estimate_until=until)
        if estimate < self.refused_estimate:
            return known
        return known._replace(refused_estimate=0, refused_until=0.0)

    def get_base_window(self, model: str) -> int:
        """The window without errors and configuration, in tokens."""
        return max(self.discovered or get_known_window(model), self.accepted)


def merge_limits(ours: LearnedLimits, theirs: LearnedLimits, now: float) -> LearnedLimits:
    """What two replicas know, taken together."""
    calibration = max(ours.calibration, theirs.calibration, key=lambda each: each.observations)
    newer = max(ours, theirs, key=lambda each: each.accepted_until)
    accepted, since = newer.accepted if newer.accepted_until > now else 0, newer.accepted_until
    believed = [
        each for each in (ours, theirs) if each.window and each.until > now and each.window >= accepted
    ]
    narrower = min(believed, key=lambda each: (each.window or 0, -each.until), default=ours)
    later = max(ours, theirs, key=lambda each: each.asked_until)
    together = LearnedLimits(
        calibration,
        narrower.window,
        narrower.until,
        later.discovered,
        later.asked_until,
        accepted,
        since,
        max(ours.adds_output_until, theirs.adds_output_until),
        max(ours.lacks_compaction_until, theirs.lacks_compaction_until),
    )
    return _add_sizes(together, (ours, theirs), now)


def _add_sizes(together: LearnedLimits, parts: Sequence[LearnedLimits], now: float) -> LearnedLimits:
    """Returns the record with the refused and accepted sizes of others, in the order they were learned."""
    sizes = [(each.refused_until, False, each.refused_estimate) for each in parts]
    sizes += [(each.accepted_estimate_until, True, each.accepted_estimate) for each in parts]
    for until, is_accepted, estimate in sorted(sizes):
        if estimate and until > now:
            add = together.add_accepted if is_accepted else together.add_refused
            together = add(estimate, until)
    return together


def to_fields(learned: LearnedLimits) -> dict[str, object]:
    """The record as JSON values, for an envelope."""
    return {
        "window": learned.window,
        "until": learned.until,
        "calibration": learned.calibration.to_dict(),
        "discovered": learned.discovered,
        "asked_until": learned.asked_until,
        "accepted": learned.accepted,
        "accepted_until": learned.accepted_until,
        "adds_output_until": learned.adds_output_until,
        "lacks_compaction_until": learned.lacks_compaction_until,
        "refused_estimate": learned.refused_estimate,
        "refused_until": learned.refused_until,
        "accepted_estimate": learned.accepted_estimate,
        "accepted_estimate_until": learned.accepted_estimate_until,
    }


def from_fields(fields: Mapping[str, Any]) -> LearnedLimits:
    """The record that `to_fields` wrote, by this version or an earlier one.

    Raises:
        KeyError, ValueError, TypeError, OverflowError: It is none of ours.
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


# Providers change what they serve behind a name; what was learned is believed this long, in seconds.
BELIEVED_S = 86_400.0
MAX_MODELS = 4_096
# A ratio that has moved by this much (in its logarithm) since it was last kept is kept again.
KEPT_STEP = 0.02
# No sooner than this after the last time, in seconds: while it settles it moves with every answer.
KEPT_EVERY_S = 5.0
# Weight of one round in what is learned of rounds, and the most that is believed, as a logarithm.
DRIFT_WEIGHT = 0.5
MOST_DRIFT = 0.15
# What other replicas have learned is asked for this often, in seconds.
LOOK_EVERY_S = 10.0
# Models whose window the upstream is asked for at once.
ASKED_AT_ONCE = 4
# Conversations of which the last answer is remembered.
MAX_THREADS = 4_096
# An inferred window, and a refused or accepted size, is believed this long, in seconds; then a full request
# shows whether it still holds.
INFERRED_S = 3_600.0
# Low counts of a model that are remembered.
MAX_LOW = 8

_log = structlog.get_logger()


class ModelLimits:
    """Remembers what was learned, on one event loop.

    Args:
        records: Where it is kept.
        now: Seconds since the epoch.
        clock: Monotonic seconds.

    Attributes:
        changes: How often something else has become known of how large requests may be.
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
        self._known: dict[str, LearnedLimits] = {}
        self._kept: dict[str, float] = {}  # the ratio's logarithm as the store has it
        self._kept_at: dict[str, float] = {}
        self._looked: dict[str, float] = {}
        self._drifts: dict[str, float] = {}  # logarithms
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._last: OrderedDict[tuple[str, str | bytes], AnsweredRequest] = OrderedDict()
        self._most: dict[str, int] = {}  # the largest count of each model
        self._low: dict[str, deque[AnsweredRequest]] = {}  # its answers with low counts
        self._accepted_bytes: dict[str, int] = {}  # its largest body that was answered unread

    async def get(self, tenant: str, origin: str, model: str) -> LearnedLimits:
        """What is known of a model. The store is waited for once in the life of the process."""
        return await self._get_by_key(model_limits_key(tenant, origin, model), model)

    async def _get_by_key(self, key: str, model: str) -> LearnedLimits:
        if key in self._known:
            self._refresh_in_background(key, model)
        else:
            await self._load_from_store(key, model)
        return self._drop_expired(key)

    def peek_window(self, tenant: str, origin: str, model: str) -> int | None:
        """The learned window, as far as this process knows it already."""
        key = model_limits_key(tenant, origin, model)
        self._refresh_in_background(key, model)
        return self._drop_expired(key).window if key in self._known else None

    def peek_effective_window(self, tenant: str, origin: str, model: str, configured: int | None) -> int:
        """The window to reckon with (`LearnedLimits.window_for`), as far as this process knows it already."""
        key = model_limits_key(tenant, origin, model)
        self._refresh_in_background(key, model)
        known = (
            self._drop_expired(key) if key in self._known else LearnedLimits(Calibration.build_prior(model))
        )
        return known.get_effective_window(model, configured)

    def is_known(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether this process has looked up what is known of a model."""
        return model_limits_key(tenant, origin, model) in self._known

    def peek_calibration(self, tenant: str, origin: str, model: str) -> Calibration:
        """How the upstream counts, as far as this process knows it already."""
        known = self._known.get(model_limits_key(tenant, origin, model))
        return known.calibration if known else Calibration.build_prior(model)

    def get_drift(self, tenant: str, origin: str, model: str) -> float:
        """What requests have come to for which a round was just made, as a factor of what was estimated.

        What rounds take away and what they put in its place need not cost the same for each token of ours.
        """
        drift = self._drifts.get(model_limits_key(tenant, origin, model))
        return math.exp(drift) if drift else 1.0

    def record_drift(self, tenant: str, origin: str, model: str, estimate: int, actual: int) -> None:
        """The first answer after a round said how many tokens the request had, for what was estimated."""
        key = model_limits_key(tenant, origin, model)
        drift = self._drifts.pop(key, 0.0) + DRIFT_WEIGHT * math.log(max(1, actual) / max(1, estimate))
        self._drifts[key] = max(-MOST_DRIFT, min(MOST_DRIFT, drift))
        if len(self._drifts) > MAX_MODELS:
            del self._drifts[next(iter(self._drifts))]

    async def learn_window(
        self, tenant: str, origin: str, model: str, window: int, believed_s: float = BELIEVED_S
    ) -> None:
        """An error named the window. A smaller one replaces a larger one, until that is forgotten."""
        known = await self.get(tenant, origin, model)
        smaller = min(window, known.window or window)
        until = self._now() + believed_s
        key = model_limits_key(tenant, origin, model)
        known = known._replace(window=smaller, until=until)
        if known.accepted > smaller:  # the upstream takes less than it did; the newer word counts
            known = known._replace(accepted=smaller, accepted_until=self._now() + BELIEVED_S)
        self._remember_limits(key, known)
        await self._save_to_store(key, model)

    def record_accepted_bytes(self, tenant: str, origin: str, model: str, size_bytes: int) -> None:
        """Remember that a body of this size, which was not counted, was answered; in this process only."""
        key = model_limits_key(tenant, origin, model)
        if size_bytes > self._accepted_bytes.get(key, 0):
            self._accepted_bytes[key] = size_bytes
            if len(self._accepted_bytes) > MAX_MODELS:
                del self._accepted_bytes[next(iter(self._accepted_bytes))]

    async def learn_refused(
        self, tenant: str, origin: str, model: str, estimate: int, size_bytes: int
    ) -> None:
        """Remember that a request of this size was refused as too long, and that no limit was named.

        What was answered uncounted before is taken to have as many tokens for each byte as this request.

        Args:
            tenant: Whose request it was.
            origin: Of the upstream.
            model: The model that was asked.
            estimate: Our uncalibrated count of it as it was forwarded. A small one is not remembered: no
                model's window is so small.
            size_bytes: Bytes of its body as it was forwarded.
        """
        known = await self.get(tenant, origin, model)
        if known.calibration.predict_tokens(estimate) < LEAST_SIZE_TOKENS:
            return
        key = model_limits_key(tenant, origin, model)
        until = self._now() + INFERRED_S
        accepted_bytes = self._accepted_bytes.pop(key, 0)
        if accepted_bytes < size_bytes:
            known = known.add_accepted(accepted_bytes * estimate // size_bytes, until)
        self._remember_limits(key, known.add_refused(estimate, until))
        await self._save_to_store(key, model)

    async def learn_accepted(self, tenant: str, origin: str, model: str, estimate: int) -> None:
        """Remember that a request of this size, in uncalibrated tokens, was answered in full."""
        key = model_limits_key(tenant, origin, model)
        known = await self._get_by_key(key, model)
        accepted = known.add_accepted(estimate, self._now() + INFERRED_S)
        if accepted is known:
            return
        self._remember_limits(key, accepted)
        if accepted.limit_estimate != known.limit_estimate:
            await self._save_to_store(key, model)

    async def is_limited(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether the upstream is believed to take less than it was said to."""
        return (await self.get(tenant, origin, model)).is_limited

    async def learn_adds_output(self, tenant: str, origin: str, model: str) -> None:
        """Remember that the upstream refused the sum of a prompt and the output asked for."""
        known = await self.get(tenant, origin, model)
        key = model_limits_key(tenant, origin, model)
        self._remember_limits(key, known._replace(adds_output_until=self._now() + BELIEVED_S))
        await self._save_to_store(key, model)

    def adds_output(self, tenant: str, origin: str, model: str) -> bool:
        """Whether the upstream counts the output asked for, too, as far as this process knows already."""
        key = model_limits_key(tenant, origin, model)
        return key in self._known and self._drop_expired(key).adds_output

    async def learn_lacks_compaction(self, tenant: str, origin: str, model: str) -> None:
        """Remember that the upstream does not answer a compaction trigger with a compaction item."""
        known = await self.get(tenant, origin, model)
        key = model_limits_key(tenant, origin, model)
        self._remember_limits(key, known._replace(lacks_compaction_until=self._now() + BELIEVED_S))
        await self._save_to_store(key, model)

    async def lacks_compaction(self, tenant: str, origin: str, model: str) -> bool:
        """Returns whether the upstream is believed not to answer a compaction trigger."""
        return (await self.get(tenant, origin, model)).lacks_compaction_until > self._now()

    async def learn_token_count(
        self, tenant: str, origin: str, model: str, estimate: int, actual: int
    ) -> None:
        """An answer's usage said how many tokens a request really had."""
        key = model_limits_key(tenant, origin, model)
        await self._update_calibration(key, model, await self._get_by_key(key, model), estimate, actual)

    async def _update_calibration(
        self, key: str, model: str, known: LearnedLimits, estimate: int, actual: int
    ) -> None:
        calibration = known.calibration.add_observation(estimate, actual)
        if calibration is not known.calibration:
            self._remember_limits(key, known._replace(calibration=calibration))
        moved = abs(calibration.mean - self._kept.get(key, math.inf)) >= KEPT_STEP
        if moved and self._clock() - self._kept_at.get(key, -math.inf) >= KEPT_EVERY_S:
            self._kept_at[key] = self._clock()
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
        """Learn from the usage of an answer. Whether the upstream had cut the request in silence.

        Args:
            tenant: Whose request it was.
            origin: Of the upstream.
            model: The model that answered.
            answer: What was counted.
            thread: The conversation's root or id; None if it has none, or branches without order.
            is_window_configured: Whether the window is configured: only an error beats that.
            find_mentioned_numbers: Gives the numbers that stand in the request, of which none is taken for a
                window. Called only where it matters.
        """
        key = model_limits_key(tenant, origin, model)
        known = await self._get_by_key(key, model)
        last = self._replace_last_answer(key, thread, answer)
        most = self._most[key] = max(self._most.get(key, 0), answer.prompt)
        verdict = judge_answer(answer, last, known.calibration)
        if verdict == "low" and answer.prompt not in find_mentioned_numbers():
            low = self._low.setdefault(key, deque(maxlen=MAX_LOW))
            low.extend((last, answer) if last and last.prompt == answer.prompt and not low else (answer,))
            window = infer_window(low, most)
            if window is None or window in find_mentioned_numbers():
                return False
            if known.window is None or window < known.window:
                counts = {"tokens_estimated": answer.estimate, "tokens_counted": answer.prompt}
                _log.warning(UPSTREAM_TRUNCATES, model=model, **counts)
            if not is_window_configured:
                await self.learn_window(tenant, origin, model, window, INFERRED_S)
            return True
        if verdict == "whole":
            known = await self._learn_larger_window(key, model, known, answer)
            await self._update_calibration(key, model, known, answer.estimate, answer.prompt)
            await self.learn_accepted(tenant, origin, model, answer.estimate)
        return False

    def start_discovery(
        self, tenant: str, origin: str, model: str, discover_window: Callable[[], Awaitable[int | None]]
    ) -> None:
        """Let the upstream be asked for the window, behind whoever calls, once in a day.

        Nothing is asked of a model that this process has not looked up yet (`get`).
        """
        key = model_limits_key(tenant, origin, model)
        known = self._known.get(key)
        due = known is not None and known.asked_until <= self._now()
        if due and key not in self._asking and len(self._asking) < ASKED_AT_ONCE:
            self._asking[key] = task = asyncio.create_task(self._run_discovery(key, model, discover_window))
            task.add_done_callback(lambda _: self._asking.pop(key, None))

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _replace_last_answer(
        self, key: str, thread: str | bytes | None, answer: AnsweredRequest
    ) -> AnsweredRequest | None:
        """The answer before this one in a conversation; of several with one count the first.

        This one takes its place, unless the count is the same again: then growth adds up.
        """
        if thread is None:
            return None
        last = self._last.pop((key, thread), None)
        self._last[key, thread] = last if last and last.prompt == answer.prompt else answer
        if len(self._last) > MAX_THREADS:
            self._last.popitem(last=False)
        return last

    async def _learn_larger_window(
        self, key: str, model: str, known: LearnedLimits, answer: AnsweredRequest
    ) -> LearnedLimits:
        """An answered request shows that the window is at least as large, if its count can be true.

        Returns what is known now.
        """
        if not (known.window or known.get_base_window(model)) < answer.prompt <= MAX_RATIO * answer.estimate:
            return known
        self._low.pop(key, None)
        until = self._now() + BELIEVED_S
        self._remember_limits(key, known._replace(accepted=answer.prompt, accepted_until=until))
        await self._save_to_store(key, model)
        return self._drop_expired(key)

    async def _run_discovery(
        self, key: str, model: str, discover_window: Callable[[], Awaitable[int | None]]
    ) -> None:
        found = None
        with suppress_and_report(_log_failed_discovery):
            found = await discover_window()
        known = self._known.get(key) or LearnedLimits(Calibration.build_prior(model))
        until = self._now() + BELIEVED_S
        self._remember_limits(key, known._replace(discovered=found, asked_until=until))
        await self._save_to_store(key, model)

    def _refresh_in_background(self, key: str, model: str) -> None:
        """Look if it is time, behind whoever asks."""
        if self._clock() - self._looked.get(key, -math.inf) >= LOOK_EVERY_S:
            self._records.background_tasks.start_once(key, lambda: self._load_from_store(key, model))

    async def _load_from_store(self, key: str, model: str) -> None:
        """Take over what the store knows. Where it fails, what this process has kept stands in."""
        [fields] = await self._records.get_many([key], bypass_cache=True)
        theirs = self._parse_stored(fields, model)
        ours = self._known.get(key)  # as it is now: something may have been learned meanwhile
        self._remember_limits(key, merge_limits(ours, theirs, self._now()) if ours else theirs)
        self._looked[key] = self._clock()
        if fields is None:
            self._kept.pop(key, None)
        else:
            self._kept[key] = theirs.calibration.mean

    def _drop_expired(self, key: str) -> LearnedLimits:
        known, now = self._known[key], self._now()
        accepted = known.accepted if known.accepted_until > now else 0
        if known.window and (known.until <= now or known.window < accepted):
            known = known._replace(window=None)
        if known.discovered and known.asked_until <= now:
            known = known._replace(discovered=None)
        if known.adds_output_until and known.adds_output_until <= now:
            known = known._replace(adds_output_until=0.0)
        if known.refused_estimate and known.refused_until <= now:
            known = known._replace(refused_estimate=0, refused_until=0.0)
        if known.accepted_estimate and known.accepted_estimate_until <= now:
            known = known._replace(accepted_estimate=0, accepted_estimate_until=0.0)
        return known._replace(accepted=0) if known.accepted and known.accepted_until <= now else known

    def _remember_limits(self, key: str, learned: LearnedLimits) -> None:
        known = self._known.get(key)
        before = (known.window, known.adds_output, known.limit_estimate) if known else (None, False, 0)
        if before != (learned.window, learned.adds_output, learned.limit_estimate):
            self.changes += 1
        if key not in self._known and len(self._known) >= MAX_MODELS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._kept.pop(oldest, None)
            self._kept_at.pop(oldest, None)
            self._most.pop(oldest, None)
            self._low.pop(oldest, None)
            self._looked.pop(oldest, None)
        self._known[key] = learned

    async def _save_to_store(self, key: str, model: str) -> None:
        """Keep what is known, and what another replica has kept since."""
        await self._load_from_store(key, model)
        learned = self._known[key]
        self._kept[key] = learned.calibration.mean
        await self._records.overwrite(key, to_fields(learned), ttl_s=BELIEVED_S)

    def _parse_stored(self, fields: Fields | None, model: str) -> LearnedLimits:
        try:
            return (
                from_fields(fields) if fields is not None else LearnedLimits(Calibration.build_prior(model))
            )
        except (KeyError, ValueError, TypeError, OverflowError):
            return LearnedLimits(Calibration.build_prior(model))


def _log_failed_discovery(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
