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

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import parse_number
from compaction_proxy.recall.archive import (
    KEPT_ARCHIVES,
    Archive,
    ArchiveContents,
    ArchivePiece,
    ArchiveReader,
    ArchiveRef,
    build_archive_key,
    parse_round,
)
from compaction_proxy.storage.keys import archive_piece_key, lease_key, root_archives_key, tenant_archives_key
from compaction_proxy.storage.records import Fields, RecordItem, RecordStore

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


class ArchiveBounds(NamedTuple):
    """How much is archived, in bytes of text; 0: without bound.

    Attributes:
        conversation_bytes: Of one conversation and its branches.
        tenant_bytes: Of all that a tenant has.
    """

    conversation_bytes: int = 0
    tenant_bytes: int = 0


class ListedArchive(NamedTuple):
    """An archive of a tenant.

    Attributes:
        ref: Where it is.
        size_bytes: Bytes of its text; in the list of a tenant without those that its conversation had before.
            0 for one of a version before.
    """

    ref: ArchiveRef
    size_bytes: int


def _parse_line(line: Fields, root: object) -> ListedArchive | None:
    made, size = parse_round(line), parse_number(line.get("bytes"))
    try:
        where = bytes.fromhex(root) if isinstance(root, str) else b""
    except ValueError:
        return None
    return ListedArchive(ArchiveRef(where, made), int(size or 0)) if made and where else None


def _get_line_key(line: Fields) -> tuple[object, object, object]:
    return line.get("root"), line.get("strategy"), line.get("place")


def _list_present(lines: Iterable[Fields]) -> list[ListedArchive]:
    """The archives that a tenant's list tells of and that are not gone, oldest first."""
    found: dict[tuple[object, object, object], ListedArchive] = {}
    for line in lines:
        gone = line.get("gone")
        if gone == "root":
            found = {name: held for name, held in found.items() if name[0] != line.get("root")}
        elif gone == "archive":
            found.pop(_get_line_key(line), None)
        elif (held := _parse_line(line, line.get("root"))) is not None:
            found.pop(_get_line_key(line), None)  # made anew: it is as old as that
            found[_get_line_key(line)] = held
    return list(found.values())


def _count_excess(sizes: Sequence[int], bound: int) -> int:
    """How many of the first, at most all but the last, go so that the others are within the bound."""
    total, gone = sum(sizes), 0
    while total > bound and gone < len(sizes) - 1:
        total -= sizes[gone]
        gone += 1
    return gone


def _compute_own_sizes(pieces: Sequence[ArchiveContents]) -> list[int]:
    """What each archive takes that no newer one has too, in bytes; they come oldest first."""
    newer: set[ArchivePiece] = set()
    sizes: list[int] = []
    for each in reversed(pieces):
        own = set(each) - newer
        sizes.append(sum(piece.size_bytes for piece in own) + each.size_bytes)
        newer |= own
    return sizes[::-1]


def _build_gone_lines(places: Iterable[ArchiveRef]) -> Iterator[Fields]:
    """Lines that say that archives are gone."""
    for root, made in places:
        yield {"gone": "archive", "root": root.hex(), "strategy": made.strategy, "place": made.place.hex()}


class ArchiveRetention:
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
        records: RecordStore,
        ttl_s: float,
        bounds: ArchiveBounds,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._ttl_s = ttl_s
        self._bounds = bounds
        self._clock = clock
        self._now = now
        # By tenant, the one that was looked at last at the end: when all that it has is looked at again.
        self._check_due_at: OrderedDict[str, float] = OrderedDict()

    async def add_archive(self, tenant: str, ref: ArchiveRef, archive: Archive) -> None:
        """An archive was committed: list it, and let go of what is over the bounds, behind the request."""
        size = await self._count_new_bytes(tenant, ref, archive.pieces)
        await self._append_lines(tenant, [{**archive.line.fields, "root": ref.root.hex(), "bytes": size}])
        work = ("archives", tenant, ref.root)
        self._records.background_tasks.start_once(work, lambda: self.enforce_bounds(tenant, ref.root))

    async def record_deleted_roots(self, tenant: str, roots: Iterable[bytes]) -> None:
        """Everything under these roots was deleted."""
        await self._append_lines(tenant, [{"gone": "root", "root": root.hex()} for root in roots])

    async def list_archives(self, tenant: str) -> list[ListedArchive]:
        """The archives that a tenant has, the oldest first; of too many, the newest."""
        lines = await self._records.read_tail(tenant_archives_key(tenant), _KEPT_LINES)
        oldest = self._now() - self._ttl_s
        return [held for held in _list_present(lines) if held.ref.round.at > oldest][-KEPT_OF_TENANT:]

    async def list_root_archives(self, tenant: str, root: bytes) -> list[ListedArchive]:
        """The archives under a root, the oldest first; some may be gone."""
        lines = await self._records.read_tail(root_archives_key(tenant, root), KEPT_ARCHIVES)
        return [held for line in lines if (held := _parse_line(line, root.hex())) is not None]

    async def enforce_bounds(self, tenant: str, root: bytes) -> None:
        """Let go of what is over the bounds, unless another process is at it for this tenant."""
        try:
            lease = await self._records.acquire_lease(lease_key(tenant_archives_key(tenant)), _LEASE_S)
        except StoreUnavailableError:
            return
        if lease is not None:
            await self._enforce_conversation_bound(tenant, root)
            await self._enforce_tenant_bound(tenant)
            await self._records.release_lease(lease)

    async def _append_lines(self, tenant: str, lines: Iterable[Fields]) -> None:
        for line in lines:
            await self._records.append_line(
                tenant_archives_key(tenant), line, ttl_s=self._ttl_s, max_lines=_KEPT_LINES
            )

    async def _count_new_bytes(self, tenant: str, place: ArchiveRef, pieces: ArchiveContents) -> int:
        """Bytes of an archive that no other one under its root has."""
        others = [held.ref for held in await self.list_root_archives(tenant, place.root) if held.size_bytes]
        known = await self._read_piece_set(tenant, [other for other in others if other != place])
        return sum(piece.size_bytes for piece in set(pieces) - known)

    async def _read_piece_set(self, tenant: str, places: Sequence[ArchiveRef]) -> set[ArchivePiece]:
        return {
            piece for each in await self._archive_reader.read_contents(tenant, places) for piece in each or ()
        }

    async def _enforce_conversation_bound(self, tenant: str, root: bytes) -> None:
        bound = self._bounds.conversation_bytes
        held = await self.list_root_archives(tenant, root) if bound else []
        if sum(each.size_bytes for each in held) <= bound:  # were every piece counted each time
            return
        places = [each.ref for each in held]
        read = zip(places, await self._archive_reader.read_contents(tenant, places), strict=True)
        there = [(place, pieces) for place, pieces in read if pieces is not None]
        over = _count_excess(_compute_own_sizes([pieces for _, pieces in there]), bound)
        await self._delete_archives(tenant, [place for place, _ in there[:over]])

    async def _enforce_tenant_bound(self, tenant: str) -> None:
        bound = self._bounds.tenant_bytes
        if not bound or not self._is_tenant_check_due(tenant):
            return
        held = await self.list_archives(tenant)
        gone = [each.ref for each in held[: _count_excess([each.size_bytes for each in held], bound)]]
        for root in dict.fromkeys(place.root for place in gone):
            await self._delete_archives(tenant, [place for place in gone if place.root == root])

    def _is_tenant_check_due(self, tenant: str) -> bool:
        now = self._clock()
        if self._check_due_at.get(tenant, now) > now:
            return False
        self._check_due_at[tenant] = now + TENANT_EVERY_S
        self._check_due_at.move_to_end(tenant)
        if len(self._check_due_at) > _TENANTS:
            self._check_due_at.popitem(last=False)
        return True

    async def _delete_archives(self, tenant: str, refs: Sequence[ArchiveRef]) -> None:
        """Let go of archives under one root, and of the pieces that no other one has."""
        if not refs:
            return
        root = refs[0].root
        listed = await self.list_root_archives(tenant, root)
        others = [held.ref for held in listed if held.size_bytes and held.ref not in refs]
        leaving = await self._read_piece_set(tenant, refs) - await self._read_piece_set(tenant, others)
        read = await self._archive_reader.read_pieces(tenant, [(root, piece) for piece in leaving])
        keys = [build_archive_key(tenant, place) for place in refs]
        keys += [archive_piece_key(tenant, root, piece.name) for piece in leaving]
        if await self._records.write([RecordItem(key, {}, _GONE_S) for key in keys]):
            await self._append_lines(tenant, _build_gone_lines(refs))
            await self._restore_pieces(tenant, root, {held.ref for held in listed}, read)

    async def _restore_pieces(
        self,
        tenant: str,
        root: bytes,
        known: AbstractSet[ArchiveRef],
        read: Mapping[tuple[bytes, str], Fields],
    ) -> None:
        """Write those pieces again that an archive has which was committed while they were let go of."""
        new = [held.ref for held in await self.list_root_archives(tenant, root) if held.ref not in known]
        names = {piece.name for piece in await self._read_piece_set(tenant, new)}
        back = [(name, fields) for (_, name), fields in read.items() if name in names]
        if back:
            items = [
                RecordItem(archive_piece_key(tenant, root, name), fields, self._ttl_s)
                for name, fields in back
            ]
            await self._records.write(items)
