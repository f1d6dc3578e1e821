"""From the bytes of messages to counted core records, each message decoded and counted once.

Clients send their whole history with every request, so nearly all of it is known from the request before:
a message is recognised by its bytes, which its record keeps anyway.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from sys import getsizeof
from typing import NamedTuple, TypeVar

from compaction_proxy.core.digest import prefix_digests
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.message import Message, Source
from compaction_proxy.core.token_rules import RULES, definition_piece, message_tokens, pieces
from compaction_proxy.providers.token_counting import Counting
from compaction_proxy.support.lru import Lru
from compaction_proxy.wires.body import Body
from compaction_proxy.wires.json.slices import elements
from compaction_proxy.wires.project_instructions import divide_each, find_client_of, has_mark, settle
from compaction_proxy.wires.wire import Dialect, Weighed

# A lot is about this many bytes.
AT_ONCE_BYTES = 128 * 1024
# So many items are looked at together first: most requests bring one or two.
FEW = 8

_Item = TypeVar("_Item")


def in_lots(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterable[tuple[int, Sequence[_Item]]]:
    """The items a few at a time, each lot with the index of its first item; others may come between."""
    if len(items) <= 1 or (len(items) <= FEW and sum(map(size, items)) <= AT_ONCE_BYTES):
        return ((0, items),)
    return _cut(items, size)


def _cut(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterator[tuple[int, Sequence[_Item]]]:
    start = pending = 0
    for index, item in enumerate(items):
        pending += size(item)
        if pending > AT_ONCE_BYTES and index > start:
            yield start, items[start:index]
            start, pending = index, size(item)
    yield start, items[start:]


# Known messages are held up to this many bytes, decoded text and record included.
MAX_HELD_BYTES = 16 * 1024 * 1024
# Known lists likewise. Their messages are mostly the known ones, and weighed once for each list.
MAX_LISTED_BYTES = 32 * 1024 * 1024
# Sizes of definitions are held for this many characters of them.
MAX_DEFINED = 4 * 1024 * 1024
# What holding a message takes beside its own bytes, in a list, and by itself (where its text comes on top).
RECORD_BYTES, HOLDING_BYTES = 450, 600
# What a list takes for each of its messages.
PLACE_BYTES = 100
# A small message counts as so many bytes more where it is decoded: that takes as long.
DECODED_BYTES = 1_024
# Large messages that are decoded beside the loop at once.
WORKERS = 2

_PARTS = attrgetter("parts")

_Made = TypeVar("_Made")


class Gauge(NamedTuple):
    """How the tokens of one request are counted.

    Attributes:
        model: The model whose vocabulary counts.
        rule: `tiktoken` or `characters`.
        dialect: The wire of the messages.
    """

    model: str
    rule: str
    dialect: Dialect


class Listed(NamedTuple):  # made for each request: a dataclass costs four times as much
    """What a client's list holds.

    Attributes:
        messages: All messages, counted.
        body: Those that a round may take: neither privileged nor instructions of a project.
        prefixes: Prefix digests of `body`.
        tokens: Sum over `messages`, before calibration.
        guessed: Whether any holds parts that are no text, whose tokens are not counted but guessed.
    """

    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    guessed: bool


EMPTY = Listed((), (), (), 0, guessed=False)


class _Known(NamedTuple):
    """A list that was read, what it takes in bytes, and the mark of the list that it grew from, or none."""

    listed: Listed
    size: int
    since: bytes


class Reading:
    """Reads messages, remembering the ones it has read.

    Args:
        countings: What counts, by the name of the rule.
        max_held_bytes: Size of the memory, in bytes as they are taken.
        max_listed_bytes: The same for whole lists, of which each conversation has two at most.
    """

    def __init__(
        self,
        countings: dict[str, Counting],
        max_held_bytes: int = MAX_HELD_BYTES,
        max_listed_bytes: int = MAX_LISTED_BYTES,
    ) -> None:
        self._countings = countings
        self._held: Lru[tuple[bytes, Gauge], Message] = Lru(max_held_bytes)
        self._lists: Lru[tuple[bytes, Gauge, str], _Known] = Lru(max_listed_bytes)
        self._turns = asyncio.Semaphore(WORKERS)
        self._overheads: Lru[tuple[tuple[str, ...], Gauge], int] = Lru(MAX_DEFINED)

    async def listed(self, body: Body, gauge: Gauge, client: str = "") -> Listed:
        """The list of a request, counted and digested; of one that has grown, only what is new is touched.

        Args:
            body: The request.
            gauge: How it is counted.
            client: The name of the client that sends it, if that is known without the messages.

        Raises:
            Unreadable: One of its messages is none.
        """
        if not body.mark:
            return (await self._grown(EMPTY, body.messages, gauge, client))[0]
        key = (body.mark, gauge, client)
        known = self._lists.get(key)
        if known is not None:
            return known.listed
        base = self._lists.get((body.since, gauge, client)) if body.since else None
        if base and _is_open(base.listed.messages, client):
            base = None
        raws = body.late if base else body.messages
        listed, size = await self._grown(base.listed if base else EMPTY, raws, gauge, client)
        if base and base.since:
            self._lists.drop((base.since, gauge, client))
        size += base.size if base else 0
        self._lists.put(key, _Known(listed, size, body.since if base else b""), size)
        return listed

    async def _grown(
        self, base: Listed, raws: Sequence[bytes], gauge: Gauge, client: str
    ) -> tuple[Listed, int]:
        """A list with more messages behind it, and the bytes that these take."""
        new = await self.messages(raws, gauge)
        client = find_client_of(base.messages or new) or client
        if client:
            new = await self._divide(base.messages, new, gauge, client)
        plain: list[Message] = []
        prefixes = [base.prefixes[-1] if base.prefixes else gauge.dialect.seed]
        tokens, guessed = base.tokens, base.guessed
        for start, lot in in_lots(new, _held_bytes):
            if start:
                await asyncio.sleep(0)
            those = [each for each in lot if not each.is_fixed]
            plain += those
            prefixes += prefix_digests(those, prefixes[-1])
            tokens += sum([each.tokens for each in lot])
            guessed = guessed or any(map(_PARTS, lot))
        body, digests = base.body + tuple(plain), base.prefixes + tuple(prefixes[1:])
        listed = Listed(base.messages + new, body, digests, tokens, guessed)
        return listed, sum(map(len, raws)) + len(raws) * (RECORD_BYTES + PLACE_BYTES)

    async def _divide(
        self, base: Sequence[Message], new: Sequence[Message], gauge: Gauge, client: str
    ) -> tuple[Message, ...]:
        """The new messages with a known client's instructions as messages of their own, marked as such."""
        made: list[Message] = []
        for record, parts in divide_each(base, new, client):
            if not parts:
                made.append(record)
                continue
            source = Source(record.raw, len(parts)) if len(parts) > 1 else None
            records = await self.messages([raw for raw, _ in parts], gauge)
            made += [
                replace(each, instruction=instruction, source=source)
                for each, (_, instruction) in zip(records, parts, strict=True)
            ]
        return settle(made) if len(made) != len(new) or any(each.instruction for each in made) else tuple(new)

    async def messages(self, raws: Sequence[bytes], gauge: Gauge) -> tuple[Message, ...]:
        """The records of these messages, counted.

        Raises:
            Unreadable: One of them is no message.
        """
        found: list[Message | None] = []
        missing: list[bytes] = []
        for start, lot in in_lots(raws, _held_bytes):
            if start:
                await asyncio.sleep(0)
            held = [self._held.get((raw, gauge)) for raw in lot]
            missing += [raw for raw, known in zip(lot, held, strict=True) if known is None]
            found += held
        new = iter(await self._read(missing, gauge) if missing else ())
        records: list[Message] = []
        for start, lot_found in in_lots(found, _place_bytes):
            if start:
                await asyncio.sleep(0)
            records += [known or self._hold(next(new), gauge) for known in lot_found]
        return tuple(records)

    async def _read(self, raws: Sequence[bytes], gauge: Gauge) -> list[Message]:
        """The records of messages that are not known."""
        read: list[Weighed] = []
        weighed = gauge.dialect.weighed
        for start, lot in in_lots(raws, _decoded_bytes):
            if start:
                await asyncio.sleep(0)
            if _large(lot[0]):
                read.append(await self._beside(weighed, lot[0], gauge.model))
            else:
                read += [weighed(raw, gauge.model) for raw in lot]
        return await self._sized(read, gauge)

    def _hold(self, record: Message, gauge: Gauge) -> Message:
        size = len(record.raw) + max(len(record.raw), getsizeof(record.text)) + HOLDING_BYTES
        self._held.put((record.raw, gauge), record, size)
        return record

    async def counted(self, records: Sequence[Message], gauge: Gauge) -> list[Message]:
        """The records with their tokens."""
        weighed = [Weighed(each, each.digest, await self._parts(each, gauge)) for each in records]
        return await self._sized(weighed, gauge)

    async def _parts(self, record: Message, gauge: Gauge) -> int:
        if not (record.parts or record.signed):
            return 0
        part_tokens = gauge.dialect.part_tokens
        if _large(record.raw):
            return await self._beside(part_tokens, record.raw, gauge.model)
        return part_tokens(record.raw, gauge.model)

    async def _sized(self, weighed: Sequence[Weighed], gauge: Gauge) -> list[Message]:
        """Records with their digests and tokens."""
        rule = RULES[gauge.rule]
        texts: list[str] = []
        numbers: list[int] = []
        for start, lot in in_lots(weighed, _weighed_bytes):
            if start:
                await asyncio.sleep(0)
            for each in lot:
                own = pieces(each.record, rule)
                texts += own
                numbers.append(len(own))
        counts = iter(await self._count(texts, gauge))
        pairs = iter(numbers)
        made: list[Message] = []
        for start, lot in in_lots(weighed, _weighed_bytes):
            if start:
                await asyncio.sleep(0)
            for record, digest, parts in lot:
                size = message_tokens(record, islice(counts, next(pairs)), rule, parts)
                made.append(record.known(digest, size))
        return made

    async def _beside(self, work: Callable[[bytes, str], _Made], raw: bytes, model: str) -> _Made:
        """What a thread makes of a large message, a few at a time."""
        async with self._turns:
            return await asyncio.to_thread(work, raw, model)

    async def overhead(self, definitions: Sequence[str], gauge: Gauge) -> int:
        """Tokens of a request beside its messages: definitions and the reply's primer."""
        key = (tuple(definitions), gauge)
        known = self._overheads.get(key)
        if known is None:
            counts = await self._count([await _definition(each) for each in definitions], gauge)
            known = sum(counts) + RULES[gauge.rule].reply
            self._overheads.put(key, known, RECORD_BYTES + sum(map(len, definitions)))
        return known

    async def _count(self, texts: Sequence[str], gauge: Gauge) -> list[int]:
        return await self._countings[gauge.rule].count(texts, gauge.model) if texts else []

    def close(self) -> None:
        """Let go of the threads that count."""
        for counting in self._countings.values():
            counting.close()


def _is_open(messages: Sequence[Message], client: str) -> bool:
    """Whether what follows a list decides what instructions in its last turn are."""
    client = find_client_of(messages) or client
    if not client:
        return False
    for each in reversed(messages):
        if each.role == "assistant" or each.answers:
            return False
        if each.source is not None or has_mark(each.raw, client):
            return True
    return False


def _decoded_bytes(raw: bytes) -> int:
    return len(raw) + DECODED_BYTES


def _held_bytes(held: bytes | Message) -> int:
    return len(held if isinstance(held, bytes) else held.raw) + RECORD_BYTES


def _weighed_bytes(weighed: Weighed) -> int:
    return _held_bytes(weighed.record)


def _place_bytes(_: object) -> int:
    return PLACE_BYTES


async def _definition(text: str) -> str:
    """What is counted of a definition; of a large one beside the loop."""
    if len(text) <= AT_ONCE_BYTES // 4:
        return definition_piece(text)
    return await asyncio.to_thread(_definitions, text)


def _definitions(text: str) -> str:
    """The same of one element after another, so that no step takes long."""
    try:
        parts = elements(text.encode())
    except (Unreadable, RecursionError, UnicodeEncodeError):
        return definition_piece(text)
    return f"[{','.join(map(definition_piece, parts))}]"


def _large(raw: bytes) -> bool:
    """Whether a message is a lot by itself, and read beside the loop: each step of that blocks it briefly."""
    return len(raw) > AT_ONCE_BYTES
