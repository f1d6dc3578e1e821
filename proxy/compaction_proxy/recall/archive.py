"""Builds and reads archives. An archive contains the text of the messages that a compaction has replaced.

The archive of a compaction consists of one archive record and several pieces. A piece is either a stretch (up
to `STRETCH_MESSAGES` neighbouring messages) or the text of one long message. Each piece has a store key that
contains a digest of the piece's content. Archives with the same root (`storage.keys`) therefore share equal
pieces. The archive record lists the digests of its pieces. A single commit writes the archive record, the
pieces, the compaction's checkpoint, and a line in the list of archives of the conversation's root.

Earlier versions of the proxy wrote the messages into the archive record itself. This module still reads such
records.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from compaction_proxy.core.message import Message
from compaction_proxy.storage.keys import archive_key, archive_piece_key, root_archives_key
from compaction_proxy.storage.records import Fields, ListItem, RecordItem, RecordStore

# Conversations with the same beginning share a root (`storage.keys`), which has a list of their archives.
# This is the maximum number of archives in the list. If there are more, the oldest are dropped from the list,
# and a search that is limited to one conversation no longer finds the messages in them.
MAX_ARCHIVES = 200


@dataclass(frozen=True, slots=True)
class RemovedMessage:
    """A message in the archive.

    Attributes:
        id: The message's id, `m_…`.
        index: Its index among the messages of the conversation that are not fixed.
        role: Its role.
        text: The message as text, with a line for each part that is not text and for each tool call
            (`format_message_text`).
        turn: The number of its turn, from 1; 0 if the message precedes the first turn; None if unknown.
    """

    id: str
    index: int
    role: str
    text: str
    turn: int | None = None


class ArchivePieceInfo(NamedTuple):
    """The name and size of one piece of an archive. The content of the piece is in a record of its own.

    Attributes:
        name: Digest of the piece's content, 64 hex digits. It is part of the piece's store key.
        size_bytes: Bytes of the piece's text as UTF-8.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArchivePieceList:
    """Names and sizes of the pieces of an archive.

    Attributes:
        stretches: Pieces that each contain several neighbouring messages, in the order of the messages.
        texts: Pieces that each contain the text of one long message. The piece with the message itself, in
            `stretches`, has the name of this piece in place of the text.
        size_bytes: Bytes of the message texts in the archive record itself. 0 unless an earlier version of
            the proxy wrote the archive.
    """

    stretches: tuple[ArchivePieceInfo, ...]
    texts: tuple[ArchivePieceInfo, ...]
    size_bytes: int = 0

    def __iter__(self) -> Iterator[ArchivePieceInfo]:
        """Yields the names and sizes of all pieces."""
        yield from self.stretches
        yield from self.texts


@dataclass(frozen=True, slots=True)
class ArchivedRound:
    """The compaction to which an archive belongs.

    Attributes:
        conversation: Id of the conversation, `c_…`.
        strategy: Name of the strategy.
        checkpoint_place: Id of the compaction's checkpoint, 64 bytes. The id is part of the archive's store
            key.
        number: Number of the compaction in its conversation, from 1.
        made_at: Time of the compaction, in seconds since the epoch.
    """

    conversation: str
    strategy: str
    checkpoint_place: bytes
    number: int
    made_at: float


def parse_archived_round(fields: Fields) -> ArchivedRound | None:
    """Returns the compaction that an archive record, or a line in a list of archives, belongs to.

    Returns None if the fields are incomplete or invalid.
    """
    try:
        return ArchivedRound(
            conversation=str(fields["conversation"]),
            strategy=str(fields["strategy"]),
            checkpoint_place=bytes.fromhex(fields["place"]),
            number=int(fields["round"]),
            made_at=float(fields["at"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def count_utf8_bytes(text: str) -> int:
    """Returns the number of bytes of a text as UTF-8. A lone surrogate counts as 3 bytes."""
    return len(text.encode("utf-8", "surrogatepass"))


def parse_archive_contents(fields: Fields) -> ArchivePieceList:
    """Returns the names and sizes of the pieces that an archive record lists. Skips invalid entries."""
    size_bytes = sum(count_utf8_bytes(each.text) for each in parse_messages(fields))
    return ArchivePieceList(
        _parse_pieces(fields.get("stretches")), _parse_pieces(fields.get("texts")), size_bytes
    )


def _parse_pieces(rows: object) -> tuple[ArchivePieceInfo, ...]:
    found = []
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), int(size)]:
                found.append(ArchivePieceInfo(name, size))
    return tuple(found)


def parse_piece_text(fields: Fields) -> str | None:
    """Returns the text of a long message from the fields of its piece.

    Returns None if the fields contain no text.
    """
    text = fields.get("text")
    return text if isinstance(text, str) else None


def parse_messages(fields: Fields, texts: Mapping[str, str] | None = None) -> Iterator[RemovedMessage]:
    """Yields the messages in a record: a stretch, or an archive record of an earlier version of the proxy.

    A stretch is a piece of an archive that contains several messages. Skips messages that cannot be parsed.

    Args:
        fields: The fields of the record.
        texts: Texts of long messages, by the names of their pieces. The function skips a long message whose
            text is missing.
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


# Maximum characters of all message texts in one archive together, and maximum characters of one message text.
# `shorten_texts` shortens longer texts. The first number also limits all texts in one detail record together
# (`recall.round_detail`).
MAX_RECORD_CHARACTERS = 2 * 1024 * 1024
MAX_MESSAGE_CHARACTERS = 256 * 1024
# Maximum number of messages in one archive. If a compaction replaces more, its archive has only the newest.
# A role with more than `MAX_ROLE_CHARACTERS` characters is cut.
MAX_MESSAGES = 10_000
MAX_ROLE_CHARACTERS = 64
# Maximum number of neighbouring messages in one stretch, which is stored as one piece of the archive. Longer
# stretches compress better. But two conversations with the same beginning can share only whole stretches.
# With longer stretches, more of the messages that both contain would be stored twice.
STRETCH_MESSAGES = 32
# A message text of at least this many characters is stored as a piece of its own, apart from the message.
PIECE_CHARACTERS = 8 * 1024
OMISSION_NOTE = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class OriginalMessage:
    """A message that `build_archive` puts into an archive.

    Attributes:
        index: Its index among the messages of the conversation that are not fixed.
        id: The message's id, `m_…`.
        turn: The number of its turn, from 1; 0 if it precedes the first turn.
        message: The message as the client sent it.
    """

    index: int
    id: str
    turn: int
    message: Message


def format_message_text(message: Message) -> str:
    """Returns a message as text.

    The result has the message's text and its refusal, then a line for each part that is not text, and a line
    for each tool call.
    """
    lines = [message.text, message.refusal]
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [f"{call.name}({call.arguments})" for call in message.calls]
    return "\n".join(filter(None, lines))


def shorten_text(text: str, limit: int) -> str:
    """Leaves out the middle of a text that has more than `limit` characters. Returns other texts unchanged.

    The result has `limit` characters of the text, half of them from its beginning and half from its end, with
    a note between the halves. The characters of the note are not included in `limit`.
    """
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    tail = text[len(text) - limit // 2 :]
    return text[:head] + OMISSION_NOTE.format(len(text) - limit) + tail


def compute_cut_size(sizes: Sequence[int], limit: int) -> int:
    """Returns the size to which all larger items must be cut so that the sum of all sizes is at most `limit`.

    The result is the largest such size. Smaller items keep their size. Returns `limit` if no item must be
    cut. Sizes and `limit` have the same unit.
    """
    room = limit
    ordered = sorted(sizes)
    for index, size in enumerate(ordered):
        share = room // (len(ordered) - index)
        if size > share:
            return share
        room -= size
    return limit


def shorten_texts(texts: Sequence[str], limit: int) -> list[str]:
    """Shortens the longest texts so that all texts together keep at most `limit` characters.

    No text keeps more than `MAX_MESSAGE_CHARACTERS` characters. The notes that `shorten_text` puts into
    shortened texts are not included in these numbers.
    """
    size = compute_cut_size([min(len(text), MAX_MESSAGE_CHARACTERS) for text in texts], limit)
    return [shorten_text(text, min(size, MAX_MESSAGE_CHARACTERS)) for text in texts]


class Archive(NamedTuple):
    """The records of an archive. The caller commits them together with the compaction's checkpoint.

    Attributes:
        items: The archive record and the pieces.
        list_line: The line for the list of archives that conversations with the same beginning share. Without
            this line, a search of the conversation does not find the archive.
        contents: The names and sizes of the pieces.
    """

    items: tuple[RecordItem, ...]
    list_line: ListItem
    contents: ArchivePieceList


def build_archive(
    tenant: str, root: bytes, archived_round: ArchivedRound, messages: Iterable[OriginalMessage], ttl_s: float
) -> Archive:
    """Builds the archive of a compaction.

    Args:
        tenant: The tenant that owns the conversation.
        root: The root under which the checkpoint is stored: the digest of the conversation's first messages.
        archived_round: The compaction to which the archive belongs.
        messages: The messages that this compaction replaces and no earlier compaction has archived, in order.
        ttl_s: Seconds for which the store keeps the archive.
    """
    newest = [*messages][-MAX_MESSAGES:]
    texts_left = shorten_texts([format_message_text(each.message) for each in newest], MAX_RECORD_CHARACTERS)
    removed_messages = [
        RemovedMessage(each.id, each.index, each.message.role[:MAX_ROLE_CHARACTERS], text, each.turn)
        for each, text in zip(newest, texts_left, strict=True)
    ]
    stretches: dict[ArchivePieceInfo, Fields] = {}
    texts: dict[ArchivePieceInfo, Fields] = {}
    for _, stretch in groupby(removed_messages, key=lambda each: each.index // STRETCH_MESSAGES):
        rows = [_build_stretch_row(each, texts) for each in stretch]
        stretches[
            _build_piece(rows, sum(count_utf8_bytes(row[3]) for row in rows if isinstance(row[3], str)))
        ] = {"messages": rows}
    record_fields = _round_to_fields(archived_round) | {
        "stretches": list(map(list, stretches)),
        "texts": list(map(list, texts)),
    }
    record = RecordItem(
        archive_key(tenant, root, archived_round.strategy, archived_round.checkpoint_place),
        record_fields,
        ttl_s,
    )
    piece_items = [
        RecordItem(archive_piece_key(tenant, root, piece.name), fields, ttl_s)
        for piece, fields in (stretches | texts).items()
    ]
    pieces = ArchivePieceList(tuple(stretches), tuple(texts))
    list_fields = _round_to_fields(archived_round) | {"bytes": sum(piece.size_bytes for piece in pieces)}
    return Archive(
        (record, *piece_items),
        ListItem(root_archives_key(tenant, root), list_fields, ttl_s, MAX_ARCHIVES),
        pieces,
    )


def _round_to_fields(archived_round: ArchivedRound) -> dict[str, Any]:
    return {
        "conversation": archived_round.conversation,
        "strategy": archived_round.strategy,
        "place": archived_round.checkpoint_place.hex(),
        "round": archived_round.number,
        "at": archived_round.made_at,
    }


def _build_piece(content: object, size: int) -> ArchivePieceInfo:
    return ArchivePieceInfo(hashlib.sha256(json.dumps(content).encode()).hexdigest(), size)


def _build_stretch_row(message: RemovedMessage, texts: dict[ArchivePieceInfo, Fields]) -> list[Any]:
    """Returns a message as a JSON list, as it is stored in a piece with several messages (a stretch).

    If the message's text has at least `PIECE_CHARACTERS` characters, adds the text to `texts` as a piece of
    its own. The list then has the name of this piece in place of the text.
    """
    text: Any = message.text
    if len(message.text) >= PIECE_CHARACTERS:
        piece = _build_piece(message.text, count_utf8_bytes(message.text))
        texts[piece] = {"text": message.text}
        text = {"piece": piece.name}
    return [message.id, message.index, message.role, text, message.turn]


# Maximum number of pieces that one call reads from the store, and maximum bytes of text in these pieces
# together. A single piece with more bytes gets a call of its own. Larger calls might exceed the time limit
# for calls of the store.
RECORDS_AT_ONCE = 32
BYTES_AT_ONCE = 1_000_000
# Maximum number of archive records that one call reads from the store. The number is small because archive
# records that earlier versions of the proxy wrote contain the texts of all their messages.
ARCHIVES_AT_ONCE = 8


class ArchiveRef(NamedTuple):
    """Identifies an archive of a tenant. Contains all parts of the archive's store key except the tenant.

    Attributes:
        root: The root under which the archive is stored: the digest of the conversation's first messages.
        round: The compaction to which the archive belongs.
    """

    root: bytes
    round: ArchivedRound


@dataclass(frozen=True, slots=True)
class RecalledMessage:
    """A removed message, read from an archive.

    Attributes:
        message: The message.
        round: The compaction that removed it.
    """

    message: RemovedMessage
    round: ArchivedRound


def build_archive_key(tenant: str, ref: ArchiveRef) -> str:
    """Returns the store key of an archive's record."""
    return archive_key(tenant, ref.root, ref.round.strategy, ref.round.checkpoint_place)


def _batch_pieces(pieces: Iterable[tuple[bytes, ArchivePieceInfo]]) -> Iterator[list[tuple[bytes, str]]]:
    """Yields the pieces in batches, each piece as its root and its name. Yields no piece twice.

    A batch has at most `RECORDS_AT_ONCE` pieces and, unless it has only one piece, `BYTES_AT_ONCE` bytes.
    """
    portion: list[tuple[bytes, str]] = []
    taken_bytes = 0
    for root, piece in dict.fromkeys(pieces):
        if portion and (len(portion) == RECORDS_AT_ONCE or taken_bytes + piece.size_bytes > BYTES_AT_ONCE):
            yield portion
            portion, taken_bytes = [], 0
        portion.append((root, piece.name))
        taken_bytes += piece.size_bytes
    if portion:
        yield portion


class ArchiveReader:
    """Reads archives.

    No method raises an error if the store fails. A record that cannot be read counts as missing.

    Args:
        records: The store of the archives.
    """

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def read_contents(self, tenant: str, refs: Sequence[ArchiveRef]) -> list[ArchivePieceList | None]:
        """Returns, for each archive, the names and sizes of its pieces, or None if its record is missing."""
        found = await self._read_records(tenant, refs)
        return [parse_archive_contents(fields) if fields else None for fields in found]

    async def read_messages(self, tenant: str, refs: Sequence[ArchiveRef]) -> list[RecalledMessage]:
        """Returns the messages of archives, in the order of `refs`, except messages in missing records."""
        archives = await self._read_records(tenant, refs)
        present = [
            (place, fields, parse_archive_contents(fields))
            for place, fields in zip(refs, archives, strict=True)
            if fields
        ]
        stretches = await self.read_pieces(
            tenant, [(place.root, piece) for place, _, pieces in present for piece in pieces.stretches]
        )
        text_records = await self.read_pieces(
            tenant, [(place.root, piece) for place, _, pieces in present for piece in pieces.texts]
        )
        texts = {
            name: text
            for (_, name), fields in text_records.items()
            if (text := parse_piece_text(fields)) is not None
        }
        found: list[RecalledMessage] = []
        for place, fields, pieces in present:
            written = [fields, *(stretches.get((place.root, piece.name), {}) for piece in pieces.stretches)]
            found += [
                RecalledMessage(each, place.round) for some in written for each in parse_messages(some, texts)
            ]
        return found

    async def read_pieces(
        self, tenant: str, pieces: Iterable[tuple[bytes, ArchivePieceInfo]]
    ) -> dict[tuple[bytes, str], Fields]:
        """Returns the fields of pieces, by the root and the name of the piece. Leaves out missing pieces.

        Args:
            tenant: The tenant that owns the archives.
            pieces: The pieces, each with the root of its archive.
        """
        found: dict[tuple[bytes, str], Fields] = {}
        for portion in _batch_pieces(pieces):
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
