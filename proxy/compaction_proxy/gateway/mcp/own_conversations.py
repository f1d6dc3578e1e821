"""What an agent may ask about the conversations of its own tenant, answered with text for a model.

A conversation of another tenant is as absent as one that there never was. No method raises because of the
store: a sentence says that it does not answer.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from compaction_proxy.compaction.commands import Overview, Steering
from compaction_proxy.core.errors import RequestRefused, StoreUnavailable
from compaction_proxy.core.event import Event
from compaction_proxy.core.masking import one_line
from compaction_proxy.telemetry.conversation_registry import Owners, Seen

# Conversations that are listed, of so many that were looked at, everybody's among them.
LISTED: Final = 10
LOOKED_AT: Final = 500
MODEL_CHARACTERS: Final = 80
NOT_FOUND: Final = "There is no such conversation."
NONE_YET: Final = "No conversation is known yet."
AWAY: Final = "This cannot be said right now: the store of the proxy does not answer."
COMPACTS: Final = "The next request of conversation {} will be compacted."


class OwnConversations:
    """The conversations of tenants, on one event loop.

    Args:
        steering: Looks at them and steers them.
        owners: Know whose they are.
        reachable: Whether the store answers; must not wait.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        steering: Steering,
        owners: Owners,
        *,
        reachable: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._steering = steering
        self._owners = owners
        self._reachable = reachable
        self._now = now

    async def missing(self, tenant: str, conversation: str) -> str:
        """Why a conversation cannot be asked about, as a sentence; empty if it is this tenant's."""
        if await self._owners.of(conversation) == tenant:
            return ""
        return NOT_FOUND if self._reachable() else AWAY

    async def status(self, tenant: str, conversation: str | None) -> str:
        """How a conversation stands; of none in particular, the tenant's last ones, or its only one."""
        if conversation is None:
            seen = [each for each in await self._owners.recent(LOOKED_AT) if each.tenant == tenant]
            if len(seen) != 1:
                return self._listing(seen[:LISTED])
            conversation = seen[0].id
        missing = await self.missing(tenant, conversation)
        if missing:
            return missing
        try:
            overview = await self._steering.overview(conversation)
        except RequestRefused:
            return NOT_FOUND
        except StoreUnavailable:
            return AWAY
        return "\n".join(_told(conversation, overview, self._now()))

    async def compact(self, tenant: str, conversation: str) -> str:
        """Have the next request of a conversation compacted."""
        missing = await self.missing(tenant, conversation)
        if missing:
            return missing
        try:
            await self._steering.compact(conversation)
        except RequestRefused:
            return NOT_FOUND
        except StoreUnavailable:
            return AWAY
        return COMPACTS.format(conversation)

    def _listing(self, seen: Iterable[Seen]) -> str:
        rows = [f"- {each.id}, last used {_ago(self._now() - each.at)}" for each in seen]
        if not rows:
            return NONE_YET if self._reachable() else AWAY
        return "\n".join(["Name one of these conversations, the one used last first:", *rows])


def _ago(seconds: float) -> str:
    minutes = max(int(seconds // 60), 0)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d ago"
    return f"{hours} h ago" if hours else f"{minutes} min ago" if minutes else "just now"


def _told(conversation: str, overview: Overview, now: float) -> Iterator[str]:
    """A line for each thing that is known; nothing of what anybody has written."""
    totals, wishes = overview.totals, overview.wishes
    model = f" Model: {one_line(totals.model, MODEL_CHARACTERS)}." if totals.model else ""
    last = f", the last one {_ago(now - totals.last_at)}" if totals.last_at else ""
    yield f"Conversation {conversation}: {totals.requests} requests{last}.{model}"
    if totals.tokens_before is not None:
        forwarded = totals.tokens_before if totals.tokens_after is None else totals.tokens_after
        due = f" Compaction starts at {totals.trigger:,} tokens." if totals.trigger else ""
        sent = f"Last request: {totals.tokens_before:,} tokens from the client"
        yield f"{sent}, {forwarded:,} to the model.{due}"
    yield f"Rounds of compaction: {len(overview.rounds)}."
    if overview.rounds:
        yield _round(overview.rounds[-1], now)
    if wishes.compact:
        yield "The next request will be compacted."
    if wishes.bypass:
        yield "Compaction is switched off for this conversation."


def _round(event: Event, now: float) -> str:
    """A round in a line."""
    number = "" if event.round is None else f" {event.round}"
    removed = "" if event.messages is None else f", {event.messages} messages removed"
    sizes = ""
    if event.tokens_before is not None and event.tokens_after is not None:
        sizes = f", {event.tokens_before:,} tokens made {event.tokens_after:,}"
    return f"The last one: round{number} by {event.strategy}, {_ago(now - event.at)}{removed}{sizes}."
