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
    Directives,
    DirectiveStore,
    build_pin_id,
    parse_pin,
)
from compaction_proxy.core.errors import RequestRefusedError, StoreUnavailableError
from compaction_proxy.core.event import (
    BYPASSED,
    COMPACTED,
    INSTRUCTION_REMOVED,
    INSTRUCTION_RESTORED,
    MARKED,
    PINNED,
    RESUMED,
    UNDONE,
    UNPINNED,
    Event,
)
from compaction_proxy.recall.search import ArchiveSearch, Hit, RecalledMessage
from compaction_proxy.storage.keys import conversation_key, scope_prefix, tenant_prefix
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_bus import EventListener, generate_event_id, ignore_event
from compaction_proxy.telemetry.event_history import KEPT_ROOT_LINES, EventHistory
from compaction_proxy.telemetry.totals import Totals, from_fields


@dataclass(frozen=True, slots=True)
class ConversationOverview:
    """A conversation as it stands.

    Attributes:
        totals: What it has used.
        rounds: The events of its rounds, oldest first.
        undone: Places, as hex digits, of those that are not applied.
        directives: What is asked of it.
    """

    totals: Totals
    rounds: tuple[Event, ...]
    undone: frozenset[str]
    directives: Directives


def _build_not_found_error(what: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(404, f"There is no such {what}.", code)


def _require_saved(saved: object) -> None:
    if not saved:
        raise StoreUnavailableError("store-failed", "the store did not take it")


class ConversationCommands:
    """The use cases, on one event loop. A conversation belongs to whoever it was last seen with.

    Every method raises `RequestRefusedError` (404) for a conversation that is not known, and
    `StoreUnavailableError`.

    Args:
        records: What is stored.
        owners: Know whose a conversation is.
        history: Knows what has happened to it.
        directives: Keeps what is asked of it.
        recall: Searches what was taken out of it.
        compacted: Lets replicas know whose requests they must read.
        announce: Told of what was done.
        on_search: Told of each search: `api`, and `found` or `nothing`.
        now: Seconds since the epoch.
    """

    def __init__(  # noqa: PLR0913 - all of them by name
        self,
        records: RecordStore,
        owners: ConversationRegistry,
        history: EventHistory,
        directives: DirectiveStore,
        recall: ArchiveSearch,
        *,
        compacted: CompactedConversations,
        announce: EventListener = ignore_event,
        on_search: Callable[[str, str], None] = lambda _source, _outcome: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._registry = owners
        self._history = history
        self._directives = directives
        self._recall = recall
        self._compacted = compacted
        self._announce = announce
        self._on_search = on_search
        self._now = now

    async def get_overview(self, conversation: str) -> ConversationOverview:
        """The conversation as it stands."""
        tenant = await self._find_tenant(conversation)
        [fields] = await self._records.get_many([conversation_key(tenant, conversation)], bypass_cache=True)
        events = await self._history.list_events(tenant, conversation)
        wishes = await self._directives.get(tenant, conversation)
        return ConversationOverview(
            totals=from_fields(fields or {}),
            rounds=tuple(event for event in events if event.kind == COMPACTED),
            undone=frozenset(place.hex() for place in wishes.undone),
            directives=wishes,
        )

    async def list_events(self, conversation: str) -> list[Event]:
        """What has happened to it, oldest first."""
        return await self._history.list_events(await self._find_tenant(conversation), conversation)

    async def request_compaction(self, conversation: str) -> None:
        """Have its next request compacted."""
        tenant = await self._find_tenant(conversation)
        _require_saved(await self._directives.request_compaction(tenant, conversation))
        await self._compacted.add(tenant, conversation)
        await self._record_event(tenant, Event(MARKED, self._now(), conversation))

    async def bypass_compaction(self, conversation: str) -> None:
        """Have its requests go on as they come, from the next one on; what is stored of it stays."""
        await self._set_bypass(conversation, BYPASSED)

    async def resume_compaction(self, conversation: str) -> None:
        """Have its requests compacted again; what was stored of it is used as before."""
        await self._set_bypass(conversation, RESUMED)

    async def _set_bypass(self, conversation: str, kind: str) -> None:
        tenant, on = await self._find_tenant(conversation), kind == BYPASSED
        before = (await self._directives.get(tenant, conversation)).bypass
        _require_saved(await self._directives.set_bypass(tenant, conversation, on=on))
        if before is not on:
            await self._record_event(tenant, Event(kind, self._now(), conversation))

    async def undo_round(self, conversation: str) -> Event:
        """Take its newest round back; the event of the round that is not applied any more.

        Raises:
            RequestRefused: 409, it has none that was not undone before.
        """
        tenant = await self._find_tenant(conversation)
        undone = set((await self._directives.get(tenant, conversation)).undone)
        rounds = await self._history.list_installed_rounds(tenant, conversation)
        newest = next((each for each in rounds if each.place not in undone), None)
        if newest is None:
            raise RequestRefusedError(
                409, "The conversation has no round that could be undone.", "nothing_to_undo"
            )
        _require_saved(await self._directives.undo_round(tenant, conversation, newest.place))
        event = newest.event
        note = Event(
            UNDONE, self._now(), conversation, strategy=event.strategy, round=event.round, place=event.place
        )
        await self._record_event(tenant, note)
        return event

    async def list_pins(self, conversation: str) -> tuple[str, ...]:
        """Its pins, oldest first."""
        return (await self._directives.get(await self._find_tenant(conversation), conversation)).pins

    async def add_pin(self, conversation: str, text: str) -> tuple[str, ...]:
        """Pin a text; the pins that it has then.

        Raises:
            RequestRefused: 422, it is no valid pin; 409, there are 50 already.
        """
        tenant = await self._find_tenant(conversation)
        pin = parse_pin(text)
        if pin is None:
            wanted = f"1 to {MAX_PIN_CHARACTERS} characters, none of them a control character"
            raise RequestRefusedError(422, f"A pin is {wanted}.", "invalid_pin")
        pins = (await self._directives.get(tenant, conversation)).pins
        if pin in pins:
            return pins
        if len(pins) >= MAX_PINS:
            raise RequestRefusedError(409, f"A conversation has at most {MAX_PINS} pins.", "too_many_pins")
        _require_saved(await self._directives.add_pin(tenant, conversation, pin))
        await self._record_event(tenant, Event(PINNED, self._now(), conversation, reason=build_pin_id(pin)))
        return await self.list_pins(conversation)

    async def remove_pin(self, conversation: str, name: str) -> None:
        """Let go of the pin with this id, `p_…`.

        Raises:
            RequestRefused: 404, there is none.
        """
        tenant = await self._find_tenant(conversation)
        pins = (await self._directives.get(tenant, conversation)).pins
        pin = next((pin for pin in pins if build_pin_id(pin) == name), None)
        if pin is None:
            raise _build_not_found_error("pin", "pin_not_found")
        _require_saved(await self._directives.remove_pin(tenant, conversation, pin))
        await self._record_event(tenant, Event(UNPINNED, self._now(), conversation, reason=name))

    async def get_instructions(self, conversation: str) -> Directives:
        """What its client says of its project (`Directives.instructions`, `Directives.removed`)."""
        return await self._directives.get(await self._find_tenant(conversation), conversation)

    async def set_instruction_removed(self, conversation: str, name: str, *, removed: bool = True) -> None:
        """Leave the instructions with this id, `i_…`, out of requests that are rewritten, or end that.

        Raises:
            RequestRefused: 404, there are none.
        """
        tenant = await self._find_tenant(conversation)
        known = await self._directives.get(tenant, conversation)
        if all(each.id != name for each in known.instructions):
            raise _build_not_found_error("instruction", "instruction_not_found")
        if (name in known.removed) is removed:
            return
        _require_saved(
            await self._directives.set_instruction_removed(tenant, conversation, name, removed=removed)
        )
        kind = INSTRUCTION_REMOVED if removed else INSTRUCTION_RESTORED
        await self._record_event(tenant, Event(kind, self._now(), conversation, reason=name))

    async def search_archive(
        self, conversation: str, query: str, limit: int, *, everywhere: bool = False
    ) -> list[Hit]:
        """What rounds have taken out that answers a query best, the best first.

        Args:
            conversation: Its id.
            query: As for `ArchiveSearch.search`.
            limit: Most hits.
            everywhere: Look in all conversations of the tenant that it belongs to.
        """
        tenant = await self._find_tenant(conversation)
        hits = await self._recall.search(tenant, None if everywhere else conversation, query, limit)
        self._on_search("api", "found" if hits else "nothing")
        return hits

    async def get_archived_message(self, conversation: str, message_id: str) -> RecalledMessage:
        """A message that rounds have taken out of it, whole.

        Raises:
            RequestRefused: 404, there is none with this id.
        """
        found = await self._recall.find_message(
            await self._find_tenant(conversation), conversation, message_id
        )
        if found is None:
            raise _build_not_found_error("message in the archive", "message_not_found")
        return found

    async def list_archived_messages(self, conversation: str) -> list[RecalledMessage]:
        """All messages that its rounds have taken out and that are kept, in their order."""
        return await self._recall.list_removed_messages(await self._find_tenant(conversation), conversation)

    async def forget_conversation(self, conversation: str) -> int:
        """Delete everything that is stored of it, and of branches that begin like it; how many records.

        Requests of this process that are under way write nothing of it afterwards.
        """
        tenant = await self._find_tenant(conversation)
        self._records.deletion_fence.add_deletion(
            scope_prefix(tenant, conversation)
        )  # first: no root joins from here on
        roots = await self._history.list_roots(tenant, conversation, KEPT_ROOT_LINES)
        scopes: list[str | bytes] = [conversation, *roots]
        counts = [await self._records.delete_prefix(scope_prefix(tenant, scope)) for scope in scopes]
        _require_saved(None not in counts)
        await self._recall.record_deleted_roots(tenant, roots)
        await self._registry.forget_conversation(conversation)
        return sum(filter(None, counts))

    async def forget_tenant(self, conversation: str) -> int:
        """Delete everything that is stored of whoever it belongs to.

        How many records, as with `forget_conversation`.
        """
        tenant = await self._find_tenant(conversation)
        count = await self._records.delete_prefix(tenant_prefix(tenant))
        _require_saved(count is not None)
        await self._registry.forget_conversation(conversation)
        return count or 0

    async def _record_event(self, tenant: str, event: Event) -> None:
        """Note it in the history, and tell of it."""
        told = replace(event, id=generate_event_id())
        await self._history.record_event(tenant, told)
        self._announce(tenant, told)

    async def _find_tenant(self, conversation: str) -> str:
        if not await self._records.open():
            raise StoreUnavailableError("store-failed", "the store cannot be reached")
        tenant = await self._registry.find_tenant(conversation)
        if tenant is None:
            raise _build_not_found_error("conversation", "conversation_not_found")
        return tenant
