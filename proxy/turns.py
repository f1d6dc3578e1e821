"""Whose turn it is to make a record: one process at a time, on however many replicas.

A lease says who is at it. Whoever comes later waits for the record, and takes over when the lease runs out
because its holder has died or been stopped. The fence in the lease keeps a holder that wakes up too late from
writing over what its successor has made.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.core.keys import lease_key
from proxy.errors import StoreUnavailable
from proxy.ports import Lease
from proxy.records import Fields, Records

# A dead holder is succeeded after this long, in seconds; a living one renews its lease three times as often.
LEASE_S = 10.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """How it stands with a record that has to be made.

    Attributes:
        made: What the record says, if another has made it meanwhile.
        lease: The right to make it; None also where the store cannot lend one, and everybody may.
    """

    made: Fields | None = None
    lease: Lease | None = None


@asynccontextmanager
async def turn(records: Records, key: str, lease_s: float = LEASE_S) -> AsyncIterator[Turn]:
    """Wait until the record under `key` is there, or it is ours to make. The lease is kept and given back."""
    current = await _awaited(records, key, lease_s)
    if current.lease is None:
        yield current
        return
    keeping = asyncio.create_task(_kept(records, current.lease, lease_s))
    try:
        yield current
    finally:
        keeping.cancel()
        await records.release(current.lease)


async def _awaited(records: Records, key: str, lease_s: float) -> Turn:
    while True:
        try:
            lease = await records.acquire(lease_key(key), lease_s)
        except StoreUnavailable:
            return Turn()
        [made] = await records.find([key], fresh=True)
        if made is not None:
            if lease is not None:
                await records.release(lease)
            return Turn(made=made)
        if lease is not None:
            return Turn(lease=lease)
        await asyncio.sleep(POLL_S)


async def _kept(records: Records, lease: Lease, lease_s: float) -> None:
    while True:
        await asyncio.sleep(lease_s / 3)
        if not await records.renew(lease, lease_s):
            return
