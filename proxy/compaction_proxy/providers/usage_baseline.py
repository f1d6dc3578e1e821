"""Keeps anchors: providers' token counts of earlier requests, shared between replicas.

The proxy estimates the size of a conversation's next request from the anchor of an earlier request. Each
process keeps anchors in memory. The first request of a conversation in a process waits until the process has
read the conversation's anchors from the store. All later reads and writes of the store run in the background.
Anchors are stored by root (the prefix digest of a conversation's first messages, see `storage.keys`). A root
can have several anchors, because all branches of a conversation have the same root.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import structlog

from compaction_proxy.providers.calibration import MAX_RATIO, MIN_RATIO, MIN_USAGE_TOKENS, Calibration
from compaction_proxy.storage.keys import usage_anchors_key
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.support.lru import BoundedDict

# A safety factor. `predict_upper_bound` multiplies the estimated tokens that were added since the anchor by
# this factor, and divides the estimated tokens that were removed by it.
DIFFERENCE_MARGIN = 1.15
_PLACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class UsageBaseline:
    """A provider's token count of one request: an anchor for the estimate of the next request.

    Attributes:
        prefix: Prefix digest up to the last of the request's messages that are not fixed.
        length: Number of the request's messages that are not fixed.
        key: Digest of the upstream's origin, the model and the checkpoint in force (`build_baseline_key`).
        estimate: The proxy's uncalibrated count of the forwarded request, in tokens.
        actual: `usage.prompt_tokens` of the response, cached tokens included.
    """

    prefix: bytes
    length: int
    key: bytes
    estimate: int
    actual: int


@lru_cache(maxsize=4_096)
def build_baseline_key(origin: str, model: str, checkpoint: bytes = b"") -> bytes:
    """Returns the 16-byte key of an anchor. Only token counts of requests with the same key are comparable.

    The key is a digest of the upstream's origin, the model, and the id of the checkpoint in force
    (`core.planner.compute_checkpoint_id`; empty without one).
    """
    parts = (origin, model, checkpoint.hex())
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).digest()[:_PLACE_BYTES]


def build_baseline(prefixes: Sequence[bytes], key: bytes, estimate: int, actual: int) -> UsageBaseline | None:
    """Builds an anchor from a request and its response.

    Returns None if `actual` is below `MIN_USAGE_TOKENS`, or if `actual / estimate` is not between `MIN_RATIO`
    and `MAX_RATIO`.

    Args:
        prefixes: Prefix digests up to each of the request's messages that are not fixed. Without such
            messages, the result is None.
        key: Key of the request (`build_baseline_key`).
        estimate: The proxy's uncalibrated count of the forwarded request, in tokens.
        actual: `usage.prompt_tokens` of the response, cached tokens included.
    """
    if not prefixes or estimate <= 0 or actual < MIN_USAGE_TOKENS:
        return None
    if not MIN_RATIO <= actual / estimate <= MAX_RATIO:
        return None
    return UsageBaseline(prefixes[-1], len(prefixes), key, estimate, actual)


def matches_request(baseline: UsageBaseline, prefixes: Sequence[bytes], key: bytes) -> bool:
    """Returns whether a request with these prefix digests and this key continues the anchor's request."""
    reached = 0 < baseline.length <= len(prefixes)
    return reached and baseline.key == key and prefixes[baseline.length - 1] == baseline.prefix


def select_deepest_baseline(
    baselines: Sequence[UsageBaseline], prefixes: Sequence[bytes], key: bytes
) -> UsageBaseline | None:
    """Returns the longest anchor that matches a request (`matches_request`), or None if there is none.

    The longest anchor is the one with the most messages. Among equally long anchors, returns the last.
    """
    deepest: UsageBaseline | None = None
    for anchor in reversed(baselines):
        if (deepest is None or anchor.length > deepest.length) and matches_request(anchor, prefixes, key):
            deepest = anchor
    return deepest


def predict_tokens(baseline: UsageBaseline, estimate: int, calibration: Calibration) -> int:
    """Predicts the provider's count of a request, in tokens, rounded up.

    The result is the anchor's actual count plus the difference between `estimate` and the anchor's estimate.
    Before the addition, the function converts this difference from estimated to actual tokens. For this, it
    multiplies the difference by the geometric mean of two ratios of actual to estimated tokens: the anchor's
    and the calibration's. The result is at least `MIN_RATIO` times `estimate`, even if an anchor with a far
    lower count than usual was much longer than the request.

    Args:
        baseline: Anchor that matches the request.
        estimate: The proxy's uncalibrated count of the request as it would be forwarded, in tokens.
        calibration: Calibration of the model.
    """
    return _predict_with_margin(baseline, estimate, calibration, 1.0)


def predict_upper_bound(baseline: UsageBaseline, estimate: int, calibration: Calibration) -> int:
    """Predicts an upper bound of the provider's count of a request, in tokens, rounded up.

    The function computes the bound like `predict_tokens`, but multiplies the difference by
    `DIFFERENCE_MARGIN` if tokens were added, and divides the difference by it if tokens were removed.
    """
    return _predict_with_margin(baseline, estimate, calibration, DIFFERENCE_MARGIN)


def _predict_with_margin(
    baseline: UsageBaseline, estimate: int, calibration: Calibration, margin: float
) -> int:
    rate = math.sqrt(baseline.actual / baseline.estimate * calibration.ratio)
    difference = (estimate - baseline.estimate) * rate
    difference *= margin if difference > 0 else 1 / margin
    return max(math.floor(estimate * MIN_RATIO), math.ceil(baseline.actual + difference))


def to_fields(baseline: UsageBaseline) -> list[Any]:
    """Returns the fields of an anchor as JSON values, for the store."""
    return [baseline.prefix.hex(), baseline.length, baseline.key.hex(), baseline.estimate, baseline.actual]


def from_fields(fields: Mapping[str, Any] | None) -> tuple[UsageBaseline, ...]:
    """Parses the anchors of a stored record. Skips entries that are not valid anchors.

    Returns an empty tuple if `fields` is None.
    """
    listed = fields.get("anchors") if fields else None
    parsed = map(_parse_baseline, listed) if isinstance(listed, list) else ()
    return tuple(anchor for anchor in parsed if anchor is not None)


def _parse_baseline(fields: Any) -> UsageBaseline | None:  # noqa: ANN401 - any stored value
    try:
        prefix, length, place, estimate, actual = fields
        baseline = UsageBaseline(
            bytes.fromhex(prefix), int(length), bytes.fromhex(place), int(estimate), int(actual)
        )
    except (TypeError, ValueError):
        return None
    return baseline if min(baseline.length, baseline.estimate, baseline.actual) > 0 else None


# Maximum number of roots (digests of the first messages of conversations) whose anchors stay in memory. If
# there are more, the process forgets the anchors of the root that it updated longest ago.
MAX_ROOTS = 4_000
# Maximum number of anchors for conversations with the same first messages. If there are more, the proxy keeps
# only the newest.
ANCHORS_PER_ROOT = 6
# Lifetime of anchors, in seconds. They expire because a provider may change its way of counting.
BASELINE_TTL_S = 86_400.0
# If a process has last read the stored anchors at least this many seconds ago, it reads them again, because
# other replicas may have added anchors.
REFRESH_INTERVAL_S = 10.0
# A background task writes new anchors to the store at intervals of this many seconds.
FLUSH_INTERVAL_S = 5.0

_log = structlog.get_logger()


def _merge_baselines(
    older: Iterable[UsageBaseline], newer: Iterable[UsageBaseline]
) -> tuple[UsageBaseline, ...]:
    """Returns the newest anchors of both arguments, at most `ANCHORS_PER_ROOT`, the newest last.

    If several anchors have the same prefix and key, the result contains only the newest of them.
    """
    merged: dict[tuple[bytes, bytes], UsageBaseline] = {}
    for anchor in (*older, *newer):
        merged.pop((anchor.prefix, anchor.key), None)
        merged[anchor.prefix, anchor.key] = anchor
    return tuple(merged.values())[-ANCHORS_PER_ROOT:]


@dataclass(slots=True)
class _KnownRoot:
    """The anchors of the conversations that begin with the same messages.

    Attributes:
        anchors: The anchors, the newest last.
        read_at: When the stored anchors were last read, in monotonic seconds; infinite if they were never
            read.
        is_unwritten: Whether there are anchors that are not in the store.
    """

    anchors: tuple[UsageBaseline, ...] = ()
    read_at: float = math.inf
    is_unwritten: bool = False


class UsageBaselineStore:
    """Keeps the anchors of conversations. Use the object on one event loop only.

    In all methods, `root` is the digest of a conversation's first messages.

    Args:
        records: Store for the anchors.
        clock: Returns monotonic seconds.
    """

    def __init__(self, records: RecordStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._known: BoundedDict[str, _KnownRoot] = BoundedDict(MAX_ROOTS)
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        records.on_delete_callbacks.append(self._forget_prefix)

    def is_loaded(self, tenant: str, root: bytes) -> bool:
        """Returns whether this process has loaded the anchors of conversations with this root."""
        return self._peek_root(usage_anchors_key(tenant, root)).read_at < math.inf

    async def load_baselines(self, tenant: str, root: bytes) -> None:
        """Loads the anchors of conversations with this root, unless this process has already loaded them."""
        if not self.is_loaded(tenant, root):
            await self._load_from_store(usage_anchors_key(tenant, root))

    def peek_deepest(
        self, tenant: str, root: bytes, prefixes: Sequence[bytes], baseline_key: bytes
    ) -> UsageBaseline | None:
        """Returns the longest anchor in memory that matches a request, or None (`select_deepest_baseline`).

        If the anchors were last read at least `REFRESH_INTERVAL_S` seconds ago, also starts a background task
        that reads them again.
        """
        key = usage_anchors_key(tenant, root)
        known = self._peek_root(key)
        if self._clock() - known.read_at >= REFRESH_INTERVAL_S:
            self._records.background_tasks.start_once(key, lambda: self._load_from_store(key))
        return select_deepest_baseline(known.anchors, prefixes, baseline_key)

    def record_baseline(self, tenant: str, root: bytes, baseline: UsageBaseline) -> None:
        """Adds an anchor to those in memory. A background task later writes it to the store.

        Does nothing if the conversation was deleted after the current request began.
        """
        key = usage_anchors_key(tenant, root)
        if self._records.deletion_fence.is_deleted(key):
            return
        known = self._known[key] = self._peek_root(key)
        known.anchors = _merge_baselines(known.anchors, [baseline])
        known.is_unwritten = True

    def start(self) -> None:
        """Starts the background task that writes anchors to the store."""
        self._task = asyncio.create_task(self._flush_periodically())

    async def close(self) -> None:
        """Stops the background task, and writes all anchors that are not in the store yet."""
        if self._task is not None:
            async with self._writing:  # lets a write in progress finish
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Merges the anchors that are not in the store yet with the stored anchors, and stores the result.

        Does nothing while the store is out of use.
        """
        async with self._writing:
            for key in [key for key, known in self._known.items() if known.is_unwritten]:
                if not self._records.is_in_use:
                    return  # the rest waits until the store is back
                with self._records.deletion_fence.scoped_start_mark():
                    await self._write_root(key)

    async def _write_root(self, key: str) -> None:
        await self._load_from_store(key)
        known = self._peek_root(key)
        if known.is_unwritten:  # otherwise deleted during the load
            known.is_unwritten = False
            fields = {"anchors": [to_fields(anchor) for anchor in known.anchors]}
            await self._records.overwrite(key, fields, ttl_s=BASELINE_TTL_S)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._known if key.startswith(prefix)]:
            del self._known[key]

    def _peek_root(self, key: str) -> _KnownRoot:
        return self._known.get(key) or _KnownRoot()

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            with suppress_and_report(_log_failed_write):
                await self.flush()

    async def _load_from_store(self, key: str) -> None:
        """Reads the stored anchors, and merges them with the anchors in memory."""
        [fields] = await self._records.get_many([key], bypass_cache=True)
        if self._records.deletion_fence.is_deleted(key):
            fields = None
        known = self._known[key] = self._peek_root(
            key
        )  # after the wait, in which anchors may have been added
        known.anchors = _merge_baselines(from_fields(fields), known.anchors)
        known.read_at = self._clock()


def _log_failed_write(error: BaseException) -> None:
    _log.warning(RESPONSE_NOT_OBSERVED, error=type(error).__name__)
