"""The anchors of conversations: what providers last counted of them, found again by any replica.

They live in the process. A conversation that is new to it is looked up once; after that the store is asked
and told behind the requests, so that none waits for it. Branches share a root, so several are kept for each.
"""

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import structlog

from compaction_proxy.providers.calibration import MAX_RATIO, MIN_RATIO, MIN_USAGE_TOKENS, Calibration
from compaction_proxy.storage.keys import usage_baselines_key
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import NOT_OBSERVED

# What was added since, or taken away, may be wrong by this factor.
MARGIN = 1.15
_PLACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class UsageBaseline:
    """What a provider counted of one request.

    Attributes:
        prefix: Prefix digest of the client's non-privileged messages.
        length: How many those were.
        key: What stood for them upstream (`build_baseline_key`).
        estimate: Our uncalibrated count of what was forwarded, tokens.
        actual: `usage.prompt_tokens` of the answer, cached tokens included.
    """

    prefix: bytes
    length: int
    key: bytes
    estimate: int
    actual: int


@lru_cache(maxsize=4_096)
def build_baseline_key(origin: str, model: str, checkpoint: bytes = b"") -> bytes:
    """What makes two requests of a conversation comparable, 16 bytes.

    Who counts, and the place of the checkpoint in force (`core.checkpoint.place`; empty for none).
    """
    parts = (origin, model, checkpoint.hex())
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).digest()[:_PLACE_BYTES]


def build_baseline(prefixes: Sequence[bytes], key: bytes, estimate: int, actual: int) -> UsageBaseline | None:
    """An anchor for a request that was answered; None if its count says nothing about a next one."""
    if not prefixes or estimate <= 0 or actual < MIN_USAGE_TOKENS:
        return None
    if not MIN_RATIO <= actual / estimate <= MAX_RATIO:
        return None
    return UsageBaseline(prefixes[-1], len(prefixes), key, estimate, actual)


def matches_request(baseline: UsageBaseline, prefixes: Sequence[bytes], key: bytes) -> bool:
    """Whether a request with these prefix digests continues what was counted, seen by the same counter."""
    reached = 0 < baseline.length <= len(prefixes)
    return reached and baseline.key == key and prefixes[baseline.length - 1] == baseline.prefix


def select_deepest(
    baselines: Sequence[UsageBaseline], prefixes: Sequence[bytes], key: bytes
) -> UsageBaseline | None:
    """The anchor that stands and covers most; of equal ones the last given."""
    found: UsageBaseline | None = None
    for anchor in reversed(baselines):
        if (found is None or anchor.length > found.length) and matches_request(anchor, prefixes, key):
            found = anchor
    return found


def predict_tokens(baseline: UsageBaseline, estimate: int, calibration: Calibration) -> int:
    """What the provider will count of a request, ⌈tokens⌉.

    The difference is taken at the geometric mean of this conversation's ratio and the model's.

    Args:
        baseline: One that stands.
        estimate: Our uncalibrated count of the request as it would be forwarded, tokens.
        calibration: Of the model.
    """
    return _predict_with_margin(baseline, estimate, calibration, 1.0)


def predict_upper_bound(baseline: UsageBaseline, estimate: int, calibration: Calibration) -> int:
    """As `predict_tokens`, with the margin: more for what was added, less off for what was taken away."""
    return _predict_with_margin(baseline, estimate, calibration, MARGIN)


def _predict_with_margin(
    baseline: UsageBaseline, estimate: int, calibration: Calibration, margin: float
) -> int:
    rate = math.sqrt(baseline.actual / baseline.estimate * calibration.ratio)
    difference = (estimate - baseline.estimate) * rate
    difference *= margin if difference > 0 else 1 / margin
    return max(0, math.ceil(baseline.actual + difference))


def to_fields(baseline: UsageBaseline) -> list[Any]:
    """The anchor as JSON values."""
    return [baseline.prefix.hex(), baseline.length, baseline.key.hex(), baseline.estimate, baseline.actual]


def from_fields(fields: Mapping[str, Any] | None) -> tuple[UsageBaseline, ...]:
    """The anchors under `baselines` in a record, without what is none of ours."""
    listed = fields.get("anchors") if fields else None
    made = map(_parse_baseline, listed) if isinstance(listed, list) else ()
    return tuple(anchor for anchor in made if anchor is not None)


def _parse_baseline(fields: Any) -> UsageBaseline | None:  # noqa: ANN401 - whatever was stored
    try:
        prefix, length, place, estimate, actual = fields
        read = UsageBaseline(
            bytes.fromhex(prefix), int(length), bytes.fromhex(place), int(estimate), int(actual)
        )
    except (TypeError, ValueError):
        return None
    return read if min(read.length, read.estimate, read.actual) > 0 else None


MAX_ROOTS = 4_000
ANCHORS_PER_ROOT = 6
# A provider may count otherwise tomorrow; anchors are kept this long, in seconds.
KEPT_S = 86_400.0
# What other replicas have counted is asked for this often, in seconds.
LOOK_EVERY_S = 10.0
# What was counted here is written this often, in seconds.
FLUSH_S = 5.0

_log = structlog.get_logger()


def _merge_baselines(
    older: Iterable[UsageBaseline], newer: Iterable[UsageBaseline]
) -> tuple[UsageBaseline, ...]:
    """The newest of both, oldest first, one for each prefix and place."""
    kept: dict[tuple[bytes, bytes], UsageBaseline] = {}
    for anchor in (*older, *newer):
        kept.pop((anchor.prefix, anchor.key), None)
        kept[anchor.prefix, anchor.key] = anchor
    return tuple(kept.values())[-ANCHORS_PER_ROOT:]


class UsageBaselineStore:
    """Keeps anchors, on one event loop.

    Args:
        records: Where they are kept.
        clock: Monotonic seconds.
    """

    def __init__(self, records: RecordStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._known: OrderedDict[str, tuple[UsageBaseline, ...]] = OrderedDict()
        self._looked: dict[str, float] = {}
        self._unwritten: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        records.on_delete_callbacks.append(self._forget_prefix)

    async def find_deepest(
        self, tenant: str, root: bytes, prefixes: Sequence[bytes], baseline_key: bytes
    ) -> UsageBaseline | None:
        """The deepest anchor that stands for a request (`providers.usage_baseline.stands`), or None.

        The store is waited for only where this process does not know the root.
        """
        await self.load_root(tenant, root)
        return self.peek_deepest(tenant, root, prefixes, baseline_key)

    def is_loaded(self, tenant: str, root: bytes) -> bool:
        """Whether the store has been asked for a root."""
        return usage_baselines_key(tenant, root) in self._looked

    async def load_root(self, tenant: str, root: bytes) -> None:
        """Ask the store for a root, unless it has been asked."""
        key = usage_baselines_key(tenant, root)
        if key not in self._looked:
            await self._load_from_store(key)

    def peek_deepest(
        self, tenant: str, root: bytes, prefixes: Sequence[bytes], baseline_key: bytes
    ) -> UsageBaseline | None:
        """As `find_deepest`, of what this process knows."""
        key = usage_baselines_key(tenant, root)
        if self._clock() - self._looked.get(key, math.inf) >= LOOK_EVERY_S:
            self._records.background_tasks.start_once(key, lambda: self._load_from_store(key))
        return select_deepest(self._known.get(key, ()), prefixes, baseline_key)

    def record_baseline(self, tenant: str, root: bytes, baseline: UsageBaseline) -> None:
        """Keep what was counted of a request that was answered; written to the store later."""
        key = usage_baselines_key(tenant, root)
        if self._records.deletion_fence.is_deleted(key):
            return
        self._remember_root(key, _merge_baselines(self._known.get(key, ()), [baseline]))
        self._unwritten.add(key)

    def start(self) -> None:
        """Begin to write in the background."""
        self._task = asyncio.create_task(self._flush_periodically())

    async def close(self) -> None:
        """Write what waits, and end."""
        if self._task is not None:
            async with self._writing:  # what is being written is written to its end
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Write what waits, and take over what other replicas have written of the same conversations."""
        async with self._writing:
            for key in list(self._unwritten):
                if not self._records.is_in_use:
                    return  # the rest waits until the store is back
                with self._records.deletion_fence.use_start_mark():
                    await self._write_root(key)

    async def _write_root(self, key: str) -> None:
        await self._load_from_store(key)
        if key not in self._unwritten:  # forgotten meanwhile
            return
        self._unwritten.discard(key)
        fields = {"anchors": [to_fields(anchor) for anchor in self._known.get(key, ())]}
        await self._records.overwrite(key, fields, ttl_s=KEPT_S)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._known if key.startswith(prefix)]:
            self._drop_root(key)

    def _drop_root(self, key: str) -> None:
        del self._known[key]
        self._looked.pop(key, None)
        self._unwritten.discard(key)

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with suppress_and_report(_log_failed_write):
                await self.flush()

    async def _load_from_store(self, key: str) -> None:
        """Take over what the store knows."""
        [fields] = await self._records.get_many([key], bypass_cache=True)
        if self._records.deletion_fence.is_deleted(key):
            fields = None
        ours = self._known.get(key, ())  # as it is now: something may have been counted meanwhile
        self._remember_root(key, _merge_baselines(from_fields(fields), ours))
        self._looked[key] = self._clock()

    def _remember_root(self, key: str, baselines: tuple[UsageBaseline, ...]) -> None:
        self._known[key] = baselines
        self._known.move_to_end(key)
        if len(self._known) > MAX_ROOTS:
            self._drop_root(next(iter(self._known)))


def _log_failed_write(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
