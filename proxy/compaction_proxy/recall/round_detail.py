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
    Archived,
    Originals,
    Place,
    Round,
    fair,
    shortened,
)
from compaction_proxy.storage.keys import detail_key
from compaction_proxy.storage.records import Fields, Item, Records
from compaction_proxy.telemetry.event_history import History

# Prompts that are kept of one round; of more, the last. Characters of each, its instructions included.
MAX_PROMPTS = 8
MAX_PROMPT_CHARACTERS = 64 * 1024
# Where a shown message comes from: it was put there by a round, or stands as the client sent it.
STAND_IN, KEPT = "stand-in", "kept"
# In place of instructions, where a prompt stood behind the conversation itself.
CONTINUED = "[The conversation itself, as it would have been forwarded, with this behind it:]"


@dataclass(frozen=True, slots=True)
class Prompt:
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
class Shown:
    """A message as the model saw it once the round was made.

    Attributes:
        role: Its role.
        text: As in `Archived`.
        origin: `stand-in` or `kept`.
        id: Its id, `m_…`; empty for a stand-in, unless it is the message itself, shortened.
    """

    role: str
    text: str
    origin: str
    id: str


@dataclass(frozen=True, slots=True)
class Detail:
    """What one round did.

    Attributes:
        event: The round.
        removed: What it took out or shortened, in the conversation's order.
        prompts: What summary models were asked for it, the last at the end; none where no model was asked.
        seen: What the model that the conversation asks saw then, privileged messages aside.
    """

    event: Event
    removed: tuple[Archived, ...]
    prompts: tuple[Prompt, ...]
    seen: tuple[Shown, ...]


def bounded_prompt(model: str, system: str, text: str) -> Prompt:
    """A prompt of at most 64 Ki characters."""
    instructions = shortened(system, MAX_PROMPT_CHARACTERS // 2)
    return Prompt(model, instructions, shortened(text, MAX_PROMPT_CHARACTERS - len(instructions)))


def detail_item(
    tenant: str, root: bytes, made: Round, prompts: Sequence[Prompt], seen: Sequence[Shown], ttl_s: float
) -> Item:
    """What to commit beside a round's checkpoint and its archive.

    Args:
        tenant: Whose it is.
        root: The root that the checkpoint is kept under.
        made: The round.
        prompts: Bounded ones, in the order in which they were sent.
        seen: What the model saw then; of too much, each of the longest messages keeps its two ends.
        ttl_s: Seconds that it is kept.
    """
    asked = prompts[-MAX_PROMPTS:]
    room = MAX_RECORD_CHARACTERS - sum(len(each.system) + len(each.text) for each in asked)
    fields = {
        "prompts": [list(astuple(each)) for each in asked],
        "seen": [[each.role, each.text, each.origin, each.id] for each in _bounded(seen, room)],
    }
    return Item(detail_key(tenant, root, made.strategy, made.place), fields, ttl_s)


def _bounded(seen: Sequence[Shown], room: int) -> Iterator[Shown]:
    newest = seen[-MAX_MESSAGES:]
    most = fair([min(len(each.text), MAX_MESSAGE_CHARACTERS) for each in newest], room)
    for each in newest:
        text = shortened(each.text, min(most, MAX_MESSAGE_CHARACTERS))
        yield replace(each, role=each.role[:MAX_ROLE_CHARACTERS], text=text)


def prompts_of(fields: Fields) -> Iterator[Prompt]:
    """The prompts in a record, without those that cannot be read."""
    for row in _rows(fields, "prompts"):
        match row:
            case [str(model), str(system), str(text)]:
                yield Prompt(model, system, text)


def seen_of(fields: Fields) -> Iterator[Shown]:
    """The messages in a record, without those that cannot be read."""
    for row in _rows(fields, "seen"):
        match row:
            case [str(role), str(text), str(origin), str(name)]:
                yield Shown(role, text, origin, name)


def _rows(fields: Fields, name: str) -> list[object]:
    rows = fields.get(name)
    return rows if isinstance(rows, list) else []


class Details:
    """Reads what rounds did. No method raises because of the store.

    Args:
        records: Where archives and details are kept.
        history: Knows the rounds.
    """

    def __init__(self, records: Records, history: History) -> None:
        self._records = records
        self._originals = Originals(records)
        self._history = history

    async def of(self, tenant: str, conversation: str, place: bytes) -> Detail | None:
        """What the round at this place did, as far as it is kept; None if it is none of this conversation.

        Args:
            tenant: Whose it is.
            conversation: Its id.
            place: Where the round's checkpoint is kept, 64 bytes (`Event.place`, as bytes).
        """
        events = await self._history.of(tenant, conversation)
        made = (each for each in events if each.kind == COMPACTED and each.place == place.hex())
        event = next(made, None)
        if event is None:
            return None
        round_made = Round(conversation, event.strategy, place, event.round or 0, event.at)
        for root in await self._history.roots(tenant, conversation):
            removed = await self._originals.of(tenant, [Place(root, round_made)])
            [told] = await self._records.find([detail_key(tenant, root, event.strategy, place)], hold=False)
            if removed or told:
                taken = tuple(each.message for each in removed)
                return Detail(event, taken, tuple(prompts_of(told or {})), tuple(seen_of(told or {})))
        return Detail(event, (), (), ())
