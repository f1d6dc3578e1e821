"""From the bytes of messages to counted core records, each message decoded and counted once.

Clients send their whole history with every request, so nearly all of it is known from the request before:
a message is recognised by its bytes, which its record keeps anyway.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxy.core.digest import prefix_digests
from proxy.core.message import Message
from proxy.core.tokens import RULES, definition_piece, message_tokens, pieces
from proxy.counting import Counting
from proxy.dialects.chat import Body
from proxy.dialects.chat_message import message
from proxy.dialects.chat_parts import part_tokens

# Known messages are held up to this many bytes; decoded text about doubles it.
MAX_HELD_BYTES = 32 * 1024 * 1024
# What holding a message takes beside its own bytes; nearly all, where messages are short.
RECORD_BYTES = 450
# Messages are decoded in lots of this many bytes.
AT_ONCE_BYTES = 256 * 1024


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


class Reading:
    """Reads messages, remembering the ones it has read.

    Args:
        countings: What counts, by the name of the rule.
        max_held_bytes: Size of the memory, in bytes of messages and `RECORD_BYTES` for each.
    """

    def __init__(self, countings: dict[str, Counting], max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._countings = countings
        self._max_held_bytes = max_held_bytes
        self._held: OrderedDict[tuple[bytes, Gauge], Message] = OrderedDict()
        self._held_bytes = 0

    async def listed(self, body: Body, gauge: Gauge) -> Listed:
        """The list of a request, counted and digested.

        Raises:
            Unreadable: One of its messages is none.
        """
        messages = await self.messages(body.messages, gauge)
        plain = tuple(message for message in messages if not message.privileged)
        return Listed(
            messages, plain, tuple(prefix_digests(plain)), sum(message.tokens for message in messages)
        )

    async def messages(self, raws: Sequence[bytes], gauge: Gauge) -> tuple[Message, ...]:
        """The records of these messages, counted.

        Raises:
            Unreadable: One of them is no message.
        """
        keys = [(raw, gauge) for raw in raws]
        found = [self._recall(key) for key in keys]
        new = [index for index, known in enumerate(found) if known is None]
        counted = await self.counted([record async for record in _read(raws, new)], gauge)
        for index, record in zip(new, counted, strict=True):
            found[index] = record
            self._hold(keys[index], record)
        return tuple(record for record in found if record is not None)

    async def counted(self, records: Sequence[Message], gauge: Gauge) -> list[Message]:
        """The records with their tokens."""
        rule = RULES[gauge.rule]
        texts = [pieces(record, rule) for record in records]
        counts = iter(await self._count([text for each in texts for text in each], gauge))
        return [
            replace(
                record,
                tokens=message_tokens(record, [next(counts) for _ in each], rule, _parts(record, gauge)),
            )
            for record, each in zip(records, texts, strict=True)
        ]

    async def overhead(self, definitions: Sequence[str], gauge: Gauge) -> int:
        """Tokens of a request beside its messages: definitions and the reply's primer."""
        counts = await self._count([definition_piece(each) for each in definitions], gauge)
        return sum(counts) + RULES[gauge.rule].reply

    async def _count(self, texts: Sequence[str], gauge: Gauge) -> list[int]:
        return await self._countings[gauge.rule].count(texts, gauge.model) if texts else []

    def close(self) -> None:
        """Let go of the threads that count."""
        for counting in self._countings.values():
            counting.close()

    def _recall(self, key: tuple[bytes, Gauge]) -> Message | None:
        record = self._held.get(key)
        if record is not None:
            self._held.move_to_end(key)
        return record

    def _hold(self, key: tuple[bytes, Gauge], record: Message) -> None:
        if _held_bytes(record) > self._max_held_bytes or key in self._held:
            return
        self._held[key] = record
        self._held_bytes += _held_bytes(record)
        while self._held_bytes > self._max_held_bytes:
            _, oldest = self._held.popitem(last=False)
            self._held_bytes -= _held_bytes(oldest)


def _held_bytes(record: Message) -> int:
    return len(record.raw) + RECORD_BYTES


async def _read(raws: Sequence[bytes], indices: Sequence[int]) -> AsyncIterator[Message]:
    """The messages decoded, a few at a time: other requests come in between."""
    pending = 0
    for index in indices:
        pending += len(raws[index]) + RECORD_BYTES
        if pending > AT_ONCE_BYTES:
            pending = 0
            await asyncio.sleep(0)
        yield message(raws[index])


def _parts(record: Message, gauge: Gauge) -> int:
    return part_tokens(record.raw, gauge.model) if record.parts else 0
