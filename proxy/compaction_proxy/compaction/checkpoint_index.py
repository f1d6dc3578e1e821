"""Lists the ids of a conversation's checkpoints, so that a request reads only checkpoints that it could use.

The index is a list in the store. When a checkpoint is written, its id is added to the list. Each process
caches the ids that it has read, and uses them for two seconds (`FRESH_S`), or longer while the store is
unavailable. In a busy conversation the process reads the list again in the background before the two seconds
are over, so that no request waits for the store.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from compaction_proxy.storage.records import ListItem, RecordStore

# Largest number of checkpoints that can be found for one conversation and its branches.
MAX_KEPT_IDS = 200
# Largest number of lists in the cache of this process. A conversation and its branches share one list.
MAX_CONVERSATIONS = 10_000
# Largest number of ids in the cache of this process. An id takes about 150 bytes of memory.
MAX_CACHED_IDS = 100_000
# How long a cached list is used after it was read, in seconds. After that, a request waits until it is read
# again.
FRESH_S = 2.0
# If a request uses a cached list that is at least this old, in seconds, the list is read again in the
# background.
AGING_S = 1.0


@dataclass(slots=True)
class _CachedIndex:
    """The ids in one list, oldest first, and when the list was last read."""

    ordered_ids: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    read_at: float = -math.inf

    def add_checkpoint_id(self, checkpoint_id: bytes) -> int:
        """Adds an id, and drops the oldest id if there are more than `MAX_KEPT_IDS`.

        Returns the number of ids by which the list has grown: 0 or 1.
        """
        if checkpoint_id in self.ordered_ids:
            return 0
        self.ordered_ids[checkpoint_id] = None
        if len(self.ordered_ids) <= MAX_KEPT_IDS:
            return 1
        self.ordered_ids.popitem(last=False)
        return 0


class CheckpointIndex:
    """Reads, caches and extends lists of checkpoint ids.

    A list is named by its store key (`storage.keys.checkpoint_list_key`).

    Args:
        records: Stores the lists.
        clock: Returns monotonic seconds.
    """

    def __init__(self, records: RecordStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._cache: OrderedDict[str, _CachedIndex] = OrderedDict()
        self._count = 0
        records.on_delete_callbacks.append(self._forget_prefix)

    async def load_checkpoint_ids(self, key: str) -> frozenset[bytes]:
        """Reads the list `key` from the store, and returns its ids together with the cached ids of the list.

        The list may contain ids of checkpoints that no longer exist.
        """
        for line in await self._records.read_tail(key, MAX_KEPT_IDS):
            try:
                self._record_checkpoint_id(key, bytes.fromhex(line["place"]))
            except (KeyError, TypeError, ValueError):
                continue
        cached = self._get_or_create(key)
        cached.read_at = self._clock()
        return frozenset(cached.ordered_ids)

    def get_cached(self, key: str) -> frozenset[bytes] | None:
        """Returns the cached ids if they were read less than `FRESH_S` seconds ago; else None."""
        cached = self._cache.get(key)
        age_s = math.inf if cached is None else self._clock() - cached.read_at
        if cached is None or age_s >= FRESH_S:
            return None
        if age_s >= AGING_S:
            self._records.background_tasks.start_once(key, lambda: self.load_checkpoint_ids(key))
        return frozenset(cached.ordered_ids)

    def has_checkpoint(self, key: str, checkpoint_id: bytes) -> bool:
        """Returns whether the cache of this process contains the id in the list `key`."""
        cached = self._cache.get(key)
        return cached is not None and checkpoint_id in cached.ordered_ids

    def cache_id_and_build_line(self, key: str, checkpoint_id: bytes, ttl_s: float) -> ListItem:
        """Builds the list entry to write together with a new checkpoint, and adds the id to the cache."""
        self._record_checkpoint_id(key, checkpoint_id)
        return ListItem(key, {"place": checkpoint_id.hex()}, ttl_s, MAX_KEPT_IDS)

    def _record_checkpoint_id(self, key: str, checkpoint_id: bytes) -> None:
        self._count += self._get_or_create(key).add_checkpoint_id(checkpoint_id)
        while self._count > MAX_CACHED_IDS:
            self._drop_cached(next(iter(self._cache)))

    def _get_or_create(self, key: str) -> _CachedIndex:
        cached = self._cache.setdefault(key, _CachedIndex())
        self._cache.move_to_end(key)
        if len(self._cache) > MAX_CONVERSATIONS:
            self._drop_cached(next(iter(self._cache)))
        return cached

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._cache if key.startswith(prefix)]:
            self._drop_cached(key)

    def _drop_cached(self, key: str) -> None:
        self._count -= len(self._cache.pop(key).ordered_ids)
