"""Whose turn it is to make a record: one process at a time, on however many replicas.

A lease says who is at it. Whoever comes later waits for the record, and takes over when the lease runs out
because its holder has died or been stopped. The fence in the lease keeps a holder that wakes up too late from
writing over what its successor has made.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import lease_key
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.storage.store import Lease

# A dead holder is succeeded after this long, in seconds; a living one renews its lease so often meanwhile.
LEASE_S = 10.0
RENEWALS = 3
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LeaseOrRecord:
    """How it stands with a record that has to be made.

    Attributes:
        record: What the record says, if another has made it meanwhile.
        lease: The right to make it; None also where the store cannot lend one, and everybody may.
    """

    record: Fields | None = None
    lease: Lease | None = None


@asynccontextmanager
async def wait_for_lease_or_record(
    records: RecordStore, key: str, lease_s: float = LEASE_S
) -> AsyncIterator[LeaseOrRecord]:
    """Wait until the record under `key` is there, or it is ours to make. The lease is kept and given back."""
    async with AsyncExitStack() as stack:
        made = lease = None
        while made is None and lease is None:
            try:
                lease = await _acquire_or_give_back(records, lease_key(key), lease_s)
            except StoreUnavailableError:
                break
            if lease is not None:
                stack.push_async_callback(records.release_lease, lease)
            [made] = await records.get_many([key], bypass_cache=True)
            if made is None and lease is None:
                await asyncio.sleep(POLL_S)
        if lease is not None and made is None:
            keeping = asyncio.create_task(_renew_until_lost(records, lease, lease_s))
            stack.callback(keeping.cancel)
        yield LeaseOrRecord(record=made, lease=lease if made is None else None)


async def _acquire_or_give_back(records: RecordStore, key: str, lease_s: float) -> Lease | None:
    """A lease, if there is one. One that comes once the caller has been cancelled is given back."""
    asking = asyncio.ensure_future(records.acquire_lease(key, lease_s))
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        with suppress(StoreUnavailableError):
            lease = await asking
            if lease is not None:
                await records.release_lease(lease)
        raise


async def _renew_until_lost(records: RecordStore, lease: Lease, lease_s: float) -> None:
    """Renew until the store says that the lease is another's; a store that fails to answer says nothing."""
    while True:
        await asyncio.sleep(lease_s / RENEWALS)
        try:
            if not await records.renew_lease(lease, lease_s):
                return
        except StoreUnavailableError:
            continue
