"""The archive: the messages that rounds have replaced, as text, for people and for recall.

The archive of a round is a record that names its pieces, committed with them, with the round's checkpoint and
with a line in the list of its root that says where it is (`recall.archiving`). Versions before wrote the
messages into the record itself; those are read, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from compaction_proxy.storage.records import Fields

# Archives of one root that are found again.
KEPT_ARCHIVES = 200


@dataclass(frozen=True, slots=True)
class Archived:
    """A message in the archive.

    Attributes:
        id: Its id, `m_…`.
        index: Its index among the non-privileged messages.
        role: Its role.
        text: Its text, then its tool calls and what else it carried, as text.
        turn: The turn it belongs to, from 1; 0 before the first; None where it is not known.
    """

    id: str
    index: int
    role: str
    text: str
    turn: int | None = None


class Piece(NamedTuple):
    """What an archive says of one of its pieces.

    Attributes:
        name: By which it is found: a digest of its content, 64 hex digits.
        size: Bytes of its text, as UTF-8.
    """

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """What an archive consists of.

    Attributes:
        stretches: Pieces that hold messages, in their order.
        texts: Pieces that hold one text each, which a stretch names.
        size: Bytes of text of what it has that is in no piece, because a version before wrote it.
    """

    stretches: tuple[Piece, ...]
    texts: tuple[Piece, ...]
    size: int = 0

    def __iter__(self) -> Iterator[Piece]:
        """All of them."""
        yield from self.stretches
        yield from self.texts


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


def size_of(text: str) -> int:
    """Bytes of a text as UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def pieces_of(fields: Fields) -> Pieces:
    """What the archive in a record consists of."""
    written = sum(size_of(each.text) for each in messages_of(fields))
    return Pieces(_named(fields.get("stretches")), _named(fields.get("texts")), written)


def _named(rows: object) -> tuple[Piece, ...]:
    found = []
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), int(size)]:
                found.append(Piece(name, size))
    return tuple(found)


def text_of(fields: Fields) -> str | None:
    """The text in a piece that holds one; None if it holds none."""
    text = fields.get("text")
    return text if isinstance(text, str) else None


def messages_of(fields: Fields, texts: Mapping[str, str] | None = None) -> Iterator[Archived]:
    """The messages in a stretch, or in an archive of a version before, without those that cannot be read.

    Args:
        fields: What the record says.
        texts: By the name of its piece, each long text; a message whose text is not there is left out.
    """
    rows = fields.get("messages")
    for row in rows if isinstance(rows, list) else ():
        message = _message(row, texts or {})
        if message is not None:
            yield message


def _message(row: object, texts: Mapping[str, str]) -> Archived | None:
    match row:
        case [str(name), int(index), str(role), str(text)]:
            return Archived(name, index, role, text)
        case [str(name), int(index), str(role), str(text), int() | None as turn]:
            return Archived(name, index, role, text, turn)
        case [str(name), int(index), str(role), {"piece": str(piece)}, int() | None as turn]:
            return Archived(name, index, role, texts[piece], turn) if piece in texts else None
    return None
