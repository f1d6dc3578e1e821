"""What people see who look on: conversations, what was done to them, what that was worth, what happens now.

Everything here reads. Prices may have to be loaded first; that is waited for once in the life of the process.
"""

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.config.config import Config, for_model
from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.cost.savings import pay_back
from compaction_proxy.core.errors import RequestRefused, StoreUnavailable
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.core.upstream_failure import UpstreamFailure
from compaction_proxy.providers.types import Prices
from compaction_proxy.providers.windows import FALLBACK_WINDOW, shipped_window
from compaction_proxy.recall.round_detail import Detail, Details
from compaction_proxy.storage.records import Records
from compaction_proxy.telemetry.conversation_registry import Owners, Seen
from compaction_proxy.telemetry.counters import Counters
from compaction_proxy.telemetry.event_history import History
from compaction_proxy.telemetry.live_feed import Feed, Item
from compaction_proxy.telemetry.statistics import OTHERS, By, Row, Statistics
from compaction_proxy.telemetry.totals import Totals
from compaction_proxy.telemetry.usage import Accounts, Kept

# Conversations that are looked at where all are wanted, or those that a word is found in.
MAX_LOOKED_AT = 1_000
# Models that were asked in this time are listed, in seconds.
SEEN_S = 30 * 86_400.0
# Conversations whose windows tell which ones are in use.
WINDOWS_OF = 200
_PLACE_BYTES = 64
_GLOB = frozenset("*?[")

Sort = Literal["last", "tokens", "net", "requests"]


class Listed(NamedTuple):
    """A conversation in a list, and what it has used."""

    id: str
    totals: Totals


class Compaction(NamedTuple):
    """A round of a conversation.

    Attributes:
        event: What is known of it.
        undone: Whether it is not applied any more.
        pays_back_after: Requests until it has paid for itself; None: that is not known, or never.
    """

    event: Event
    undone: bool
    pays_back_after: float | None


class Standing(NamedTuple):
    """A conversation's account, and whether it is bypassed."""

    totals: Totals
    bypass: bool


class Summed(NamedTuple):
    """Statistics: a row for each hour, day, model or key, and the sum of all."""

    rows: tuple[Row, ...]
    total: Counters


class Model(NamedTuple):
    """What is known of a model.

    Attributes:
        model: Its name.
        window: Largest input, in tokens.
        window_source: `configured`, `learned`, `table` (by its name), or `default`.
        price: What it costs; None: that is not known.
    """

    model: str
    window: int
    window_source: str
    price: Price | None


@dataclass(frozen=True, slots=True)
class Watching:
    """The use cases, on one event loop.

    Those about one conversation raise `RequestRefused` (404) where it is not known; all of them, but for
    `follow` and `upstream_failures`, `StoreUnavailable` where the store cannot be reached.

    Attributes:
        records: What is stored.
        owners: Know which conversations there are, and whose.
        accounts: Keep what each has used, and its exchanges.
        history: Knows what has happened to it.
        details: Know what each round did.
        wishing: Keeps what is asked of it.
        statistics: Count everything.
        feed: Tells what happens now.
        pricing: Knows prices.
        config: The configuration.
        origin: Of the upstream.
        now: Seconds since the epoch.
    """

    records: Records
    owners: Owners
    accounts: Accounts
    history: History
    details: Details
    wishing: Wishing
    statistics: Statistics
    feed: Feed
    pricing: Prices
    config: Config
    origin: str
    now: Callable[[], float] = time.time

    async def conversations(self, limit: int, *, q: str = "", sort: Sort = "last") -> list[Listed]:
        """Conversations with their totals; so many at most.

        Args:
            limit: How many.
            q: What their id or model holds, in any case; empty: anything.
            sort: The largest first: the time of the last request, the tokens that the upstream has counted,
                dollars saved (unknown ones last), or the number of requests.
        """
        plain = sort == "last" and not q
        found = await self._listed(limit if plain else MAX_LOOKED_AT)
        word = q.casefold()
        wanted = [each for each in found if word in each.id or word in each.totals.model.casefold()]
        return sorted(wanted, key=lambda each: _rank(each.totals, sort), reverse=True)[:limit]

    async def standing(self, conversation: str) -> Standing:
        """The conversation's account, and whether it is bypassed."""
        tenant = await self._tenant(conversation)
        [totals] = await self.accounts.totals([(tenant, conversation)])
        return Standing(totals, (await self.wishing.of(tenant, conversation)).bypass)

    async def exchanges(self, conversation: str, limit: int) -> list[Kept]:
        """Its newest exchanges, oldest first."""
        return await self.accounts.exchanges(await self._tenant(conversation), conversation, limit)

    async def compactions(self, conversation: str) -> list[Compaction]:
        """Its rounds, oldest first."""
        tenant = await self._tenant(conversation)
        events = await self.history.of(tenant, conversation)
        return await self._rounds(tenant, conversation, [e for e in events if e.kind == COMPACTED])

    async def detail(self, conversation: str, place: str) -> tuple[Compaction, Detail]:
        """A round, and what it did.

        Args:
            conversation: The conversation.
            place: Where its checkpoint is kept (`Event.place`), as hex digits.

        Raises:
            RequestRefused: 404, the conversation has no such round.
        """
        tenant, at = await self._tenant(conversation), _place(place)
        found = await self.details.of(tenant, conversation, at) if at else None
        if found is None:
            raise RequestRefused(404, "There is no such compaction.", "compaction_not_found")
        [made] = await self._rounds(tenant, conversation, [found.event])
        return made, found

    async def summed(self, since: float, until: float, by: By) -> Summed:
        """What all exchanges of these hours come to; see `Statistics.rows`."""
        await self._open()
        rows = await self.statistics.rows(since, until, by)
        total = Counters()
        for row in rows:
            total.join(row.counters)
        return Summed(tuple(rows), total)

    async def recent(self, limit: int, *, failures: bool = False) -> list[Item]:
        """What has happened last, newest first; with `failures` only what went wrong."""
        await self._open()
        return await self.feed.recent(limit, failures=failures)

    async def upstream_failures(self, since: float, until: float) -> tuple[list[UpstreamFailure], bool]:
        """Failures of upstreams in these hours, and whether the store has answered.

        The failure that happened last comes first. Without the store the list holds what this process knows.
        """
        unanswered = self.records.unanswered
        found = await self.statistics.list_upstream_failures(since, until)
        return found, self.records.unanswered == unanswered

    def follow(self, after: str | None) -> AsyncGenerator[Item]:
        """What happens, as it happens, with what came since the item of that id."""
        return self.feed.follow(after)

    async def models(self) -> list[Model]:
        """The models that are configured by name, and those that were asked lately; by name."""
        await self._open()
        rows = await self.statistics.rows(self.now() - SEEN_S, self.now(), "model")
        seen = {row.of for row in rows} - {"", OTHERS[0]}
        named = {name for name in self.config.models if _GLOB.isdisjoint(name)}
        await self.pricing.ready((name, self.origin) for name in seen | named)
        used: dict[str, int] = {}
        for each in await self._listed(WINDOWS_OF):
            if each.totals.window:
                used.setdefault(each.totals.model, each.totals.window)
        return [
            model_of(self.config, name, self.pricing.of(name, self.origin), used.get(name))
            for name in sorted(seen | named)
        ]

    async def everything(self) -> AsyncIterator[tuple[Listed, list[Kept], list[Event]]]:
        """Conversations, last in use first, with their exchanges and events; read one at a time."""
        for seen in await self._seen(MAX_LOOKED_AT):
            [totals] = await self.accounts.totals([(seen.tenant, seen.id)])
            exchanges = await self.accounts.exchanges(seen.tenant, seen.id, MAX_LOOKED_AT)
            yield Listed(seen.id, totals), exchanges, await self.history.of(seen.tenant, seen.id)

    async def reachable(self) -> None:
        """Return if the store can be reached; for what begins an answer before it has asked for anything."""
        await self._open()

    async def _rounds(self, tenant: str, conversation: str, events: Sequence[Event]) -> list[Compaction]:
        [totals] = await self.accounts.totals([(tenant, conversation)])
        await self.pricing.ready({(event.asked or totals.model, self.origin) for event in events})
        undone = {place.hex() for place in (await self.wishing.of(tenant, conversation)).undone}
        return [
            Compaction(event, event.place in undone, self._pays_back_after(event, totals)) for event in events
        ]

    def _pays_back_after(self, event: Event, totals: Totals) -> float | None:
        """Requests until the round has paid for itself, where the provider caches what it has read."""
        before, after = event.tokens_before, event.tokens_real or event.tokens_after
        if before is None or after is None:
            return None
        price = self.pricing.of(event.asked or totals.model, self.origin)
        paid = event.cost_usd if event.calls else 0.0
        caches = 1.0 if totals.cached_tokens else 0.0
        return pay_back(before, after, price, summary_usd=paid, cached_share=caches)

    async def _listed(self, limit: int) -> list[Listed]:
        seen = await self._seen(limit)
        totals = await self.accounts.totals([(each.tenant, each.id) for each in seen])
        return [Listed(each.id, used) for each, used in zip(seen, totals, strict=True)]

    async def _seen(self, limit: int) -> list[Seen]:
        await self._open()
        return await self.owners.recent(limit)

    async def _tenant(self, conversation: str) -> str:
        await self._open()
        tenant = await self.owners.of(conversation)
        if tenant is None:
            raise RequestRefused(404, "There is no such conversation.", "conversation_not_found")
        return tenant

    async def _open(self) -> None:
        if not await self.records.open():
            raise StoreUnavailable("store-failed", "the store cannot be reached")


def model_of(config: Config, name: str, price: Price | None, used: int | None = None) -> Model:
    """What is known of a model; `used` is the window that a request was last reckoned with."""
    configured, shipped = for_model(config, name).window, shipped_window(name)
    if configured is not None:
        return Model(name, configured, "configured", price)
    if used is not None and used != (shipped or FALLBACK_WINDOW):
        return Model(name, used, "learned", price)
    return Model(name, shipped or FALLBACK_WINDOW, "table" if shipped else "default", price)


def _rank(totals: Totals, sort: Sort) -> tuple[float, float]:
    """What a list is sorted by, and the time of the last request where that is the same."""
    net = totals.net_usd
    by: dict[Sort, float] = {
        "last": totals.last_at,
        "tokens": totals.prompt_tokens,
        "net": -math.inf if net is None else net,
        "requests": totals.requests,
    }
    return by[sort], totals.last_at


def _place(digits: str) -> bytes | None:
    try:
        place = bytes.fromhex(digits)
    except ValueError:
        return None
    return place if len(place) == _PLACE_BYTES else None
