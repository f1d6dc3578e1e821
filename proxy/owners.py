"""Whose a conversation is, for those who know nothing but its id, such as the admin API.

A conversation's id is a keyed digest of its tenant too, so no two tenants share one.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from proxy.core.keys import conversation_key, owner_key, tenant_key
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
        # By conversation, with its tenant: until when it need not be written. All that is held of it is here.
        self._noted: OrderedDict[str, float] = OrderedDict()
        records.forgetters.append(self._forget)

    async def note(self, tenant: str, conversation: str) -> None:
        """A conversation of this tenant is in use. Writes once a minute at most, behind an answer.

        Once a second while the store fails; not at all for a request that began before it was forgotten.
        """
        key, outdated = conversation_key(tenant, conversation), self._records.outdated
        if self._noted.get(key, 0.0) > self._clock() or outdated.covers(key):
            return
        self._hold(key, NOTED_FOR_S)
        saved = await self._records.keep(tenant_key(conversation), {"tenant": tenant}, ttl_s=self._ttl_s)
        if outdated.covers(key):
            await self.forget(conversation)
        elif not saved:
            self._hold(key, RETRY_S)

    async def of(self, conversation: str) -> str | None:
        """The tenant of a conversation; None if it is not known."""
        [fields] = await self._records.find([tenant_key(conversation)], fresh=True)
        tenant = (fields or {}).get("tenant")
        if not isinstance(tenant, str):
            return None
        key = conversation_key(tenant, conversation)
        if key not in self._noted:
            self._hold(key, 0.0)
        return tenant

    async def forget(self, conversation: str) -> None:
        """Remember nothing of a conversation, until it is in use again."""
        await self._records.forget(tenant_key(conversation))

    def _hold(self, key: str, quiet_s: float) -> None:
        self._noted[key] = self._clock() + quiet_s
        self._noted.move_to_end(key)
        if len(self._noted) > MAX_CONVERSATIONS:
            self._let_go(next(iter(self._noted)))

    def _let_go(self, key: str) -> None:
        del self._noted[key]
        self._records.let_go(owner_key(key) or key)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._noted if key.startswith(prefix) or owner_key(key) == prefix]:
            self._let_go(key)
