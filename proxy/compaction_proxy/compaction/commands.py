"""What people do with a conversation that they know by its id: look at it, steer it, search it, forget it.

The proxy need not hold the full history between requests. So what is asked here takes effect with the
conversation's next request, and the event of that round carries the result.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import (
    MAX_PIN_CHARACTERS,
    MAX_PINS,
    Wishes,
    Wishing,
    pin_id,
    valid_pin,
)
from compaction_proxy.core.errors import RequestRefused, StoreUnavailable
from compaction_proxy.core.event import (
    BYPASSED,
    COMPACTED,
    MARKED,
    PINNED,
    REMOVED,
    RESTORED,
    RESUMED,
    UNDONE,
    UNPINNED,
    Event,
)
from compaction_proxy.recall.search import Hit, Recall, Recalled
from compaction_proxy.storage.keys import conversation_key, scope_prefix, tenant_prefix
from compaction_proxy.storage.records import Records
from compaction_proxy.telemetry.conversation_registry import Owners
from compaction_proxy.telemetry.event_bus import Listener, event_id, unheard
from compaction_proxy.telemetry.event_history import KEPT_ROOT_LINES, History
from compaction_proxy.telemetry.totals import Totals, from_fields


@dataclass(frozen=True, slots=True)
class Overview:
    """A conversation as it stands.

    Attributes:
        totals: What it has used.
        rounds: The events of its rounds, oldest first.
        undone: Places, as hex digits, of those that are not applied.
        wishes: What is asked of it.
    """

    totals: Totals
    rounds: tuple[Event, ...]
    undone: frozenset[str]
    wishes: Wishes


def _unknown(what: str, code: str) -> RequestRefused:
    return RequestRefused(404, f"There is no such {what}.", code)


def _saved(saved: object) -> None:
    if not saved:
        raise StoreUnavailable("store-failed", "the store did not take it")


class Steering:
    """The use cases, on one event loop. A conversation belongs to whoever it was last seen with.

    Every method raises `RequestRefused` (404) for a conversation that is not known, and `StoreUnavailable`.

    Args:
        records: What is stored.
        owners: Know whose a conversation is.
        history: Knows what has happened to it.
        wishing: Keeps what is asked of it.
        recall: Searches what was taken out of it.
        compacted: Lets replicas know whose requests they must read.
        announce: Told of what was done.
        searched: Told of each search: `api`, and `found` or `nothing`.
        now: Seconds since the epoch.
    """

    def __init__(  # noqa: PLR0913 - all of them by name
        self,
        records: Records,
        owners: Owners,
        history: History,
        wishing: Wishing,
        recall: Recall,
        *,
        compacted: CompactedConversations,
        announce: Listener = unheard,
        searched: Callable[[str, str], None] = lambda _source, _outcome: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._owners = owners
        self._history = history
        self._wishing = wishing
        self._recall = recall
        self._compacted = compacted
        self._announce = announce
        self._searched = searched
        self._now = now

    async def overview(self, conversation: str) -> Overview:
        """The conversation as it stands."""
        tenant = await self._owner(conversation)
        [fields] = await self._records.find([conversation_key(tenant, conversation)], fresh=True)
        events = await self._history.of(tenant, conversation)
        wishes = await self._wishing.of(tenant, conversation)
        return Overview(
            totals=from_fields(fields or {}),
            rounds=tuple(event for event in events if event.kind == COMPACTED),
            undone=frozenset(place.hex() for place in wishes.undone),
            wishes=wishes,
        )

    async def events(self, conversation: str) -> list[Event]:
        """What has happened to it, oldest first."""
        return await self._history.of(await self._owner(conversation), conversation)

    async def compact(self, conversation: str) -> None:
        """Have its next request compacted."""
        tenant = await self._owner(conversation)
        _saved(await self._wishing.ask_compact(tenant, conversation))
        await self._compacted.add(tenant, conversation)
        await self._done(tenant, Event(MARKED, self._now(), conversation))

    async def bypass(self, conversation: str) -> None:
        """Have its requests go on as they come, from the next one on; what is stored of it stays."""
        await self._bypassed(conversation, BYPASSED)

    async def resume(self, conversation: str) -> None:
        """Have its requests compacted again; what was stored of it is used as before."""
        await self._bypassed(conversation, RESUMED)

    async def _bypassed(self, conversation: str, kind: str) -> None:
        tenant, on = await self._owner(conversation), kind == BYPASSED
        before = (await self._wishing.of(tenant, conversation)).bypass
        _saved(await self._wishing.bypass(tenant, conversation, on=on))
        if before is not on:
            await self._done(tenant, Event(kind, self._now(), conversation))

    async def undo(self, conversation: str) -> Event:
        """Take its newest round back; the event of the round that is not applied any more.

        Raises:
            RequestRefused: 409, it has none that was not undone before.
        """
        tenant = await self._owner(conversation)
        undone = set((await self._wishing.of(tenant, conversation)).undone)
        rounds = await self._history.places(tenant, conversation)
        newest = next((each for each in rounds if each.place not in undone), None)
        if newest is None:
            raise RequestRefused(
                409, "The conversation has no round that could be undone.", "nothing_to_undo"
            )
        _saved(await self._wishing.undo(tenant, conversation, newest.place))
        event = newest.event
        note = Event(
            UNDONE, self._now(), conversation, strategy=event.strategy, round=event.round, place=event.place
        )
        await self._done(tenant, note)
        return event

    async def pins(self, conversation: str) -> tuple[str, ...]:
        """Its pins, oldest first."""
        return (await self._wishing.of(await self._owner(conversation), conversation)).pins

    async def pin(self, conversation: str, text: str) -> tuple[str, ...]:
        """Pin a text; the pins that it has then.

        Raises:
            RequestRefused: 422, it is no valid pin; 409, there are 50 already.
        """
        tenant = await self._owner(conversation)
        pin = valid_pin(text)
        if pin is None:
            wanted = f"1 to {MAX_PIN_CHARACTERS} characters, none of them a control character"
            raise RequestRefused(422, f"A pin is {wanted}.", "invalid_pin")
        pins = (await self._wishing.of(tenant, conversation)).pins
        if pin in pins:
            return pins
        if len(pins) >= MAX_PINS:
            raise RequestRefused(409, f"A conversation has at most {MAX_PINS} pins.", "too_many_pins")
        _saved(await self._wishing.pin(tenant, conversation, pin))
        await self._done(tenant, Event(PINNED, self._now(), conversation, reason=pin_id(pin)))
        return await self.pins(conversation)

    async def unpin(self, conversation: str, name: str) -> None:
        """Let go of the pin with this id, `p_…`.

        Raises:
            RequestRefused: 404, there is none.
        """
        tenant = await self._owner(conversation)
        pins = (await self._wishing.of(tenant, conversation)).pins
        pin = next((pin for pin in pins if pin_id(pin) == name), None)
        if pin is None:
            raise _unknown("pin", "pin_not_found")
        _saved(await self._wishing.unpin(tenant, conversation, pin))
        await self._done(tenant, Event(UNPINNED, self._now(), conversation, reason=name))

    async def instructions(self, conversation: str) -> Wishes:
        """What its client says of its project (`Wishes.instructions`, `Wishes.removed`)."""
        return await self._wishing.of(await self._owner(conversation), conversation)

    async def remove_instruction(self, conversation: str, name: str, *, removed: bool = True) -> None:
        """Leave the instructions with this id, `i_…`, out of requests that are rewritten, or end that.

        Raises:
            RequestRefused: 404, there are none.
        """
        tenant = await self._owner(conversation)
        known = await self._wishing.of(tenant, conversation)
        if all(each.id != name for each in known.instructions):
            raise _unknown("instruction", "instruction_not_found")
        if (name in known.removed) is removed:
            return
        _saved(await self._wishing.remove_instruction(tenant, conversation, name, removed=removed))
        kind = REMOVED if removed else RESTORED
        await self._done(tenant, Event(kind, self._now(), conversation, reason=name))

    async def search(
        self, conversation: str, query: str, limit: int, *, everywhere: bool = False
    ) -> list[Hit]:
        """What rounds have taken out that answers a query best, the best first.

        Args:
            conversation: Its id.
            query: As for `Recall.search`.
            limit: Most hits.
            everywhere: Look in all conversations of the tenant that it belongs to.
        """
        tenant = await self._owner(conversation)
        hits = await self._recall.search(tenant, None if everywhere else conversation, query, limit)
        self._searched("api", "found" if hits else "nothing")
        return hits

    async def message(self, conversation: str, message_id: str) -> Recalled:
        """A message that rounds have taken out of it, whole.

        Raises:
            RequestRefused: 404, there is none with this id.
        """
        found = await self._recall.message(await self._owner(conversation), conversation, message_id)
        if found is None:
            raise _unknown("message in the archive", "message_not_found")
        return found

    async def archive(self, conversation: str) -> list[Recalled]:
        """All messages that its rounds have taken out and that are kept, in their order."""
        return await self._recall.everything(await self._owner(conversation), conversation)

    async def forget(self, conversation: str) -> int:
        """Delete everything that is stored of it, and of branches that begin like it; how many records.

        Requests of this process that are under way write nothing of it afterwards.
        """
        tenant = await self._owner(conversation)
        self._records.outdated.add(scope_prefix(tenant, conversation))  # first: no root joins from here on
        roots = await self._history.roots(tenant, conversation, KEPT_ROOT_LINES)
        scopes: list[str | bytes] = [conversation, *roots]
        counts = [await self._records.forget(scope_prefix(tenant, scope)) for scope in scopes]
        _saved(None not in counts)
        await self._recall.forgotten(tenant, roots)
        await self._owners.forget(conversation)
        return sum(filter(None, counts))

    async def forget_tenant(self, conversation: str) -> int:
        """Delete everything that is stored of whoever it belongs to; how many records, as with `forget`."""
        tenant = await self._owner(conversation)
        count = await self._records.forget(tenant_prefix(tenant))
        _saved(count is not None)
        await self._owners.forget(conversation)
        return count or 0

    async def _done(self, tenant: str, event: Event) -> None:
        """Note it in the history, and tell of it."""
        told = replace(event, id=event_id())
        await self._history.note(tenant, told)
        self._announce(tenant, told)

    async def _owner(self, conversation: str) -> str:
        if not await self._records.open():
            raise StoreUnavailable("store-failed", "the store cannot be reached")
        tenant = await self._owners.of(conversation)
        if tenant is None:
            raise _unknown("conversation", "conversation_not_found")
        return tenant
