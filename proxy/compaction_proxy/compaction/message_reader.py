"""Decodes the bytes of messages into `Message` objects and counts their tokens, once for each message.

Clients send their whole history with every request, so nearly all messages are already cached from the
previous request. The bytes of a message are its cache key. The key takes no extra memory, because each
decoded message keeps its bytes anyway.
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
    TOKEN_RULES,
    list_countable_texts,
    minify_json,
    sum_message_tokens,
)
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.support.lru import LruCache
from compaction_proxy.support.offload import FairQueue, run_in_worker_if_large
from compaction_proxy.wires.body import RequestBody
from compaction_proxy.wires.content import UncountedMessage
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.project_instructions import (
    divide_messages,
    find_client_by_messages,
    may_hold_form,
    unmark_pasted_instructions,
)
from compaction_proxy.wires.wire import Wire

# Messages and texts are processed in chunks of at most this many bytes. A larger message or text is a chunk
# of its own. Between two chunks, the event loop can run other tasks.
CHUNK_BYTES = 128 * 1024
# If there are at most this many items, and their total size is at most `CHUNK_BYTES`, they form one chunk and
# no loop has to divide them. This is the usual case, because most requests bring only one or two new items.
FEW_ITEMS = 8

_Item = TypeVar("_Item")


def chunk_by_bytes(
    items: Sequence[_Item], get_size_bytes: Callable[[_Item], int]
) -> Iterable[tuple[int, Sequence[_Item]]]:
    """Splits items into chunks, so that the caller can let other tasks run between two chunks.

    Each chunk comes with the index of its first item. A chunk has at most `CHUNK_BYTES` bytes, unless it
    consists of a single larger item.
    """
    if len(items) <= FEW_ITEMS and sum(map(get_size_bytes, items)) <= CHUNK_BYTES:
        return ((0, items),)
    return _iterate_chunks(items, get_size_bytes)


def _iterate_chunks(
    items: Sequence[_Item], get_size_bytes: Callable[[_Item], int]
) -> Iterator[tuple[int, Sequence[_Item]]]:
    start = pending = 0
    for index, item in enumerate(items):
        pending += get_size_bytes(item)
        if pending > CHUNK_BYTES and index > start:
            yield start, items[start:index]
            start, pending = index, get_size_bytes(item)
    yield start, items[start:]


# Largest size of the cache of messages, in bytes of memory. The size includes the decoded texts. If a new
# message does not fit, it displaces the least recently used messages.
MAX_HELD_BYTES = 16 * 1024 * 1024
# Largest size of the cache of message lists, in bytes of memory. The size of a list includes its messages,
# although most of them are also in the cache of messages and take memory only once. If a new list does not
# fit, it displaces the least recently used lists.
MAX_LISTED_BYTES = 32 * 1024 * 1024
# Largest size of the cache of token counts of definitions such as tools. The size is the number of characters
# of the definitions. If new definitions do not fit, they displace the least recently used ones.
MAX_DEFINITION_CHARACTERS = 4 * 1024 * 1024
# Bytes of memory that a message takes in addition to its own bytes, in the cache of lists (`RECORD_BYTES`)
# and in the cache of messages (`CACHE_ENTRY_BYTES`). In the cache of messages, the size of the decoded text
# is added as well.
RECORD_BYTES, CACHE_ENTRY_BYTES = 450, 600
# Bytes of memory that a list takes for its reference to each message.
LIST_ENTRY_BYTES = 100
# To decode even a tiny message takes about as long as to decode this many bytes of text. So this number is
# added to the size of each message when messages are divided into chunks for decoding.
DECODED_BYTES = 1_024
# Largest number of large messages that are read in threads at the same time. Further ones wait.
WORKERS = 2

_PARTS, _INSTRUCTION = attrgetter("parts"), attrgetter("instruction")

_Made = TypeVar("_Made")


class CountingOptions(NamedTuple):
    """The options with which the tokens of a request are counted.

    Attributes:
        model: The name of the model. It decides which tokenizer is used.
        rule: The name of the counting rule, `tiktoken` or `characters`.
        wire: The wire of the messages.
    """

    model: str
    rule: str
    wire: Wire


class MessageList(NamedTuple):  # created for each request: a dataclass costs four times as much
    """The messages of a request, decoded and counted.

    Attributes:
        messages: All messages, with their token counts.
        unfixed_messages: The messages that are not fixed: neither privileged nor project instructions.
        prefixes: Prefix digests of `unfixed_messages`.
        tokens: Counted tokens of all messages, before calibration.
        has_guessed_tokens: Whether any message contains non-text parts such as images, whose tokens can only
            be guessed.
        has_instructions: Whether any message is project instructions.
    """

    messages: tuple[Message, ...]
    unfixed_messages: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    has_guessed_tokens: bool
    has_instructions: bool


EMPTY_LIST = MessageList((), (), (), 0, has_guessed_tokens=False, has_instructions=False)


class _CachedList(NamedTuple):
    """The cache entry of a list of messages.

    Attributes:
        message_list: The list.
        size: Size of the list, in bytes of memory.
        since: The fingerprint (`RequestBody.fingerprint`) of the request whose cached list this list extends;
            empty if this list extends none.
    """

    message_list: MessageList
    size: int
    since: bytes


class MessageReader:
    """Reads the messages of requests and caches them.

    Args:
        schedulers: The token counters, by the name of their counting rule.
        max_held_bytes: Largest size of the cache of messages, in bytes of memory.
        max_listed_bytes: Largest size of the cache of lists, in bytes of memory. The cache holds at most two
            lists of each conversation.
    """

    def __init__(
        self,
        schedulers: dict[str, TokenScheduler],
        max_held_bytes: int = MAX_HELD_BYTES,
        max_listed_bytes: int = MAX_LISTED_BYTES,
    ) -> None:
        self._schedulers = schedulers
        self._messages: LruCache[tuple[bytes, CountingOptions], Message] = LruCache(max_held_bytes)
        self._lists: LruCache[tuple[bytes, CountingOptions, str], _CachedList] = LruCache(max_listed_bytes)
        self._turns = FairQueue(WORKERS)
        self._worker_slots = asyncio.Semaphore(WORKERS)
        self._overheads: LruCache[tuple[tuple[str, ...], CountingOptions], int] = LruCache(
            MAX_DEFINITION_CHARACTERS
        )

    async def read_request(
        self, body: RequestBody, options: CountingOptions, client: str = ""
    ) -> MessageList:
        """Decodes the messages of a request, counts their tokens and computes their digests.

        If the list extends a cached list, usually only the new messages are processed. All messages are
        processed if later messages can change how the last ones of the cached list are read.

        Args:
            body: The body of the request.
            options: How tokens are counted.
            client: The name of the client program, if the headers or the members of the body besides the
                messages show it; else empty.

        Raises:
            UnreadableBodyError: If a message cannot be read.
        """
        if not body.fingerprint:
            return (await self._extend_list(EMPTY_LIST, await _split_messages(body), options, client))[0]
        key = (body.fingerprint, options, client)
        cached = self._lists.get(key)
        if cached is not None:
            return cached.message_list
        base = (
            self._lists.get((body.previous_fingerprint, options, client))
            if body.previous_fingerprint
            else None
        )
        if base and _has_open_turn(base.message_list.messages, client):
            base = None
        raws = body.new_pieces if base else await _split_messages(body)
        message_list, size = await self._extend_list(
            base.message_list if base else EMPTY_LIST, raws, options, client
        )
        if base and base.since:
            self._lists.remove((base.since, options, client))
        size += base.size if base else 0
        self._lists.put(
            key, _CachedList(message_list, size, body.previous_fingerprint if base else b""), size
        )
        return message_list

    async def _extend_list(
        self, base: MessageList, raws: Sequence[bytes], options: CountingOptions, client: str
    ) -> tuple[MessageList, int]:
        """Decodes the messages `raws` and returns a new list of those of `base` and the decoded ones.

        Also returns the number of bytes of memory that the decoded messages take.
        """
        new = await self.decode_messages(raws, options)
        client = find_client_by_messages(base.messages or new) or client
        if client:
            new = await self._split_instructions(base.messages, new, options, client)
        plain: list[Message] = []
        prefixes = [base.prefixes[-1] if base.prefixes else options.wire.digest_seed]
        tokens, guessed, instructed = base.tokens, base.has_guessed_tokens, base.has_instructions
        for start, chunk in chunk_by_bytes(new, _estimate_held_bytes):
            if start:
                await asyncio.sleep(0)
            removable = [each for each in chunk if not each.is_fixed]
            plain += removable
            prefixes += compute_prefix_digests(removable, prefixes[-1])
            tokens += sum([each.tokens for each in chunk])
            guessed = guessed or any(map(_PARTS, chunk))
            instructed = instructed or any(map(_INSTRUCTION, chunk))
        body, digests = base.unfixed_messages + tuple(plain), base.prefixes + tuple(prefixes[1:])
        message_list = MessageList(base.messages + new, body, digests, tokens, guessed, instructed)
        return message_list, sum(map(len, raws)) + len(raws) * (RECORD_BYTES + LIST_ENTRY_BYTES)

    async def _split_instructions(
        self, base: Sequence[Message], new: Sequence[Message], options: CountingOptions, client: str
    ) -> tuple[Message, ...]:
        """Splits each new message that contains project instructions, and returns all new messages.

        The project instructions become separate messages, whose field `instruction` identifies them. `base`
        contains the messages before the new ones. `client` is the name of the client program.
        """
        messages: list[Message] = []
        for record, parts in divide_messages(base, new, client):
            if not parts:
                messages.append(record)
                continue
            source = SourceMessage(record.raw, len(parts)) if len(parts) > 1 else None
            records = await self.decode_messages([raw for raw, _ in parts], options)
            messages += [
                replace(each, instruction=instruction, source=source)
                for each, (_, instruction) in zip(records, parts, strict=True)
            ]
        return (
            unmark_pasted_instructions(messages)
            if len(messages) != len(new) or any(each.instruction for each in messages)
            else tuple(new)
        )

    async def decode_messages(self, raws: Sequence[bytes], options: CountingOptions) -> tuple[Message, ...]:
        """Decodes messages and counts their tokens. Cached messages are not decoded again.

        Raises:
            UnreadableBodyError: If an element of `raws` is not a valid message.
        """
        cached_messages: list[Message | None] = []
        missing: list[bytes] = []
        for start, chunk in chunk_by_bytes(raws, _estimate_held_bytes):
            if start:
                await asyncio.sleep(0)
            if chunk and _is_large(chunk[0]):
                # A message keeps its hash. The first computation takes a millisecond per megabyte.
                await self._run_in_thread(_compute_hash, chunk[0], options.model)
            cached_chunk = [self._messages.get((raw, options)) for raw in chunk]
            missing += [raw for raw, known in zip(chunk, cached_chunk, strict=True) if known is None]
            cached_messages += cached_chunk
        new = iter(await self._decode_missing(missing, options) if missing else ())
        records: list[Message] = []
        for start, known_chunk in chunk_by_bytes(cached_messages, _get_list_entry_bytes):
            if start:
                await asyncio.sleep(0)
            records += [known or self._cache_message(next(new), options) for known in known_chunk]
        return tuple(records)

    async def _decode_missing(self, raws: Sequence[bytes], options: CountingOptions) -> list[Message]:
        """Decodes messages and counts their tokens. Decodes large messages in a thread."""
        uncounted: list[UncountedMessage] = []
        parse = options.wire.parse_uncounted
        for start, chunk in chunk_by_bytes(raws, _estimate_decode_bytes):
            if start:
                await asyncio.sleep(0)
            if _is_large(chunk[0]):
                uncounted.append(await self._run_in_thread(parse, chunk[0], options.model))
            else:
                uncounted += [parse(raw, options.model) for raw in chunk]
        return await self._build_counted_messages(uncounted, options)

    def _cache_message(self, record: Message, options: CountingOptions) -> Message:
        size = len(record.raw) + max(len(record.raw), getsizeof(record.text)) + CACHE_ENTRY_BYTES
        self._messages.put((record.raw, options), record, size)
        return record

    async def add_token_counts(self, records: Sequence[Message], options: CountingOptions) -> list[Message]:
        """Counts the tokens of decoded messages, and returns the messages with their counts."""
        uncounted = [
            UncountedMessage(each, each.digest, await self._count_part_tokens(each, options))
            for each in records
        ]
        return await self._build_counted_messages(uncounted, options)

    async def _count_part_tokens(self, record: Message, options: CountingOptions) -> int:
        if not (record.parts or record.has_signed_reasoning):
            return 0
        part_tokens = options.wire.estimate_nontext_tokens
        if _is_large(record.raw):
            return await self._run_in_thread(part_tokens, record.raw, options.model)
        return part_tokens(record.raw, options.model)

    async def _build_counted_messages(
        self, uncounted: Sequence[UncountedMessage], options: CountingOptions
    ) -> list[Message]:
        rule = TOKEN_RULES[options.rule]
        texts: list[str] = []
        text_counts: list[int] = []
        for start, chunk in chunk_by_bytes(uncounted, _estimate_uncounted_bytes):
            if start:
                await asyncio.sleep(0)
            for each in chunk:
                own_texts = list_countable_texts(each.record, rule)
                texts += own_texts
                text_counts.append(len(own_texts))
        counts = iter(await self._count_texts(texts, options))
        remaining_text_counts = iter(text_counts)
        messages: list[Message] = []
        for start, chunk in chunk_by_bytes(uncounted, _estimate_uncounted_bytes):
            if start:
                await asyncio.sleep(0)
            for record, digest, parts in chunk:
                size = sum_message_tokens(record, islice(counts, next(remaining_text_counts)), rule, parts)
                messages.append(record.with_digest_and_tokens(digest, size))
        return messages

    async def _run_in_thread(self, work: Callable[[bytes, str], _Made], raw: bytes, model: str) -> _Made:
        """Runs `work` on a large message in a thread. At most `WORKERS` such threads run at the same time."""
        async with self._turns.wait_for_turn(), self._worker_slots:
            return await asyncio.to_thread(work, raw, model)

    async def count_overhead(self, definitions: Sequence[str], options: CountingOptions) -> int:
        """Counts the tokens of a request that are not in its messages.

        These are the tokens of the definitions, such as tools, and the tokens that introduce the model's
        reply.
        """
        key = (tuple(definitions), options)
        if sum(map(len, definitions)) > CHUNK_BYTES:
            await asyncio.to_thread(hash, key)  # texts keep their hashes
        tokens = self._overheads.get(key)
        if tokens is None:
            counts = await self._count_texts(
                [await _format_definition(each) for each in definitions], options
            )
            tokens = sum(counts) + TOKEN_RULES[options.rule].reply_tokens
            self._overheads.put(key, tokens, RECORD_BYTES + sum(map(len, definitions)))
        return tokens

    async def _count_texts(self, texts: Sequence[str], options: CountingOptions) -> list[int]:
        return await self._schedulers[options.rule].count(texts, options.model) if texts else []

    def close(self) -> None:
        """Closes the token counters and their threads."""
        for counting in self._schedulers.values():
            counting.close()


async def _split_messages(body: RequestBody) -> Sequence[bytes]:
    """Returns the bytes of all messages. If a large body must be split again, a thread does it."""
    size_bytes = len(body.raw) if body.previous_fingerprint else 0
    return await run_in_worker_if_large(size_bytes, lambda: body.messages)


def _has_open_turn(messages: Sequence[Message], client: str) -> bool:
    """Returns whether the last turn of a list has no reply yet and may contain project instructions.

    Later messages of such a turn may change which parts of the turn count as project instructions. So the
    turn must be read again together with the later messages.
    """
    client = find_client_by_messages(messages) or client
    if not client:
        return False
    for each in reversed(messages):
        if each.role == "assistant" or each.answered_call_ids:
            return False
        if each.source is not None or may_hold_form(each.raw, client):
            return True
    return False


def _estimate_decode_bytes(raw: bytes) -> int:
    return len(raw) + DECODED_BYTES


def _estimate_held_bytes(record: bytes | Message) -> int:
    return len(record if isinstance(record, bytes) else record.raw) + RECORD_BYTES


def _estimate_uncounted_bytes(message: UncountedMessage) -> int:
    return _estimate_held_bytes(message.record)


def _get_list_entry_bytes(_: object) -> int:
    return LIST_ENTRY_BYTES


async def _format_definition(text: str) -> str:
    """Minifies the JSON text of a definition before its tokens are counted.

    A large definition is minified in a thread.
    """
    if len(text) <= CHUNK_BYTES // 4:
        return minify_json(text)
    return await asyncio.to_thread(_format_definitions, text)


def _format_definitions(text: str) -> str:
    """Minifies the elements of a JSON array of definitions one by one, so that no single step takes long.

    Minifies any other text as a whole.
    """
    try:
        parts = split_elements(text.encode())
    except (UnreadableBodyError, RecursionError, UnicodeEncodeError):
        return minify_json(text)
    return f"[{','.join(map(minify_json, parts))}]"


def _compute_hash(raw: bytes, _: str) -> int:
    return hash(raw)


def _is_large(raw: bytes) -> bool:
    """Returns whether a message has more than `CHUNK_BYTES` bytes, so that a thread must decode it."""
    return len(raw) > CHUNK_BYTES
