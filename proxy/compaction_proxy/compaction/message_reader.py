"""Decodes the bytes of messages into `Message` objects and counts their tokens, once for each message.

Clients send their whole history with every request, so nearly all messages are already cached from the
previous request. The bytes of a message are its cache key. The key takes no extra memory, because each
decoded message keeps its bytes anyway.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
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

# Messages that have more bytes than this in total are processed in a thread.
CHUNK_BYTES = 128 * 1024
# The cache of messages is read and written for this many messages at a time. Between two such chunks, the
# event loop can run other tasks.
CHUNK_MESSAGES = 256
# If the messages of a chunk have more bytes than this in total, a thread computes their hashes, by which the
# cache finds them. That takes a millisecond for two megabytes. An object keeps its hash.
MAX_HASHED_BYTES = 1024 * 1024

# Largest size of the cache of messages, in bytes of memory. The size includes the decoded texts. If a new
# message does not fit, it displaces the least recently used messages.
MAX_HELD_BYTES = 8 * 1024 * 1024
# Largest size of the cache of message lists, in bytes of memory. The size of a list includes its messages,
# although most of them are also in the cache of messages and take memory only once. If a new list does not
# fit, it displaces the least recently used lists.
MAX_LISTED_BYTES = 16 * 1024 * 1024
# Largest size of the cache of token counts of definitions such as tools. The size is the number of characters
# of the definitions. If new definitions do not fit, they displace the least recently used ones.
MAX_DEFINITION_CHARACTERS = 4 * 1024 * 1024
# Bytes of memory that a message takes in addition to its own bytes and its decoded texts, in the cache of
# lists (`RECORD_BYTES`) and in the cache of messages (`CACHE_ENTRY_BYTES`).
RECORD_BYTES, CACHE_ENTRY_BYTES = 450, 600
# Bytes of memory that a list takes for its reference to each message.
LIST_ENTRY_BYTES = 100
# To decode even a tiny message takes about as long as to decode this many bytes of text. So this number is
# added to the size of each message to decide whether a thread decodes the messages.
DECODED_BYTES = 1_024
# Largest number of threads that read messages at the same time.
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
        append = partial(_append_messages, base, new, options.wire.digest_seed)
        size_bytes = sum(map(len, raws)) + len(raws) * RECORD_BYTES
        message_list = await self._run_if_large(size_bytes, append)
        size = sum([_measure_content(each) + RECORD_BYTES + LIST_ENTRY_BYTES for each in new])
        return message_list, size

    async def _split_instructions(
        self, base: Sequence[Message], new: Sequence[Message], options: CountingOptions, client: str
    ) -> tuple[Message, ...]:
        """Splits each new message that contains project instructions, and returns all new messages.

        The project instructions become separate messages, whose field `instruction` identifies them. `base`
        contains the messages before the new ones. `client` is the name of the client program.
        """
        size_bytes = sum([len(each.raw) for each in new]) + len(new) * RECORD_BYTES
        divided = await self._run_if_large(size_bytes, lambda: list(divide_messages(base, new, client)))
        raws = [raw for _, parts in divided for raw, _ in parts]
        decoded = iter(await self.decode_messages(raws, options))

        def build_messages() -> tuple[Message, ...]:
            messages: list[Message] = []
            for record, parts in divided:
                source = SourceMessage(record.raw, len(parts)) if len(parts) > 1 else None
                messages += [
                    replace(next(decoded), instruction=instruction, source=source) for _, instruction in parts
                ] or [record]
            if len(messages) == len(new) and not any(map(_INSTRUCTION, messages)):
                return tuple(new)
            return unmark_pasted_instructions(messages)

        return await self._run_if_large(size_bytes, build_messages)

    async def decode_messages(self, raws: Sequence[bytes], options: CountingOptions) -> tuple[Message, ...]:
        """Decodes messages and counts their tokens. Cached messages are not decoded again.

        Raises:
            UnreadableBodyError: If an element of `raws` is not a valid message.
        """
        cached_messages: list[Message | None] = []
        for start in range(0, len(raws), CHUNK_MESSAGES):
            chunk = raws[start : start + CHUNK_MESSAGES]
            if start:
                await asyncio.sleep(0)
            if sum(map(len, chunk)) > MAX_HASHED_BYTES:
                await self._run_if_large(MAX_HASHED_BYTES, partial(_compute_hashes, chunk))
            cached_messages += [self._messages.get((raw, options)) for raw in chunk]
        missing = [raw for raw, known in zip(raws, cached_messages, strict=True) if known is None]
        new = await self._decode_missing(missing, options) if missing else []
        for start in range(0, len(new), CHUNK_MESSAGES):
            if start:
                await asyncio.sleep(0)
            for record in new[start : start + CHUNK_MESSAGES]:
                self._cache_message(record, options)
        added = iter(new)
        return tuple([known or next(added) for known in cached_messages])

    async def _decode_missing(self, raws: Sequence[bytes], options: CountingOptions) -> list[Message]:
        """Decodes messages and counts their tokens. Decodes many or large messages in a thread."""
        parse, model = options.wire.parse_uncounted, options.model
        size_bytes = sum(map(len, raws)) + len(raws) * DECODED_BYTES
        uncounted = await self._run_if_large(size_bytes, lambda: [parse(raw, model) for raw in raws])
        return await self._build_counted_messages(uncounted, options)

    def _cache_message(self, record: Message, options: CountingOptions) -> None:
        self._messages.put((record.raw, options), record, _measure_content(record) + CACHE_ENTRY_BYTES)

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
        estimate_tokens = partial(options.wire.estimate_nontext_tokens, record.raw, options.model)
        return await self._run_if_large(len(record.raw), estimate_tokens)

    async def _build_counted_messages(
        self, uncounted: Sequence[UncountedMessage], options: CountingOptions
    ) -> list[Message]:
        rule, size_bytes = TOKEN_RULES[options.rule], len(uncounted) * DECODED_BYTES

        def list_texts() -> list[tuple[str, ...]]:
            return [list_countable_texts(each.record, rule) for each in uncounted]

        def build_messages() -> list[Message]:
            remaining = iter(counts)
            return [
                record.with_digest_and_tokens(
                    digest, sum_message_tokens(record, islice(remaining, len(own_texts)), rule, parts)
                )
                for (record, digest, parts), own_texts in zip(uncounted, texts, strict=True)
            ]

        texts = await self._run_if_large(size_bytes, list_texts)
        counts = await self._count_texts(list(chain.from_iterable(texts)), options)
        return await self._run_if_large(size_bytes, build_messages)

    async def _run_if_large(self, size_bytes: int, work: Callable[[], _Made]) -> _Made:
        """Runs `work` on messages, in a thread if they have more than `CHUNK_BYTES` bytes.

        At most `WORKERS` such threads run at the same time.
        """
        if size_bytes <= CHUNK_BYTES:
            return work()
        async with self._turns.wait_for_turn(), self._worker_slots:
            return await asyncio.to_thread(work)

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


def _measure_content(record: Message) -> int:
    """Returns how many bytes of memory the bytes of a message and its decoded texts take."""
    calls = sum([getsizeof(each.arguments) + RECORD_BYTES for each in record.calls]) if record.calls else 0
    return len(record.raw) + getsizeof(record.text) + calls


def _append_messages(base: MessageList, new: tuple[Message, ...], seed: bytes) -> MessageList:
    """Returns a list of the messages of `base` and the new ones. The digests of a wire begin with `seed`."""
    plain = tuple(each for each in new if not each.is_fixed)
    prefixes = compute_prefix_digests(plain, base.prefixes[-1] if base.prefixes else seed)
    return MessageList(
        base.messages + new,
        base.unfixed_messages + plain,
        base.prefixes + tuple(prefixes),
        base.tokens + sum([each.tokens for each in new]),
        base.has_guessed_tokens or any(map(_PARTS, new)),
        base.has_instructions or any(map(_INSTRUCTION, new)),
    )


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


def _compute_hashes(raws: Sequence[bytes]) -> None:
    for raw in raws:
        hash(raw)
