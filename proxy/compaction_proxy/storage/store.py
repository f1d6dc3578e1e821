"""The interface of the stores: records, lists and leases by key."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """One value to store.

    Attributes:
        key: The store key. Records that are read or committed together share the part of their key in `{}`.
        value: An envelope (`compaction_proxy.storage.envelope`). A store does not interpret it.
        ttl_s: Seconds until the record expires, infinite for never. Reading it does not prolong this time.
    """

    key: str
    value: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One line to add to a list of limited length.

    Attributes:
        key: The store key of the list.
        value: The line. A store does not interpret it.
        ttl_s: Seconds until the whole list expires, counted from its newest line.
        max_lines: Number of newest lines that the list keeps.
    """

    key: str
    value: bytes
    ttl_s: float
    max_lines: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do one piece of work, for a limited time.

    Attributes:
        key: The store key of the work.
        fence: A number. Each new lease on the same key gets a higher one, so that the store recognises a
            former holder and refuses its writes.
    """

    key: str
    fence: int


class Store(Protocol):
    """Keeps data that can be made again. Its loss may cost new summaries, but no request fails.

    Every method raises `StoreUnavailableError` if the store cannot do its work. A method has no deadline of
    its own: the caller sets one. Keys that are written together share one hash tag. Keys that are read
    together may have several, at the cost of a round trip to each node of a cluster.
    """

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values under `keys`, in order; None for a key that is absent or expired.

        Without keys, nothing is read, but a store that cannot be reached raises an error.
        """
        ...

    async def commit(
        self, claim: Record, other_items: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Writes all items or none, unless `claim.key` is taken.

        Returns the value that is now stored under `claim.key`: the claim's own, or the one that was there
        first, in which case nothing was written. So the first commit decides the bytes that all processes
        use. Returns None if the key is free and nothing was written because `lease` is lost.
        """
        ...

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Writes all items or none. Replaces earlier values."""
        ...

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first."""
        ...

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if another process holds one that has not expired.

        A record may have the same key as the lease; they do not affect each other. A lease that is passed to
        `commit` must have a key with the same hash tag as the committed records.
        """
        ...

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Prolongs a lease. Returns False if it is lost."""
        ...

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it is lost."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes all records and lists whose keys begin with `prefix`, and returns their number.

        The records that name the tenants of these conversations (`storage.keys.derive_tenant_key`) are
        deleted, too, and not counted. Leases on such keys end, so that work in progress cannot write the keys
        again. The call may take longer the more keys there are.
        """
        ...

    async def publish(self, channel: str, message: bytes) -> None:
        """Sends a message to all processes that listen on a channel.

        The message is not stored. It may be lost before it reaches a process.
        """
        ...

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yields messages as any process publishes them on a channel.

        The first item is None. It means that the process now receives all messages. None comes again when
        messages may have been missed. The generator ends at once if the store cannot send messages between
        processes.
        """
        ...

    async def close(self) -> None:
        """Closes files and connections. Further calls do nothing."""
        ...
