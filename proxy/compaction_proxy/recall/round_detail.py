"""Builds and reads the details of a compaction for people: removed messages, prompts and what the model saw.

The removed messages are in the archive of the compaction. The prompts and the messages that the model saw are
in one more record, the detail record. It is committed with the compaction's checkpoint, and its size is
limited like that of the archive. Neither of them contains privileged messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.recall.archive import (
    MAX_MESSAGE_CHARACTERS,
    MAX_MESSAGES,
    MAX_RECORD_CHARACTERS,
    MAX_ROLE_CHARACTERS,
    ArchivedRound,
    ArchiveReader,
    ArchiveRef,
    RemovedMessage,
    compute_item_limit,
    shorten_text,
)
from compaction_proxy.storage.keys import round_detail_key
from compaction_proxy.storage.records import Fields, RecordItem, RecordStore
from compaction_proxy.telemetry.event_history import EventHistory

# Maximum number of prompts that are kept of a compaction (the last ones), and maximum characters of each
# prompt together with its instructions.
MAX_PROMPTS = 8
MAX_PROMPT_CHARACTERS = 64 * 1024
# The origin of a visible message: a compaction wrote it, or it is as the client sent it.
STAND_IN, KEPT = "stand-in", "kept"
# Stored in place of the instructions if the prompt was appended to the conversation itself (an aligned call).
CONTINUED = "[The conversation itself, as it would have been forwarded, with this behind it:]"


@dataclass(frozen=True, slots=True)
class SummaryPrompt:
    """The prompt of a summary call.

    Attributes:
        model: The name of the summary model.
        system: The instructions; `CONTINUED` if the call continued the conversation and had no instructions.
        text: The text after the instructions.
    """

    model: str
    system: str
    text: str


@dataclass(frozen=True, slots=True)
class VisibleMessage:
    """A message as the model saw it after the compaction.

    Attributes:
        role: The message's role.
        text: The message as text, as in `RemovedMessage`.
        origin: `stand-in` or `kept`.
        id: The message's id, `m_…`. Empty for a replacement, except for a shortened original message.
    """

    role: str
    text: str
    origin: str
    id: str


@dataclass(frozen=True, slots=True)
class RoundDetail:
    """The details of one compaction.

    Attributes:
        event: The event that reports the compaction.
        removed: The messages that it removed or shortened, in the conversation's order.
        prompts: The prompts of its summary calls, in order; empty if no model was called.
        visible_messages: The messages that the conversation's model saw afterwards, without privileged
            messages.
    """

    event: Event
    removed: tuple[RemovedMessage, ...]
    prompts: tuple[SummaryPrompt, ...]
    visible_messages: tuple[VisibleMessage, ...]


def build_bounded_prompt(model: str, system: str, text: str) -> SummaryPrompt:
    """Builds a prompt whose instructions and text are cut to 65,536 characters together."""
    instructions = shorten_text(system, MAX_PROMPT_CHARACTERS // 2)
    return SummaryPrompt(model, instructions, shorten_text(text, MAX_PROMPT_CHARACTERS - len(instructions)))


def build_detail_item(
    tenant: str,
    root: bytes,
    archived_round: ArchivedRound,
    prompts: Sequence[SummaryPrompt],
    visible_messages: Sequence[VisibleMessage],
    ttl_s: float,
) -> RecordItem:
    """Builds the detail record to commit together with a compaction's checkpoint and archive.

    Args:
        tenant: The tenant that owns the conversation.
        root: The root under which the checkpoint is stored.
        archived_round: The compaction.
        prompts: Bounded prompts (`build_bounded_prompt`), in the order in which they were sent.
        visible_messages: The messages that the model saw afterwards. If they are too large, only the
            beginning and the end of the longest messages are kept.
        ttl_s: Seconds for which the record is kept.
    """
    kept_prompts = prompts[-MAX_PROMPTS:]
    room = MAX_RECORD_CHARACTERS - sum(len(each.system) + len(each.text) for each in kept_prompts)
    fields = {
        "prompts": [list(astuple(each)) for each in kept_prompts],
        "seen": [
            [each.role, each.text, each.origin, each.id] for each in _shorten_messages(visible_messages, room)
        ],
    }
    return RecordItem(
        round_detail_key(tenant, root, archived_round.strategy, archived_round.checkpoint_place),
        fields,
        ttl_s,
    )


def _shorten_messages(seen: Sequence[VisibleMessage], room: int) -> Iterator[VisibleMessage]:
    newest = seen[-MAX_MESSAGES:]
    most = compute_item_limit([min(len(each.text), MAX_MESSAGE_CHARACTERS) for each in newest], room)
    for each in newest:
        text = shorten_text(each.text, min(most, MAX_MESSAGE_CHARACTERS))
        yield replace(each, role=each.role[:MAX_ROLE_CHARACTERS], text=text)


def parse_prompts(fields: Fields) -> Iterator[SummaryPrompt]:
    """Yields the prompts in a record. Skips prompts that cannot be read."""
    for row in _get_rows(fields, "prompts"):
        match row:
            case [str(model), str(system), str(text)]:
                yield SummaryPrompt(model, system, text)


def parse_visible_messages(fields: Fields) -> Iterator[VisibleMessage]:
    """Yields the visible messages in a record. Skips messages that cannot be read."""
    for row in _get_rows(fields, "seen"):
        match row:
            case [str(role), str(text), str(origin), str(name)]:
                yield VisibleMessage(role, text, origin, name)


def _get_rows(fields: Fields, name: str) -> list[object]:
    rows = fields.get(name)
    return rows if isinstance(rows, list) else []


class RoundDetailReader:
    """Reads the details of compactions. No method raises because of the store.

    Args:
        records: The store of archives and details.
        history: The event history, which lists the compactions.
    """

    def __init__(self, records: RecordStore, history: EventHistory) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._history = history

    async def find_detail(
        self, tenant: str, conversation: str, checkpoint_place: bytes
    ) -> RoundDetail | None:
        """Returns the stored details of a compaction, or None if it does not belong to the conversation.

        Args:
            tenant: The tenant that owns the conversation.
            conversation: The conversation's id.
            checkpoint_place: Where the compaction's checkpoint is stored, 64 bytes (`Event.place`, as bytes).
        """
        events = await self._history.list_events(tenant, conversation)
        matching = (
            each for each in events if each.kind == COMPACTED and each.place == checkpoint_place.hex()
        )
        event = next(matching, None)
        if event is None:
            return None
        round_made = ArchivedRound(conversation, event.strategy, checkpoint_place, event.round or 0, event.at)
        for root in await self._history.list_roots(tenant, conversation):
            removed = await self._archive_reader.read_messages(tenant, [ArchiveRef(root, round_made)])
            [record_fields] = await self._records.get_many(
                [round_detail_key(tenant, root, event.strategy, checkpoint_place)], keep_in_cache=False
            )
            if removed or record_fields:
                removed_messages = tuple(each.message for each in removed)
                return RoundDetail(
                    event,
                    removed_messages,
                    tuple(parse_prompts(record_fields or {})),
                    tuple(parse_visible_messages(record_fields or {})),
                )
        return RoundDetail(event, (), (), ())
