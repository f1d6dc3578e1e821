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

from compaction_proxy.storage.records import Line, Records

# Checkpoints of one conversation and its branches that can be found again.
KEPT_PLACES = 200
MAX_CONVERSATIONS = 10_000
# Places that this process keeps of all conversations; each takes about 150 bytes.
MAX_PLACES = 100_000
# What was read is used for this long, in seconds.
FRESH_S = 2.0
# Once it is this old, a request has it read again behind itself, in seconds.
AGING_S = 1.0


@dataclass(slots=True)
class _Seen:
    """What is known of one list: its places, oldest first, and when it was last read."""

    places: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    read_at: float = -math.inf
    _frozen: frozenset[bytes] | None = None

    @property
    def known(self) -> frozenset[bytes]:
        """The places, made once for all who ask."""
        if self._frozen is None:
            self._frozen = frozenset(self.places)
        return self._frozen

    def add(self, place: bytes) -> int:
        """Another place, for which an old one may have to go; by how many there are more now."""
        if place in self.places:
            return 0
        self.places[place], self._frozen = None, None
        if len(self.places) <= KEPT_PLACES:
            return 1
        self.places.popitem(last=False)
        return 0


class CheckpointIndex:
    """The places of checkpoints, by the index's store key (`storage.keys.checkpoints_key`).

    Args:
        records: Where the lists are.
        clock: Monotonic seconds.
    """

    def __init__(self, records: Records, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._count = 0
        records.forgetters.append(self._forget)

    async def places(self, key: str) -> frozenset[bytes]:
        """Places (`core.checkpoint.place`) at which there may be a checkpoint, as the store has them now."""
        for line in await self._records.tail(key, KEPT_PLACES):
            try:
                self._note(key, bytes.fromhex(line["place"]))
            except (KeyError, TypeError, ValueError):
                continue
        seen = self._of(key)
        seen.read_at = self._clock()
        return seen.known

    def held(self, key: str) -> frozenset[bytes] | None:
        """The same without waiting, at most two seconds old; None where the store has to be asked."""
        seen = self._seen.get(key)
        age_s = math.inf if seen is None else self._clock() - seen.read_at
        if seen is None or age_s >= FRESH_S:
            return None
        if age_s >= AGING_S:
            self._records.behind.begin(key, lambda: self.places(key))
        return seen.known

    def knows(self, key: str, place: bytes) -> bool:
        """Whether this process has seen a place in the index."""
        seen = self._seen.get(key)
        return seen is not None and place in seen.places

    def line(self, key: str, place: bytes, ttl_s: float) -> Line:
        """What to commit beside a new checkpoint; it is known here from now on."""
        self._note(key, place)
        return Line(key, {"place": place.hex()}, ttl_s, KEPT_PLACES)

    def _note(self, key: str, place: bytes) -> None:
        self._count += self._of(key).add(place)
        while self._count > MAX_PLACES:
            self._let_go(next(iter(self._seen)))

    def _of(self, key: str) -> _Seen:
        seen = self._seen.setdefault(key, _Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_CONVERSATIONS:
            self._let_go(next(iter(self._seen)))
        return seen

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._seen if key.startswith(prefix)]:
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        self._count -= len(self._seen.pop(key).places)
