"""Builds the events that report compactions, and lists the messages that the model sees after one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compaction_proxy.compaction.ledger_cache import LedgerCache
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.summary_client import PriceLookup, SummaryUsage
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, MAX_MESSAGE_IDS, Event
from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.ledger import flatten_text
from compaction_proxy.core.summary.retention import count_retained_facts
from compaction_proxy.recall.archive import format_message_text
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, VisibleMessage
from compaction_proxy.telemetry.event_bus import generate_event_id
from compaction_proxy.telemetry.logs import REQUEST_ID

# The outcome of a compaction. `APPLIED`: a waiting request uses it at once. `SCHEDULED`: it is stored for a
# later request.
APPLIED, SCHEDULED = "applied", "scheduled"

# For each kind of fact: how many facts of this kind the model still sees after a compaction, and how many the
# replaced messages held.
Facts = Mapping[str, tuple[int, int]]


def build_created_event(
    job: RoundJob,
    checkpoint: Checkpoint,
    facts: Facts,
    price: PriceLookup,
    *,
    created_at_s: float,
    duration_s: float,
    outcome: str,
) -> Event:
    """Builds the event that reports a compaction that was made.

    Args:
        job: The compaction.
        checkpoint: The checkpoint of the compaction.
        facts: How many facts of the replaced messages the model still sees.
        price: Returns what a summary call costs.
        created_at_s: Time of the event, in seconds since the epoch.
        duration_s: How long the compaction took, in seconds.
        outcome: `APPLIED` or `SCHEDULED`.
    """
    affected = job.affected_indices
    return Event(
        COMPACTED,
        created_at_s,
        **_build_common_fields(job, price),
        place=job.checkpoint_id.hex(),
        reason=job.reason,
        outcome=outcome,
        model=checkpoint.writer,
        tokens_after=checkpoint.tokens_after,
        messages=len(affected),
        message_ids=tuple(format_message_id(job.prefixes[index]) for index in affected[:MAX_MESSAGE_IDS]),
        seconds=round(duration_s, 3),
        facts=facts,
        summary=checkpoint.summary,
    )


def build_failed_event(job: RoundJob, reason: str, price: PriceLookup, *, failed_at_s: float) -> Event:
    """Builds the event that reports a failed compaction, with the cost of its summary calls."""
    return Event(FAILED, failed_at_s, **_build_common_fields(job, price), reason=reason)


def build_installed_event(
    view: RequestView, checkpoint: Checkpoint, checkpoint_id: bytes, due_reason: str, installed_at_s: float
) -> Event:
    """Builds the event that reports that a checkpoint made ahead of need is now in force."""
    installed = view.with_checkpoint(checkpoint)
    return Event(
        INSTALLED,
        installed_at_s,
        conversation=view.conversation_id or checkpoint.conversation,
        id=generate_event_id(),
        request=REQUEST_ID.get(""),
        strategy=checkpoint.strategy,
        round=checkpoint.round,
        place=checkpoint_id.hex(),
        reason=due_reason,
        outcome=APPLIED,
        asked=view.request.model,
        tokens_before=view.estimate_tokens(view.effective_messages),
        tokens_after=installed.estimate_tokens(installed.effective_messages),
        trigger=view.marks.trigger_tokens if view.is_automatic else None,
        window=view.budget.window,
        basis=view.price_basis,
        listed=len(view.messages),
    )


def _build_common_fields(job: RoundJob, price: PriceLookup) -> dict[str, Any]:
    """Builds the event fields that are the same for compactions that were made and for failed ones."""
    usage = job.summary_request.usage if job.summary_request else SummaryUsage()
    fields = {
        "conversation": job.conversation,
        "id": generate_event_id(),
        "request": REQUEST_ID.get(""),
        "strategy": job.policy.name,
        "round": job.plan.round,
        "asked": job.model,
        "tokens_before": job.tokens_before,
        "trigger": job.calibrated_trigger_tokens,
        "window": job.window,
        "basis": job.price_basis,
        "listed": job.client_message_count,
    }
    return {**fields, **_build_cost_fields(usage, price)} if usage.calls else fields


def _build_cost_fields(usage: SummaryUsage, price: PriceLookup) -> dict[str, Any]:
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cost_usd": usage.compute_cost_usd(price),
    }


def find_retained_facts(
    job: RoundJob, visible_messages: Sequence[VisibleMessage], ledger_cache: LedgerCache
) -> Facts:
    """Counts how many facts of the replaced messages the model still sees (`core.summary.retention`).

    Returns an empty mapping if no message is replaced.
    """
    affected = job.affected_indices
    if not affected:
        return {}
    removed = [job.messages[index] for index in affected]
    statements = ledger_cache.get_active_statements(job.messages).list_statements_in_messages(
        frozenset(affected)
    )
    rules = [
        flatten_text(spoken.statement.text) for _, spoken in statements if spoken.kind is StatementKind.RULE
    ]
    replacements_first = sorted(visible_messages, key=lambda each: each.origin == KEPT)
    return count_retained_facts(
        removed, [each.text for each in replacements_first], rules, ledger_cache.get_shown_facts
    )


def list_messages_after_round(job: RoundJob, checkpoint: Checkpoint) -> Iterator[VisibleMessage]:
    """Yields the messages that are forwarded after the compaction, without fixed messages."""
    replacements = {span.start: (span, replaced) for span, replaced in checkpoint.span_replacements}
    index = 0
    while index < len(job.messages):
        message_id = format_message_id(job.prefixes[index])
        if index in replacements:
            span, replaced = replacements[index]
            own_id = message_id if index in checkpoint.edited else ""
            yield from (
                VisibleMessage(each.role, format_message_text(each), STAND_IN, own_id) for each in replaced
            )
            index = span.stop
        else:
            message = job.messages[index]
            yield VisibleMessage(message.role, format_message_text(message), KEPT, message_id)
            index += 1
