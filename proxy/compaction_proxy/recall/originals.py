"""Reading archives: records, the pieces that they name, and what stands in those.

Pieces are read a few at a time, because a call of the store has a deadline, and unpacked beside the loop.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compaction_proxy.recall.archive import Archived, Piece, Pieces, Round, messages_of, pieces_of, text_of
from compaction_proxy.storage.keys import archive_key, piece_key
from compaction_proxy.storage.records import Fields, Records

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
