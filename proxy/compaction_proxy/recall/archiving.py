"""Writing the archive of a round.

A piece is named by its content: a stretch of 32 messages, counted from the conversation's beginning, or one
long text. So branches, strategies and rounds that archive the same messages, and tools that read the same
file again, write the same piece: it stands there once, and is kept as long as the last of them says. A round
archives only what no earlier round of its chain has. Privileged messages are never replaced, and so never
here. Text that would make an archive too large keeps its beginning and its end.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from compaction_proxy.core.message import Message
from compaction_proxy.recall.archive import KEPT_ARCHIVES, Archived, Piece, Pieces, Round, size_of
from compaction_proxy.storage.keys import archive_key, archives_key, piece_key
from compaction_proxy.storage.records import Fields, Item, Line

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
