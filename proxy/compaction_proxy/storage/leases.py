"""Ensures that only one process at a time creates a given record, while the store is available.

The process that creates the record holds a lease on it. All other processes wait for the record.
If the lease expires because its holder died or was stopped, one of the waiting processes gets the next lease.
Each lease has a number, its fence, which the store checks before it writes. Therefore a process whose lease
has expired cannot write the record any more.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import lease_key
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.storage.store import Lease

# Lifetime of a lease, in seconds. If its holder dies, another process can get the lease after this time. A
# live holder renews its lease `RENEWALS` times within this time. A waiting process looks for the record, and
# asks for the lease, every `POLL_S` seconds.
LEASE_S = 10.0
RENEWALS = 3
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LeaseOrRecord:
    """The result of `wait_for_lease_or_record`: the record, or the right to create it.

    Attributes:
        record: The record's fields, if another process has created the record.
        lease: The lease, if this process may create the record. If `record` and `lease` are both None, the
            store is unavailable and cannot grant a lease. This process may then create the record without a
            lease.
    """

    record: Fields | None = None
    lease: Lease | None = None


@asynccontextmanager
async def wait_for_lease_or_record(
    records: RecordStore, key: str, lease_s: float = LEASE_S
) -> AsyncIterator[LeaseOrRecord]:
    """Waits until the record under `key` exists, or until this process holds the lease to create it.

    Renews the lease while the `with` block runs, and releases it afterwards. If the store is unavailable, the
    wait ends without a record or a lease.
    """
    async with AsyncExitStack() as stack:
        record = lease = None
        while record is None and lease is None:
            try:
                lease = await _acquire_or_give_back(records, lease_key(key), lease_s)
            except StoreUnavailableError:
                break
            if lease is not None:
                stack.push_async_callback(records.release_lease, lease)
            [record] = await records.get_many([key], bypass_cache=True)
            if record is None and lease is None:
                await asyncio.sleep(POLL_S)
        if lease is not None and record is None:
            renewal = asyncio.create_task(_renew_until_lost(records, lease, lease_s))
            stack.callback(renewal.cancel)
        yield LeaseOrRecord(record=record, lease=lease if record is None else None)


async def _acquire_or_give_back(records: RecordStore, key: str, lease_s: float) -> Lease | None:
    """Returns a lease on `key`, or None if there is a lease on it already.

    If the caller is cancelled before the store answers, waits for the answer. If the answer is a lease,
    releases it.
    """
    request = asyncio.ensure_future(records.acquire_lease(key, lease_s))
    try:
        return await asyncio.shield(request)
    except asyncio.CancelledError:
        with suppress(StoreUnavailableError):
            lease = await request
            if lease is not None:
                await records.release_lease(lease)
        raise


async def _renew_until_lost(records: RecordStore, lease: Lease, lease_s: float) -> None:
    """Renews the lease until the store reports that it has expired or was released.

    Tries again later if the store does not answer.
    """
    while True:
        await asyncio.sleep(lease_s / RENEWALS)
        try:
            if not await records.renew_lease(lease, lease_s):
                return
        except StoreUnavailableError:
            continue
