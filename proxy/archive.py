"""The archive: the messages that rounds have replaced, as text, for people and for recall.

The archive of a round is one record, committed with its checkpoint and with a line in the list of its root
that says where it is. A round archives only what no earlier round has. Privileged messages are never
replaced, and so never here. Text that would make a record too large keeps its beginning and its end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.core.keys import archive_key, archives_key
from proxy.core.message import Message
from proxy.storage.records import Fields, Item, Line

# Characters of text in one record, and of one message in it.
MAX_RECORD_CHARACTERS = 2 * 1024 * 1024
MAX_MESSAGE_CHARACTERS = 256 * 1024
# Messages in one record; of more, the newest.
MAX_MESSAGES = 10_000
MAX_ROLE_CHARACTERS = 64
# Archives of one root that are found again.
KEPT_ARCHIVES = 200
GAP = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class Archived:
    """A message in the archive.

    Attributes:
        id: Its id, `m_…`.
        index: Its index among the non-privileged messages.
        role: Its role.
        text: Its text, then its tool calls and what else it carried, as text.
    """

    id: str
    index: int
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """The round that a record is about.

    Attributes:
        conversation: The conversation it was made in, `c_…`.
        strategy: Name of the strategy.
        place: Where its checkpoint is kept, 64 bytes.
        number: 1 for the first of a chain.
        at: When it was made, in seconds since the epoch.
    """

    conversation: str
    strategy: str
    place: bytes
    number: int
    at: float


def readable(message: Message) -> str:
    """A message as text: what it says, a line for each part that is no text, a line for each tool call."""
    lines = [message.text, message.refusal]
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [f"{call.name}({call.arguments})" for call in message.calls]
    return "\n".join(filter(None, lines))


def shortened(text: str, limit: int) -> str:
    """The text, or as much of its beginning and its end, `limit` characters in all, around a note."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    tail = text[len(text) - limit // 2 :]
    return text[:head] + GAP.format(len(text) - limit) + tail


def fair(sizes: Sequence[int], limit: int) -> int:
    """The most that each of these may take so that all of them take `limit` at most: the small ones whole."""
    left = limit
    ordered = sorted(sizes)
    for index, size in enumerate(ordered):
        share = left // (len(ordered) - index)
        if size > share:
            return share
        left -= size
    return limit


def _bounded(messages: Sequence[Archived]) -> Iterator[Archived]:
    newest = messages[-MAX_MESSAGES:]
    most = fair([min(len(each.text), MAX_MESSAGE_CHARACTERS) for each in newest], MAX_RECORD_CHARACTERS)
    for each in newest:
        yield replace(each, text=shortened(each.text, min(most, MAX_MESSAGE_CHARACTERS)))


def archived(
    tenant: str, root: bytes, made: Round, messages: Iterable[tuple[int, str, Message]], ttl_s: float
) -> tuple[Item, Line]:
    """What to commit beside a round's checkpoint: its archive, and the line by which it is found.

    Args:
        tenant: Whose it is.
        root: The root that the checkpoint is kept under.
        made: The round.
        messages: Index, id and message of each that it replaces and no earlier round has, in their order.
        ttl_s: Seconds that they are kept.
    """
    kept = _bounded(
        [
            Archived(name, index, each.role[:MAX_ROLE_CHARACTERS], readable(each))
            for index, name, each in messages
        ]
    )
    about = {
        "conversation": made.conversation,
        "strategy": made.strategy,
        "place": made.place.hex(),
        "round": made.number,
        "at": made.at,
    }
    rows = [[each.id, each.index, each.role, each.text] for each in kept]
    key = archive_key(tenant, root, made.strategy, made.place)
    return (
        Item(key, {**about, "messages": rows}, ttl_s),
        Line(archives_key(tenant, root), about, ttl_s, KEPT_ARCHIVES),
    )


def round_of(fields: Fields) -> Round | None:
    """The round that a record or a line is about; None if it does not say so."""
    try:
        return Round(
            conversation=str(fields["conversation"]),
            strategy=str(fields["strategy"]),
            place=bytes.fromhex(fields["place"]),
            number=int(fields["round"]),
            at=float(fields["at"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def messages_of(fields: Fields) -> Iterator[Archived]:
    """The messages in a record, in their order, without those that cannot be read."""
    rows = fields.get("messages")
    for row in rows if isinstance(rows, list) else ():
        message = _message(row)
        if message is not None:
            yield message


def _message(row: Any) -> Archived | None:  # noqa: ANN401 - a stored JSON value may be anything
    match row:
        case [str(name), int(index), str(role), str(text)]:
            return Archived(name, index, role, text)
    return None
