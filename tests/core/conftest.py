"""What tests of planning share: the checkpoint that a plan becomes, made by the real functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from compaction_proxy.core.checkpoint import Checkpoint, compute_exact_digest, list_covered_results
from compaction_proxy.core.masking import format_mask, map_results_to_calls
from compaction_proxy.core.message import Message
from compaction_proxy.core.planner import PlannedReplacement, RoundPlan, list_chain_records
from compaction_proxy.core.render import build_excerpt, format_replacement_text
from compaction_proxy.core.strategies import Policy

# Tokens of a message of ours.
OURS_TOKENS = 9

AsCheckpoint = Callable[[RoundPlan, Sequence[Message], Policy, Checkpoint | None], Checkpoint]


def _ours(role: str, text: str) -> Message:
    return Message(role, text, raw=text.encode(), tokens=OURS_TOKENS)


def _summary(made: RoundPlan, fill: PlannedReplacement, body: Sequence[Message], policy: Policy) -> Message:
    carried = "" if made.carried_index is None else body[made.carried_index].text
    text = f"Summary {made.round}.{fill.reference_index}"
    return _ours(
        policy.stand_in_role, format_replacement_text(policy.frame, made.round, text, request=carried)
    )


def _put(
    made: RoundPlan,
    fill: PlannedReplacement,
    body: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
) -> Iterator[Message]:
    """What stands in for one span."""
    if fill.kind == "before":
        assert earlier is not None
        yield from earlier.stand_ins[fill.reference_index]
    elif fill.kind == "text":
        yield _summary(made, fill, body, policy)
    elif fill.kind == "records":
        yield from (list_chain_records(earlier) if earlier else ())[: made.frozen_record_count]
        yield _summary(made, fill, body, policy)
        yield _ours("user", f"Ledger {made.round}")
    elif fill.kind in {"mask", "cap"}:
        whole = body[fill.reference_index]
        call = map_results_to_calls(body).get(fill.reference_index)
        text = (
            format_mask(whole, call, f"m_{fill.reference_index}")
            if fill.kind == "mask"
            else build_excerpt(whole.text, 0.1, f"m_{fill.reference_index}")
        )
        yield replace(whole, text=text, raw=text.encode(), tokens=min(OURS_TOKENS, whole.tokens))


def _edited(made: RoundPlan, earlier: Checkpoint | None) -> frozenset[int]:
    known = earlier.edited if earlier else frozenset()
    return frozenset(
        span.start
        for span, fill in zip(made.spans, made.planned_replacements, strict=True)
        if fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in known)
    )


def _rounds(made: RoundPlan, earlier: Checkpoint | None) -> tuple[int, ...]:
    kept = earlier.rounds[: made.frozen_record_count] if earlier else ()
    return (*kept, made.length) if any(fill.kind == "records" for fill in made.planned_replacements) else kept


@pytest.fixture(scope="session")
def as_checkpoint() -> AsCheckpoint:
    """Makes the checkpoint of a plan for these non-privileged messages; its summaries are `Summary R.G`."""

    def checkpoint(
        made: RoundPlan, body: Sequence[Message], policy: Policy, earlier: Checkpoint | None
    ) -> Checkpoint:
        return Checkpoint(
            strategy=policy.name,
            conversation="c_1",
            round=made.round,
            length=made.length,
            exact=compute_exact_digest(body[: made.length]),
            results=list_covered_results(body, made.spans),
            spans=made.spans,
            stand_ins=tuple(
                tuple(_put(made, fill, body, policy, earlier)) for fill in made.planned_replacements
            ),
            summary=f"Summary {made.round}",
            tokens_before=0,
            tokens_after=0,
            listed=len(body),
            carried=made.carried_index,
            rounds=_rounds(made, earlier),
            writer="model" if made.groups else "",
            edited=_edited(made, earlier),
        )

    return checkpoint
