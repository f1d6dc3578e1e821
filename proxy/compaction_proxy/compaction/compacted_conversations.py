"""Which conversations have rounds: their requests are read however small they are, on every replica.

A request under the gate is not read, and nothing is asked of the store for it. So each process holds the set
of conversations whose small requests need what is stored of them. It loads the set at start and hears of
changes from the store. A store that tells of none is asked for the newest changes once a second.

Each tenant has a list of its own in the store, bounded in lines and in age, and one more list names the
tenants. So a tenant with many conversations drives out only its own.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from secrets import token_hex

import structlog

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.core.event import number
from compaction_proxy.storage.keys import compacted_changes_key, compacted_key, compacted_tenants_key
from compaction_proxy.storage.records import Fields, Line, Records
from compaction_proxy.storage.resilient import within
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import COMPACTED_NOT_HEARD

# Conversations that are held of one tenant and in all, and tenants that are listed.
MAX_OF_TENANT = 10_000
MAX_CONVERSATIONS = 50_000
MAX_TENANTS = 10_000
# A conversation in use is listed again after this long, in seconds, or after a quarter of what rounds live.
LISTED_FOR_S = 86_400.0
LISTED_SHARE = 0.25
# Seconds between two looks for changes where the store tells of none, and where it does: some may get lost.
POLL_S = 1.0
CHECK_S = 15.0
# Changes that are kept for those who look, and that one look takes; after more of them all is loaded anew.
KEPT_CHANGES = 100
LATEST = 16
# Seconds that the start waits for the set, and between two attempts to be told of changes.
START_LIMIT_S = 5.0
RETRY_S = 1.0
# Lists that are read at once.
READ_AT_ONCE = 8
CHANNEL = "compacted"
# Stands for all conversations of a tenant that have no id.
UNNAMED = ""
_CHANGE_BYTES = 8

_log = structlog.get_logger()


class CompactedConversations:
    """The set, on one event loop. No method raises because of the store.

    Args:
        records: Where it is kept.
        ttl_s: Seconds that rounds are kept.
        now: Seconds since the epoch.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        records: Records,
        ttl_s: float,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._listed_for_s = min(LISTED_FOR_S, LISTED_SHARE * ttl_s)
        self._ttl_s = ttl_s
        self._now = now
        self._clock = clock
        # By tenant and conversation: when it was last listed, in seconds since the epoch.
        self._known: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()
        self._count = 0
        self._unlisted: set[tuple[str, str]] = set()  # of which the store has no line
        self._tenants: dict[str, float] = {}  # when this process last listed a tenant
        self._change = ""  # the last one that is known
        self._loaded = False
        self._hears = False
        self._tasks: list[asyncio.Task[None]] = []

    def has(self, tenant: str, conversation: str | None) -> bool:
        """Whether a conversation has rounds, as far as this process knows; never waits.

        Without an id: whether any conversation of the tenant without an id has.
        """
        known = self._known.get(tenant)
        return known is not None and (UNNAMED if conversation is None else conversation) in known

    async def add(self, tenant: str, conversation: str | None, *, listed: bool = True) -> None:
        """Remember that a conversation has rounds, and tell the other processes unless they know.

        Args:
            tenant: Whose it is.
            conversation: Its id; None if it has none.
            listed: Whether other processes may need to know.
        """
        name, now = UNNAMED if conversation is None else conversation, self._now()
        at = self._listed_at(tenant, name)
        if now - at < self._listed_for_s and (tenant, name) not in self._unlisted:
            self._hold(tenant, name, at)
            return
        self._hold(tenant, name, now)
        self._unlisted.add((tenant, name))
        if listed and await self._list(tenant, name, now):
            self._unlisted.discard((tenant, name))

    async def load(self) -> bool:
        """Take over what the store knows. Returns whether it has answered."""
        unanswered = self._records.unanswered
        changes = await self._records.tail(compacted_changes_key(), 1)
        oldest = self._now() - self._ttl_s
        lines = await self._records.tail(compacted_tenants_key(), MAX_TENANTS)
        tenants = dict.fromkeys(each for line in lines if isinstance(each := line.get("tenant"), str))
        places = asyncio.Semaphore(READ_AT_ONCE)

        async def load_tenant(tenant: str) -> None:
            async with places:
                for line in await self._records.tail(compacted_key(tenant), MAX_OF_TENANT):
                    self._take(tenant, line, oldest)

        await asyncio.gather(*map(load_tenant, tenants))
        self._loaded = self._records.in_use and self._records.unanswered == unanswered
        if self._loaded and changes:
            self._change = _change_of(changes[-1])
        return self._loaded

    async def start(self) -> None:
        """Load the set, for a few seconds at most, and begin to follow its changes."""
        with contained(_not_heard):
            await within(START_LIMIT_S, self.load())
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._poll())]

    async def close(self) -> None:
        """Follow no more changes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _list(self, tenant: str, name: str, at: float) -> bool:
        """Write and announce a line. Returns whether the store has it."""
        line = {"conversation": name, "at": at}
        entry = Line(compacted_key(tenant), line, self._ttl_s, MAX_OF_TENANT)
        if not self._records.in_use or not await self._records.write([entry]):
            return False
        if at - self._tenants.get(tenant, -math.inf) >= self._listed_for_s:
            listed = {"tenant": tenant}
            if not await self._records.append(
                compacted_tenants_key(), listed, ttl_s=self._ttl_s, keep=MAX_TENANTS
            ):
                return False
            self._tenants[tenant] = at
            if len(self._tenants) > MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
        change = {**line, "tenant": tenant, "change": token_hex(_CHANGE_BYTES)}
        await asyncio.gather(
            self._records.publish(CHANNEL, change),
            self._records.append(compacted_changes_key(), change, ttl_s=self._ttl_s, keep=KEPT_CHANGES),
        )
        return True

    def _listed_at(self, tenant: str, name: str) -> float:
        known = self._known.get(tenant)
        return -math.inf if known is None else known.get(name, -math.inf)

    def _take(self, tenant: str, line: Fields, oldest: float) -> None:
        name, at = line.get("conversation"), number(line.get("at"))
        if isinstance(name, str) and at is not None and at > oldest:
            self._hold(tenant, name, max(at, self._listed_at(tenant, name)))
            self._unlisted.discard((tenant, name))

    def _hold(self, tenant: str, name: str, at: float) -> None:
        names = self._known.setdefault(tenant, OrderedDict())
        self._known.move_to_end(tenant)
        self._count += name not in names
        names[name] = at
        names.move_to_end(name)
        if len(names) > MAX_OF_TENANT:
            self._let_go(tenant)
        elif self._count > MAX_CONVERSATIONS:
            self._let_go(max(self._known, key=lambda each: len(self._known[each])))

    def _let_go(self, tenant: str) -> None:
        """Let go of the conversation of a tenant that was in use longest ago."""
        names = self._known[tenant]
        name, _ = names.popitem(last=False)
        self._count -= 1
        self._unlisted.discard((tenant, name))
        if not names:
            del self._known[tenant]

    async def _listen(self) -> None:
        while True:
            with contained(_not_heard):
                await self._hear()
            self._hears = False
            await asyncio.sleep(RETRY_S)

    async def _hear(self) -> None:
        """Follow what the store tells, until it tells nothing more."""
        try:
            async for fields in self._records.listen(CHANNEL):
                if fields is None:  # from here on, or again after a gap
                    self._hears = True
                    await self.load()
                else:
                    self._take_change(fields)
        except StoreUnavailable as error:
            if self._hears:
                _not_heard(error)

    async def _poll(self) -> None:
        checked = self._clock()
        while True:
            await asyncio.sleep(POLL_S)
            if self._hears and self._loaded and self._clock() - checked < CHECK_S:
                continue
            checked = self._clock()
            with contained(_not_heard):
                if self._records.in_use:
                    await (self._catch_up() if self._loaded else self.load())

    async def _catch_up(self) -> None:
        """Take over the newest changes; everything where there may be more."""
        lines = await self._records.tail(compacted_changes_key(), LATEST)
        if len(lines) == LATEST and self._change not in map(_change_of, lines):
            await self.load()
        for line in lines:
            self._take_change(line)

    def _take_change(self, line: Fields) -> None:
        if isinstance(tenant := line.get("tenant"), str):
            self._take(tenant, line, self._now() - self._ttl_s)
            self._change = _change_of(line)


def _change_of(line: Fields) -> str:
    return str(line.get("change", ""))


def _not_heard(error: BaseException) -> None:
    _log.warning(COMPACTED_NOT_HEARD, error=type(error).__name__)
