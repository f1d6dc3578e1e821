"""Whose a conversation is, for those who know nothing but its id, such as the admin API.

A conversation's id is a keyed digest of its tenant too, so no two tenants share one.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from proxy.core.keys import tenant_key
from proxy.storage.records import Records

# What was written is not written again for so long, in seconds.
NOTED_FOR_S = 60.0
# What could not be written is tried again after so long.
RETRY_S = 1.0
MAX_CONVERSATIONS = 10_000


class Owners:
    """Remembers tenants by conversation, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the last request.
        clock: Monotonic seconds.
    """

    def __init__(
        self, records: Records, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._clock = clock
        self._noted: OrderedDict[str, float] = OrderedDict()

    async def note(self, tenant: str, conversation: str) -> None:
        """A conversation of this tenant is in use. Writes once a minute at most, behind an answer.

        Once a second while the store fails.
        """
        if self._noted.get(conversation, 0.0) > self._clock():
            return
        self._noted[conversation] = self._clock() + NOTED_FOR_S
        self._noted.move_to_end(conversation)
        if len(self._noted) > MAX_CONVERSATIONS:
            self._noted.popitem(last=False)
        if not await self._records.keep(tenant_key(conversation), {"tenant": tenant}, ttl_s=self._ttl_s):
            self._noted[conversation] = self._clock() + RETRY_S

    async def of(self, conversation: str) -> str | None:
        """The tenant of a conversation; None if it is not known."""
        [fields] = await self._records.find([tenant_key(conversation)], fresh=True)
        tenant = (fields or {}).get("tenant")
        return tenant if isinstance(tenant, str) else None

    async def forget(self, conversation: str) -> None:
        """Remember nothing of a conversation, until it is in use again."""
        self._noted.pop(conversation, None)
        await self._records.forget(tenant_key(conversation))
