"""Checkpoints: what a round replaced, and when it may stand for what a client sends.

A checkpoint is found by the outline digest of the prefix it covers. Before it is applied, the exact digest
must match too, or every difference must be a tool result that the client has since cleared or shortened.
So a wrong, stale or shared identity is a miss, never a leak. Indices count non-privileged messages.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from compaction_proxy.core.digest import chain_digests, compute_message_digest, compute_result_digest
from compaction_proxy.core.message import Message, Span, find_latest_user_message

PREFIX_BYTES = 32
# Who wrote a summary that no model wrote.
EXTRACT = "extract"
# A result that the client has cleared may leave a notice of this many characters in its place.
CLEARED_CHARACTERS = 256
# A result that the client has shortened still begins with this many of its characters.
HEAD_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class CoveredToolResult:
    """A covered tool result, remembered well enough to know it again when it has been shortened.

    Attributes:
        index: Its index.
        digest: The message's digest, 32 bytes.
        outline: Its digest without the text, 32 bytes (`result_digest`).
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
        stand_ins: What each span is replaced by, in order.
        summary: The text that was written, for the next round to integrate.
        tokens_before: Calibrated size of the request that it was made for.
        tokens_after: Calibrated size of what was forwarded instead.
        listed: Number of messages that the client's list had then; counts of what it gains start here.
        carried: Index of the user message whose text the stand-in carries; None if there is none.
        rounds: The frozen records of a chain, by the length up to which each speaks; they are the first
            stand-ins of their span.
        writer: Name of the model that wrote the summary; `EXTRACT` if none did, empty if there is none.
        edited: Indices of messages that stay where they are, shortened.
        names: The `name` of each message in `[0, length)` that had one, by its index. None in records of
            version 0.1, which stand for messages of the same names only.
    """

    strategy: str
    conversation: str
    round: int
    length: int
    exact: bytes
    results: tuple[CoveredToolResult, ...]
    spans: tuple[Span, ...]
    stand_ins: tuple[tuple[Message, ...], ...]
    summary: str
    tokens_before: int
    tokens_after: int
    listed: int = 0
    carried: int | None = None
    rounds: tuple[int, ...] = ()
    writer: str = ""
    edited: frozenset[int] = frozenset()
    names: tuple[tuple[int, str], ...] | None = None

    def covers_message(self, index: int) -> bool:
        """Whether something stands in for the message at `index`, be it the message itself, shortened."""
        return any(span.start <= index < span.stop for span in self.spans)

    @property
    def span_replacements(self) -> tuple[tuple[Span, tuple[Message, ...]], ...]:
        """Each span with what stands in for it."""
        return tuple(zip(self.spans, self.stand_ins, strict=True))

    @property
    def edited_messages(self) -> dict[int, Message]:
        """The shortened messages, by index; all other covered messages are gone."""
        return {span.start: put[0] for span, put in self.span_replacements if span.start in self.edited}

    @property
    def removed_indices(self) -> frozenset[int]:
        """Indices of the messages that are not in the effective list in any form."""
        return frozenset(
            index
            for span in self.spans
            if span.start not in self.edited
            for index in range(span.start, span.stop)
        )


def _hash_head(text: str) -> bytes:
    return hashlib.sha256(text[:HEAD_CHARACTERS].encode("utf-8", "surrogatepass")).digest()


def build_checkpoint_id(prefix: bytes, exact: bytes, spans: Iterable[Span], variant: str = "") -> bytes:
    """Where a checkpoint is kept: the prefix digest that finds it, then what makes it this one; 64 bytes.

    Two lists can share an outline and still differ in the text of a tool result, or in which user message was
    their latest: they have checkpoints of their own. So have several ways to replace the same spans, told
    apart by `variant`.
    """
    edges = ",".join(f"{span.start}-{span.stop}" for span in spans) + (f"/{variant}" if variant else "")
    return prefix + hashlib.sha256(exact + edges.encode()).digest()


def get_prefix_digest(checkpoint_id: bytes) -> bytes:
    """The prefix digest in a place."""
    return checkpoint_id[:PREFIX_BYTES]


def compute_exact_digest(messages: Iterable[Message]) -> bytes:
    """Chained digest of all the messages given, 32 bytes."""
    return _compute_chained_digest(tuple([message.digest for message in messages]))


def list_covered_results(messages: Sequence[Message], spans: Iterable[Span]) -> tuple[CoveredToolResult, ...]:
    """What to remember of the tool results inside the spans."""
    return tuple(
        _build_covered_result(index, messages[index])
        for span in spans
        for index in range(span.start, span.stop)
        if messages[index].answers
    )


def list_participant_names(messages: Iterable[Message]) -> tuple[tuple[int, str], ...]:
    """The `name` of each message that has one, by its index."""
    return tuple((index, message.name) for index, message in enumerate(messages) if message.name)


def _build_covered_result(index: int, message: Message) -> CoveredToolResult:
    return CoveredToolResult(
        index, message.digest, compute_result_digest(message), _hash_head(message.text), len(message.text)
    )


def _is_shortened_result(result: CoveredToolResult, message: Message) -> bool:
    """Whether the message is the remembered result, cleared or shortened."""
    if compute_result_digest(message) != result.outline:
        return False
    characters = len(message.text)
    return characters < result.characters and (
        characters <= CLEARED_CHARACTERS or _hash_head(message.text) == result.head
    )


def _matches_prefix(checkpoint: Checkpoint, messages: Sequence[Message], *, shortened: bool) -> bool:
    """Whether the covered prefix is the one that the checkpoint was made of."""
    possible = _iter_possible_prefixes(checkpoint, messages)
    return any(_matches_digest(checkpoint, covered, shortened=shortened) for covered in possible)


def _matches_digest(checkpoint: Checkpoint, covered: Sequence[Message], *, shortened: bool) -> bool:
    digests = [message.digest for message in covered]
    for result in checkpoint.results:
        if 0 <= result.index < len(digests) and digests[result.index] != result.digest:
            if not (shortened and _is_shortened_result(result, covered[result.index])):
                return False
            digests[result.index] = result.digest
    return _compute_chained_digest(tuple(digests)) == checkpoint.exact


def _iter_possible_prefixes(
    checkpoint: Checkpoint, messages: Sequence[Message]
) -> Iterator[Sequence[Message]]:
    """The covered prefix with the names that it has, and then, where these differ, with those that it had.

    A name that only one of the two sides has makes no difference.
    """
    covered = list(messages[: checkpoint.length])
    yield covered
    if checkpoint.names is None:
        return
    names = dict(checkpoint.names)
    renamed = [_restore_name(message, names.get(index, "")) for index, message in enumerate(covered)]
    if any(one is not other for one, other in zip(covered, renamed, strict=True)):
        yield renamed


def _restore_name(message: Message, name: str) -> Message:
    """The message under the name that it had, where it had or has none; else the message."""
    if name == message.name or (name and message.name):
        return message
    made = replace(message, name=name)
    return replace(made, digest=compute_message_digest(made))


@lru_cache(maxsize=256)  # a round asks several times, and each request of its conversation again
def _compute_chained_digest(digests: tuple[bytes, ...]) -> bytes:
    return chain_digests(digests)[-1]


def _splits_unit(messages: Sequence[Message], at: int) -> bool:
    """Whether an edge before `at` would part calls from answers that directly follow them."""
    if not 0 < at < len(messages) or not messages[at].answers:
        return False
    before = at - 1
    while before > 0 and messages[before].answers and not messages[before].calls:
        before -= 1
    return bool(messages[before].calls)


def is_applicable(
    checkpoint: Checkpoint, messages: Sequence[Message], conversation: str | None = None
) -> bool:
    """Whether a checkpoint may be applied to these non-privileged messages.

    It may if it covers their prefix and not their latest user message, which is never hidden from the model:
    it stays in its place, or its text is carried by the stand-in. A result that is shorter than the one
    remembered is taken for cleared in the checkpoint's own conversation only: under another id that the
    client gave, it is another result.
    """
    if not 0 < checkpoint.length <= len(messages):
        return False
    latest = find_latest_user_message(messages)
    if latest is not None and checkpoint.covers_message(latest) and latest != checkpoint.carried:
        return False
    end = max((span.stop for span in checkpoint.spans if span.start not in checkpoint.edited), default=0)
    if _splits_unit(messages, end):  # a further result of a call that is gone
        return False
    return _matches_prefix(checkpoint, messages, shortened=conversation in {None, checkpoint.conversation})


def drop_outdated_edits(checkpoint: Checkpoint, messages: Sequence[Message]) -> Checkpoint:
    """The checkpoint without what it shortened and the client has since shortened itself."""
    made_of = {result.index: result.digest for result in checkpoint.results}
    possible = list(_iter_possible_prefixes(checkpoint, messages))
    masked = checkpoint.edited & made_of.keys()
    changed = {k for k in masked if all(each[k].digest != made_of[k] for each in possible)}
    if not changed:
        return checkpoint
    pieces = [(span, put) for span, put in checkpoint.span_replacements if span.start not in changed]
    return replace(
        checkpoint,
        spans=tuple(span for span, _ in pieces),
        stand_ins=tuple(put for _, put in pieces),
        edited=checkpoint.edited - changed,
    )


def find_deepest_checkpoint(
    candidates: Iterable[Checkpoint | None], messages: Sequence[Message], conversation: str | None = None
) -> Checkpoint | None:
    """The checkpoint that covers most and may be applied; of several, what a model wrote at last.

    Args:
        candidates: Checkpoints that may stand for the messages.
        messages: The non-privileged messages of a request.
        conversation: The id that its client gave, if any.
    """
    best: Checkpoint | None = None
    for each in sorted((each for each in candidates if each), key=_rank_checkpoint, reverse=True):
        if best is not None and _rank_checkpoint(each)[:-1] != _rank_checkpoint(best)[:-1]:
            break
        if is_applicable(each, messages, conversation):
            fitting = drop_outdated_edits(each, messages)
            best = fitting if best is None else max(best, fitting, key=_rank_checkpoint)
    return best


def _rank_checkpoint(checkpoint: Checkpoint) -> tuple[int, int, bool, int]:
    """How far a checkpoint leads: what it covers, its round, who wrote it, and how much it replaces."""
    spans = len(checkpoint.spans)
    return checkpoint.length, checkpoint.round, checkpoint.writer != EXTRACT, spans


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
        "stand_ins": [[_build_replacement_fields(each) for each in put] for put in checkpoint.stand_ins],
        "summary": checkpoint.summary,
        "tokens": [checkpoint.tokens_before, checkpoint.tokens_after],
        "listed": checkpoint.listed,
        "carried": checkpoint.carried,
        "rounds": list(checkpoint.rounds),
        "writer": checkpoint.writer,
        "edited": sorted(checkpoint.edited),
        **({} if checkpoint.names is None else {"names": [list(each) for each in checkpoint.names]}),
    }


def _build_replacement_fields(message: Message) -> list[Any]:
    return [
        message.role,
        message.text,
        b64encode(message.raw).decode(),
        message.tokens,
        list(message.answers),
    ]


def from_fields(fields: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint that `to_fields` gave, or None if these are not its fields."""
    try:
        checkpoint = Checkpoint(
            strategy=str(fields["strategy"]),
            conversation=str(fields["conversation"]),
            round=int(fields["round"]),
            length=int(fields["length"]),
            exact=bytes.fromhex(fields["exact"]),
            results=tuple(map(_parse_result, fields["results"])),
            spans=tuple(Span(int(start), int(stop)) for start, stop in fields["spans"]),
            stand_ins=tuple(map(_parse_replacement, fields["stand_ins"])),
            summary=str(fields["summary"]),
            tokens_before=int(fields["tokens"][0]),
            tokens_after=int(fields["tokens"][1]),
            listed=int(fields["listed"]),
            carried=fields.get("carried"),
            rounds=tuple(map(int, fields.get("rounds", ()))),
            writer=str(fields.get("writer", "")),
            edited=frozenset(map(int, fields.get("edited", ()))),
            names=_parse_names(fields.get("names")),
        )
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return checkpoint if _is_consistent(checkpoint) else None


def _parse_names(fields: Sequence[Any] | None) -> tuple[tuple[int, str], ...] | None:
    return None if fields is None else tuple((int(index), str(name)) for index, name in fields)


def _parse_result(fields: Sequence[Any]) -> CoveredToolResult:
    index, digest, outline, head, characters = fields
    return CoveredToolResult(
        index=int(index),
        digest=bytes.fromhex(digest),
        outline=bytes.fromhex(outline),
        head=bytes.fromhex(head),
        characters=int(characters),
    )


def _parse_replacement(fields: Sequence[Any] | None) -> tuple[Message, ...]:
    """What stands in for a span. Version 0.1 wrote one message, or null for nothing."""
    if fields is None or fields == []:
        return ()
    return tuple(
        _parse_replacement_message(each) for each in ([fields] if isinstance(fields[0], str) else fields)
    )


def _parse_replacement_message(fields: Sequence[Any]) -> Message:
    role, text, raw, tokens, *answers = fields
    return Message(
        role=str(role),
        text=str(text),
        answers=tuple(map(str, answers[0])) if answers else (),
        raw=b64decode(raw, validate=True),
        tokens=int(tokens),
    )


def _is_consistent(checkpoint: Checkpoint) -> bool:
    """Whether the spans are in order, within what the checkpoint speaks of, and have a stand-in each."""
    edges = [0, *(edge for span in checkpoint.spans for edge in span), checkpoint.length]
    return (
        edges == sorted(edges)
        and all(span.start < span.stop for span in checkpoint.spans)
        and len(checkpoint.spans) == len(checkpoint.stand_ins)
        and (checkpoint.carried is None or type(checkpoint.carried) is int)
        and checkpoint.edited
        <= {
            span.start
            for span, put in checkpoint.span_replacements
            if span.stop - span.start == len(put) == 1
        }
    )
