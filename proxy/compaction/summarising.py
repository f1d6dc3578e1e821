"""Asking for a summary: what a round needs, whom to ask, and how much of the transcript is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from proxy.core.checkpoint import Checkpoint
from proxy.core.digest import message_id
from proxy.core.message import Message
from proxy.core.planner import Plan
from proxy.core.policy import Policy
from proxy.core.render import excerpt
from proxy.core.summary import NO_TASK, prompt, task_of, validated
from proxy.errors import SummaryFailed
from proxy.ports import SummaryCall, SummaryModel
from proxy.reading import Gauge, Reading

# How often a transcript that the summary model cannot take is halved, and its smallest cut in characters.
HALVINGS = 6
SMALLEST_CUT = 40
# After a call that was too long, this share of the summary model's window is filled: the count was wrong.
OVERFLOW_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class SummaryRoute:
    """Where a summary is asked for.

    Attributes:
        url: Absolute URL of a chat completions endpoint.
        headers: Credentials and whatever else the call needs.
        model: The model's name.
        window: Tokens that the model takes.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    window: int


@dataclass(frozen=True, slots=True)
class Job:
    """One round to be made.

    Attributes:
        plan: What to take.
        policy: How.
        key: Store key of the checkpoint to be.
        place: Its place (`core.checkpoint.place`), 64 bytes.
        root: The conversation's root (`core.keys.root_of`).
        tenant: Whose it is.
        conversation: In which conversation.
        messages: The client's non-privileged messages.
        prefixes: Their prefix digests.
        earlier: The round before.
        instructions: System prompt of the summary call.
        routes: Whom to ask; the next one where a model is unknown.
        gauge: How tokens are counted.
        ratio: Calibrated tokens for each counted one.
        tokens_before: Calibrated size of the request.
        reason: What made it due.
        timeout_s: Seconds for the whole round.
        ttl_s: Seconds that the checkpoint is kept.
    """

    plan: Plan
    policy: Policy
    key: str
    place: bytes
    root: bytes
    tenant: str
    conversation: str
    messages: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    earlier: Checkpoint | None
    instructions: str
    routes: tuple[SummaryRoute, ...]
    gauge: Gauge
    ratio: float
    tokens_before: int
    reason: str
    timeout_s: float
    ttl_s: float

    @property
    def fresh(self) -> tuple[Message, ...]:
        """What no earlier round has summarised."""
        return tuple(self.messages[index] for index in self.plan.fresh)

    @property
    def replaced_tokens(self) -> int:
        """Counted tokens of what the stand-in replaces, the earlier stand-in included."""
        earlier = self.earlier.stand_ins if self.earlier else ()
        return sum(each.tokens for each in self.fresh) + sum(each.tokens for each in earlier if each)


async def summarise(job: Job, model: SummaryModel, reading: Reading) -> tuple[str, str]:
    """The summary's text, validated, and the name of the model that wrote it.

    Raises:
        SummaryFailed: None of the job's routes gave a usable one.
    """
    for route in job.routes[:-1]:
        try:
            return await _ask(job, route, model, reading), route.model
        except SummaryFailed as failed:
            if failed.reason != "unknown-model":
                raise
    return await _ask(job, job.routes[-1], model, reading), job.routes[-1].model


async def _ask(job: Job, route: SummaryRoute, model: SummaryModel, reading: Reading) -> str:
    """The summary by one model; if the call is too long for it, once more with a shorter transcript."""
    try:
        return await _answer(job, route, model, reading)
    except SummaryFailed as failed:
        if failed.reason != "overflow":
            raise
        window = int(min(failed.limit or route.window, route.window) * OVERFLOW_SHARE)
        return await _answer(job, replace(route, window=window), model, reading)


async def _answer(job: Job, route: SummaryRoute, model: SummaryModel, reading: Reading) -> str:
    shape = job.policy.summary
    call = SummaryCall(
        url=route.url,
        headers=route.headers,
        model=route.model,
        system=job.instructions,
        prompt=await _prompt(job, route, reading),
        max_tokens=shape.max_tokens,
        temperature=shape.temperature,
    )
    answer = await model.ask(call)
    return validated(
        answer.text, answer.finish_reason, called_tools=answer.called_tools, refused=answer.refused
    )


async def _prompt(job: Job, route: SummaryRoute, reading: Reading) -> str:
    """The prompt, its transcript cut until the summary model can take it."""
    shape = job.policy.summary
    room = route.window - shape.max_tokens - len(job.instructions) // 3
    earlier = job.earlier.summary if job.earlier else ""
    for _ in range(HALVINGS):
        text = prompt(job.fresh, shape, task_text(job), earlier)
        [counted] = await reading.counted([Message(role="user", text=text)], job.gauge)
        if counted.tokens * job.ratio <= room:
            break
        shape = replace(
            shape,
            tool_characters=max(SMALLEST_CUT, shape.tool_characters // 2),
            message_characters=max(SMALLEST_CUT, shape.message_characters // 2),
        )
    return text


def task_text(job: Job) -> str:
    """The task, verbatim up to the strategy's size."""
    task = task_of(job.messages)
    if task is None or not task.text:
        return NO_TASK
    if task.tokens <= job.policy.task_tokens:
        return task.text
    handle = message_id(job.prefixes[job.messages.index(task)])
    return excerpt(task.text, job.policy.task_tokens / task.tokens, handle)
