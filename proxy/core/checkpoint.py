"""Checkpoints: what a round replaced, and when it may stand for what a client sends.

A checkpoint is found by the outline digest of the prefix it covers. Before it is applied, the exact digest
must match too, or every difference must be a tool result that the client has since cleared or shortened.
So a wrong, stale or shared identity is a miss, never a leak. Indices count non-privileged messages.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.digest import chain, outline_digest
from proxy.core.message import Message, Span, latest_user

PREFIX_BYTES = 32
# A result that the client has cleared may leave a notice of this many characters in its place.
CLEARED_CHARACTERS = 256
# A result that the client has shortened still begins with this many of its characters.
HEAD_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Result:
    """A covered tool result, remembered well enough to know it again when it has been shortened.

    Attributes:
        index: Its index.
        digest: The message's digest, 32 bytes.
        outline: Its digest without the text, 32 bytes.
        head: SHA-256 of its first characters, 32 bytes.
        characters: Length of its text.
    """

    index: int
    digest: bytes
    outline: bytes
    head: bytes
    characters: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One round, immutable.

    Attributes:
        strategy: Name of the strategy that made it.
        conversation: The conversation it was made in, `c_…`.
        round: 1 for the first of a chain.
        length: Number of messages that it covers or keeps: it speaks of `[0, length)`.
        exact: Chained digest of those messages, 32 bytes.
        results: The tool results among the covered ones.
        spans: What is replaced, sorted and disjoint.
        stand_ins: What each span is replaced by; None leaves nothing.
        summary: The text that the summary model wrote, for the next round to integrate.
        tokens_before: Calibrated size of the request that it was made for.
        tokens_after: Calibrated size of what was forwarded instead.
        listed: Number of messages that the client's list had then; counts of what it gains start here.
    """

    strategy: str
    conversation: str
    round: int
    length: int
    exact: bytes
    results: tuple[Result, ...]
    spans: tuple[Span, ...]
    stand_ins: tuple[Message | None, ...]
    summary: str
    tokens_before: int
    tokens_after: int
    listed: int = 0

    def covers(self, index: int) -> bool:
        """Whether the message at `index` has been replaced."""
        return any(span.start <= index < span.stop for span in self.spans)


def _head(text: str) -> bytes:
    return hashlib.sha256(text[:HEAD_CHARACTERS].encode("utf-8", "surrogatepass")).digest()


def place(prefix: bytes, exact: bytes, spans: Iterable[Span]) -> bytes:
    """Where a checkpoint is kept: the prefix digest that finds it, then what makes it this one; 64 bytes.

    Two lists can share an outline and still differ in the text of a tool result, or in which user message was
    their latest: they have checkpoints of their own.
    """
    edges = ",".join(f"{span.start}-{span.stop}" for span in spans)
    return prefix + hashlib.sha256(exact + edges.encode()).digest()


def found_by(place: bytes) -> bytes:
    """The prefix digest in a place."""
    return place[:PREFIX_BYTES]


def exact_digest(messages: Iterable[Message]) -> bytes:
    """Chained digest of all the messages given, 32 bytes."""
    return chain(message.digest for message in messages)[-1]


def covered_results(messages: Sequence[Message], spans: Iterable[Span]) -> tuple[Result, ...]:
    """What to remember of the tool results inside the spans."""
    return tuple(
        _remembered(index, messages[index])
        for span in spans
        for index in range(span.start, span.stop)
        if messages[index].answers
    )


def _remembered(index: int, message: Message) -> Result:
    return Result(index, message.digest, outline_digest(message), _head(message.text), len(message.text))


def _known(result: Result, message: Message) -> bool:
    """Whether the message is the remembered result, as it was, cleared or shortened."""
    if message.digest == result.digest:
        return True
    if outline_digest(message) != result.outline:
        return False
    characters = len(message.text)
    return characters < result.characters and (
        characters <= CLEARED_CHARACTERS or _head(message.text) == result.head
    )


def _same_prefix(checkpoint: Checkpoint, messages: Sequence[Message]) -> bool:
    """Whether the covered prefix is the one that the checkpoint was made of, shortened results allowed."""
    results = {result.index: result for result in checkpoint.results}
    for index, message in enumerate(messages[: checkpoint.length]):
        result = results.get(index)
        if result is not None and not _known(result, message):
            return False
    restored = (
        results[index].digest if index in results else message.digest
        for index, message in enumerate(messages[: checkpoint.length])
    )
    return chain(restored)[-1] == checkpoint.exact


def stands(checkpoint: Checkpoint, messages: Sequence[Message]) -> bool:
    """Whether a checkpoint may be applied to these non-privileged messages.

    It may if it covers their prefix and not their latest user message, which is never hidden from the model.
    """
    if not 0 < checkpoint.length <= len(messages):
        return False
    latest = latest_user(messages)
    if latest is not None and checkpoint.covers(latest):
        return False
    return _same_prefix(checkpoint, messages)


def deepest(found: Iterable[Checkpoint | None], messages: Sequence[Message]) -> Checkpoint | None:
    """The checkpoint that covers most and may be applied."""
    candidates = sorted((each for each in found if each), key=lambda each: each.length, reverse=True)
    return next((each for each in candidates if stands(each, messages)), None)


def to_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint as JSON values, for an envelope."""
    return {
        "strategy": checkpoint.strategy,
        "conversation": checkpoint.conversation,
        "round": checkpoint.round,
        "length": checkpoint.length,
        "exact": checkpoint.exact.hex(),
        "results": [
            [each.index, each.digest.hex(), each.outline.hex(), each.head.hex(), each.characters]
            for each in checkpoint.results
        ],
        "spans": [list(span) for span in checkpoint.spans],
        "stand_ins": [
            each and [each.role, each.text, b64encode(each.raw).decode(), each.tokens]
            for each in checkpoint.stand_ins
        ],
        "summary": checkpoint.summary,
        "tokens": [checkpoint.tokens_before, checkpoint.tokens_after],
        "listed": checkpoint.listed,
    }


def from_fields(fields: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint that `to_fields` gave, or None if these are not its fields."""
    try:
        checkpoint = Checkpoint(
            strategy=str(fields["strategy"]),
            conversation=str(fields["conversation"]),
            round=int(fields["round"]),
            length=int(fields["length"]),
            exact=bytes.fromhex(fields["exact"]),
            results=tuple(map(_result, fields["results"])),
            spans=tuple(Span(int(start), int(stop)) for start, stop in fields["spans"]),
            stand_ins=tuple(map(_stand_in, fields["stand_ins"])),
            summary=str(fields["summary"]),
            tokens_before=int(fields["tokens"][0]),
            tokens_after=int(fields["tokens"][1]),
            listed=int(fields["listed"]),
        )
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return checkpoint if _sound(checkpoint) else None


def _result(fields: Sequence[Any]) -> Result:
    index, digest, outline, head, characters = fields
    return Result(
        index=int(index),
        digest=bytes.fromhex(digest),
        outline=bytes.fromhex(outline),
        head=bytes.fromhex(head),
        characters=int(characters),
    )


def _stand_in(fields: Sequence[Any] | None) -> Message | None:
    if fields is None:
        return None
    role, text, raw, tokens = fields
    return Message(role=str(role), text=str(text), raw=b64decode(raw, validate=True), tokens=int(tokens))


def _sound(checkpoint: Checkpoint) -> bool:
    """Whether the spans are in order, within what the checkpoint speaks of, and have a stand-in each."""
    edges = [0, *(edge for span in checkpoint.spans for edge in span), checkpoint.length]
    return (
        edges == sorted(edges)
        and all(span.start < span.stop for span in checkpoint.spans)
        and len(checkpoint.spans) == len(checkpoint.stand_ins)
    )
