"""Where a conversation's checkpoints stand, so that only those are looked up that a request could use.

The index is a list beside the checkpoints, written at once with each. What this process has seen of it is
kept too, for when the store is away.
"""

from collections import OrderedDict

from proxy.storage.records import Line, Records

# Checkpoints of one conversation and its branches that can be found again.
KEPT_PLACES = 200
MAX_CONVERSATIONS = 10_000


class CheckpointIndex:
    """The places of checkpoints, by the index's store key (`core.keys.checkpoints_key`)."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._seen: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    async def places(self, key: str) -> frozenset[bytes]:
        """Places (`core.checkpoint.place`) at which there may be a checkpoint."""
        for line in await self._records.tail(key, KEPT_PLACES):
            try:
                self._note(key, bytes.fromhex(line["place"]))
            except (KeyError, TypeError, ValueError):
                continue
        return frozenset(self._seen.get(key, ()))

    def knows(self, key: str, place: bytes) -> bool:
        """Whether this process has seen a place in the index."""
        return place in self._seen.get(key, ())

    def line(self, key: str, place: bytes, ttl_s: float) -> Line:
        """What to commit beside a new checkpoint; it is known here from now on."""
        self._note(key, place)
        return Line(key, {"place": place.hex()}, ttl_s, KEPT_PLACES)

    def _note(self, key: str, place: bytes) -> None:
        places = self._seen.setdefault(key, OrderedDict())
        places[place] = None
        if len(places) > KEPT_PLACES:
            places.popitem(last=False)
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_CONVERSATIONS:
            self._seen.popitem(last=False)
