"""The archive: the messages that rounds have replaced, as text, for people and for recall.

The archive of a round is a record that names its pieces, committed with them, with the round's checkpoint and
with a line in the list of its root that says where it is (`recall.archive`). Versions before wrote the
messages into the record itself; those are read, too.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from compaction_proxy.core.message import Message
from compaction_proxy.storage.keys import archive_key, archives_key, piece_key
from compaction_proxy.storage.records import Fields, Item, Line, Records

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


# Characters of text in one record, and of one message in it.
MAX_RECORD_CHARACTERS = 2 * 1024 * 1024
MAX_MESSAGE_CHARACTERS = 256 * 1024
# Messages in one record; of more, the newest.
MAX_MESSAGES = 10_000
MAX_ROLE_CHARACTERS = 64
# Messages in one stretch: the more, the better they are compressed, and the more of a branch is written anew.
STRETCH_MESSAGES = 32
# From here on a text is a piece of its own, in characters.
PIECE_CHARACTERS = 8 * 1024
GAP = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class Original:
    """A message to be archived.

    Attributes:
        index: Its index among the non-privileged messages.
        id: Its id, `m_…`.
        turn: The turn it belongs to, from 1; 0 before the first.
        message: The message.
    """

    index: int
    id: str
    turn: int
    message: Message


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


class Archive(NamedTuple):
    """What to commit beside a round's checkpoint.

    Attributes:
        items: Its record, and its pieces.
        line: By which it is found.
        pieces: What it consists of.
    """

    items: tuple[Item, ...]
    line: Line
    pieces: Pieces


def archived(tenant: str, root: bytes, made: Round, messages: Iterable[Original], ttl_s: float) -> Archive:
    """The archive of a round.

    Args:
        tenant: Whose it is.
        root: The root that the checkpoint is kept under.
        made: The round.
        messages: Those that it replaces and no earlier round has, in their order.
        ttl_s: Seconds that they are kept.
    """
    kept = _bounded([_kept(each) for each in messages])
    stretches: dict[Piece, Fields] = {}
    texts: dict[Piece, Fields] = {}
    for _, stretch in groupby(kept, key=lambda each: each.index // STRETCH_MESSAGES):
        rows = [_row(each, texts) for each in stretch]
        stretches[_piece(rows, sum(size_of(row[3]) for row in rows if isinstance(row[3], str)))] = {
            "messages": rows
        }
    told = _about(made) | {"stretches": list(map(list, stretches)), "texts": list(map(list, texts))}
    record = Item(archive_key(tenant, root, made.strategy, made.place), told, ttl_s)
    written = [
        Item(piece_key(tenant, root, piece.name), fields, ttl_s)
        for piece, fields in (stretches | texts).items()
    ]
    pieces = Pieces(tuple(stretches), tuple(texts))
    listed = _about(made) | {"bytes": sum(piece.size for piece in pieces)}
    return Archive((record, *written), Line(archives_key(tenant, root), listed, ttl_s, KEPT_ARCHIVES), pieces)


def _kept(each: Original) -> Archived:
    role = each.message.role[:MAX_ROLE_CHARACTERS]
    return Archived(each.id, each.index, role, readable(each.message), each.turn)


def _about(made: Round) -> dict[str, Any]:
    return {
        "conversation": made.conversation,
        "strategy": made.strategy,
        "place": made.place.hex(),
        "round": made.number,
        "at": made.at,
    }


def _piece(content: object, size: int) -> Piece:
    return Piece(hashlib.sha256(json.dumps(content).encode()).hexdigest(), size)


def _row(message: Archived, texts: dict[Piece, Fields]) -> list[Any]:
    """A message in a stretch. A long text joins `texts`, and the name of its piece stands in its place."""
    text: Any = message.text
    if len(message.text) >= PIECE_CHARACTERS:
        piece = _piece(message.text, size_of(message.text))
        texts[piece] = {"text": message.text}
        text = {"piece": piece.name}
    return [message.id, message.index, message.role, text, message.turn]


# What is asked of a store in one call: so many records, and bytes of text in them.
RECORDS_AT_ONCE = 32
BYTES_AT_ONCE = 1_000_000
# Archives that a version before wrote hold everything, so that many are read at once.
ARCHIVES_AT_ONCE = 8


class Place(NamedTuple):
    """Where an archive is.

    Attributes:
        root: The root that it is kept under.
        made: The round that it is of.
    """

    root: bytes
    made: Round


@dataclass(frozen=True, slots=True)
class Recalled:
    """A message that rounds have taken out, whole.

    Attributes:
        message: The message.
        round: The round that took it out.
    """

    message: Archived
    round: Round


def archive_at(tenant: str, place: Place) -> str:
    """The key of an archive's record."""
    return archive_key(tenant, place.root, place.made.strategy, place.made.place)


def _portions(named: Iterable[tuple[bytes, Piece]]) -> Iterator[list[tuple[bytes, str]]]:
    """Pieces, each once, in portions that a store gives within its deadline."""
    portion: list[tuple[bytes, str]] = []
    taken = 0
    for root, piece in dict.fromkeys(named):
        if portion and (len(portion) == RECORDS_AT_ONCE or taken + piece.size > BYTES_AT_ONCE):
            yield portion
            portion, taken = [], 0
        portion.append((root, piece.name))
        taken += piece.size
    if portion:
        yield portion


class Originals:
    """Reads what rounds have taken out. No method raises because of the store.

    Args:
        records: Where archives are kept.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    async def pieces(self, tenant: str, places: Sequence[Place]) -> list[Pieces | None]:
        """What each of these archives consists of; None for one that is not there."""
        found = await self._archives(tenant, places)
        return [pieces_of(fields) if fields else None for fields in found]

    async def of(self, tenant: str, places: Sequence[Place]) -> list[Recalled]:
        """The messages in these archives, archive by archive, without what is not there."""
        archives = await self._archives(tenant, places)
        held = [
            (place, fields, pieces_of(fields))
            for place, fields in zip(places, archives, strict=True)
            if fields
        ]
        stretches = await self.read(
            tenant, [(place.root, piece) for place, _, pieces in held for piece in pieces.stretches]
        )
        read = await self.read(
            tenant, [(place.root, piece) for place, _, pieces in held for piece in pieces.texts]
        )
        texts = {name: text for (_, name), fields in read.items() if (text := text_of(fields)) is not None}
        found: list[Recalled] = []
        for place, fields, pieces in held:
            written = [fields, *(stretches.get((place.root, piece.name), {}) for piece in pieces.stretches)]
            found += [Recalled(each, place.made) for some in written for each in messages_of(some, texts)]
        return found

    async def read(
        self, tenant: str, named: Iterable[tuple[bytes, Piece]]
    ) -> dict[tuple[bytes, str], Fields]:
        """The content of pieces under their roots, by root and name, without what is not there."""
        found: dict[tuple[bytes, str], Fields] = {}
        for portion in _portions(named):
            keys = [piece_key(tenant, root, name) for root, name in portion]
            read = await self._records.find(keys, hold=False)
            found |= {each: fields for each, fields in zip(portion, read, strict=True) if fields}
        return found

    async def _archives(self, tenant: str, places: Sequence[Place]) -> list[Fields | None]:
        keys = [archive_at(tenant, place) for place in places]
        found: list[Fields | None] = []
        for start in range(0, len(keys), ARCHIVES_AT_ONCE):
            found += await self._records.find(keys[start : start + ARCHIVES_AT_ONCE], hold=False)
        return found
