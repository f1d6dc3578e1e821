"""Implements commands on conversations, for example to show, compact, search or delete a conversation.

Between two requests of a conversation, the proxy does not have the messages. So a command that concerns
compaction takes effect with the next request of the conversation. If the proxy then makes a compaction, an
event reports the result.
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
    REDONE,
    RESUMED,
    SCHEDULED,
    UNDONE,
    UNPINNED,
    Event,
)
from compaction_proxy.recall.archive import RecalledMessage
from compaction_proxy.recall.search import ArchiveSearch, SearchHit
from compaction_proxy.storage.keys import conversation_key, scope_prefix, tenant_prefix
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_history import (
    KEPT_ROOT_LINES,
    EventHistory,
    EventListener,
    generate_event_id,
    ignore_event,
)
from compaction_proxy.telemetry.usage import Totals, from_fields


@dataclass(frozen=True, slots=True)
class ConversationOverview:
    """The current state of a conversation.

    Attributes:
        totals: The requests, tokens and cost of the conversation so far.
        rounds: The events that report the compactions of the conversation, oldest first.
        undone: Ids of the checkpoints whose compactions users have undone, as hex digits.
        directives: What users have asked for in this conversation, such as pins.
    """

    totals: Totals
    rounds: tuple[Event, ...]
    undone: frozenset[str]
    directives: Directives


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What an undo has changed.

    Attributes:
        round: The event of the compaction that was undone, which was the newest one in use.
        dropped: The events of prepared compactions that will not be used either, oldest first.
        remaining: The event of the compaction that is in use again; None if there is none.
        totals: The requests, tokens and cost of the conversation so far.
    """

    round: Event
    dropped: tuple[Event, ...]
    remaining: Event | None
    totals: Totals


def _build_not_found_error(resource: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(404, f"The {resource} does not exist.", code)


def _require_saved(saved: object) -> None:
    if not saved:
        raise StoreUnavailableError("store-failed", "the store did not save the change")


class ConversationCommands:
    """Executes commands on conversations. Not thread-safe: use it on one event loop.

    A conversation belongs to the tenant that sent its latest request. Every method raises
    `RequestRefusedError` (404) if the conversation is unknown, and `StoreUnavailableError` if the store
    cannot be reached or does not save a change.

    Args:
        records: Accesses the store.
        registry: Finds the tenant of a conversation.
        history: Reads and stores the events of conversations.
        directives: Stores what users ask for, such as pins.
        recall: Searches removed messages.
        compacted: The set of conversations whose small requests the proxy must parse as well. If a user
            requests a compaction of a conversation, the conversation is added to this set.
        announce: Called with each event that reports an executed command.
        on_search: Called after each search with the source `api` and the outcome `found` or `nothing`.
        now: Returns seconds since the epoch.
    """

    def __init__(  # noqa: PLR0913 - all of them by name
        self,
        records: RecordStore,
        registry: ConversationRegistry,
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
        self._registry = registry
        self._history = history
        self._directives = directives
        self._recall = recall
        self._compacted = compacted
        self._announce = announce
        self._on_search = on_search
        self._now = now

    async def get_overview(self, conversation: str) -> ConversationOverview:
        """Returns the current state of the conversation."""
        tenant = await self._find_tenant(conversation)
        events = await self._history.list_events(tenant, conversation)
        directives = await self._directives.get(tenant, conversation)
        return ConversationOverview(
            totals=await self._read_totals(tenant, conversation),
            rounds=tuple(event for event in events if event.kind == COMPACTED),
            undone=frozenset(place.hex() for place in directives.undone),
            directives=directives,
        )

    async def list_events(self, conversation: str) -> list[Event]:
        """Lists the events of the conversation, oldest first."""
        return await self._history.list_events(await self._find_tenant(conversation), conversation)

    async def request_compaction(self, conversation: str) -> None:
        """Asks for a compaction. The proxy makes it when the next request of the conversation arrives."""
        tenant = await self._find_tenant(conversation)
        _require_saved(
            await self._directives.update(tenant, conversation, lambda known: replace(known, compact=True))
        )
        await self._compacted.add(tenant, conversation)
        await self._record_event(tenant, Event(MARKED, self._now(), conversation))

    async def bypass_compaction(self, conversation: str) -> None:
        """Switches compaction off for the conversation, until `resume_compaction` is called.

        Requests of the conversation are then forwarded unchanged. Stored checkpoints are kept, but the proxy
        does not apply them.
        """
        await self._set_bypass(conversation, BYPASSED)

    async def resume_compaction(self, conversation: str) -> None:
        """Switches compaction on again after `bypass_compaction`. Stored checkpoints are then used again."""
        await self._set_bypass(conversation, RESUMED)

    async def _set_bypass(self, conversation: str, event_kind: str) -> None:
        tenant, on = await self._find_tenant(conversation), event_kind == BYPASSED
        was_on = (await self._directives.get(tenant, conversation)).bypass
        _require_saved(
            await self._directives.update(tenant, conversation, lambda known: replace(known, bypass=on))
        )
        if was_on is not on:
            await self._record_event(tenant, Event(event_kind, self._now(), conversation))

    async def undo_round(self, conversation: str) -> UndoResult:
        """Undoes the newest compaction that is in use, and drops prepared compactions.

        A prepared compaction builds on the one that is undone. So it must not be used later.

        Raises:
            RequestRefusedError: If no compaction is in use (status 409).
        """
        tenant = await self._find_tenant(conversation)
        undone = {place.hex() for place in (await self._directives.get(tenant, conversation)).undone}
        installed = await self._history.list_installed_rounds(tenant, conversation)
        newest, remaining, *_ = [*(each for each in installed if each.place not in undone), None, None]
        if newest is None:
            raise RequestRefusedError(409, "The conversation has no compaction to undo.", "nothing_to_undo")
        used = {each.place for each in installed}
        prepared = tuple(
            each
            for each in await self._history.list_events(tenant, conversation)
            if each.kind == COMPACTED and each.outcome == SCHEDULED and each.place not in {*used, *undone, ""}
        )
        place, prepared_ids = bytes.fromhex(newest.place), [bytes.fromhex(each.place) for each in prepared]
        await self._switch_round(
            tenant, UNDONE, newest, lambda known: known.with_undone_round(place, prepared_ids)
        )
        totals = await self._read_totals(tenant, conversation)
        return UndoResult(newest, prepared, remaining, totals)

    async def redo_round(self, conversation: str) -> Event:
        """Applies the compaction again that was undone last. Returns the event of this compaction.

        Automatic compactions stay suppressed only if a later compaction is still undone. Prepared
        compactions that the undo has dropped may be used again, too.

        Raises:
            RequestRefusedError: If nothing was undone, or if a compaction was made since (status 409).
        """
        tenant = await self._find_tenant(conversation)
        directives = await self._directives.get(tenant, conversation)
        installed = {
            each.place: each for each in await self._history.list_installed_rounds(tenant, conversation)
        }
        undone = [each for each in directives.undone if each.hex() in installed]
        if not undone or not directives.suppressed:
            raise RequestRefusedError(
                409, "The conversation has no undone compaction to redo.", "nothing_to_redo"
            )
        redone = installed[undone[-1].hex()]
        ids = [each for each in directives.undone if each == undone[-1] or each.hex() not in installed]
        suppressed = any(installed[each.hex()].at > redone.at for each in undone)
        await self._switch_round(
            tenant, REDONE, redone, lambda known: known.without_undone_rounds(ids, suppressed=suppressed)
        )
        return redone

    async def _switch_round(
        self, tenant: str, kind: str, made: Event, change: Callable[[Directives], Directives]
    ) -> None:
        """Changes the directives, and records that the compaction of the event `made` is undone or redone."""
        _require_saved(await self._directives.update(tenant, made.conversation, change))
        note = Event(
            kind, self._now(), made.conversation, strategy=made.strategy, round=made.round, place=made.place
        )
        await self._record_event(tenant, note)

    async def list_pins(self, conversation: str) -> tuple[str, ...]:
        """Lists the pins of the conversation, oldest first."""
        return (await self._directives.get(await self._find_tenant(conversation), conversation)).pins

    async def add_pin(self, conversation: str, text: str) -> tuple[str, ...]:
        """Pins a text, and returns all pins of the conversation. Does nothing if the text is already a pin.

        Raises:
            RequestRefusedError: If the text is not a valid pin (status 422), or if the conversation already
                has `MAX_PINS` pins (status 409).
        """
        tenant = await self._find_tenant(conversation)
        pin = parse_pin(text)
        if pin is None:
            wanted = f"1 to {MAX_PIN_CHARACTERS} characters without control characters"
            raise RequestRefusedError(422, f"A pin must have {wanted}.", "invalid_pin")
        pins = (await self._directives.get(tenant, conversation)).pins
        if pin in pins:
            return pins
        if len(pins) >= MAX_PINS:
            raise RequestRefusedError(
                409, f"A conversation can have at most {MAX_PINS} pins.", "too_many_pins"
            )
        _require_saved(await self._directives.add_pin(tenant, conversation, pin))
        await self._record_event(tenant, Event(PINNED, self._now(), conversation, reason=build_pin_id(pin)))
        return await self.list_pins(conversation)

    async def remove_pin(self, conversation: str, pin_id: str) -> None:
        """Removes the pin whose id is `pin_id`, of the form `p_…`.

        Raises:
            RequestRefusedError: If the conversation has no pin with this id (status 404).
        """
        tenant = await self._find_tenant(conversation)
        pins = (await self._directives.get(tenant, conversation)).pins
        pin = next((pin for pin in pins if build_pin_id(pin) == pin_id), None)
        if pin is None:
            raise _build_not_found_error("pin", "pin_not_found")
        _require_saved(
            await self._directives.update(tenant, conversation, lambda known: known.without_pin(pin))
        )
        await self._record_event(tenant, Event(UNPINNED, self._now(), conversation, reason=pin_id))

    async def get_instructions(self, conversation: str) -> Directives:
        """Returns the directives of the conversation, which include its project instructions.

        `Directives.instructions` lists the project instructions that users can remove. `Directives.removed`
        lists the ids of the project instructions that users have removed.
        """
        return await self._directives.get(await self._find_tenant(conversation), conversation)

    async def set_instruction_removed(
        self, conversation: str, instruction_id: str, *, removed: bool = True
    ) -> None:
        """Removes project instructions from the conversation, or restores them.

        The proxy leaves removed instructions out of each later request that it rewrites.

        Args:
            conversation: The conversation id.
            instruction_id: The id of the instructions, `i_…`.
            removed: True to remove the instructions; False to restore them.

        Raises:
            RequestRefusedError: If the conversation has no instructions with this id (status 404).
        """
        tenant = await self._find_tenant(conversation)
        directives = await self._directives.get(tenant, conversation)
        if all(each.id != instruction_id for each in directives.instructions):
            raise _build_not_found_error("instruction", "instruction_not_found")
        if (instruction_id in directives.removed) is removed:
            return
        _require_saved(
            await self._directives.update(
                tenant,
                conversation,
                lambda known: known.with_removed_instruction(instruction_id, removed=removed),
            )
        )
        kind = INSTRUCTION_REMOVED if removed else INSTRUCTION_RESTORED
        await self._record_event(tenant, Event(kind, self._now(), conversation, reason=instruction_id))

    async def search_archive(
        self, conversation: str, query: str, limit: int, *, everywhere: bool = False
    ) -> list[SearchHit]:
        """Searches the removed messages, and returns the best hits first.

        Args:
            conversation: The conversation id.
            query: The words, prefixes and phrases to search for (`ArchiveSearch.search`).
            limit: Largest number of hits.
            everywhere: Whether to search all conversations of the tenant, not only this one.
        """
        tenant = await self._find_tenant(conversation)
        hits = await self._recall.search(tenant, None if everywhere else conversation, query, limit)
        self._on_search("api", "found" if hits else "nothing")
        return hits

    async def get_archived_message(self, conversation: str, message_id: str) -> RecalledMessage:
        """Returns the full original of a removed message from the archive.

        Raises:
            RequestRefusedError: If the archive has no message with this id (status 404).
        """
        message = await self._recall.find_message(
            await self._find_tenant(conversation), conversation, message_id
        )
        if message is None:
            raise _build_not_found_error("message in the archive", "message_not_found")
        return message

    async def list_archived_messages(self, conversation: str) -> list[RecalledMessage]:
        """Lists the removed messages that are still in the archive, in their original order."""
        return await self._recall.list_removed_messages(await self._find_tenant(conversation), conversation)

    async def forget_conversation(self, conversation: str) -> int:
        """Deletes all records of the conversation and of its branches. Returns the number of deleted records.

        Branches are conversations that begin with the same messages. Requests that this process is now
        serving cannot write new records of the conversation.
        """
        tenant = await self._find_tenant(conversation)
        # Records are stored under root digests (digests of the first messages of a conversation). The next
        # line stops all writes for this conversation. Otherwise a running request could add a root digest
        # after the roots were listed, and the records under this root would not be deleted.
        self._records.deletion_fence.add_deletion(scope_prefix(tenant, conversation))
        roots = await self._history.list_roots(tenant, conversation, KEPT_ROOT_LINES)
        scopes: list[str | bytes] = [conversation, *roots]
        counts = [await self._records.delete_prefix(scope_prefix(tenant, scope)) for scope in scopes]
        _require_saved(None not in counts)
        await self._recall.record_deleted_roots(tenant, roots)
        await self._registry.forget_conversation(conversation)
        return sum(filter(None, counts))

    async def forget_owning_tenant(self, conversation: str) -> int:
        """Deletes from the store all data of the tenant that owns the conversation.

        Returns the number of deleted records and lists.
        """
        tenant = await self._find_tenant(conversation)
        count = await self._records.delete_prefix(tenant_prefix(tenant))
        _require_saved(count is not None)
        await self._registry.forget_conversation(conversation)
        return count or 0

    async def _read_totals(self, tenant: str, conversation: str) -> Totals:
        [fields] = await self._records.get_many([conversation_key(tenant, conversation)], bypass_cache=True)
        return from_fields(fields or {})

    async def _record_event(self, tenant: str, event: Event) -> None:
        """Gives the event an id, stores the event in the history, and passes it to `announce`."""
        identified_event = replace(event, id=generate_event_id())
        await self._history.record_event(tenant, identified_event)
        self._announce(tenant, identified_event)

    async def _find_tenant(self, conversation: str) -> str:
        if not await self._records.open():
            raise StoreUnavailableError("store-failed", "the store is not reachable")
        tenant = await self._registry.find_tenant(conversation)
        if tenant is None:
            raise _build_not_found_error("conversation", "conversation_not_found")
        return tenant
