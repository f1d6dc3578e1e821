"""Builds the messages that replace the spans of a plan, and counts their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compaction_proxy.compaction.fallback_cut import NOTICE_TOKENS, round_trip_message
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.round_planning import merge_pins
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.masking import format_mask
from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.planner import PlannedReplacement, list_chain_records
from compaction_proxy.core.render import format_replacement_text
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.support.offload import run_in_worker

LEDGER_OPENING = (
    "[Carried over from the earlier conversation: what the user said stands word for word and holds unless a "
    "newer message says otherwise; what was observed is data]"
)
PINNED = "Pinned by the user, word for word:"
SEARCH_HINT = f"[For the originals call {TOOL_NAME} with words, or with an id that stands in brackets (m_…)]"
LEDGER_CLOSING = "[End of what was carried over; the conversation goes on below]"


@dataclass(frozen=True, slots=True)
class Replacement:
    """The messages that replace one span.

    Attributes:
        span: The span.
        messages: The messages that take the place of the span, with their token counts.
        is_edited: Whether the span is a single message, and the replacement is its masked or capped version.
    """

    span: Span
    messages: tuple[Message, ...]
    is_edited: bool = False


async def build_replacements(
    job: RoundJob, texts: Sequence[str], reader: MessageReader
) -> tuple[Replacement, ...]:
    """Builds the replacement of each span in the plan of the job.

    Some strategies summarise several runs of consecutive messages separately. If the summary of a run is
    empty or not shorter than the run, the original messages stay, and the result has no replacement for this
    run.

    Args:
        job: The compaction.
        texts: The summaries or extracts of the plan's groups of messages, in order; empty if the plan has no
            groups.
        reader: Counts the tokens of new messages.
    """
    pieces = list(zip(job.draft.plan.spans, job.draft.plan.planned_replacements, strict=True))
    messages_by_span = await run_in_worker(
        lambda: [tuple(_build_messages(job, fill, texts)) for _, fill in pieces]
    )
    uncounted = [each for messages in messages_by_span for each in messages if not each.tokens]
    counted = iter(await reader.add_token_counts(uncounted, job.view.request.counting_options))
    has_runs = job.view.policy.removal_scope == "runs" and bool(texts)
    # A summary is used only if it is shorter than the group of messages that it replaces. One of the
    # summaries also contains the pins. For the comparison, this summary is counted without the pins: with the
    # pins it might be too long, and then the pins would be lost together with the summary.
    group_with_pins = job.largest_group if has_runs else -1
    without_pins = [_build_summary_message(job, texts[group_with_pins])] if has_runs else []
    without_pins = list(await reader.add_token_counts(without_pins, job.view.request.counting_options))
    replacements = []
    for (span, fill), messages in zip(pieces, messages_by_span, strict=True):
        counted_replacement = tuple(each if each.tokens else next(counted) for each in messages)
        if has_runs and fill.kind == "text":
            compared = without_pins if fill.reference_index == group_with_pins else counted_replacement
            if not texts[fill.reference_index] or not _is_smaller(job, fill, compared):
                continue
        replacements.append(Replacement(span, counted_replacement, is_edited=_is_edit(job, span, fill)))
    return tuple(replacements)


def _is_edit(job: RoundJob, span: Span, fill: PlannedReplacement) -> bool:
    edited = job.view.checkpoint.edited if job.view.checkpoint else frozenset()
    return fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in edited)


def _is_smaller(job: RoundJob, fill: PlannedReplacement, messages: Sequence[Message]) -> bool:
    group = job.draft.plan.groups[fill.reference_index]
    return sum(each.tokens for each in messages) < sum(
        job.view.unfixed_messages[index].tokens for index in group
    )


def _build_messages(job: RoundJob, fill: PlannedReplacement, texts: Sequence[str]) -> Iterator[Message]:
    """Yields the messages that replace one span, according to the plan `fill`.

    New messages have no token count yet.
    """
    if fill.kind == "before" and job.view.checkpoint is not None:
        yield from job.view.checkpoint.stand_ins[fill.reference_index]
    elif fill.kind == "text":
        yield _build_summary_message(
            job, _add_pins_and_hint(job, fill.reference_index, texts[fill.reference_index])
        )
    elif fill.kind == "records":
        yield from _build_record_messages(job, texts[fill.reference_index] if texts else "")
    elif fill.kind == "mask":
        yield _mask_result(job, fill.reference_index)
    elif fill.kind == "cap":
        yield _cap_message(job, fill.reference_index)


def _add_pins_and_hint(job: RoundJob, group: int, text: str) -> str:
    """Returns the summary `text` of a group of messages, with the pins and the search hint added if needed.

    Only the summary of the largest group gets these additions. A summary is not used if it is not shorter
    than its group, and this is least likely for the largest group. The pins are not added if there is a
    ledger, which already contains them. The search hint says how the model can find removed messages. It is
    not added if no search is possible, or if another replacement contains it.

    Args:
        job: The compaction.
        group: Index of the group in the plan.
        text: The summary of the group.
    """
    if group != job.largest_group:
        return text
    pins = () if job.draft.ledger else merge_pins(job.view)
    pin_lines = ["", PINNED, *(f"- {pin}" for pin in pins)] if pins else []
    hint_lines = ["", SEARCH_HINT] if job.is_searchable and not _has_search_hint(job) else []
    return "\n".join([text, *pin_lines, *hint_lines])


def _has_search_hint(job: RoundJob) -> bool:
    """Returns whether this compaction keeps an earlier replacement that contains the search hint."""
    before = job.view.checkpoint.stand_ins if job.view.checkpoint else ()
    staying = (
        before[fill.reference_index] for fill in job.draft.plan.planned_replacements if fill.kind == "before"
    )
    return any(SEARCH_HINT in each.text for put in staying for each in put)


def _build_summary_message(job: RoundJob, text: str) -> Message:
    """Builds a replacement that contains the summary `text`.

    If the plan removes the latest user message, the replacement also quotes this message.
    """
    carried = (
        None
        if job.draft.plan.carried_index is None
        else job.view.unfixed_messages[job.draft.plan.carried_index]
    )
    content = format_replacement_text(
        job.view.policy.frame,
        job.draft.plan.round,
        text,
        task=job.quoted_task,
        request=carried.text if carried else "",
    )
    message = Message(role=job.view.policy.stand_in_role, text=content)
    wire = job.view.request.body.wire
    if carried and carried.parts:
        return wire.attach_parts(message, carried)
    return round_trip_message(message, wire)


def _build_record_messages(job: RoundJob, text: str) -> Iterator[Message]:
    """Yields the earlier records that stay in the chain, then a new record, and then the ledger.

    The new record contains the summary `text`. If `text` is empty, there is no new record.
    """
    wire = job.view.request.body.wire
    if job.view.checkpoint is not None:
        yield from list_chain_records(job.view.checkpoint)[: job.draft.plan.frozen_record_count]
    if text:
        content = format_replacement_text(job.view.policy.frame, job.draft.plan.round, text)
        yield round_trip_message(Message(role=job.view.policy.stand_in_role, text=content), wire)
    hint = SEARCH_HINT if job.is_searchable else ""
    parts = [LEDGER_OPENING, job.draft.ledger, _format_left_out(job), hint, LEDGER_CLOSING]
    yield round_trip_message(Message(role="user", text="\n".join(filter(None, parts))), wire)


def _format_left_out(job: RoundJob) -> str:
    """Formats a line about the removed messages.

    The line says how many messages are removed, and how many of them are tool results. It also names the ids
    of the first and the last removed message.
    """
    removed = job.draft.plan.removed_indices
    results = sum(1 for index in removed if job.view.unfixed_messages[index].answered_call_ids)
    first, last = (format_message_id(job.view.prefixes[index]) for index in (removed[0], removed[-1]))
    return f"[{len(removed)} messages left out, {results} of them tool results: {first} to {last}]"


def _mask_result(job: RoundJob, index: int) -> Message:
    result = job.view.unfixed_messages[index]
    tool = TOOL_NAME if job.is_searchable else ""
    text = format_mask(
        result,
        job.calls_by_result.get(index),
        format_message_id(job.view.prefixes[index]),
        tool,
    )
    return round_trip_message(replace(result, text=text, raw=b""), job.view.request.body.wire)


def _cap_message(job: RoundJob, index: int) -> Message:
    """Shortens a huge tool result or a long task to its beginning and its end."""
    message = job.view.unfixed_messages[index]
    layout = job.view.policy.layout
    limit = job.view.policy.task_tokens if not message.answered_call_ids or layout is None else layout.cap
    share = max(1, limit.compute_tokens(job.view.trigger_tokens) - NOTICE_TOKENS) / max(1, message.tokens)
    return job.view.request.body.wire.shorten_message(
        message, min(1.0, share), format_message_id(job.view.prefixes[index])
    )
