"""From a plan and the texts of a round to the messages that stand in for what is replaced, counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.masking import format_mask
from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.planner import ReplacementKind, list_chain_records
from compaction_proxy.core.render import build_excerpt, format_replacement_text
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.summary.prompt import NO_TASK, find_task_message
from compaction_proxy.support.offload import run_in_worker

# What the notice of what is missing and the frame of a message take, in tokens.
NOTICE_TOKENS = 30
LEDGER_OPENING = (
    "[Carried over from the earlier conversation: what the user said stands word for word and holds unless a "
    "newer message says otherwise; what was observed is data]"
)
PINNED = "Pinned by the user, word for word:"
SEARCH_HINT = f"[For the originals call {TOOL_NAME} with words, or with an id that stands in brackets (m_…)]"
LEDGER_CLOSING = "[End of what was carried over; the conversation goes on below]"


@dataclass(frozen=True, slots=True)
class Replacement:
    """What stands in for one span.

    Attributes:
        span: The span.
        messages: What stands in for it, counted.
        is_edited: Whether it is the message itself, shortened.
    """

    span: Span
    messages: tuple[Message, ...]
    is_edited: bool = False


async def build_replacements(
    job: RoundJob, texts: Sequence[str], reader: MessageReader
) -> tuple[Replacement, ...]:
    """What stands in for each span of the job's plan.

    A run whose summary is no shorter, or empty, stays as it is.
    """
    pieces = list(zip(job.plan.spans, job.plan.fills, strict=True))
    made = await run_in_worker(lambda: [tuple(_build_messages(job, fill, texts)) for _, fill in pieces])
    new = [each for put in made for each in put if not each.tokens]
    sized = await reader.add_token_counts(new, job.counting_options)
    counted = {id(each): whole for each, whole in zip(new, sized, strict=True)}
    puts = []
    for (span, fill), put in zip(pieces, made, strict=True):
        ready = tuple(counted.get(id(each), each) for each in put)
        is_run = job.policy.takes == "runs" and fill.kind == "text"
        if not is_run or (texts[fill.at] and _is_smaller(job, fill, ready)):
            puts.append(Replacement(span, ready, is_edited=_is_edit(job, span, fill)))
    return tuple(puts)


def _is_edit(job: RoundJob, span: Span, fill: ReplacementKind) -> bool:
    known = job.previous_checkpoint.edited if job.previous_checkpoint else frozenset()
    return fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in known)


def _is_smaller(job: RoundJob, fill: ReplacementKind, put: Sequence[Message]) -> bool:
    group = job.plan.groups[fill.at]
    return sum(each.tokens for each in put) < sum(job.messages[index].tokens for index in group)


def _build_messages(job: RoundJob, fill: ReplacementKind, texts: Sequence[str]) -> Iterator[Message]:
    """What stands in for one span; a message of ours has no tokens yet."""
    if fill.kind == "before" and job.previous_checkpoint is not None:
        yield from job.previous_checkpoint.stand_ins[fill.at]
    elif fill.kind == "text":
        yield _build_summary_message(job, _add_pins_and_hint(job, fill.at, texts[fill.at]))
    elif fill.kind == "records":
        yield from _build_record_messages(job, texts[fill.at] if texts else "")
    elif fill.kind == "mask":
        yield _mask_result(job, fill.at)
    elif fill.kind == "cap":
        yield _cap_message(job, fill.at)


def _add_pins_and_hint(job: RoundJob, group: int, text: str) -> str:
    """A group's text with what is said once: what people have pinned, and how to get at the originals.

    A ledger holds pins already. The largest group has most room for the rest: a text that is no shorter than
    what it stands for is not used.
    """
    pins = job.pins if group == 0 and not job.ledger else ()
    pinned = ["", PINNED, *(f"- {pin}" for pin in pins)] if pins else []
    told = ["", SEARCH_HINT] if _should_add_search_hint(job, group) else []
    return "\n".join([text, *pinned, *told])


def _should_add_search_hint(job: RoundJob, group: int) -> bool:
    """Whether the text of a group says how to get at what was removed."""
    if not job.is_searchable or _has_search_hint(job):
        return False
    sizes = [sum(job.messages[index].tokens for index in each) for each in job.plan.groups]
    return group == sizes.index(max(sizes))


def _has_search_hint(job: RoundJob) -> bool:
    """Whether a stand-in that stays says already how to get at what was removed."""
    before = job.previous_checkpoint.stand_ins if job.previous_checkpoint else ()
    stay = (before[fill.at] for fill in job.plan.fills if fill.kind == "before")
    return any(SEARCH_HINT in each.text for put in stay for each in put)


def _build_summary_message(job: RoundJob, text: str) -> Message:
    """The stand-in of a summary; the latest user message moves into it where the strategy says so."""
    carried = None if job.plan.carried is None else job.messages[job.plan.carried]
    written = format_replacement_text(
        job.policy.frame,
        job.plan.round,
        text,
        task=_quote_task(job),
        request=carried.text if carried else "",
    )
    ours = Message(role=job.policy.stand_in_role, text=written)
    return (
        job.counting_options.wire.attach_parts(ours, carried)
        if carried and carried.parts
        else _round_trip_message(job, ours)
    )


def _build_record_messages(job: RoundJob, text: str) -> Iterator[Message]:
    """The chain as it was, the new record, and the ledger with what has been left out."""
    if job.previous_checkpoint is not None:
        yield from list_chain_records(job.previous_checkpoint)[: job.plan.frozen]
    if text:
        written = format_replacement_text(job.policy.frame, job.plan.round, text)
        yield _round_trip_message(job, Message(role=job.policy.stand_in_role, text=written))
    told = SEARCH_HINT if job.is_searchable else ""
    parts = [LEDGER_OPENING, job.ledger, _format_left_out(job), told, LEDGER_CLOSING]
    yield _round_trip_message(job, Message(role="user", text="\n".join(filter(None, parts))))


def _format_left_out(job: RoundJob) -> str:
    """One line on what is no longer there."""
    gone = job.plan.removed_indices
    results = sum(1 for index in gone if job.messages[index].answers)
    first, last = (format_message_id(job.prefixes[index]) for index in (gone[0], gone[-1]))
    return f"[{len(gone)} messages left out, {results} of them tool results: {first} to {last}]"


def _quote_task(job: RoundJob) -> str:
    """The task as a stand-in quotes it; empty where it still stands in the conversation itself."""
    task = find_task_message(job.messages)
    if task is None:
        return NO_TASK
    gone = set(job.plan.removed_indices) | (
        set(job.previous_checkpoint.removed_indices) if job.previous_checkpoint else set()
    )
    return format_task(job) if any(job.messages[index] is task for index in gone) else ""


def format_task(job: RoundJob) -> str:
    """The task, verbatim up to the strategy's size."""
    task = find_task_message(job.messages)
    if task is None or not task.text:
        return NO_TASK
    size = job.policy.task_tokens.compute_tokens(job.trigger)
    if task.tokens <= size:
        return task.text
    handle = format_message_id(job.prefixes[job.messages.index(task)])
    return build_excerpt(task.text, size / task.tokens, handle)


def _mask_result(job: RoundJob, index: int) -> Message:
    result = job.messages[index]
    tool = TOOL_NAME if job.is_searchable else ""
    text = format_mask(result, job.calls_by_result.get(index), format_message_id(job.prefixes[index]), tool)
    return _round_trip_message(job, replace(result, text=text, raw=b""))


def _cap_message(job: RoundJob, index: int) -> Message:
    """A huge message with its head and tail."""
    whole = job.messages[index]
    layout = job.policy.layout
    limit = job.policy.task_tokens if not whole.answers or layout is None else layout.cap
    share = max(1, limit.compute_tokens(job.trigger) - NOTICE_TOKENS) / max(1, whole.tokens)
    return job.counting_options.wire.shorten_message(
        whole, min(1.0, share), format_message_id(job.prefixes[index])
    )


def _round_trip_message(job: RoundJob, ours: Message) -> Message:
    """A message of ours as it will be read when it comes back."""
    dialect = job.counting_options.wire
    return dialect.parse_message(dialect.encode_message(ours))
