"""What keeps derived data: records, lists and leases by key."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """One value to be kept.

    Attributes:
        key: Where; records that are read or committed together share the part of their key in `{}`.
        value: An envelope (`compaction_proxy.storage.records`), opaque to a store.
        ttl_s: Seconds until it is forgotten, infinite for never; reading it does not prolong it.
    """

    key: str
    value: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One line to be added to a bounded list.

    Attributes:
        key: Which list.
        value: The line, opaque to a store.
        ttl_s: Seconds until the whole list is forgotten, counted from its newest line.
        max_lines: Number of newest lines that stay.
    """

    key: str
    value: bytes
    ttl_s: float
    max_lines: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do one piece of work, for a while.

    Attributes:
        key: Which work.
        fence: Rises with every holder of this key, so that one who lost the lease can be told apart.
    """

    key: str
    fence: int


class Store(Protocol):
    """Where derived data is kept. Losing it costs a summary, never an answer.

    Every method raises `StoreUnavailableError` when the store cannot do what was asked, and may take as long
    as the store takes: deadlines are the caller's. Keys that are written together share one hash tag; keys
    that are read together may have many, at the price of a round trip to each node of a cluster.
    """

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values under `keys`, in their order; None for what is absent or expired.

        Without keys nothing is read, but a store that cannot be reached says so.
        """
        ...

    async def commit(
        self, claim: Record, also: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Write everything, all or nothing, unless `claim.key` is taken.

        Returns the value that now stands under `claim.key`: ours, or the one that was there first, in which
        case nothing was written. So whoever commits first decides the bytes that all use. None where nothing
        stands there and nothing was written, because `lease` is no longer ours.
        """
        ...

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Write everything, all or nothing, over what was there."""
        ...

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines of a list, oldest first."""
        ...

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """A lease on `key`, unless another holds one that has not expired.

        It has nothing to do with a record of the same key, but is kept with it: a commit names a lease whose
        key shares the hash tag.
        """
        ...

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease. False if it is no longer ours."""
        ...

    async def release_lease(self, lease: Lease) -> None:
        """Give a lease back. Nothing happens if it is no longer ours."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Forget every record and list whose key begins with `prefix`; how many.

        With them, and not counted, go the notes of whose they are (`storage.keys.owner_key`). Leases on such
        keys end, too, so that nothing that is being made now comes back. May take as long as there are keys.
        """
        ...

    async def publish(self, channel: str, message: bytes) -> None:
        """Tell every process that listens on a channel. Nothing is kept, and nobody need have heard it."""
        ...

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Messages that are published on a channel, by whichever process, as they come.

        None comes first, once all that is published from then on is heard. It comes again where something
        may have been missed. Ends at once where the store tells processes nothing.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections. Calling it twice does no harm."""
        ...
