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

from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message, SourceMessage
from compaction_proxy.core.token_rules import (
    RULES,
    list_countable_texts,
    minify_definition,
    sum_message_tokens,
)
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.support.lru import LruCache
from compaction_proxy.wires.body import RequestBody
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.project_instructions import (
    divide_each,
    find_client_by_messages,
    may_hold_form,
    unmark_pasted,
)
from compaction_proxy.wires.wire import UncountedMessage, Wire

# A lot is about this many bytes.
AT_ONCE_BYTES = 128 * 1024
# So many items are looked at together first: most requests bring one or two.
FEW_ITEMS = 8

_Item = TypeVar("_Item")


def chunk_by_bytes(
    items: Sequence[_Item], size: Callable[[_Item], int]
) -> Iterable[tuple[int, Sequence[_Item]]]:
    """The items a few at a time, each lot with the index of its first item; others may come between."""
    if len(items) <= 1 or (len(items) <= FEW_ITEMS and sum(map(size, items)) <= AT_ONCE_BYTES):
        return ((0, items),)
    return _iterate_chunks(items, size)


def _iterate_chunks(
    items: Sequence[_Item], size: Callable[[_Item], int]
) -> Iterator[tuple[int, Sequence[_Item]]]:
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


class CountingOptions(NamedTuple):
    """How the tokens of one request are counted.

    Attributes:
        model: The model whose vocabulary counts.
        rule: `tiktoken` or `characters`.
        wire: The wire of the messages.
    """

    model: str
    rule: str
    wire: Wire


class MessageList(NamedTuple):  # made for each request: a dataclass costs four times as much
    """What a client's list holds.

    Attributes:
        messages: All messages, counted.
        body: Those that a round may take: neither privileged nor instructions of a project.
        prefixes: Prefix digests of `body`.
        tokens: Sum over `decode_messages`, before calibration.
        has_guessed_tokens: Whether any holds parts that are no text, whose tokens are not counted but
            guessed.
    """

    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    has_guessed_tokens: bool


EMPTY_LIST = MessageList((), (), (), 0, has_guessed_tokens=False)


class _CachedList(NamedTuple):
    """A list that was read, what it takes in bytes, and the mark of the list that it grew from, or none."""

    message_list: MessageList
    size: int
    since: bytes


class MessageReader:
    """Reads messages, remembering the ones it has read.

    Args:
        countings: What counts, by the name of the rule.
        max_held_bytes: Size of the memory, in bytes as they are taken.
        max_listed_bytes: The same for whole lists, of which each conversation has two at most.
    """

    def __init__(
        self,
        countings: dict[str, TokenScheduler],
        max_held_bytes: int = MAX_HELD_BYTES,
        max_listed_bytes: int = MAX_LISTED_BYTES,
    ) -> None:
        self._schedulers = countings
        self._messages: LruCache[tuple[bytes, CountingOptions], Message] = LruCache(max_held_bytes)
        self._lists: LruCache[tuple[bytes, CountingOptions, str], _CachedList] = LruCache(max_listed_bytes)
        self._worker_slots = asyncio.Semaphore(WORKERS)
        self._overheads: LruCache[tuple[tuple[str, ...], CountingOptions], int] = LruCache(MAX_DEFINED)

    async def read_request(
        self, body: RequestBody, options: CountingOptions, client: str = ""
    ) -> MessageList:
        """The list of a request, counted and digested; of one that has grown, only what is new is touched.

        Args:
            body: The request.
            options: How it is counted.
            client: The name of the client that sends it, if that is known without the messages.

        Raises:
            Unreadable: One of its messages is none.
        """
        if not body.mark:
            return (await self._extend_list(EMPTY_LIST, body.messages, options, client))[0]
        key = (body.mark, options, client)
        known = self._lists.get(key)
        if known is not None:
            return known.message_list
        base = self._lists.get((body.previous_mark, options, client)) if body.previous_mark else None
        if base and _has_open_turn(base.message_list.messages, client):
            base = None
        raws = body.new_pieces if base else body.messages
        listed, size = await self._extend_list(
            base.message_list if base else EMPTY_LIST, raws, options, client
        )
        if base and base.since:
            self._lists.remove((base.since, options, client))
        size += base.size if base else 0
        self._lists.put(key, _CachedList(listed, size, body.previous_mark if base else b""), size)
        return listed

    async def _extend_list(
        self, base: MessageList, raws: Sequence[bytes], options: CountingOptions, client: str
    ) -> tuple[MessageList, int]:
        """A list with more messages behind it, and the bytes that these take."""
        new = await self.decode_messages(raws, options)
        client = find_client_by_messages(base.messages or new) or client
        if client:
            new = await self._split_instructions(base.messages, new, options, client)
        plain: list[Message] = []
        prefixes = [base.prefixes[-1] if base.prefixes else options.wire.digest_seed]
        tokens, guessed = base.tokens, base.has_guessed_tokens
        for start, lot in chunk_by_bytes(new, _estimate_held_bytes):
            if start:
                await asyncio.sleep(0)
            those = [each for each in lot if not each.is_fixed]
            plain += those
            prefixes += compute_prefix_digests(those, prefixes[-1])
            tokens += sum([each.tokens for each in lot])
            guessed = guessed or any(map(_PARTS, lot))
        body, digests = base.body + tuple(plain), base.prefixes + tuple(prefixes[1:])
        listed = MessageList(base.messages + new, body, digests, tokens, guessed)
        return listed, sum(map(len, raws)) + len(raws) * (RECORD_BYTES + PLACE_BYTES)

    async def _split_instructions(
        self, base: Sequence[Message], new: Sequence[Message], options: CountingOptions, client: str
    ) -> tuple[Message, ...]:
        """The new messages with a known client's instructions as messages of their own, marked as such."""
        made: list[Message] = []
        for record, parts in divide_each(base, new, client):
            if not parts:
                made.append(record)
                continue
            source = SourceMessage(record.raw, len(parts)) if len(parts) > 1 else None
            records = await self.decode_messages([raw for raw, _ in parts], options)
            made += [
                replace(each, instruction=instruction, source=source)
                for each, (_, instruction) in zip(records, parts, strict=True)
            ]
        return (
            unmark_pasted(made)
            if len(made) != len(new) or any(each.instruction for each in made)
            else tuple(new)
        )

    async def decode_messages(self, raws: Sequence[bytes], options: CountingOptions) -> tuple[Message, ...]:
        """The records of these messages, counted.

        Raises:
            Unreadable: One of them is no message.
        """
        found: list[Message | None] = []
        missing: list[bytes] = []
        for start, lot in chunk_by_bytes(raws, _estimate_held_bytes):
            if start:
                await asyncio.sleep(0)
            held = [self._messages.get((raw, options)) for raw in lot]
            missing += [raw for raw, known in zip(lot, held, strict=True) if known is None]
            found += held
        new = iter(await self._decode_missing(missing, options) if missing else ())
        records: list[Message] = []
        for start, lot_found in chunk_by_bytes(found, _get_place_bytes):
            if start:
                await asyncio.sleep(0)
            records += [known or self._cache_message(next(new), options) for known in lot_found]
        return tuple(records)

    async def _decode_missing(self, raws: Sequence[bytes], options: CountingOptions) -> list[Message]:
        """The records of messages that are not known."""
        read: list[UncountedMessage] = []
        weighed = options.wire.parse_uncounted
        for start, lot in chunk_by_bytes(raws, _estimate_decode_bytes):
            if start:
                await asyncio.sleep(0)
            if _is_large(lot[0]):
                read.append(await self._run_in_thread(weighed, lot[0], options.model))
            else:
                read += [weighed(raw, options.model) for raw in lot]
        return await self._build_counted_messages(read, options)

    def _cache_message(self, record: Message, options: CountingOptions) -> Message:
        size = len(record.raw) + max(len(record.raw), getsizeof(record.text)) + HOLDING_BYTES
        self._messages.put((record.raw, options), record, size)
        return record

    async def add_token_counts(self, records: Sequence[Message], options: CountingOptions) -> list[Message]:
        """The records with their tokens."""
        weighed = [
            UncountedMessage(each, each.digest, await self._count_part_tokens(each, options))
            for each in records
        ]
        return await self._build_counted_messages(weighed, options)

    async def _count_part_tokens(self, record: Message, options: CountingOptions) -> int:
        if not (record.parts or record.signed):
            return 0
        part_tokens = options.wire.estimate_part_tokens
        if _is_large(record.raw):
            return await self._run_in_thread(part_tokens, record.raw, options.model)
        return part_tokens(record.raw, options.model)

    async def _build_counted_messages(
        self, uncounted: Sequence[UncountedMessage], options: CountingOptions
    ) -> list[Message]:
        """Records with their digests and tokens."""
        rule = RULES[options.rule]
        texts: list[str] = []
        numbers: list[int] = []
        for start, lot in chunk_by_bytes(uncounted, _estimate_weighed_bytes):
            if start:
                await asyncio.sleep(0)
            for each in lot:
                own = list_countable_texts(each.record, rule)
                texts += own
                numbers.append(len(own))
        counts = iter(await self._count_texts(texts, options))
        pairs = iter(numbers)
        made: list[Message] = []
        for start, lot in chunk_by_bytes(uncounted, _estimate_weighed_bytes):
            if start:
                await asyncio.sleep(0)
            for record, digest, parts in lot:
                size = sum_message_tokens(record, islice(counts, next(pairs)), rule, parts)
                made.append(record.with_digest_and_tokens(digest, size))
        return made

    async def _run_in_thread(self, work: Callable[[bytes, str], _Made], raw: bytes, model: str) -> _Made:
        """What a thread makes of a large message, a few at a time."""
        async with self._worker_slots:
            return await asyncio.to_thread(work, raw, model)

    async def count_overhead(self, definitions: Sequence[str], options: CountingOptions) -> int:
        """Tokens of a request beside its messages: definitions and the reply's primer."""
        key = (tuple(definitions), options)
        known = self._overheads.get(key)
        if known is None:
            counts = await self._count_texts(
                [await _format_definition(each) for each in definitions], options
            )
            known = sum(counts) + RULES[options.rule].reply
            self._overheads.put(key, known, RECORD_BYTES + sum(map(len, definitions)))
        return known

    async def _count_texts(self, texts: Sequence[str], options: CountingOptions) -> list[int]:
        return await self._schedulers[options.rule].count(texts, options.model) if texts else []

    def close(self) -> None:
        """Let go of the threads that count."""
        for counting in self._schedulers.values():
            counting.close()


def _has_open_turn(messages: Sequence[Message], client: str) -> bool:
    """Whether what follows a list decides what instructions in its last turn are."""
    client = find_client_by_messages(messages) or client
    if not client:
        return False
    for each in reversed(messages):
        if each.role == "assistant" or each.answers:
            return False
        if each.source is not None or may_hold_form(each.raw, client):
            return True
    return False


def _estimate_decode_bytes(raw: bytes) -> int:
    return len(raw) + DECODED_BYTES


def _estimate_held_bytes(record: bytes | Message) -> int:
    return len(record if isinstance(record, bytes) else record.raw) + RECORD_BYTES


def _estimate_weighed_bytes(message: UncountedMessage) -> int:
    return _estimate_held_bytes(message.record)


def _get_place_bytes(_: object) -> int:
    return PLACE_BYTES


async def _format_definition(text: str) -> str:
    """What is counted of a definition; of a large one beside the loop."""
    if len(text) <= AT_ONCE_BYTES // 4:
        return minify_definition(text)
    return await asyncio.to_thread(_format_definitions, text)


def _format_definitions(text: str) -> str:
    """The same of one element after another, so that no step takes long."""
    try:
        parts = split_elements(text.encode())
    except (UnreadableBodyError, RecursionError, UnicodeEncodeError):
        return minify_definition(text)
    return f"[{','.join(map(minify_definition, parts))}]"


def _is_large(raw: bytes) -> bool:
    """Whether a message is a lot by itself, and read beside the loop: each step of that blocks it briefly."""
    return len(raw) > AT_ONCE_BYTES
