"""Which archives a tenant has, over all of its conversations, and that they stay within bounds.

A list of the tenant has a line for each archive, and one for what is gone of it. Once a round is committed,
the oldest archives of its conversation go until the others are within the bound of a conversation; then the
oldest of the tenant, whatever conversation they are of. A piece goes with the last archive that names it, and
the newest archive always stays. Bytes are those of the text before compression, each piece counted once.

Conversations that begin alike share archives, so they count as one here. What else the store keeps of a
round, its checkpoint and events among them, is no part of this.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.core.event import number
from compaction_proxy.recall.archive import (
    KEPT_ARCHIVES,
    Archive,
    Originals,
    Piece,
    Pieces,
    Place,
    archive_at,
    round_of,
)
from compaction_proxy.storage.keys import archived_key, archives_key, lease_key, piece_key
from compaction_proxy.storage.records import Fields, Item, Records

# Archives of a tenant that are found again and counted. Lines of its list: some say what is gone.
KEPT_OF_TENANT = 2_000
_KEPT_LINES = 2 * KEPT_OF_TENANT
# What is gone stays in the store for so long, empty, in seconds: no store deletes a single record.
_GONE_S = 1.0
# A process looks at all that a tenant has once in so many seconds; of so many tenants it knows when it did.
TENANT_EVERY_S = 60.0
_TENANTS = 1_000
# How long one process may take to let go of what is over the bounds of a tenant, in seconds.
_LEASE_S = 10.0


class Bounds(NamedTuple):
    """How much is archived, in bytes of text; 0: without bound.

    Attributes:
        conversation: Of one conversation and its branches.
        tenant: Of all that a tenant has.
    """

    conversation: int = 0
    tenant: int = 0


class Held(NamedTuple):
    """An archive of a tenant.

    Attributes:
        place: Where it is.
        size: Bytes of its text; in the list of a tenant without those that its conversation had before. 0 for
            one of a version before.
    """

    place: Place
    size: int


def _held(line: Fields, root: object) -> Held | None:
    made, size = round_of(line), number(line.get("bytes"))
    try:
        where = bytes.fromhex(root) if isinstance(root, str) else b""
    except ValueError:
        return None
    return Held(Place(where, made), int(size or 0)) if made and where else None


def _name(line: Fields) -> tuple[object, object, object]:
    return line.get("root"), line.get("strategy"), line.get("place")


def _there(lines: Iterable[Fields]) -> list[Held]:
    """The archives that a tenant's list tells of and that are not gone, oldest first."""
    found: dict[tuple[object, object, object], Held] = {}
    for line in lines:
        gone = line.get("gone")
        if gone == "root":
            found = {name: held for name, held in found.items() if name[0] != line.get("root")}
        elif gone == "archive":
            found.pop(_name(line), None)
        elif (held := _held(line, line.get("root"))) is not None:
            found.pop(_name(line), None)  # made anew: it is as old as that
            found[_name(line)] = held
    return list(found.values())


def _over(sizes: Sequence[int], bound: int) -> int:
    """How many of the first, at most all but the last, go so that the others are within the bound."""
    total, gone = sum(sizes), 0
    while total > bound and gone < len(sizes) - 1:
        total -= sizes[gone]
        gone += 1
    return gone


def _once(pieces: Sequence[Pieces]) -> list[int]:
    """What each archive takes that no newer one has too, in bytes; they come oldest first."""
    newer: set[Piece] = set()
    sizes: list[int] = []
    for each in reversed(pieces):
        own = set(each) - newer
        sizes.append(sum(piece.size for piece in own) + each.size)
        newer |= own
    return sizes[::-1]


def _gone(places: Iterable[Place]) -> Iterator[Fields]:
    """Lines that say that archives are gone."""
    for root, made in places:
        yield {"gone": "archive", "root": root.hex(), "strategy": made.strategy, "place": made.place.hex()}


class Holdings:
    """The archives of tenants, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept.
        bounds: How much of them.
        clock: Monotonic seconds.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        records: Records,
        ttl_s: float,
        bounds: Bounds,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._originals = Originals(records)
        self._ttl_s = ttl_s
        self._bounds = bounds
        self._clock = clock
        self._now = now
        # By tenant, the one that was looked at last at the end: when all that it has is looked at again.
        self._due: OrderedDict[str, float] = OrderedDict()

    async def added(self, tenant: str, place: Place, archive: Archive) -> None:
        """An archive was committed: list it, and let go of what is over the bounds, behind the request."""
        size = await self._new(tenant, place, archive.pieces)
        await self._list(tenant, [{**archive.line.fields, "root": place.root.hex(), "bytes": size}])
        work = ("archives", tenant, place.root)
        self._records.behind.begin(work, lambda: self.settle(tenant, place.root))

    async def forgotten(self, tenant: str, roots: Iterable[bytes]) -> None:
        """Everything under these roots was deleted."""
        await self._list(tenant, [{"gone": "root", "root": root.hex()} for root in roots])

    async def of(self, tenant: str) -> list[Held]:
        """The archives that a tenant has, the oldest first; of too many, the newest."""
        lines = await self._records.tail(archived_key(tenant), _KEPT_LINES)
        oldest = self._now() - self._ttl_s
        return [held for held in _there(lines) if held.place.made.at > oldest][-KEPT_OF_TENANT:]

    async def under(self, tenant: str, root: bytes) -> list[Held]:
        """The archives under a root, the oldest first; some may be gone."""
        lines = await self._records.tail(archives_key(tenant, root), KEPT_ARCHIVES)
        return [held for line in lines if (held := _held(line, root.hex())) is not None]

    async def settle(self, tenant: str, root: bytes) -> None:
        """Let go of what is over the bounds, unless another process is at it for this tenant."""
        try:
            lease = await self._records.acquire(lease_key(archived_key(tenant)), _LEASE_S)
        except StoreUnavailable:
            return
        if lease is not None:
            await self._within_conversation(tenant, root)
            await self._within_tenant(tenant)
            await self._records.release(lease)

    async def _list(self, tenant: str, lines: Iterable[Fields]) -> None:
        for line in lines:
            await self._records.append(archived_key(tenant), line, ttl_s=self._ttl_s, keep=_KEPT_LINES)

    async def _new(self, tenant: str, place: Place, pieces: Pieces) -> int:
        """Bytes of an archive that no other one under its root has."""
        others = [held.place for held in await self.under(tenant, place.root) if held.size]
        known = await self._pieces(tenant, [other for other in others if other != place])
        return sum(piece.size for piece in set(pieces) - known)

    async def _pieces(self, tenant: str, places: Sequence[Place]) -> set[Piece]:
        return {piece for each in await self._originals.pieces(tenant, places) for piece in each or ()}

    async def _within_conversation(self, tenant: str, root: bytes) -> None:
        bound = self._bounds.conversation
        held = await self.under(tenant, root) if bound else []
        if sum(each.size for each in held) <= bound:  # were every piece counted each time
            return
        places = [each.place for each in held]
        read = zip(places, await self._originals.pieces(tenant, places), strict=True)
        there = [(place, pieces) for place, pieces in read if pieces is not None]
        over = _over(_once([pieces for _, pieces in there]), bound)
        await self._let_go(tenant, [place for place, _ in there[:over]])

    async def _within_tenant(self, tenant: str) -> None:
        bound = self._bounds.tenant
        if not bound or not self._is_due(tenant):
            return
        held = await self.of(tenant)
        gone = [each.place for each in held[: _over([each.size for each in held], bound)]]
        for root in dict.fromkeys(place.root for place in gone):
            await self._let_go(tenant, [place for place in gone if place.root == root])

    def _is_due(self, tenant: str) -> bool:
        now = self._clock()
        if self._due.get(tenant, now) > now:
            return False
        self._due[tenant] = now + TENANT_EVERY_S
        self._due.move_to_end(tenant)
        if len(self._due) > _TENANTS:
            self._due.popitem(last=False)
        return True

    async def _let_go(self, tenant: str, gone: Sequence[Place]) -> None:
        """Let go of archives under one root, and of the pieces that no other one has."""
        if not gone:
            return
        root = gone[0].root
        listed = await self.under(tenant, root)
        others = [held.place for held in listed if held.size and held.place not in gone]
        leaving = await self._pieces(tenant, gone) - await self._pieces(tenant, others)
        read = await self._originals.read(tenant, [(root, piece) for piece in leaving])
        keys = [archive_at(tenant, place) for place in gone]
        keys += [piece_key(tenant, root, piece.name) for piece in leaving]
        if await self._records.write([Item(key, {}, _GONE_S) for key in keys]):
            await self._list(tenant, _gone(gone))
            await self._put_back(tenant, root, {held.place for held in listed}, read)

    async def _put_back(
        self, tenant: str, root: bytes, known: AbstractSet[Place], read: Mapping[tuple[bytes, str], Fields]
    ) -> None:
        """Write those pieces again that an archive has which was committed while they were let go of."""
        new = [held.place for held in await self.under(tenant, root) if held.place not in known]
        names = {piece.name for piece in await self._pieces(tenant, new)}
        back = [(name, fields) for (_, name), fields in read.items() if name in names]
        if back:
            items = [Item(piece_key(tenant, root, name), fields, self._ttl_s) for name, fields in back]
            await self._records.write(items)
