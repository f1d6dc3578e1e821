"""Where a conversation's checkpoints stand, so that only those are looked up that a request could use.

The index is a list beside the checkpoints, written at once with each. What this process has seen of it is
kept: for requests that follow soon, and for when the store is away. In a busy conversation the list is read
again behind a request, so that none waits for it.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from compaction_proxy.storage.records import ListItem, RecordStore

# Checkpoints of one conversation and its branches that can be found again.
MAX_KEPT_IDS = 200
MAX_CONVERSATIONS = 10_000
# Places that this process keeps of all conversations; each takes about 150 bytes.
MAX_CACHED_IDS = 100_000
# What was read is used for this long, in seconds.
FRESH_S = 2.0
# Once it is this old, a request has it read again behind itself, in seconds.
AGING_S = 1.0


@dataclass(slots=True)
class _CachedIndex:
    """What is known of one list: its places, oldest first, and when it was last read."""

    places: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    read_at: float = -math.inf
    _frozen: frozenset[bytes] | None = None

    @property
    def checkpoint_ids(self) -> frozenset[bytes]:
        """The places, made once for all who ask."""
        if self._frozen is None:
            self._frozen = frozenset(self.places)
        return self._frozen

    def add_checkpoint_id(self, checkpoint_id: bytes) -> int:
        """Another place, for which an old one may have to go; by how many there are more now."""
        if checkpoint_id in self.places:
            return 0
        self.places[checkpoint_id], self._frozen = None, None
        if len(self.places) <= MAX_KEPT_IDS:
            return 1
        self.places.popitem(last=False)
        return 0


class CheckpointIndex:
    """The places of checkpoints, by the index's store key (`storage.keys.checkpoints_key`).

    Args:
        records: Where the lists are.
        clock: Monotonic seconds.
    """

    def __init__(self, records: RecordStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._cache: OrderedDict[str, _CachedIndex] = OrderedDict()
        self._count = 0
        records.on_delete_callbacks.append(self._forget_prefix)

    async def load_checkpoint_ids(self, key: str) -> frozenset[bytes]:
        """Places (`core.checkpoint.place`) at which there may be a checkpoint, as the store has them now."""
        for line in await self._records.read_tail(key, MAX_KEPT_IDS):
            try:
                self._record_checkpoint_id(key, bytes.fromhex(line["place"]))
            except (KeyError, TypeError, ValueError):
                continue
        seen = self._get_or_create(key)
        seen.read_at = self._clock()
        return seen.checkpoint_ids

    def get_cached(self, key: str) -> frozenset[bytes] | None:
        """The same without waiting, at most two seconds old; None where the store has to be asked."""
        seen = self._cache.get(key)
        age_s = math.inf if seen is None else self._clock() - seen.read_at
        if seen is None or age_s >= FRESH_S:
            return None
        if age_s >= AGING_S:
            self._records.background_tasks.start_once(key, lambda: self.load_checkpoint_ids(key))
        return seen.checkpoint_ids

    def has_checkpoint(self, key: str, checkpoint_id: bytes) -> bool:
        """Whether this process has seen a place in the index."""
        seen = self._cache.get(key)
        return seen is not None and checkpoint_id in seen.places

    def build_line(self, key: str, checkpoint_id: bytes, ttl_s: float) -> ListItem:
        """What to commit beside a new checkpoint; it is known here from now on."""
        self._record_checkpoint_id(key, checkpoint_id)
        return ListItem(key, {"place": checkpoint_id.hex()}, ttl_s, MAX_KEPT_IDS)

    def _record_checkpoint_id(self, key: str, checkpoint_id: bytes) -> None:
        self._count += self._get_or_create(key).add_checkpoint_id(checkpoint_id)
        while self._count > MAX_CACHED_IDS:
            self._drop_cached(next(iter(self._cache)))

    def _get_or_create(self, key: str) -> _CachedIndex:
        seen = self._cache.setdefault(key, _CachedIndex())
        self._cache.move_to_end(key)
        if len(self._cache) > MAX_CONVERSATIONS:
            self._drop_cached(next(iter(self._cache)))
        return seen

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._cache if key.startswith(prefix)]:
            self._drop_cached(key)

    def _drop_cached(self, key: str) -> None:
        self._count -= len(self._cache.pop(key).places)
