"""Keeps a list of checkpoint ids for each conversation.

An id shows which messages its checkpoint covers. So the proxy can tell from the ids which checkpoints a
request could use, and reads only these from the store. The list itself is also in the store. When a process
writes a checkpoint, it adds the id to the list. Each process caches the lists that it has read. It uses a
cached list for two seconds (`FRESH_S`), or longer while the store is unavailable. If a request uses a list
that was read more than one second ago (`AGING_S`), the process reads the list again in the background. So the
requests of a busy conversation seldom wait for the store.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from compaction_proxy.storage.records import ListItem, RecordStore

# Largest number of ids in one list. A conversation and its branches (conversations that begin with the same
# messages) share one list. If there are more ids, the oldest are dropped.
MAX_KEPT_IDS = 200
# Largest number of lists in the cache of a process. If there are more, the least recently used one is
# dropped.
MAX_CONVERSATIONS = 10_000
# Largest number of ids in all cached lists together. An id takes about 150 bytes of memory. If there are
# more, the least recently used lists are dropped.
MAX_CACHED_IDS = 100_000
# For this many seconds after a list was read, requests use the cached list. After that, the next request
# waits until the list is read again.
FRESH_S = 2.0
# If a request uses a cached list that was read at least this many seconds ago, the process also reads the
# list again in the background.
AGING_S = 1.0


@dataclass(slots=True)
class _CachedIndex:
    """A cached list of checkpoint ids.

    Attributes:
        ordered_ids: The ids, oldest first. The values are not used.
        read_at: When the list was last read from the store, in monotonic seconds; minus infinity if never.
    """

    ordered_ids: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    read_at: float = -math.inf

    def add_checkpoint_id(self, checkpoint_id: bytes) -> int:
        """Adds an id to the list. If the list then has more than `MAX_KEPT_IDS` ids, drops the oldest one.

        Returns the number of ids by which the list has grown: 1, or 0 if the id was already in the list or
        another id was dropped.
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

    The argument `key` of the methods is the store key of a list (`storage.keys.checkpoint_list_key`).

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
        """Reads a list from the store, adds its ids to the cached list, and returns the cached list.

        If the store fails, the cached list stays as it is. The list may contain ids of checkpoints that no
        longer exist.
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
        """Returns the cached list if it was read less than `FRESH_S` seconds ago; else None.

        If it was read at least `AGING_S` seconds ago, also starts to read it again in the background.
        """
        cached = self._cache.get(key)
        age_s = math.inf if cached is None else self._clock() - cached.read_at
        if cached is None or age_s >= FRESH_S:
            return None
        if age_s >= AGING_S:
            self._records.background_tasks.start_once(key, lambda: self.load_checkpoint_ids(key))
        return frozenset(cached.ordered_ids)

    def has_checkpoint(self, key: str, checkpoint_id: bytes) -> bool:
        """Returns whether the cached list contains the id. Does not ask the store."""
        cached = self._cache.get(key)
        return cached is not None and checkpoint_id in cached.ordered_ids

    def cache_id_and_build_line(self, key: str, checkpoint_id: bytes, ttl_s: float) -> ListItem:
        """Adds the id of a new checkpoint to the cached list, and returns the line to write to the store.

        The caller writes the line to the stored list. `ttl_s` is the lifetime of this list, in seconds.
        """
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
