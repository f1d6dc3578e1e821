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

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import parse_number
from compaction_proxy.storage.keys import (
    compacted_changes_key,
    compacted_conversations_key,
    compacted_tenants_key,
)
from compaction_proxy.storage.records import Fields, ListItem, RecordStore
from compaction_proxy.storage.resilient import run_with_deadline
from compaction_proxy.support.fail_open import suppress_and_report
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
        records: RecordStore,
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
        self._is_loaded = False
        self._is_listening = False
        self._tasks: list[asyncio.Task[None]] = []

    def has_rounds(self, tenant: str, conversation: str | None) -> bool:
        """Whether a conversation has rounds, as far as this process knows; never waits.

        Without an id: whether any conversation of the tenant without an id has.
        """
        known = self._known.get(tenant)
        return known is not None and (UNNAMED if conversation is None else conversation) in known

    async def add(self, tenant: str, conversation: str | None, *, is_listed: bool = True) -> None:
        """Remember that a conversation has rounds, and tell the other processes unless they know.

        Args:
            tenant: Whose it is.
            conversation: Its id; None if it has none.
            is_listed: Whether other processes may need to know.
        """
        name, now = UNNAMED if conversation is None else conversation, self._now()
        at = self._get_listed_at(tenant, name)
        if now - at < self._listed_for_s and (tenant, name) not in self._unlisted:
            self._hold_conversation(tenant, name, at)
            return
        self._hold_conversation(tenant, name, now)
        self._unlisted.add((tenant, name))
        if is_listed and await self._write_line(tenant, name, now):
            self._unlisted.discard((tenant, name))

    async def load(self) -> bool:
        """Take over what the store knows. Returns whether it has answered."""
        unanswered = self._records.failed_reads
        changes = await self._records.read_tail(compacted_changes_key(), 1)
        oldest = self._now() - self._ttl_s
        lines = await self._records.read_tail(compacted_tenants_key(), MAX_TENANTS)
        tenants = dict.fromkeys(each for line in lines if isinstance(each := line.get("tenant"), str))
        places = asyncio.Semaphore(READ_AT_ONCE)

        async def load_tenant(tenant: str) -> None:
            async with places:
                for line in await self._records.read_tail(compacted_conversations_key(tenant), MAX_OF_TENANT):
                    self._take_line(tenant, line, oldest)

        await asyncio.gather(*map(load_tenant, tenants))
        self._is_loaded = self._records.is_in_use and self._records.failed_reads == unanswered
        if self._is_loaded and changes:
            self._change = _get_change_id(changes[-1])
        return self._is_loaded

    async def start(self) -> None:
        """Load the set, for a few seconds at most, and begin to follow its changes."""
        with suppress_and_report(_log_not_heard):
            await run_with_deadline(START_LIMIT_S, self.load())
        self._tasks = [asyncio.create_task(self._listen_forever()), asyncio.create_task(self._poll_changes())]

    async def close(self) -> None:
        """Follow no more changes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_line(self, tenant: str, name: str, at: float) -> bool:
        """Write and announce a line. Returns whether the store has it."""
        line = {"conversation": name, "at": at}
        entry = ListItem(compacted_conversations_key(tenant), line, self._ttl_s, MAX_OF_TENANT)
        if not self._records.is_in_use or not await self._records.write([entry]):
            return False
        if at - self._tenants.get(tenant, -math.inf) >= self._listed_for_s:
            listed = {"tenant": tenant}
            if not await self._records.append_line(
                compacted_tenants_key(), listed, ttl_s=self._ttl_s, max_lines=MAX_TENANTS
            ):
                return False
            self._tenants[tenant] = at
            if len(self._tenants) > MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
        change = {**line, "tenant": tenant, "change": token_hex(_CHANGE_BYTES)}
        await asyncio.gather(
            self._records.publish(CHANNEL, change),
            self._records.append_line(
                compacted_changes_key(), change, ttl_s=self._ttl_s, max_lines=KEPT_CHANGES
            ),
        )
        return True

    def _get_listed_at(self, tenant: str, name: str) -> float:
        known = self._known.get(tenant)
        return -math.inf if known is None else known.get(name, -math.inf)

    def _take_line(self, tenant: str, line: Fields, oldest: float) -> None:
        name, at = line.get("conversation"), parse_number(line.get("at"))
        if isinstance(name, str) and at is not None and at > oldest:
            self._hold_conversation(tenant, name, max(at, self._get_listed_at(tenant, name)))
            self._unlisted.discard((tenant, name))

    def _hold_conversation(self, tenant: str, name: str, at: float) -> None:
        names = self._known.setdefault(tenant, OrderedDict())
        self._known.move_to_end(tenant)
        self._count += name not in names
        names[name] = at
        names.move_to_end(name)
        if len(names) > MAX_OF_TENANT:
            self._evict_oldest(tenant)
        elif self._count > MAX_CONVERSATIONS:
            self._evict_oldest(max(self._known, key=lambda each: len(self._known[each])))

    def _evict_oldest(self, tenant: str) -> None:
        """Let go of the conversation of a tenant that was in use longest ago."""
        names = self._known[tenant]
        name, _ = names.popitem(last=False)
        self._count -= 1
        self._unlisted.discard((tenant, name))
        if not names:
            del self._known[tenant]

    async def _listen_forever(self) -> None:
        while True:
            with suppress_and_report(_log_not_heard):
                await self._follow_channel()
            self._is_listening = False
            await asyncio.sleep(RETRY_S)

    async def _follow_channel(self) -> None:
        """Follow what the store tells, until it tells nothing more."""
        try:
            async for fields in self._records.listen(CHANNEL):
                if fields is None:  # from here on, or again after a gap
                    self._is_listening = True
                    await self.load()
                else:
                    self._take_change(fields)
        except StoreUnavailableError as error:
            if self._is_listening:
                _log_not_heard(error)

    async def _poll_changes(self) -> None:
        checked = self._clock()
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_listening and self._is_loaded and self._clock() - checked < CHECK_S:
                continue
            checked = self._clock()
            with suppress_and_report(_log_not_heard):
                if self._records.is_in_use:
                    await (self._take_latest_changes() if self._is_loaded else self.load())

    async def _take_latest_changes(self) -> None:
        """Take over the newest changes; everything where there may be more."""
        lines = await self._records.read_tail(compacted_changes_key(), LATEST)
        if len(lines) == LATEST and self._change not in map(_get_change_id, lines):
            await self.load()
        for line in lines:
            self._take_change(line)

    def _take_change(self, line: Fields) -> None:
        if isinstance(tenant := line.get("tenant"), str):
            self._take_line(tenant, line, self._now() - self._ttl_s)
            self._change = _get_change_id(line)


def _get_change_id(line: Fields) -> str:
    return str(line.get("change", ""))


def _log_not_heard(error: BaseException) -> None:
    _log.warning(COMPACTED_NOT_HEARD, error=type(error).__name__)
