"""Where a checkpoint is kept, by what it is."""

from collections.abc import Collection, Sequence

from compaction_proxy.core.checkpoint import EXTRACT, Checkpoint, build_checkpoint_id
from compaction_proxy.core.planner import RoundPlan


def format_variant(*, extract: bool, rounds: int, edited: Collection[int]) -> str:
    """What tells apart checkpoints that replace the same spans of the same messages.

    Args:
        extract: Whether no model wrote the summary.
        rounds: Number of records in the chain.
        edited: Indices of the messages that are shortened where they stand.
    """
    marks = (["extract"] if extract else []) + ([f"rounds-{rounds}"] if rounds else [])
    return ",".join([*marks, *(f"edited-{index}" for index in sorted(edited))])


def compute_checkpoint_id(checkpoint: Checkpoint | None, prefixes: Sequence[bytes]) -> bytes:
    """The place of a checkpoint that stands for these prefix digests, 64 bytes; empty for none."""
    if checkpoint is None:
        return b""
    found = format_variant(
        extract=checkpoint.writer == EXTRACT, rounds=len(checkpoint.rounds), edited=checkpoint.edited
    )
    return build_checkpoint_id(prefixes[checkpoint.length - 1], checkpoint.exact, checkpoint.spans, found)


def list_edited_indices(plan: RoundPlan, earlier: Checkpoint | None) -> frozenset[int]:
    """Indices of the messages that a plan shortens where they stand, or leaves as they were shortened."""
    known = earlier.edited if earlier else frozenset()
    return frozenset(
        span.start
        for span, fill in zip(plan.spans, plan.fills, strict=True)
        if fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in known)
    )


def predict_checkpoint_id(
    plan: RoundPlan, earlier: Checkpoint | None, prefixes: Sequence[bytes], exact: bytes, *, extract: bool
) -> bytes:
    """The place of the checkpoint that a plan behind an earlier round will become."""
    chained = any(fill.kind == "records" for fill in plan.fills)
    rounds = plan.frozen + (1 if chained else 0)
    found = format_variant(extract=extract, rounds=rounds, edited=list_edited_indices(plan, earlier))
    return build_checkpoint_id(prefixes[plan.length - 1], exact, plan.spans, found)
