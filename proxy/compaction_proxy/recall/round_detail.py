"""Builds and reads the details of a compaction, which the admin API and the admin pages show.

The details are the removed messages, the prompts of the summary calls, and the visible messages. Visible
messages are those that the conversation's model got in the request after the compaction. The removed messages
are in the archive of the compaction. The prompts and the visible messages are in the detail record, which the
proxy commits with the compaction's checkpoint. The texts in a detail record have the same size limit as those
in an archive (`MAX_RECORD_CHARACTERS`). Neither an archive nor a detail record contains fixed messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.recall.archive import (
    MAX_MESSAGES,
    MAX_RECORD_CHARACTERS,
    MAX_ROLE_CHARACTERS,
    ArchivedRound,
    ArchiveReader,
    ArchiveRef,
    RemovedMessage,
    shorten_text,
    shorten_texts,
)
from compaction_proxy.storage.keys import round_detail_key
from compaction_proxy.storage.records import Fields, RecordItem, RecordStore
from compaction_proxy.telemetry.event_history import EventHistory

# Maximum number of prompts in a detail record, and maximum characters of each prompt including its
# instructions. If a compaction has more prompts, the record has only the last ones. The middle of a longer
# prompt is left out.
MAX_PROMPTS = 8
MAX_PROMPT_CHARACTERS = 64 * 1024
# The two origins of a visible message. `STAND_IN`: a compaction wrote or shortened the message. `KEPT`: the
# client sent it in this form.
STAND_IN, KEPT = "stand-in", "kept"
# The text that is stored as the instructions of an aligned summary call. In such a call, the prompt follows
# the conversation itself, and there are no other instructions.
CONTINUED = "[The conversation as the proxy would have forwarded it, followed by this text:]"


@dataclass(frozen=True, slots=True)
class SummaryPrompt:
    """The prompt of a summary call.

    Attributes:
        model: The name of the summary model.
        system: The instructions, or `CONTINUED` for an aligned call, which has no instructions of its own.
        text: The text of the prompt, without the instructions.
    """

    model: str
    system: str
    text: str


@dataclass(frozen=True, slots=True)
class VisibleMessage:
    """A message that the conversation's model got after the compaction.

    Attributes:
        role: The message's role.
        text: The message as text, in the form of `RemovedMessage.text`.
        origin: `STAND_IN` or `KEPT`.
        id: The message's id, `m_…`. Empty for a replacement that a compaction wrote. A message that a
            compaction only shortened keeps its id.
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
        removed: The messages that the compaction removed or shortened, in the conversation's order.
        prompts: The prompts of the summary calls of the compaction, in their order; empty if there were none.
        visible_messages: The messages that the conversation's model got afterwards, without fixed messages.
    """

    event: Event
    removed: tuple[RemovedMessage, ...]
    prompts: tuple[SummaryPrompt, ...]
    visible_messages: tuple[VisibleMessage, ...]


def build_bounded_prompt(model: str, system: str, text: str) -> SummaryPrompt:
    """Builds a `SummaryPrompt` with at most about `MAX_PROMPT_CHARACTERS` characters.

    If the instructions have more than half of this number of characters, leaves out their middle. If the text
    has more characters than then remain, leaves out the middle of the text.
    """
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
    """Builds the detail record of a compaction. The caller commits it with the checkpoint and the archive.

    Args:
        tenant: The tenant that owns the conversation.
        root: The root under which the checkpoint is stored: the digest of the conversation's first messages.
        archived_round: The compaction.
        prompts: Bounded prompts (`build_bounded_prompt`), in the order in which they were sent.
        visible_messages: The messages that the conversation's model got after the compaction. If their texts
            are too long for the record, the longest ones lose their middle.
        ttl_s: Seconds for which the store keeps the record.
    """
    kept_prompts = prompts[-MAX_PROMPTS:]
    room = MAX_RECORD_CHARACTERS - sum(len(each.system) + len(each.text) for each in kept_prompts)
    newest = visible_messages[-MAX_MESSAGES:]
    texts = shorten_texts([each.text for each in newest], room)
    fields = {
        "prompts": [list(astuple(each)) for each in kept_prompts],
        "seen": [
            [each.role[:MAX_ROLE_CHARACTERS], text, each.origin, each.id]
            for each, text in zip(newest, texts, strict=True)
        ],
    }
    return RecordItem(
        round_detail_key(tenant, root, archived_round.strategy, archived_round.checkpoint_place),
        fields,
        ttl_s,
    )


def parse_prompts(fields: Fields) -> Iterator[SummaryPrompt]:
    """Yields the prompts in a detail record. Skips prompts that cannot be parsed."""
    for row in _get_rows(fields, "prompts"):
        match row:
            case [str(model), str(system), str(text)]:
                yield SummaryPrompt(model, system, text)


def parse_visible_messages(fields: Fields) -> Iterator[VisibleMessage]:
    """Yields the visible messages in a detail record. Skips messages that cannot be parsed."""
    for row in _get_rows(fields, "seen"):
        match row:
            case [str(role), str(text), str(origin), str(name)]:
                yield VisibleMessage(role, text, origin, name)


def _get_rows(fields: Fields, name: str) -> list[object]:
    rows = fields.get(name)
    return rows if isinstance(rows, list) else []


class RoundDetailReader:
    """Reads the details of compactions. No method raises if the store fails.

    Args:
        records: The store of archives and detail records.
        history: Lists the events of conversations, and the roots under which their records are stored.
    """

    def __init__(self, records: RecordStore, history: EventHistory) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._history = history

    async def find_detail(
        self, tenant: str, conversation: str, checkpoint_place: bytes
    ) -> RoundDetail | None:
        """Returns the details of a compaction, or None if the conversation has no such compaction.

        If neither the archive nor the detail record can be read, the result contains only the event of the
        compaction.

        Args:
            tenant: The tenant that owns the conversation.
            conversation: The conversation's id.
            checkpoint_place: Id of the compaction's checkpoint, 64 bytes (`Event.place`, decoded from hex).
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
