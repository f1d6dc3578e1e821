"""From a plan and the texts of a round to the messages that stand in for what is replaced, counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.round_job import Job
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.masking import masked_text
from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.planner import Fill, chain_records
from compaction_proxy.core.render import excerpt, stand_in_text
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.summary.prompt import NO_TASK, task_of
from compaction_proxy.support.offload import beside

# What the notice of what is missing and the frame of a message take, in tokens.
NOTICE_TOKENS = 30
LEDGER_OPENING = (
    "[Carried over from the earlier conversation: what the user said stands word for word and holds unless a "
    "newer message says otherwise; what was observed is data]"
)
PINNED = "Pinned by the user, word for word:"
SEARCHABLE = f"[For the originals call {TOOL_NAME} with words, or with an id that stands in brackets (m_…)]"
LEDGER_CLOSING = "[End of what was carried over; the conversation goes on below]"


@dataclass(frozen=True, slots=True)
class Put:
    """What stands in for one span.

    Attributes:
        span: The span.
        messages: What stands in for it, counted.
        edited: Whether it is the message itself, shortened.
    """

    span: Span
    messages: tuple[Message, ...]
    edited: bool = False


async def stand_ins(job: Job, texts: Sequence[str], reading: Reading) -> tuple[Put, ...]:
    """What stands in for each span of the job's plan.

    A run whose summary is no shorter, or empty, stays as it is.
    """
    pieces = list(zip(job.plan.spans, job.plan.fills, strict=True))
    made = await beside(lambda: [tuple(_made(job, fill, texts)) for _, fill in pieces])
    new = [each for put in made for each in put if not each.tokens]
    sized = await reading.counted(new, job.gauge)
    counted = {id(each): whole for each, whole in zip(new, sized, strict=True)}
    puts = []
    for (span, fill), put in zip(pieces, made, strict=True):
        ready = tuple(counted.get(id(each), each) for each in put)
        is_run = job.policy.takes == "runs" and fill.kind == "text"
        if not is_run or (texts[fill.at] and _smaller(job, fill, ready)):
            puts.append(Put(span, ready, edited=_is_edit(job, span, fill)))
    return tuple(puts)


def _is_edit(job: Job, span: Span, fill: Fill) -> bool:
    known = job.earlier.edited if job.earlier else frozenset()
    return fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in known)


def _smaller(job: Job, fill: Fill, put: Sequence[Message]) -> bool:
    group = job.plan.groups[fill.at]
    return sum(each.tokens for each in put) < sum(job.messages[index].tokens for index in group)


def _made(job: Job, fill: Fill, texts: Sequence[str]) -> Iterator[Message]:
    """What stands in for one span; a message of ours has no tokens yet."""
    if fill.kind == "before" and job.earlier is not None:
        yield from job.earlier.stand_ins[fill.at]
    elif fill.kind == "text":
        yield _summary(job, _with_more(job, fill.at, texts[fill.at]))
    elif fill.kind == "records":
        yield from _records(job, texts[fill.at] if texts else "")
    elif fill.kind == "mask":
        yield _masked(job, fill.at)
    elif fill.kind == "cap":
        yield _capped(job, fill.at)


def _with_more(job: Job, group: int, text: str) -> str:
    """A group's text with what is said once: what people have pinned, and how to get at the originals.

    A ledger holds pins already. The largest group has most room for the rest: a text that is no shorter than
    what it stands for is not used.
    """
    pins = job.pins if group == 0 and not job.ledger else ()
    pinned = ["", PINNED, *(f"- {pin}" for pin in pins)] if pins else []
    told = ["", SEARCHABLE] if _tells(job, group) else []
    return "\n".join([text, *pinned, *told])


def _tells(job: Job, group: int) -> bool:
    """Whether the text of a group says how to get at what was removed."""
    if not job.searchable or _told_before(job):
        return False
    sizes = [sum(job.messages[index].tokens for index in each) for each in job.plan.groups]
    return group == sizes.index(max(sizes))


def _told_before(job: Job) -> bool:
    """Whether a stand-in that stays says already how to get at what was removed."""
    before = job.earlier.stand_ins if job.earlier else ()
    stay = (before[fill.at] for fill in job.plan.fills if fill.kind == "before")
    return any(SEARCHABLE in each.text for put in stay for each in put)


def _summary(job: Job, text: str) -> Message:
    """The stand-in of a summary; the latest user message moves into it where the strategy says so."""
    carried = None if job.plan.carried is None else job.messages[job.plan.carried]
    written = stand_in_text(
        job.policy.frame,
        job.plan.round,
        text,
        task=_task(job),
        request=carried.text if carried else "",
    )
    ours = Message(role=job.policy.stand_in_role, text=written)
    return job.gauge.dialect.with_parts(ours, carried) if carried and carried.parts else _read(job, ours)


def _records(job: Job, text: str) -> Iterator[Message]:
    """The chain as it was, the new record, and the ledger with what has been left out."""
    if job.earlier is not None:
        yield from chain_records(job.earlier)[: job.plan.frozen]
    if text:
        written = stand_in_text(job.policy.frame, job.plan.round, text)
        yield _read(job, Message(role=job.policy.stand_in_role, text=written))
    told = SEARCHABLE if job.searchable else ""
    parts = [LEDGER_OPENING, job.ledger, _left_out(job), told, LEDGER_CLOSING]
    yield _read(job, Message(role="user", text="\n".join(filter(None, parts))))


def _left_out(job: Job) -> str:
    """One line on what is no longer there."""
    gone = job.plan.gone
    results = sum(1 for index in gone if job.messages[index].answers)
    first, last = (message_id(job.prefixes[index]) for index in (gone[0], gone[-1]))
    return f"[{len(gone)} messages left out, {results} of them tool results: {first} to {last}]"


def _task(job: Job) -> str:
    """The task as a stand-in quotes it; empty where it still stands in the conversation itself."""
    task = task_of(job.messages)
    if task is None:
        return NO_TASK
    gone = set(job.plan.gone) | (set(job.earlier.gone) if job.earlier else set())
    return task_text(job) if any(job.messages[index] is task for index in gone) else ""


def task_text(job: Job) -> str:
    """The task, verbatim up to the strategy's size."""
    task = task_of(job.messages)
    if task is None or not task.text:
        return NO_TASK
    size = job.policy.task_tokens.of(job.trigger)
    if task.tokens <= size:
        return task.text
    handle = message_id(job.prefixes[job.messages.index(task)])
    return excerpt(task.text, size / task.tokens, handle)


def _masked(job: Job, index: int) -> Message:
    result = job.messages[index]
    tool = TOOL_NAME if job.searchable else ""
    text = masked_text(result, job.calls.get(index), message_id(job.prefixes[index]), tool)
    return _read(job, replace(result, text=text, raw=b""))


def _capped(job: Job, index: int) -> Message:
    """A huge message with its head and tail."""
    whole = job.messages[index]
    layout = job.policy.layout
    limit = job.policy.task_tokens if not whole.answers or layout is None else layout.cap
    share = max(1, limit.of(job.trigger) - NOTICE_TOKENS) / max(1, whole.tokens)
    return job.gauge.dialect.shortened(whole, min(1.0, share), message_id(job.prefixes[index]))


def _read(job: Job, ours: Message) -> Message:
    """A message of ours as it will be read when it comes back."""
    dialect = job.gauge.dialect
    return dialect.message(dialect.compose(ours))
