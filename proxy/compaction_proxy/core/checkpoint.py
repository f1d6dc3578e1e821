"""Checkpoints: the stored results of compactions, and the rules for applying a checkpoint to a request.

A checkpoint is found by the prefix digest of the messages for which it was made. This digest is a chain of
outline digests (`core.digest`), which ignore participant names and the text of tool results. A checkpoint is
applied only if the exact digest of the messages, which also covers names and tool results, matches too. Only
two differences are allowed: the client may have cleared or shortened tool results, and it may have added or
removed names. So the proxy never applies a checkpoint to other messages, even if a conversation id is wrong,
outdated or shared by two conversations. No text gets from one conversation into another.

Indices count only the messages that are not fixed.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from compaction_proxy.core.digest import chain_digests, compute_message_digest, compute_textless_digest
from compaction_proxy.core.message import Message, Span, find_latest_user_message

PREFIX_BYTES = 32
# The value of `Checkpoint.writer` if code wrote the summary without a model.
EXTRACT_WRITER = "extract"
# A client that clears a tool result may leave a notice in its place. So a shortened tool result of at most
# this many characters is accepted, whatever it says.
MAX_NOTICE_CHARACTERS = 256
# A shortened tool result of more than `MAX_NOTICE_CHARACTERS` characters is accepted only if it begins
# with the first `HEAD_CHARACTERS` characters of the original.
HEAD_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class CoveredToolResult:
    """An entry of a checkpoint for one tool result inside a span.

    The entry serves to recognise the tool result after the client has shortened it.

    Attributes:
        index: Index of the message with the tool result.
        digest: Digest of the whole message, 32 bytes.
        outline_digest: Digest of the message without its content, 32 bytes (`compute_textless_digest`).
        head_digest: SHA-256 of the first `HEAD_CHARACTERS` characters of the text, 32 bytes.
        character_count: Length of the text, in characters.
    """

    index: int
    digest: bytes
    outline_digest: bytes
    head_digest: bytes
    character_count: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The stored result of one compaction. It never changes.

    Attributes:
        strategy: Name of the strategy that made the checkpoint.
        conversation: Id of the conversation in which the checkpoint was made, `c_…`.
        round: Number of the compaction within its conversation, from 1.
        length: The checkpoint is made for the messages `[0, length)`. It replaces some of them and leaves the
            others unchanged.
        exact: Chained digest of the messages `[0, length)`, 32 bytes.
        results: One entry for each tool result inside the spans.
        spans: The spans that are replaced, sorted and disjoint.
        stand_ins: The replacements of each span, in the order of `spans`.
        summary: Text of the summary. The next compaction may make its content part of a new summary.
        tokens_before: Calibrated size, in tokens, of the request that was compacted.
        tokens_after: Calibrated size, in tokens, of the request that was forwarded instead.
        listed: Number of messages, not counting fixed ones, that the client had sent when the compaction was
            made. Messages after these count as new since the compaction.
        carried: Index of the user message whose text moved into a replacement; None if no text moved.
        rounds: One number for each record of the chain, oldest first: the `length` of the checkpoint whose
            compaction wrote the record. All records are replacements of the same span, and come before its
            other replacements.
        writer: Name of the model that wrote the summary; `EXTRACT_WRITER` if code made it; empty if there is
            no summary.
        edited: Indices of messages that are shortened and stay in place.
        names: The `name` of each message in `[0, length)` that had one, with its index. None in a checkpoint
            that version 0.1 stored. Such a checkpoint matches only if no name has changed.
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

    @property
    def span_replacements(self) -> tuple[tuple[Span, tuple[Message, ...]], ...]:
        """The spans in their order, each paired with its replacements."""
        return tuple(zip(self.spans, self.stand_ins, strict=True))

    @property
    def edited_messages(self) -> dict[int, Message]:
        """The shortened messages by index. All other messages inside the spans are removed."""
        return {
            span.start: replacements[0]
            for span, replacements in self.span_replacements
            if span.start in self.edited
        }

    @property
    def removed_indices(self) -> frozenset[int]:
        """Indices of the messages that the checkpoint removes from the effective list.

        Messages that are only shortened are not included.
        """
        return frozenset(
            index
            for span in self.spans
            if span.start not in self.edited
            for index in range(span.start, span.stop)
        )


def _hash_head(text: str) -> bytes:
    return hashlib.sha256(text[:HEAD_CHARACTERS].encode("utf-8", "surrogatepass")).digest()


def build_checkpoint_id(
    prefix_digest: bytes, exact_digest: bytes, spans: Iterable[Span], variant: str = ""
) -> bytes:
    """Builds the 64-byte id under which a checkpoint is stored.

    The first 32 bytes are the prefix digest, by which the checkpoint is found. The last 32 bytes distinguish
    checkpoints with the same prefix digest. Such checkpoints can differ in names and tool results, which the
    prefix digest does not cover, and in their spans. `variant` distinguishes several ways to replace the same
    spans.
    """
    edges = ",".join(f"{span.start}-{span.stop}" for span in spans) + (f"/{variant}" if variant else "")
    return prefix_digest + hashlib.sha256(exact_digest + edges.encode()).digest()


def get_prefix_digest(checkpoint_id: bytes) -> bytes:
    """Returns the prefix digest in a checkpoint id."""
    return checkpoint_id[:PREFIX_BYTES]


def compute_exact_digest(messages: Iterable[Message]) -> bytes:
    """Computes the exact digest of one or more messages, 32 bytes, by chaining their digests."""
    return _compute_chained_digest(tuple([message.digest for message in messages]))


def list_covered_results(messages: Sequence[Message], spans: Iterable[Span]) -> tuple[CoveredToolResult, ...]:
    """Returns the entries that a checkpoint stores for the tool results inside the spans."""
    return tuple(
        CoveredToolResult(
            index,
            message.digest,
            compute_textless_digest(message),
            _hash_head(message.text),
            len(message.text),
        )
        for span in spans
        for index, message in enumerate(messages[span.start : span.stop], span.start)
        if message.answered_call_ids
    )


def list_participant_names(messages: Iterable[Message]) -> tuple[tuple[int, str], ...]:
    """Returns the `name` of each message that has one, with its index."""
    return tuple((index, message.name) for index, message in enumerate(messages) if message.name)


def _is_shortened_result(result: CoveredToolResult, message: Message) -> bool:
    """Returns whether the message is the stored tool result after the client has cleared or shortened it."""
    if compute_textless_digest(message) != result.outline_digest:
        return False
    characters = len(message.text)
    return characters < result.character_count and (
        characters <= MAX_NOTICE_CHARACTERS or _hash_head(message.text) == result.head_digest
    )


def _matches_digest(checkpoint: Checkpoint, covered: Sequence[Message], *, shortened: bool) -> bool:
    """Returns whether the messages are those for which the checkpoint was made.

    If `shortened` is true, a tool result that the client has since cleared or shortened counts as unchanged.
    """
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
    """Yields the first `checkpoint.length` messages, then the same messages with names as they were before.

    In the second list, a name that the client has since added is missing, and a name that it has since
    removed is restored. So a checkpoint still matches after such a change. The second list is yielded only if
    it differs from the first.
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
    """Returns the message with the stored name `name` if the client has since added or removed its name.

    The client has added the name if `name` is empty, and has removed it if the name of the message is empty.
    If both names are equal, or neither is empty, the message is returned unchanged.
    """
    if name == message.name or (name and message.name):
        return message
    renamed = replace(message, name=name)
    return replace(renamed, digest=compute_message_digest(renamed))


# The result is needed several times in a compaction, and for each later request. The digests of 8,000
# messages take half a megabyte.
@lru_cache(maxsize=32)
def _compute_chained_digest(digests: tuple[bytes, ...]) -> bytes:
    return chain_digests(digests)[-1]


def _splits_unit(messages: Sequence[Message], edge: int) -> bool:
    """Returns whether a cut before index `edge` would separate calls from the results that follow them."""
    if not 0 < edge < len(messages) or not messages[edge].answered_call_ids:
        return False
    caller = edge - 1
    while caller > 0 and messages[caller].answered_call_ids and not messages[caller].calls:
        caller -= 1
    return bool(messages[caller].calls)


def can_apply_checkpoint(
    checkpoint: Checkpoint, messages: Sequence[Message], conversation: str | None = None
) -> bool:
    """Returns whether a checkpoint may be applied to these messages.

    All of these conditions must hold:

    - The messages begin with those for which the checkpoint was made.
    - The latest user message stays in its place, or a replacement contains its text.
    - If a tool call is removed, none of its results stays.

    A tool result may be shorter than the stored one, because the client may have shortened it. This is
    allowed only if `conversation` is None or is the conversation of the checkpoint.
    """
    if not 0 < checkpoint.length <= len(messages):
        return False
    latest = find_latest_user_message(messages)
    is_covered = latest is not None and any(span.start <= latest < span.stop for span in checkpoint.spans)
    if is_covered and latest != checkpoint.carried:
        return False
    end = max((span.stop for span in checkpoint.spans if span.start not in checkpoint.edited), default=0)
    if _splits_unit(messages, end):  # the next message is the result of a removed call
        return False
    shortened = conversation in {None, checkpoint.conversation}
    possible = _iter_possible_prefixes(checkpoint, messages)
    return any(_matches_digest(checkpoint, covered, shortened=shortened) for covered in possible)


def drop_outdated_edits(checkpoint: Checkpoint, messages: Sequence[Message]) -> Checkpoint:
    """Returns the checkpoint without its edits of tool results that the client has since changed.

    The client has cleared or shortened such a tool result, and the proxy forwards the client's version.
    """
    known_digests = {result.index: result.digest for result in checkpoint.results}
    possible = list(_iter_possible_prefixes(checkpoint, messages))
    masked = checkpoint.edited & known_digests.keys()
    changed = {k for k in masked if all(prefix[k].digest != known_digests[k] for prefix in possible)}
    if not changed:
        return checkpoint
    pieces = [
        (span, replacements)
        for span, replacements in checkpoint.span_replacements
        if span.start not in changed
    ]
    return replace(
        checkpoint,
        spans=tuple(span for span, _ in pieces),
        stand_ins=tuple(replacements for _, replacements in pieces),
        edited=checkpoint.edited - changed,
    )


def find_longest_applicable_checkpoint(
    candidates: Iterable[Checkpoint | None], messages: Sequence[Message], conversation: str | None = None
) -> Checkpoint | None:
    """Finds the applicable checkpoint of the greatest length; None if no checkpoint may be applied.

    Among checkpoints of equal length, the one with the highest round is chosen. If several remain, one with a
    summary by a model is preferred, and then one with more spans. Outdated edits are removed from the result
    (`drop_outdated_edits`).

    Args:
        candidates: Checkpoints that may fit the messages. None entries are skipped.
        messages: The messages of a request that are not fixed.
        conversation: The conversation id that the client gave; None if it gave none.
    """
    best: Checkpoint | None = None
    for candidate in sorted(filter(None, candidates), key=_rank_checkpoint, reverse=True):
        if best is not None and _rank_checkpoint(candidate)[:-1] != _rank_checkpoint(best)[:-1]:
            break
        if can_apply_checkpoint(candidate, messages, conversation):
            fitting = drop_outdated_edits(candidate, messages)
            best = fitting if best is None else max(best, fitting, key=_rank_checkpoint)
    return best


def _rank_checkpoint(checkpoint: Checkpoint) -> tuple[int, int, bool, int]:
    """Returns a sort key: the length, the round, whether a model wrote the summary, the number of spans."""
    by_model = checkpoint.writer != EXTRACT_WRITER
    return checkpoint.length, checkpoint.round, by_model, len(checkpoint.spans)


def to_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the checkpoint as JSON values, ready to be stored."""
    return {
        "strategy": checkpoint.strategy,
        "conversation": checkpoint.conversation,
        "round": checkpoint.round,
        "length": checkpoint.length,
        "exact": checkpoint.exact.hex(),
        "results": [
            [
                each.index,
                each.digest.hex(),
                each.outline_digest.hex(),
                each.head_digest.hex(),
                each.character_count,
            ]
            for each in checkpoint.results
        ],
        "spans": [list(span) for span in checkpoint.spans],
        "stand_ins": [
            [
                [
                    each.role,
                    each.text,
                    b64encode(each.raw).decode(),
                    each.tokens,
                    list(each.answered_call_ids),
                ]
                for each in replacements
            ]
            for replacements in checkpoint.stand_ins
        ],
        "summary": checkpoint.summary,
        "tokens": [checkpoint.tokens_before, checkpoint.tokens_after],
        "listed": checkpoint.listed,
        "carried": checkpoint.carried,
        "rounds": list(checkpoint.rounds),
        "writer": checkpoint.writer,
        "edited": sorted(checkpoint.edited),
        **({} if checkpoint.names is None else {"names": [list(each) for each in checkpoint.names]}),
    }


def from_fields(fields: Mapping[str, Any]) -> Checkpoint | None:
    """Rebuilds a checkpoint from the result of `to_fields`. Returns None if the fields are invalid."""
    try:
        names = fields.get("names")
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
            names=None if names is None else tuple((int(index), str(name)) for index, name in names),
        )
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return checkpoint if _is_consistent(checkpoint) else None


def _parse_result(fields: Sequence[Any]) -> CoveredToolResult:
    index, digest, outline, head, characters = fields
    return CoveredToolResult(
        index=int(index),
        digest=bytes.fromhex(digest),
        outline_digest=bytes.fromhex(outline),
        head_digest=bytes.fromhex(head),
        character_count=int(characters),
    )


def _parse_replacement(fields: Sequence[Any] | None) -> tuple[Message, ...]:
    """Parses the replacements of one span.

    Version 0.1 stored a single message instead of a list, or null if there was no replacement.
    """
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
        answered_call_ids=tuple(map(str, answers[0])) if answers else (),
        raw=b64decode(raw, validate=True),
        tokens=int(tokens),
    )


def _is_consistent(checkpoint: Checkpoint) -> bool:
    """Returns whether the spans, replacements and edits fit each other and the checkpoint's length."""
    edges = [0, *(edge for span in checkpoint.spans for edge in span), checkpoint.length]
    return (
        edges == sorted(edges)
        and all(span.start < span.stop for span in checkpoint.spans)
        and len(checkpoint.spans) == len(checkpoint.stand_ins)
        and (checkpoint.carried is None or type(checkpoint.carried) is int)
        and checkpoint.edited
        <= {
            span.start
            for span, replacements in checkpoint.span_replacements
            if span.stop - span.start == len(replacements) == 1
        }
    )
