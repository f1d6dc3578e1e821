"""From the bytes of messages to counted core records, each message decoded and counted once.

Clients send their whole history with every request, so nearly all of it is known from the request before:
a message is recognised by its bytes, which its record keeps anyway.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from proxy.core.digest import VERSION, prefix_digests
from proxy.core.message import Message
from proxy.core.tokens import RULES, definition_piece, message_tokens, pieces
from proxy.counting import Counting
from proxy.dialects.chat import Body
from proxy.dialects.chat_message import message
from proxy.dialects.chat_parts import part_tokens
from proxy.lru import Lru

# Known messages are held up to this many bytes; decoded text about doubles it.
MAX_HELD_BYTES = 32 * 1024 * 1024
# Known lists likewise. Their messages are mostly the known ones, and weighed once for each list.
MAX_LISTED_BYTES = 32 * 1024 * 1024
# Sizes of definitions are held for this many characters of them.
MAX_DEFINED = 4 * 1024 * 1024
# What holding a message takes beside its own bytes; nearly all, where messages are short.
RECORD_BYTES = 450
# What a list takes for each of its messages.
PLACE_BYTES = 100
# Messages are decoded in lots of this many bytes.
AT_ONCE_BYTES = 256 * 1024

_Item = TypeVar("_Item")


class Gauge(NamedTuple):
    """How the tokens of one request are counted.

    Attributes:
        model: The model whose vocabulary counts.
        rule: `tiktoken` or `characters`.
    """

    model: str
    rule: str


@dataclass(frozen=True, slots=True)
class Listed:
    """What a client's list holds.

    Attributes:
        messages: All messages, counted.
        body: The non-privileged ones.
        prefixes: Prefix digests of `body`.
        tokens: Sum over `messages`, before calibration.
    """

    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int


EMPTY = Listed((), (), (), 0)


class _Known(NamedTuple):
    """A list that was read.

    Attributes:
        listed: The list.
        size: What it takes, in bytes.
        since: The mark of the list that it grew from, or empty.
    """

    listed: Listed
    size: int
    since: bytes


class Reading:
    """Reads messages, remembering the ones it has read.

    Args:
        countings: What counts, by the name of the rule.
        max_held_bytes: Size of the memory, in bytes of messages and `RECORD_BYTES` for each.
        max_listed_bytes: The same for whole lists, of which the last two of each conversation are held.
    """

    def __init__(
        self,
        countings: dict[str, Counting],
        max_held_bytes: int = MAX_HELD_BYTES,
        max_listed_bytes: int = MAX_LISTED_BYTES,
    ) -> None:
        self._countings = countings
        self._held: Lru[tuple[bytes, Gauge], Message] = Lru(max_held_bytes)
        self._lists: Lru[tuple[bytes, Gauge], _Known] = Lru(max_listed_bytes)
        self._overheads: Lru[tuple[tuple[str, ...], Gauge], int] = Lru(MAX_DEFINED)

    async def listed(self, body: Body, gauge: Gauge) -> Listed:
        """The list of a request, counted and digested; of one that has grown, only what is new is touched.

        Raises:
            Unreadable: One of its messages is none.
        """
        if not body.mark:
            return (await self._grown(EMPTY, body.messages, gauge))[0]
        key = (body.mark, gauge)
        known = self._lists.get(key)
        if known is not None:
            return known.listed
        base = self._lists.get((body.since, gauge)) if body.since else None
        raws = body.late if base else body.messages
        listed, size = await self._grown(base.listed if base else EMPTY, raws, gauge)
        if base and base.since:
            self._lists.drop((base.since, gauge))
        size += base.size if base else 0
        self._lists.put(key, _Known(listed, size, body.since if base else b""), size)
        return listed

    async def _grown(self, base: Listed, raws: Sequence[bytes], gauge: Gauge) -> tuple[Listed, int]:
        """A list with more messages behind it, and the bytes that these take."""
        new = await self.messages(raws, gauge)
        plain = tuple([each for each in new if not each.privileged])
        prefixes: list[bytes] = []
        last = base.prefixes[-1] if base.prefixes else VERSION
        for start, lot in _lots(plain, _held_bytes):
            await _between(start)
            prefixes += prefix_digests(lot, prefixes[-1] if prefixes else last)
        listed = Listed(
            base.messages + new,
            base.body + plain,
            base.prefixes + tuple(prefixes),
            base.tokens + sum([each.tokens for each in new]),
        )
        return listed, sum(map(len, raws)) + len(raws) * (RECORD_BYTES + PLACE_BYTES)

    async def messages(self, raws: Sequence[bytes], gauge: Gauge) -> tuple[Message, ...]:
        """The records of these messages, counted.

        Raises:
            Unreadable: One of them is no message.
        """
        found: list[Message | None] = []
        for start, lot in _lots(raws, _raw_bytes):
            await _between(start)
            found += [self._held.get((raw, gauge)) for raw in lot]
        if None not in found:
            return tuple([record for record in found if record is not None])
        read: list[Message] = []
        for start, lot in _lots(
            [raw for raw, known in zip(raws, found, strict=True) if not known], _raw_bytes
        ):
            await _between(start)
            read += (
                [await asyncio.to_thread(message, lot[0])] if lot and _large(lot[0]) else map(message, lot)
            )
        new = iter(await self.counted(read, gauge))
        records: list[Message] = []
        for start, lot_found in _lots(found, _place_bytes):
            await _between(start)
            records += [known or self._hold(next(new), gauge) for known in lot_found]
        return tuple(records)

    def _hold(self, record: Message, gauge: Gauge) -> Message:
        self._held.put((record.raw, gauge), record, _held_bytes(record))
        return record

    async def counted(self, records: Sequence[Message], gauge: Gauge) -> list[Message]:
        """The records with their tokens."""
        rule = RULES[gauge.rule]
        texts: list[tuple[str, ...]] = []
        for start, lot in _lots(records, _held_bytes):
            await _between(start)
            texts += [pieces(record, rule) for record in lot]
        counts = iter(await self._count([text for each in texts for text in each], gauge))
        pairs = iter(texts)
        made: list[Message] = []
        for start, lot in _lots(records, _held_bytes):
            await _between(start)
            for record in lot:
                counted = [next(counts) for _ in next(pairs)]
                parts = await _parts(record, gauge) if record.parts else 0
                size = message_tokens(record, counted, rule, parts)
                made.append(record.known(record.digest, size))
        return made

    async def overhead(self, definitions: Sequence[str], gauge: Gauge) -> int:
        """Tokens of a request beside its messages: definitions and the reply's primer."""
        key = (tuple(definitions), gauge)
        known = self._overheads.get(key)
        if known is None:
            counts = await self._count([definition_piece(each) for each in definitions], gauge)
            known = sum(counts) + RULES[gauge.rule].reply
            self._overheads.put(key, known, RECORD_BYTES + sum(map(len, definitions)))
        return known

    async def _count(self, texts: Sequence[str], gauge: Gauge) -> list[int]:
        return await self._countings[gauge.rule].count(texts, gauge.model) if texts else []

    def close(self) -> None:
        """Let go of the threads that count."""
        for counting in self._countings.values():
            counting.close()


def _raw_bytes(raw: bytes) -> int:
    return len(raw) + RECORD_BYTES


def _place_bytes(_: object) -> int:
    return PLACE_BYTES


def _held_bytes(record: Message) -> int:
    return len(record.raw) + RECORD_BYTES


def _lots(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterator[tuple[int, Sequence[_Item]]]:
    """The items a few at a time, each lot with the index of its first item."""
    start = pending = 0
    for index, item in enumerate(items):
        pending += size(item)
        if pending > AT_ONCE_BYTES and index > start:
            yield start, items[start:index]
            start, pending = index, size(item)
    yield start, items[start:]


async def _between(start: int) -> None:
    """Let other requests come in before a lot that begins here."""
    if start:
        await asyncio.sleep(0)


async def _parts(record: Message, gauge: Gauge) -> int:
    if _large(record.raw):
        return await asyncio.to_thread(part_tokens, record.raw, gauge.model)
    return part_tokens(record.raw, gauge.model)


def _large(raw: bytes) -> bool:
    """Whether a message is a lot by itself, and read beside the loop: each step of that blocks it briefly."""
    return len(raw) > AT_ONCE_BYTES
