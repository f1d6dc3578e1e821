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
from compaction_proxy.storage.keys import anchors_key
from compaction_proxy.storage.records import Records
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import NOT_OBSERVED

# What was added since, or taken away, may be wrong by this factor.
MARGIN = 1.15
_PLACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a provider counted of one request.

    Attributes:
        prefix: Prefix digest of the client's non-privileged messages.
        length: How many those were.
        place: What stood for them upstream (`place_of`).
        estimate: Our uncalibrated count of what was forwarded, tokens.
        actual: `usage.prompt_tokens` of the answer, cached tokens included.
    """

    prefix: bytes
    length: int
    place: bytes
    estimate: int
    actual: int


@lru_cache(maxsize=4_096)
def place_of(origin: str, model: str, checkpoint: bytes = b"") -> bytes:
    """What makes two requests of a conversation comparable, 16 bytes.

    Who counts, and the place of the checkpoint in force (`core.checkpoint.place`; empty for none).
    """
    parts = (origin, model, checkpoint.hex())
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).digest()[:_PLACE_BYTES]


def anchored(prefixes: Sequence[bytes], place: bytes, estimate: int, actual: int) -> Anchor | None:
    """An anchor for a request that was answered; None if its count says nothing about a next one."""
    if not prefixes or estimate <= 0 or actual < MIN_USAGE_TOKENS:
        return None
    if not MIN_RATIO <= actual / estimate <= MAX_RATIO:
        return None
    return Anchor(prefixes[-1], len(prefixes), place, estimate, actual)


def stands(anchor: Anchor, prefixes: Sequence[bytes], place: bytes) -> bool:
    """Whether a request with these prefix digests continues what was counted, seen by the same counter."""
    reached = 0 < anchor.length <= len(prefixes)
    return reached and anchor.place == place and prefixes[anchor.length - 1] == anchor.prefix


def deepest(anchors: Sequence[Anchor], prefixes: Sequence[bytes], place: bytes) -> Anchor | None:
    """The anchor that stands and covers most; of equal ones the last given."""
    found: Anchor | None = None
    for anchor in reversed(anchors):
        if (found is None or anchor.length > found.length) and stands(anchor, prefixes, place):
            found = anchor
    return found


def predicted(anchor: Anchor, estimate: int, calibration: Calibration) -> int:
    """What the provider will count of a request, ⌈tokens⌉.

    The difference is taken at the geometric mean of this conversation's ratio and the model's.

    Args:
        anchor: One that stands.
        estimate: Our uncalibrated count of the request as it would be forwarded, tokens.
        calibration: Of the model.
    """
    return _reckoned(anchor, estimate, calibration, 1.0)


def bound(anchor: Anchor, estimate: int, calibration: Calibration) -> int:
    """As `predicted`, with the margin: more for what was added, less off for what was taken away."""
    return _reckoned(anchor, estimate, calibration, MARGIN)


def _reckoned(anchor: Anchor, estimate: int, calibration: Calibration, margin: float) -> int:
    rate = math.sqrt(anchor.actual / anchor.estimate * calibration.ratio)
    difference = (estimate - anchor.estimate) * rate
    difference *= margin if difference > 0 else 1 / margin
    return max(0, math.ceil(anchor.actual + difference))


def to_fields(anchor: Anchor) -> list[Any]:
    """The anchor as JSON values."""
    return [anchor.prefix.hex(), anchor.length, anchor.place.hex(), anchor.estimate, anchor.actual]


def from_fields(fields: Mapping[str, Any] | None) -> tuple[Anchor, ...]:
    """The anchors under `anchors` in a record, without what is none of ours."""
    listed = fields.get("anchors") if fields else None
    made = map(_read, listed) if isinstance(listed, list) else ()
    return tuple(anchor for anchor in made if anchor is not None)


def _read(fields: Any) -> Anchor | None:  # noqa: ANN401 - whatever was stored
    try:
        prefix, length, place, estimate, actual = fields
        read = Anchor(bytes.fromhex(prefix), int(length), bytes.fromhex(place), int(estimate), int(actual))
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


def _together(older: Iterable[Anchor], newer: Iterable[Anchor]) -> tuple[Anchor, ...]:
    """The newest of both, oldest first, one for each prefix and place."""
    kept: dict[tuple[bytes, bytes], Anchor] = {}
    for anchor in (*older, *newer):
        kept.pop((anchor.prefix, anchor.place), None)
        kept[anchor.prefix, anchor.place] = anchor
    return tuple(kept.values())[-ANCHORS_PER_ROOT:]


class Anchors:
    """Keeps anchors, on one event loop.

    Args:
        records: Where they are kept.
        clock: Monotonic seconds.
    """

    def __init__(self, records: Records, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._known: OrderedDict[str, tuple[Anchor, ...]] = OrderedDict()
        self._looked: dict[str, float] = {}
        self._unwritten: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        records.forgetters.append(self._forget)

    async def find(self, tenant: str, root: bytes, prefixes: Sequence[bytes], place: bytes) -> Anchor | None:
        """The deepest anchor that stands for a request (`providers.usage_baseline.stands`), or None.

        The store is waited for only where this process does not know the root.
        """
        await self.look(tenant, root)
        return self.held(tenant, root, prefixes, place)

    def knows(self, tenant: str, root: bytes) -> bool:
        """Whether the store has been asked for a root."""
        return anchors_key(tenant, root) in self._looked

    async def look(self, tenant: str, root: bytes) -> None:
        """Ask the store for a root, unless it has been asked."""
        key = anchors_key(tenant, root)
        if key not in self._looked:
            await self._look(key)

    def held(self, tenant: str, root: bytes, prefixes: Sequence[bytes], place: bytes) -> Anchor | None:
        """As `find`, of what this process knows."""
        key = anchors_key(tenant, root)
        if self._clock() - self._looked.get(key, math.inf) >= LOOK_EVERY_S:
            self._records.behind.begin(key, lambda: self._look(key))
        return deepest(self._known.get(key, ()), prefixes, place)

    def note(self, tenant: str, root: bytes, anchor: Anchor) -> None:
        """Keep what was counted of a request that was answered; written to the store later."""
        key = anchors_key(tenant, root)
        if self._records.outdated.covers(key):
            return
        self._remember(key, _together(self._known.get(key, ()), [anchor]))
        self._unwritten.add(key)

    def start(self) -> None:
        """Begin to write in the background."""
        self._task = asyncio.create_task(self._run())

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
                if not self._records.in_use:
                    return  # the rest waits until the store is back
                with self._records.outdated.beginning():
                    await self._write(key)

    async def _write(self, key: str) -> None:
        await self._look(key)
        if key not in self._unwritten:  # forgotten meanwhile
            return
        self._unwritten.discard(key)
        fields = {"anchors": [to_fields(anchor) for anchor in self._known.get(key, ())]}
        await self._records.keep(key, fields, ttl_s=KEPT_S)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._known if key.startswith(prefix)]:
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        del self._known[key]
        self._looked.pop(key, None)
        self._unwritten.discard(key)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contained(_not_written):
                await self.flush()

    async def _look(self, key: str) -> None:
        """Take over what the store knows."""
        [fields] = await self._records.find([key], fresh=True)
        if self._records.outdated.covers(key):
            fields = None
        ours = self._known.get(key, ())  # as it is now: something may have been counted meanwhile
        self._remember(key, _together(from_fields(fields), ours))
        self._looked[key] = self._clock()

    def _remember(self, key: str, anchors: tuple[Anchor, ...]) -> None:
        self._known[key] = anchors
        self._known.move_to_end(key)
        if len(self._known) > MAX_ROOTS:
            self._let_go(next(iter(self._known)))


def _not_written(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
