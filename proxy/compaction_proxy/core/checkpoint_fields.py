"""Checkpoints as JSON values, for an envelope: written by this version, read from this one and the last."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from compaction_proxy.core.checkpoint import Checkpoint, Result
from compaction_proxy.core.message import Message, Span


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
        "stand_ins": [[_stand_in_fields(each) for each in put] for put in checkpoint.stand_ins],
        "summary": checkpoint.summary,
        "tokens": [checkpoint.tokens_before, checkpoint.tokens_after],
        "listed": checkpoint.listed,
        "carried": checkpoint.carried,
        "rounds": list(checkpoint.rounds),
        "writer": checkpoint.writer,
        "edited": sorted(checkpoint.edited),
        **({} if checkpoint.names is None else {"names": [list(each) for each in checkpoint.names]}),
    }


def _stand_in_fields(message: Message) -> list[Any]:
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
            results=tuple(map(_result, fields["results"])),
            spans=tuple(Span(int(start), int(stop)) for start, stop in fields["spans"]),
            stand_ins=tuple(map(_stand_ins, fields["stand_ins"])),
            summary=str(fields["summary"]),
            tokens_before=int(fields["tokens"][0]),
            tokens_after=int(fields["tokens"][1]),
            listed=int(fields["listed"]),
            carried=fields.get("carried"),
            rounds=tuple(map(int, fields.get("rounds", ()))),
            writer=str(fields.get("writer", "")),
            edited=frozenset(map(int, fields.get("edited", ()))),
            names=_names(fields.get("names")),
        )
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return checkpoint if _sound(checkpoint) else None


def _names(fields: Sequence[Any] | None) -> tuple[tuple[int, str], ...] | None:
    return None if fields is None else tuple((int(index), str(name)) for index, name in fields)


def _result(fields: Sequence[Any]) -> Result:
    index, digest, outline, head, characters = fields
    return Result(
        index=int(index),
        digest=bytes.fromhex(digest),
        outline=bytes.fromhex(outline),
        head=bytes.fromhex(head),
        characters=int(characters),
    )


def _stand_ins(fields: Sequence[Any] | None) -> tuple[Message, ...]:
    """What stands in for a span. Version 0.1 wrote one message, or null for nothing."""
    if fields is None or fields == []:
        return ()
    return tuple(_stand_in(each) for each in ([fields] if isinstance(fields[0], str) else fields))


def _stand_in(fields: Sequence[Any]) -> Message:
    role, text, raw, tokens, *answers = fields
    return Message(
        role=str(role),
        text=str(text),
        answers=tuple(map(str, answers[0])) if answers else (),
        raw=b64decode(raw, validate=True),
        tokens=int(tokens),
    )


def _sound(checkpoint: Checkpoint) -> bool:
    """Whether the spans are in order, within what the checkpoint speaks of, and have a stand-in each."""
    edges = [0, *(edge for span in checkpoint.spans for edge in span), checkpoint.length]
    return (
        edges == sorted(edges)
        and all(span.start < span.stop for span in checkpoint.spans)
        and len(checkpoint.spans) == len(checkpoint.stand_ins)
        and (checkpoint.carried is None or type(checkpoint.carried) is int)
        and checkpoint.edited
        <= {span.start for span, put in checkpoint.pieces if span.stop - span.start == len(put) == 1}
    )
