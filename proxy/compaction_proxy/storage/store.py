"""The interface of the stores. A store keeps records (one value each), lists and leases under keys."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """One value to store.

    Attributes:
        key: The store key. The keys of items that are written together share a hash tag, the part in `{}`.
        value: An envelope (`compaction_proxy.storage.envelope`). A store does not interpret it.
        ttl_s: Seconds until the record expires; infinite if it does not expire. A read does not extend this
            time.
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
        key: The store key that identifies the work (`storage.keys.lease_key`).
        fence: A number that rises with each new lease on the same key. By this number, the store recognises a
            former holder and refuses its writes.
    """

    key: str
    fence: int


class Store(Protocol):
    """Stores records, lists and leases.

    If a store loses data, some summaries may have to be made again, but no request fails. Every method raises
    `StoreUnavailableError` if the store cannot do its work. A method has no deadline of its own: the caller
    sets one. Keys that are written together must share a hash tag. Keys that are read together may have
    several hash tags, at the cost of a round trip to each node of a cluster.
    """

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values under `keys`, in order; None for a key that is absent or expired.

        Without keys, only checks that the store can be reached.
        """
        ...

    async def commit(
        self, claim: Record, other_items: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Writes `claim` and `other_items` together, unless a value is stored under `claim.key` already.

        Returns the value that is stored under `claim.key` after the call. If there was a value before, this
        is the earlier value, and nothing is written. Otherwise, it is the value of `claim`. The first commit
        therefore decides which bytes all processes use. Returns None, and writes nothing, if there was no
        value and `lease` is not held.
        """
        ...

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Writes all items or none. Replaces earlier values of records, and adds lines to lists."""
        ...

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first."""
        ...

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if there is an unexpired lease on it already.

        The lease expires after `ttl_s` seconds. A record and a lease with the same key do not affect each
        other. A lease that is passed to `commit` must have a key with the hash tag of the committed items.
        """
        ...

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` seconds from now. Returns False if it has expired or was released."""
        ...

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it has expired or was released."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes all records and lists whose keys begin with `prefix`, and returns their number.

        For each conversation whose keys it deletes, also deletes the record that contains the conversation's
        tenant (`storage.keys.derive_conversation_tenant_key`). These records are not counted. Ends leases on
        keys with this prefix, so that work in progress cannot commit these keys again. The more keys there
        are, the longer a call may take.
        """
        ...

    async def publish(self, channel: str, message: bytes) -> None:
        """Sends a message to all processes that listen on a channel.

        The message is not stored. It may be lost before it reaches a process.
        """
        ...

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yields the messages that any process publishes on a channel.

        Yields None first, when the subscription has begun, and again whenever messages may have been missed.
        Ends immediately, without an item, if the store cannot send messages between processes.
        """
        ...

    async def close(self) -> None:
        """Closes files and connections. A second call of this method does nothing."""
        ...
