"""Builds jobs. A job contains everything that is needed to make one compaction.

The main parts of a job are the draft (`RoundDraft`), with the plan and the ledger, and the request for the
summary model, with its system prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path

from compaction_proxy.compaction.request_view import RequestView, resolve_policy
from compaction_proxy.compaction.round_planning import CHARACTERS_A_TOKEN, RoundDraft, list_edited_indices
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    Group,
    SummaryRequest,
    SummaryRoute,
    count_shown_characters,
)
from compaction_proxy.compaction.types import FitRequest
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.validation import MAX_PROMPT_BYTES
from compaction_proxy.core.checkpoint import compute_exact_digest
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import ConfigError, UnreadableBodyError
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.masking import map_results_to_calls
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.planner import RoundPlan, list_chain_records, predict_checkpoint_id
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.core.repair import repair_messages
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.strategies import STRATEGIES, Policy
from compaction_proxy.core.summary.prompt import NO_TASK, find_task_message
from compaction_proxy.recall.offer import should_offer_tool
from compaction_proxy.storage.keys import checkpoint_keys
from compaction_proxy.support.cached import cached_attribute
from compaction_proxy.support.offload import run_in_worker


@lru_cache(maxsize=64)
def _load_prompt(prompt_file: str | None, built_in: str) -> str:
    if prompt_file is None:
        return files("compaction_proxy").joinpath("prompts", f"{built_in}.md").read_text(encoding="utf-8")
    path = Path(prompt_file).expanduser()
    try:
        data = path.read_bytes()
        if len(data) > MAX_PROMPT_BYTES:
            raise ConfigError(f"summary.prompt_file: {path}: larger than {MAX_PROMPT_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"summary.prompt_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"summary.prompt_file: {path}: is not UTF-8") from None


def build_summary_instructions(settings: ModelSettings, policy: Policy) -> str:
    """Returns the system prompt for summary calls; empty if the strategy uses no summaries.

    All calls with the same settings and strategy get the same prompt. The text of a prompt file is cached, so
    changes to the file have no effect until the proxy is started again.

    Raises:
        ConfigError: If the prompt file cannot be read.
    """
    if policy.summary is None:
        return ""
    strategy_settings = getattr(settings.compaction.strategies, policy.name)
    prompt_file = strategy_settings.prompt_file or settings.summary.prompt_file
    text = _load_prompt(prompt_file, policy.summary.prompt_name).replace(
        "{tokens}", str(policy.summary.tokens)
    )
    instructions = (
        settings.summary.instructions
        if strategy_settings.instructions is None
        else strategy_settings.instructions
    )
    extra = instructions.strip()
    return f"{text.rstrip()}\n\n{extra}\n" if extra else text


def check_prompt_files(config: Config) -> None:
    """Checks that every prompt file that the configuration names can be read.

    Raises:
        ConfigError: If a prompt file cannot be read.
    """
    for model in ("", *config.models):
        settings = get_model_settings(config, model)
        for name in STRATEGIES:
            build_summary_instructions(settings, resolve_policy(settings, name))


# The reported reason of a compaction that is prepared before any request needs it.
AHEAD_REASON = "soft"


@dataclass(frozen=True)  # no slots: cached attributes are stored in `__dict__`
class RoundJob:
    """A compaction to be made, with everything that is needed to make it.

    Attributes:
        view: The request for which the compaction is made.
        draft: The plan of the compaction, the ledger, and the size of the summary.
        root: Digest of the first messages of the conversation (`storage.keys.get_conversation_root`).
        checkpoint_id: Id of the checkpoint that will be written (`core.planner`), 64 bytes.
        conversation: The conversation id.
        reason: Why the compaction is due.
        ttl_s: How long the checkpoint is kept, in seconds.
        is_searchable: Whether the model will probably be offered the tool that searches removed messages.
        summary_request: The request for the summary model; None if no model writes a summary.
        is_extractive: Whether an extract, written without a model, is used instead of a summary.
    """

    view: RequestView
    draft: RoundDraft
    root: bytes
    checkpoint_id: bytes
    conversation: str
    reason: str
    ttl_s: float
    is_searchable: bool
    summary_request: SummaryRequest | None = None
    is_extractive: bool = False

    @property
    def tenant(self) -> str:
        """The tenant that owns the conversation."""
        return self.view.request.tenant

    @cached_attribute
    def key(self) -> str:
        """Store key of the checkpoint that will be written."""
        [key] = checkpoint_keys(self.tenant, self.root, self.view.policy.name, [self.checkpoint_id])
        return key

    @property
    def is_staged(self) -> bool:
        """Whether the checkpoint is first staged. Requests use it only after it has been installed."""
        return self.view.policy.layout is not None and bool(self.draft.plan.groups) and not self.is_extractive

    @property
    def groups(self) -> tuple[Group, ...]:
        """The messages to summarise, by group.

        User statements that later statements have replaced are removed from the text of the messages.
        """
        return tuple(tuple(map(self._drop_outdated, group)) for group in self.draft.plan.groups)

    @property
    def user_messages(self) -> Group:
        """All user messages. Statements that later statements have replaced are removed from their text."""
        return tuple(
            self._drop_outdated(k)
            for k, message in enumerate(self.view.unfixed_messages)
            if message.role == "user" and not message.answered_call_ids
        )

    def _drop_outdated(self, index: int) -> Message:
        message = self.view.unfixed_messages[index]
        if index not in self.draft.outdated_statements:
            return message
        text = message.text
        for statement in self.draft.outdated_statements[index]:
            text = text.replace(statement, "")
        return replace(message, text=text)

    @cached_attribute
    def affected_indices(self) -> tuple[int, ...]:
        """Indices of the messages that this compaction removes or shortens, in order.

        Messages that an earlier compaction has removed or shortened are not included.
        """
        earlier = self.view.checkpoint
        known = earlier.removed_indices | earlier.edited if earlier else frozenset[int]()
        plan = self.draft.plan
        return tuple(sorted({*plan.removed_indices, *list_edited_indices(plan)} - known))

    @cached_attribute
    def calls_by_result(self) -> Mapping[int, MessageToolCall]:
        """The call to which each tool result belongs, by the index of the result."""
        return map_results_to_calls(self.view.unfixed_messages)

    @cached_attribute
    def largest_group(self) -> int:
        """The index of the group that has the most tokens. The plan must have at least one group."""
        messages = self.view.unfixed_messages
        sizes = [sum(messages[index].tokens for index in each) for each in self.draft.plan.groups]
        return sizes.index(max(sizes))

    @cached_attribute
    def quoted_task(self) -> str:
        """The text of the task, which the replacement quotes if the task is removed.

        Empty if the task is not removed, and `NO_TASK` if the conversation has no task.
        """
        messages, earlier = self.view.unfixed_messages, self.view.checkpoint
        task = find_task_message(messages)
        if task is None:
            return NO_TASK
        removed = {*self.draft.plan.removed_indices, *(earlier.removed_indices if earlier else ())}
        return self.format_task() if any(messages[index] is task for index in removed) else ""

    def format_task(self) -> str:
        """Returns the text of the task, or an excerpt if the text exceeds the strategy's size limit.

        Returns `NO_TASK` if the conversation has no task, or if the task has no text.
        """
        messages = self.view.unfixed_messages
        task = find_task_message(messages)
        if task is None or not task.text:
            return NO_TASK
        size = self.view.policy.task_tokens.compute_tokens(self.view.trigger_tokens)
        if task.tokens <= size:
            return task.text
        handle = format_message_id(self.view.prefixes[messages.index(task)])
        return build_excerpt(task.text, size / task.tokens, handle)


# When a chain of records is written anew, the summary model reads the original messages if they take at most
# this share of its context window. Otherwise it reads the old records in place of the messages that they
# cover.
READ_SHARE = 0.7


class JobBuilder:
    """Builds jobs (`RoundJob`) from drafts (`RoundDraft`).

    Args:
        mint_conversation: Builds a conversation id from a tenant and a prefix digest. It is called if the
            conversation has no id yet.
        ttl_s: How long checkpoints are kept, in seconds.
        has_archive: Whether removed messages are archived, so that they can be searched later.
    """

    def __init__(
        self, mint_conversation: Callable[[str, bytes], str], ttl_s: float, *, has_archive: bool = True
    ) -> None:
        self._mint_conversation = mint_conversation
        self.ttl_s = ttl_s
        self._has_archive = has_archive

    async def build_job(self, view: RequestView, draft: RoundDraft, due_reason: str) -> RoundJob:
        """Builds the job of a compaction, in a worker thread. `view.root` must not be None."""
        return await run_in_worker(partial(self._build_job, view, draft, due_reason))

    def _build_job(self, view: RequestView, draft: RoundDraft, due_reason: str) -> RoundJob:
        last_prefix = view.prefixes[draft.plan.length - 1]
        job = RoundJob(
            view=view,
            draft=draft,
            root=view.root or b"",
            checkpoint_id=predict_job_checkpoint_id(view, draft.plan, extract=False),
            conversation=view.conversation_id or self._mint_conversation(view.request.tenant, last_prefix),
            reason=due_reason,
            ttl_s=self.ttl_s,
            is_searchable=self._has_archive and _should_mention_search_tool(view.request),
        )
        # A compaction may run for minutes. So the job does not keep the body of the client's request in
        # memory. Only the request for the summary model keeps the body, if the summary call needs it.
        body = view.request.body._replace(raw=b"", new_pieces=())
        view = replace(view, request=replace(view.request, body=body))
        return replace(job, view=view, summary_request=_build_summary_request(job))


def predict_job_checkpoint_id(view: RequestView, plan: RoundPlan, *, extract: bool) -> bytes:
    """Returns the id that the checkpoint of a planned compaction will have.

    `extract` says whether the compaction uses an extract instead of a summary.
    """
    exact = compute_exact_digest(view.unfixed_messages[: plan.length])
    return predict_checkpoint_id(plan, view.checkpoint, view.prefixes, exact, extract=extract)


def _build_summary_request(job: RoundJob) -> SummaryRequest | None:
    """Builds the request for the summary model.

    Returns None if there is no summary model, or if the compaction needs no summary.
    """
    view = job.view
    shape, settings = view.policy.summary, view.request.settings
    routes = tuple(_with_known_window(each, view) for each in view.request.summary_routes)
    if shape is None or not routes or not job.draft.plan.groups:
        return None
    user_messages, groups = job.user_messages, job.groups
    summary = view.checkpoint.summary if view.checkpoint else ""
    earlier: tuple[str, ...] = (summary,) if summary and view.policy.earlier_rounds != "leave" else ()
    # If one new record replaces all records of the chain, the summary model reads the original messages. If
    # these are too long for one call, it reads the texts of the old records in place of them.
    if view.policy.earlier_rounds == "freeze" and not job.draft.plan.frozen_record_count:
        earlier = ()
        characters = sum(count_shown_characters(each, shape) for each in groups)
        if characters / CHARACTERS_A_TOKEN * view.calibration_ratio > READ_SHARE * routes[0].window:
            groups, earlier = _exclude_recorded_messages(job)
    aligned = (
        AlignedConversation(view.request.body, repair_messages(view.effective_messages))
        if shape.form == "aligned"
        else None
    )
    return SummaryRequest(
        shape=shape,
        instructions=build_summary_instructions(settings, view.policy),
        groups=groups,
        task=job.format_task(),
        earlier=earlier,
        language=detect_language(each.text for each in user_messages),
        tokens=job.draft.summary_tokens,
        routes=routes,
        counting_options=view.request.counting_options,
        calibration_ratio=view.calibration_ratio,
        tenant=view.request.tenant,
        calls_per_hour=settings.summary.calls_per_hour,
        deadline_s=settings.summary.timeout_s,
        user_messages=user_messages,
        aligned=aligned,
        states=job.draft.frontier.states,
    )


def _should_mention_search_tool(ask: FitRequest) -> bool:
    """Returns whether the proxy will probably offer the model the tool that searches removed messages.

    The replacement mentions the tool only in this case. The replacement never changes, so the result must
    serve for all later requests. It is a guess: the proxy may be unable to offer the tool with a later
    request, for example because that request defines no tools.
    """
    tool = ask.body.wire.search_tool
    if ask.settings.recall.tool == "none" or tool is None:
        return False
    try:
        inspection = tool.inspect_tool_support(ask.body.raw, TOOL_NAME)
    except UnreadableBodyError:
        return False
    return inspection.can_add_tool and should_offer_tool(
        ask.settings, is_compacted=True, has_tools=inspection.has_tools, model=ask.model
    )


def _with_known_window(route: SummaryRoute, view: RequestView) -> SummaryRoute:
    """Returns the route with the context window that is known for its model.

    If the route uses the model that the client's request names, the context window of the route is limited to
    the window in the budget of this request. Otherwise the route stays unchanged.
    """
    if route.model != view.request.model:
        return route
    return replace(route, window=min(view.budget.window, route.window))


def _exclude_recorded_messages(job: RoundJob) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Returns the groups without the messages that the chain of records covers, and the records' texts."""
    chain = job.view.checkpoint
    if chain is None:
        return job.groups, ()
    covered = chain.removed_indices
    new_groups = tuple(
        tuple(message for index, message in zip(indices, messages, strict=True) if index not in covered)
        for indices, messages in zip(job.draft.plan.groups, job.groups, strict=True)
    )
    return new_groups, tuple(each.text for each in list_chain_records(chain))
