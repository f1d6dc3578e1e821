"""What one round did, for people: what it took out, what was asked of a model, what the model saw afterwards.

What a round took out is in its archive. The rest is one more record, committed with the round's checkpoint as
the archive is, and bounded as that is. Privileged messages are in neither.
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
    compute_fair_limit,
    shorten_text,
)
from compaction_proxy.storage.keys import round_detail_key
from compaction_proxy.storage.records import Fields, RecordItem, RecordStore
from compaction_proxy.telemetry.event_history import EventHistory

# Prompts that are kept of one round; of more, the last. Characters of each, its instructions included.
MAX_PROMPTS = 8
MAX_PROMPT_CHARACTERS = 64 * 1024
# Where a shown message comes from: it was put there by a round, or stands as the client sent it.
STAND_IN, KEPT = "stand-in", "kept"
# In place of instructions, where a prompt stood behind the conversation itself.
CONTINUED = "[The conversation itself, as it would have been forwarded, with this behind it:]"


@dataclass(frozen=True, slots=True)
class SummaryPrompt:
    """What a summary model was asked.

    Attributes:
        model: Its name.
        system: Its instructions; `CONTINUED` where the call continued the conversation and had none.
        text: What followed.
    """

    model: str
    system: str
    text: str


@dataclass(frozen=True, slots=True)
class VisibleMessage:
    """A message as the model saw it once the round was made.

    Attributes:
        role: Its role.
        text: As in `RemovedMessage`.
        origin: `stand-in` or `kept`.
        id: Its id, `m_…`; empty for a stand-in, unless it is the message itself, shortened.
    """

    role: str
    text: str
    origin: str
    id: str


@dataclass(frozen=True, slots=True)
class RoundDetail:
    """What one round did.

    Attributes:
        event: The round.
        removed: What it took out or shortened, in the conversation's order.
        prompts: What summary models were asked for it, the last at the end; none where no model was asked.
        seen: What the model that the conversation asks saw then, privileged messages aside.
    """

    event: Event
    removed: tuple[RemovedMessage, ...]
    prompts: tuple[SummaryPrompt, ...]
    seen: tuple[VisibleMessage, ...]


def build_bounded_prompt(model: str, system: str, text: str) -> SummaryPrompt:
    """A prompt of at most 64 Ki characters."""
    instructions = shorten_text(system, MAX_PROMPT_CHARACTERS // 2)
    return SummaryPrompt(model, instructions, shorten_text(text, MAX_PROMPT_CHARACTERS - len(instructions)))


def build_detail_item(
    tenant: str,
    root: bytes,
    archived_round: ArchivedRound,
    prompts: Sequence[SummaryPrompt],
    seen: Sequence[VisibleMessage],
    ttl_s: float,
) -> RecordItem:
    """What to commit beside a round's checkpoint and its archive.

    Args:
        tenant: Whose it is.
        root: The root that the checkpoint is kept under.
        archived_round: The round.
        prompts: Bounded ones, in the order in which they were sent.
        seen: What the model saw then; of too much, each of the longest messages keeps its two ends.
        ttl_s: Seconds that it is kept.
    """
    asked = prompts[-MAX_PROMPTS:]
    room = MAX_RECORD_CHARACTERS - sum(len(each.system) + len(each.text) for each in asked)
    fields = {
        "prompts": [list(astuple(each)) for each in asked],
        "seen": [[each.role, each.text, each.origin, each.id] for each in _shorten_messages(seen, room)],
    }
    return RecordItem(
        round_detail_key(tenant, root, archived_round.strategy, archived_round.place), fields, ttl_s
    )


def _shorten_messages(seen: Sequence[VisibleMessage], room: int) -> Iterator[VisibleMessage]:
    newest = seen[-MAX_MESSAGES:]
    most = compute_fair_limit([min(len(each.text), MAX_MESSAGE_CHARACTERS) for each in newest], room)
    for each in newest:
        text = shorten_text(each.text, min(most, MAX_MESSAGE_CHARACTERS))
        yield replace(each, role=each.role[:MAX_ROLE_CHARACTERS], text=text)


def parse_prompts(fields: Fields) -> Iterator[SummaryPrompt]:
    """The prompts in a record, without those that cannot be read."""
    for row in _get_rows(fields, "prompts"):
        match row:
            case [str(model), str(system), str(text)]:
                yield SummaryPrompt(model, system, text)


def parse_visible_messages(fields: Fields) -> Iterator[VisibleMessage]:
    """The messages in a record, without those that cannot be read."""
    for row in _get_rows(fields, "seen"):
        match row:
            case [str(role), str(text), str(origin), str(name)]:
                yield VisibleMessage(role, text, origin, name)


def _get_rows(fields: Fields, name: str) -> list[object]:
    rows = fields.get(name)
    return rows if isinstance(rows, list) else []


class RoundDetailReader:
    """Reads what rounds did. No method raises because of the store.

    Args:
        records: Where archives and details are kept.
        history: Knows the rounds.
    """

    def __init__(self, records: RecordStore, history: EventHistory) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._history = history

    async def find_detail(self, tenant: str, conversation: str, place: bytes) -> RoundDetail | None:
        """What the round at this place did, as far as it is kept; None if it is none of this conversation.

        Args:
            tenant: Whose it is.
            conversation: Its id.
            place: Where the round's checkpoint is kept, 64 bytes (`Event.place`, as bytes).
        """
        events = await self._history.list_events(tenant, conversation)
        made = (each for each in events if each.kind == COMPACTED and each.place == place.hex())
        event = next(made, None)
        if event is None:
            return None
        round_made = ArchivedRound(conversation, event.strategy, place, event.round or 0, event.at)
        for root in await self._history.list_roots(tenant, conversation):
            removed = await self._archive_reader.read_messages(tenant, [ArchiveRef(root, round_made)])
            [record_fields] = await self._records.get_many(
                [round_detail_key(tenant, root, event.strategy, place)], keep_in_cache=False
            )
            if removed or record_fields:
                taken = tuple(each.message for each in removed)
                return RoundDetail(
                    event,
                    taken,
                    tuple(parse_prompts(record_fields or {})),
                    tuple(parse_visible_messages(record_fields or {})),
                )
        return RoundDetail(event, (), (), ())
