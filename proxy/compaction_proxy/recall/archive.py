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
from compaction_proxy.storage.keys import archive_key, archive_piece_key, root_archives_key
from compaction_proxy.storage.records import Fields, ListItem, RecordItem, RecordStore

# Archives of one root that are found again.
KEPT_ARCHIVES = 200


@dataclass(frozen=True, slots=True)
class RemovedMessage:
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


class ArchivePiece(NamedTuple):
    """What an archive says of one of its pieces.

    Attributes:
        name: By which it is found: a digest of its content, 64 hex digits.
        size_bytes: Bytes of its text, as UTF-8.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """What an archive consists of.

    Attributes:
        stretches: Pieces that hold messages, in their order.
        texts: Pieces that hold one text each, which a stretch names.
        size_bytes: Bytes of text of what it has that is in no piece, because a version before wrote it.
    """

    stretches: tuple[ArchivePiece, ...]
    texts: tuple[ArchivePiece, ...]
    size_bytes: int = 0

    def __iter__(self) -> Iterator[ArchivePiece]:
        """All of them."""
        yield from self.stretches
        yield from self.texts


@dataclass(frozen=True, slots=True)
class ArchivedRound:
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


def parse_round(fields: Fields) -> ArchivedRound | None:
    """The round that a record or a line is about; None if it does not say so."""
    try:
        return ArchivedRound(
            conversation=str(fields["conversation"]),
            strategy=str(fields["strategy"]),
            place=bytes.fromhex(fields["place"]),
            number=int(fields["round"]),
            at=float(fields["at"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def count_utf8_bytes(text: str) -> int:
    """Bytes of a text as UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def parse_contents(fields: Fields) -> ArchiveContents:
    """What the archive in a record consists of."""
    written = sum(count_utf8_bytes(each.text) for each in parse_messages(fields))
    return ArchiveContents(
        _parse_pieces(fields.get("stretches")), _parse_pieces(fields.get("texts")), written
    )


def _parse_pieces(rows: object) -> tuple[ArchivePiece, ...]:
    found = []
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), int(size)]:
                found.append(ArchivePiece(name, size))
    return tuple(found)


def parse_piece_text(fields: Fields) -> str | None:
    """The text in a piece that holds one; None if it holds none."""
    text = fields.get("text")
    return text if isinstance(text, str) else None


def parse_messages(fields: Fields, texts: Mapping[str, str] | None = None) -> Iterator[RemovedMessage]:
    """The messages in a stretch, or in an archive of a version before, without those that cannot be read.

    Args:
        fields: What the record says.
        texts: By the name of its piece, each long text; a message whose text is not there is left out.
    """
    rows = fields.get("messages")
    for row in rows if isinstance(rows, list) else ():
        message = _parse_message(row, texts or {})
        if message is not None:
            yield message


def _parse_message(row: object, texts: Mapping[str, str]) -> RemovedMessage | None:
    match row:
        case [str(name), int(index), str(role), str(text)]:
            return RemovedMessage(name, index, role, text)
        case [str(name), int(index), str(role), str(text), int() | None as turn]:
            return RemovedMessage(name, index, role, text, turn)
        case [str(name), int(index), str(role), {"piece": str(piece)}, int() | None as turn]:
            return RemovedMessage(name, index, role, texts[piece], turn) if piece in texts else None
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
OMISSION_NOTE = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class OriginalMessage:
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


def format_message_text(message: Message) -> str:
    """A message as text: what it says, a line for each part that is no text, a line for each tool call."""
    lines = [message.text, message.refusal]
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [f"{call.name}({call.arguments})" for call in message.calls]
    return "\n".join(filter(None, lines))


def shorten_text(text: str, limit: int) -> str:
    """The text, or as much of its beginning and its end, `limit` characters in all, around a note."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    tail = text[len(text) - limit // 2 :]
    return text[:head] + OMISSION_NOTE.format(len(text) - limit) + tail


def compute_fair_limit(sizes: Sequence[int], limit: int) -> int:
    """The most that each of these may take so that all of them take `limit` at most: the small ones whole."""
    left = limit
    ordered = sorted(sizes)
    for index, size in enumerate(ordered):
        share = left // (len(ordered) - index)
        if size > share:
            return share
        left -= size
    return limit


def _shorten_messages(messages: Sequence[RemovedMessage]) -> Iterator[RemovedMessage]:
    newest = messages[-MAX_MESSAGES:]
    most = compute_fair_limit(
        [min(len(each.text), MAX_MESSAGE_CHARACTERS) for each in newest], MAX_RECORD_CHARACTERS
    )
    for each in newest:
        yield replace(each, text=shorten_text(each.text, min(most, MAX_MESSAGE_CHARACTERS)))


class Archive(NamedTuple):
    """What to commit beside a round's checkpoint.

    Attributes:
        items: Its record, and its pieces.
        line: By which it is found.
        pieces: What it consists of.
    """

    items: tuple[RecordItem, ...]
    line: ListItem
    pieces: ArchiveContents


def build_archive(
    tenant: str, root: bytes, archived_round: ArchivedRound, messages: Iterable[OriginalMessage], ttl_s: float
) -> Archive:
    """The archive of a round.

    Args:
        tenant: Whose it is.
        root: The root that the checkpoint is kept under.
        archived_round: The round.
        messages: Those that it replaces and no earlier round has, in their order.
        ttl_s: Seconds that they are kept.
    """
    removed = _shorten_messages([_to_removed_message(each) for each in messages])
    stretches: dict[ArchivePiece, Fields] = {}
    texts: dict[ArchivePiece, Fields] = {}
    for _, stretch in groupby(removed, key=lambda each: each.index // STRETCH_MESSAGES):
        rows = [_build_row(each, texts) for each in stretch]
        stretches[
            _build_piece(rows, sum(count_utf8_bytes(row[3]) for row in rows if isinstance(row[3], str)))
        ] = {"messages": rows}
    record_fields = _round_to_fields(archived_round) | {
        "stretches": list(map(list, stretches)),
        "texts": list(map(list, texts)),
    }
    record = RecordItem(
        archive_key(tenant, root, archived_round.strategy, archived_round.place), record_fields, ttl_s
    )
    written = [
        RecordItem(archive_piece_key(tenant, root, piece.name), fields, ttl_s)
        for piece, fields in (stretches | texts).items()
    ]
    pieces = ArchiveContents(tuple(stretches), tuple(texts))
    listed = _round_to_fields(archived_round) | {"bytes": sum(piece.size_bytes for piece in pieces)}
    return Archive(
        (record, *written), ListItem(root_archives_key(tenant, root), listed, ttl_s, KEPT_ARCHIVES), pieces
    )


def _to_removed_message(each: OriginalMessage) -> RemovedMessage:
    role = each.message.role[:MAX_ROLE_CHARACTERS]
    return RemovedMessage(each.id, each.index, role, format_message_text(each.message), each.turn)


def _round_to_fields(archived_round: ArchivedRound) -> dict[str, Any]:
    return {
        "conversation": archived_round.conversation,
        "strategy": archived_round.strategy,
        "place": archived_round.place.hex(),
        "round": archived_round.number,
        "at": archived_round.at,
    }


def _build_piece(content: object, size: int) -> ArchivePiece:
    return ArchivePiece(hashlib.sha256(json.dumps(content).encode()).hexdigest(), size)


def _build_row(message: RemovedMessage, texts: dict[ArchivePiece, Fields]) -> list[Any]:
    """A message in a stretch. A long text joins `texts`, and the name of its piece stands in its place."""
    text: Any = message.text
    if len(message.text) >= PIECE_CHARACTERS:
        piece = _build_piece(message.text, count_utf8_bytes(message.text))
        texts[piece] = {"text": message.text}
        text = {"piece": piece.name}
    return [message.id, message.index, message.role, text, message.turn]


# What is asked of a store in one call: so many records, and bytes of text in them.
RECORDS_AT_ONCE = 32
BYTES_AT_ONCE = 1_000_000
# Archives that a version before wrote hold everything, so that many are read at once.
ARCHIVES_AT_ONCE = 8


class ArchiveRef(NamedTuple):
    """Where an archive is.

    Attributes:
        root: The root that it is kept under.
        round: The round that it is of.
    """

    root: bytes
    round: ArchivedRound


@dataclass(frozen=True, slots=True)
class RecalledMessage:
    """A message that rounds have taken out, whole.

    Attributes:
        message: The message.
        round: The round that took it out.
    """

    message: RemovedMessage
    round: ArchivedRound


def build_archive_key(tenant: str, ref: ArchiveRef) -> str:
    """The key of an archive's record."""
    return archive_key(tenant, ref.root, ref.round.strategy, ref.round.place)


def _batch_pieces(named: Iterable[tuple[bytes, ArchivePiece]]) -> Iterator[list[tuple[bytes, str]]]:
    """Pieces, each once, in portions that a store gives within its deadline."""
    portion: list[tuple[bytes, str]] = []
    taken = 0
    for root, piece in dict.fromkeys(named):
        if portion and (len(portion) == RECORDS_AT_ONCE or taken + piece.size_bytes > BYTES_AT_ONCE):
            yield portion
            portion, taken = [], 0
        portion.append((root, piece.name))
        taken += piece.size_bytes
    if portion:
        yield portion


class ArchiveReader:
    """Reads what rounds have taken out. No method raises because of the store.

    Args:
        records: Where archives are kept.
    """

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def read_contents(self, tenant: str, places: Sequence[ArchiveRef]) -> list[ArchiveContents | None]:
        """What each of these archives consists of; None for one that is not there."""
        found = await self._read_records(tenant, places)
        return [parse_contents(fields) if fields else None for fields in found]

    async def read_messages(self, tenant: str, places: Sequence[ArchiveRef]) -> list[RecalledMessage]:
        """The messages in these archives, archive by archive, without what is not there."""
        archives = await self._read_records(tenant, places)
        present = [
            (place, fields, parse_contents(fields))
            for place, fields in zip(places, archives, strict=True)
            if fields
        ]
        stretches = await self.read_pieces(
            tenant, [(place.root, piece) for place, _, pieces in present for piece in pieces.stretches]
        )
        read = await self.read_pieces(
            tenant, [(place.root, piece) for place, _, pieces in present for piece in pieces.texts]
        )
        texts = {
            name: text for (_, name), fields in read.items() if (text := parse_piece_text(fields)) is not None
        }
        found: list[RecalledMessage] = []
        for place, fields, pieces in present:
            written = [fields, *(stretches.get((place.root, piece.name), {}) for piece in pieces.stretches)]
            found += [
                RecalledMessage(each, place.round) for some in written for each in parse_messages(some, texts)
            ]
        return found

    async def read_pieces(
        self, tenant: str, named: Iterable[tuple[bytes, ArchivePiece]]
    ) -> dict[tuple[bytes, str], Fields]:
        """The content of pieces under their roots, by root and name, without what is not there."""
        found: dict[tuple[bytes, str], Fields] = {}
        for portion in _batch_pieces(named):
            keys = [archive_piece_key(tenant, root, name) for root, name in portion]
            read = await self._records.get_many(keys, keep_in_cache=False)
            found |= {each: fields for each, fields in zip(portion, read, strict=True) if fields}
        return found

    async def _read_records(self, tenant: str, places: Sequence[ArchiveRef]) -> list[Fields | None]:
        keys = [build_archive_key(tenant, place) for place in places]
        found: list[Fields | None] = []
        for start in range(0, len(keys), ARCHIVES_AT_ONCE):
            found += await self._records.get_many(keys[start : start + ARCHIVES_AT_ONCE], keep_in_cache=False)
        return found
