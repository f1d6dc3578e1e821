"""Lists the archives of all conversations of a tenant, and deletes old archives to observe size limits.

The tenant's list has a line for each archive and for each deletion. After a compaction is committed,
`ArchiveRetention` deletes the oldest archives of its conversation until the others are within the limit for a
conversation. Then it deletes the tenant's oldest archives, of any conversation, until the others are within
the limit for a tenant. Neither step deletes the newest archive. A piece of an archive (`recall.archive`) is
deleted with the last archive that contains it. The size of an archive is the number of bytes of its text
before compression. A piece that several archives share counts once.

Conversations with the same beginning share a root and its archives. Here they count as one conversation. The
other records of a compaction, such as its checkpoint and its events, are not deleted.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import parse_number
from compaction_proxy.recall.archive import (
    MAX_ARCHIVES,
    Archive,
    ArchivePieceInfo,
    ArchivePieceList,
    ArchiveReader,
    ArchiveRef,
    build_archive_key,
    parse_archived_round,
)
from compaction_proxy.storage.keys import archive_piece_key, lease_key, root_archives_key, tenant_archives_key
from compaction_proxy.storage.records import Fields, RecordItem, RecordStore
from compaction_proxy.support.lru import BoundedDict

# Maximum number of a tenant's archives that `list_archives` returns. Older archives do not count towards the
# tenant's size limit, and a search of all the tenant's conversations does not find them. `_MAX_LINES` is the
# maximum number of lines in the tenant's list, which also has lines for deletions.
MAX_TENANT_ARCHIVES = 2_000
_MAX_LINES = 2 * MAX_TENANT_ARCHIVES
# A store cannot delete a single record. `ArchiveRetention` therefore overwrites the record with an empty
# record, which expires after this many seconds.
_TOMBSTONE_TTL_S = 1.0
# Shortest time, in seconds, between two checks of the size limit of one tenant by one process.
TENANT_CHECK_INTERVAL_S = 60.0
# Maximum number of tenants for which a process remembers when it may check the size limit again. If there are
# more, it forgets the tenant that it checked longest ago.
_MAX_TENANTS = 1_000
# To delete archives of a tenant, a process needs the tenant's lease, which only one process can hold. A lease
# that the process does not release ends after this many seconds.
_LEASE_S = 10.0


class ArchiveBounds(NamedTuple):
    """Limits for archives, in bytes of text. 0 means no limit.

    Attributes:
        conversation_bytes: Limit for all archives of a conversation and its branches together. They are
            stored under the same root.
        tenant_bytes: Limit for all archives of a tenant together.
    """

    conversation_bytes: int = 0
    tenant_bytes: int = 0


class ListedArchive(NamedTuple):
    """An archive in the list of a tenant, or in that of a root (conversations with the same beginning).

    Attributes:
        ref: Identifies the archive.
        size_bytes: Bytes of the archive's text. In a tenant's list, the number does not include pieces that
            earlier archives under the same root also contain. 0 if an earlier version of the proxy wrote the
            archive.
    """

    ref: ArchiveRef
    size_bytes: int


def _parse_line(line: Fields, root: object) -> ListedArchive | None:
    archived_round, size = parse_archived_round(line), parse_number(line.get("bytes"))
    try:
        root_bytes = bytes.fromhex(root) if isinstance(root, str) else b""
    except ValueError:
        return None
    return (
        ListedArchive(ArchiveRef(root_bytes, archived_round), int(size or 0))
        if archived_round and root_bytes
        else None
    )


def _get_line_key(line: Fields) -> tuple[object, object, object]:
    return line.get("root"), line.get("strategy"), line.get("place")


def _list_present_archives(lines: Iterable[Fields]) -> list[ListedArchive]:
    """Returns the archives in a tenant's list, oldest first, without those whose deletion it records."""
    found: dict[tuple[object, object, object], ListedArchive] = {}
    for line in lines:
        deleted_kind = line.get("gone")
        if deleted_kind == "root":
            found = {name: held for name, held in found.items() if name[0] != line.get("root")}
        elif deleted_kind == "archive":
            found.pop(_get_line_key(line), None)
        elif (held := _parse_line(line, line.get("root"))) is not None:
            found.pop(_get_line_key(line), None)  # an archive that is listed again moves to the end
            found[_get_line_key(line)] = held
    return list(found.values())


def _count_items_to_delete(sizes: Sequence[int], bound: int) -> int:
    """Returns how many items at the start to delete so that the sum of the others is at most `bound`.

    The result is the smallest such number. It never includes the last item, even if this item alone exceeds
    `bound`.
    """
    total, gone = sum(sizes), 0
    while total > bound and gone < len(sizes) - 1:
        total -= sizes[gone]
        gone += 1
    return gone


def _compute_unshared_sizes(pieces: Sequence[ArchivePieceList]) -> list[int]:
    """Returns the bytes of each archive, without the pieces that a newer archive also contains.

    `pieces` has the pieces of each archive, oldest archive first. The result has the same order.
    """
    newer: set[ArchivePieceInfo] = set()
    sizes: list[int] = []
    for each in reversed(pieces):
        own = set(each) - newer
        sizes.append(sum(piece.size_bytes for piece in own) + each.size_bytes)
        newer |= own
    return sizes[::-1]


def _build_deletion_lines(refs: Iterable[ArchiveRef]) -> Iterator[Fields]:
    """Yields the lines for the tenant's list that record the deletion of archives."""
    for root, made in refs:
        yield {
            "gone": "archive",
            "root": root.hex(),
            "strategy": made.strategy,
            "place": made.checkpoint_place.hex(),
        }


class ArchiveRetention:
    """Lists the archives of tenants, and deletes old archives if the limits are exceeded.

    Use the object on one event loop.

    No method raises if the store fails.

    Args:
        records: The store of the archives.
        ttl_s: Seconds for which the store keeps archives.
        bounds: The limits for archives.
        clock: Returns monotonic seconds.
        now: Returns seconds since the epoch.
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
        # Maps each tenant to the time, in monotonic seconds, from which this process may check the tenant's
        # size limit again.
        self._check_due_at: BoundedDict[str, float] = BoundedDict(_MAX_TENANTS)

    async def add_archive(self, tenant: str, ref: ArchiveRef, archive: Archive) -> None:
        """Adds an archive to its tenant's list, and starts `enforce_bounds` as a background task.

        Call it after the archive was committed.
        """
        size = await self._count_new_bytes(tenant, ref, archive.contents)
        await self._append_lines(
            tenant, [{**archive.list_line.fields, "root": ref.root.hex(), "bytes": size}]
        )
        work = ("archives", tenant, ref.root)
        self._records.background_tasks.start_once(work, lambda: self.enforce_bounds(tenant, ref.root))

    async def record_deleted_roots(self, tenant: str, roots: Iterable[bytes]) -> None:
        """Records in the tenant's list that the caller has deleted all archives under these roots.

        A root is the digest of a conversation's first messages.
        """
        await self._append_lines(tenant, [{"gone": "root", "root": root.hex()} for root in roots])

    async def list_archives(self, tenant: str) -> list[ListedArchive]:
        """Returns the archives of a tenant that have not expired, oldest first.

        If there are more than `MAX_TENANT_ARCHIVES`, returns only the newest.
        """
        lines = await self._records.read_tail(tenant_archives_key(tenant), _MAX_LINES)
        oldest = self._now() - self._ttl_s
        return [held for held in _list_present_archives(lines) if held.ref.round.made_at > oldest][
            -MAX_TENANT_ARCHIVES:
        ]

    async def list_root_archives(self, tenant: str, root: bytes) -> list[ListedArchive]:
        """Returns the archives in the list of a root, oldest first. Some of them may have been deleted.

        Conversations with the same beginning share a root.
        """
        lines = await self._records.read_tail(root_archives_key(tenant, root), MAX_ARCHIVES)
        return [held for line in lines if (held := _parse_line(line, root.hex())) is not None]

    async def enforce_bounds(self, tenant: str, root: bytes) -> None:
        """Deletes the oldest archives until those of a root, and those of the tenant, are within the limits.

        Conversations with the same beginning share a root, and count as one conversation.

        Does nothing if another process is deleting archives of this tenant, or if the store fails. Checks the
        limit of a tenant at most once in `TENANT_CHECK_INTERVAL_S` seconds.
        """
        try:
            lease = await self._records.acquire_lease(lease_key(tenant_archives_key(tenant)), _LEASE_S)
        except StoreUnavailableError:
            return
        if lease is None:
            return
        try:
            await self._enforce_conversation_bound(tenant, root)
            await self._enforce_tenant_bound(tenant)
        finally:
            await self._records.release_lease(lease)

    async def _append_lines(self, tenant: str, lines: Iterable[Fields]) -> None:
        for line in lines:
            await self._records.append_line(
                tenant_archives_key(tenant), line, ttl_s=self._ttl_s, max_lines=_MAX_LINES
            )

    async def _count_new_bytes(self, tenant: str, place: ArchiveRef, pieces: ArchivePieceList) -> int:
        """Returns the bytes of those pieces of an archive that no other archive under its root contains."""
        others = [held.ref for held in await self.list_root_archives(tenant, place.root) if held.size_bytes]
        known = await self._read_piece_set(tenant, [other for other in others if other != place])
        return sum(piece.size_bytes for piece in set(pieces) - known)

    async def _read_piece_set(self, tenant: str, places: Sequence[ArchiveRef]) -> set[ArchivePieceInfo]:
        return {
            piece for each in await self._archive_reader.read_contents(tenant, places) for piece in each or ()
        }

    async def _enforce_conversation_bound(self, tenant: str, root: bytes) -> None:
        bound = self._bounds.conversation_bytes
        archives = await self.list_root_archives(tenant, root) if bound else []
        if (
            sum(each.size_bytes for each in archives) <= bound
        ):  # the sum counts shared pieces several times, so the real size is not larger than the sum
            return
        places = [each.ref for each in archives]
        contents = zip(places, await self._archive_reader.read_contents(tenant, places), strict=True)
        present = [(place, pieces) for place, pieces in contents if pieces is not None]
        excess = _count_items_to_delete(_compute_unshared_sizes([pieces for _, pieces in present]), bound)
        await self._delete_archives(tenant, [place for place, _ in present[:excess]])

    async def _enforce_tenant_bound(self, tenant: str) -> None:
        bound = self._bounds.tenant_bytes
        if not bound or not self._is_tenant_check_due(tenant):
            return
        archives = await self.list_archives(tenant)
        excess = [
            each.ref
            for each in archives[: _count_items_to_delete([each.size_bytes for each in archives], bound)]
        ]
        for root in dict.fromkeys(place.root for place in excess):
            await self._delete_archives(tenant, [place for place in excess if place.root == root])

    def _is_tenant_check_due(self, tenant: str) -> bool:
        now = self._clock()
        if self._check_due_at.get(tenant, now) > now:
            return False
        self._check_due_at[tenant] = now + TENANT_CHECK_INTERVAL_S
        return True

    async def _delete_archives(self, tenant: str, refs: Sequence[ArchiveRef]) -> None:
        """Deletes archives, which are all under one root, and their pieces that no other archive contains."""
        if not refs:
            return
        root = refs[0].root
        listed = await self.list_root_archives(tenant, root)
        others = [held.ref for held in listed if held.size_bytes and held.ref not in refs]
        unused_pieces = await self._read_piece_set(tenant, refs) - await self._read_piece_set(tenant, others)
        piece_fields = await self._archive_reader.read_pieces(
            tenant, [(root, piece) for piece in unused_pieces]
        )
        keys = [build_archive_key(tenant, place) for place in refs]
        keys += [archive_piece_key(tenant, root, piece.name) for piece in unused_pieces]
        if await self._records.write([RecordItem(key, {}, _TOMBSTONE_TTL_S) for key in keys]):
            await self._append_lines(tenant, _build_deletion_lines(refs))
            await self._restore_pieces(tenant, root, {held.ref for held in listed}, piece_fields)

    async def _restore_pieces(
        self,
        tenant: str,
        root: bytes,
        known_refs: AbstractSet[ArchiveRef],
        deleted_pieces: Mapping[tuple[bytes, str], Fields],
    ) -> None:
        """Writes deleted pieces again if they are still needed.

        During the deletion, another process may have committed an archive that contains some of the pieces.

        Args:
            tenant: The tenant that owns the archives.
            root: The root of the deleted archives.
            known_refs: The archives under the root that were listed before the deletion.
            deleted_pieces: The contents of the deleted pieces, by root and name.
        """
        new_refs = [
            held.ref for held in await self.list_root_archives(tenant, root) if held.ref not in known_refs
        ]
        names = {piece.name for piece in await self._read_piece_set(tenant, new_refs)}
        restored = [(name, fields) for (_, name), fields in deleted_pieces.items() if name in names]
        if restored:
            items = [
                RecordItem(archive_piece_key(tenant, root, name), fields, self._ttl_s)
                for name, fields in restored
            ]
            await self._records.write(items)
