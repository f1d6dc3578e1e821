"""Computes the ids of checkpoints, and predicts the ids of the checkpoints that plans will become."""

from collections.abc import Collection, Sequence

from compaction_proxy.core.checkpoint import EXTRACT_WRITER, Checkpoint, build_checkpoint_id
from compaction_proxy.core.planner import RoundPlan


def format_checkpoint_variant(*, extract: bool, record_count: int, edited_indices: Collection[int]) -> str:
    """Formats the `variant` of a checkpoint id, which tells apart checkpoints for the same spans.

    Args:
        extract: Whether code made the summary without a model.
        record_count: Number of records in the chain.
        edited_indices: Indices of the messages that are shortened in place.
    """
    marks = (["extract"] if extract else []) + ([f"rounds-{record_count}"] if record_count else [])
    return ",".join([*marks, *(f"edited-{index}" for index in sorted(edited_indices))])


def compute_checkpoint_id(checkpoint: Checkpoint | None, prefix_digests: Sequence[bytes]) -> bytes:
    """Computes the 64-byte id of a checkpoint; empty if there is none.

    `prefix_digests` are the prefix digests of the messages for which the checkpoint was made.
    """
    if checkpoint is None:
        return b""
    variant = format_checkpoint_variant(
        extract=checkpoint.writer == EXTRACT_WRITER,
        record_count=len(checkpoint.rounds),
        edited_indices=checkpoint.edited,
    )
    return build_checkpoint_id(
        prefix_digests[checkpoint.length - 1], checkpoint.exact, checkpoint.spans, variant
    )


def list_edited_indices(plan: RoundPlan, earlier: Checkpoint | None) -> frozenset[int]:
    """Returns the indices of the messages that are shortened in place once the plan is carried out.

    The plan itself shortens them, or it leaves them as the earlier compaction shortened them.
    """
    earlier_edits = earlier.edited if earlier else frozenset()
    return frozenset(
        span.start
        for span, fill in zip(plan.spans, plan.planned_replacements, strict=True)
        if fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in earlier_edits)
    )


def predict_checkpoint_id(
    plan: RoundPlan,
    earlier: Checkpoint | None,
    prefix_digests: Sequence[bytes],
    exact_digest: bytes,
    *,
    extract: bool,
) -> bytes:
    """Predicts the id of the checkpoint that carrying out a plan will produce.

    Args:
        plan: The plan.
        earlier: The checkpoint that is in force before the plan is carried out; None if there is none.
        prefix_digests: Prefix digests of the messages.
        exact_digest: Exact digest of the first `plan.length` messages.
        extract: Whether code will make the summary without a model.
    """
    chained = any(fill.kind == "records" for fill in plan.planned_replacements)
    rounds = plan.frozen_record_count + (1 if chained else 0)
    variant = format_checkpoint_variant(
        extract=extract, record_count=rounds, edited_indices=list_edited_indices(plan, earlier)
    )
    return build_checkpoint_id(prefix_digests[plan.length - 1], exact_digest, plan.spans, variant)
