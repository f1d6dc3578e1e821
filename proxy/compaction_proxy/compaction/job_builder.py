"""Builds jobs from drafts.

A draft holds the plan of a compaction, and the ledger if there is one. A job holds everything that is needed
to make the compaction, including the request for the summary model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from compaction_proxy.compaction.chunking import Group, count_shown_characters
from compaction_proxy.compaction.replacements import format_task
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.round_planning import CHARACTERS_A_TOKEN, RoundDraft, merge_pins
from compaction_proxy.compaction.summary_request import AlignedConversation, SummaryRequest, SummaryRoute
from compaction_proxy.compaction.types import FitRequest
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.core.checkpoint import compute_exact_digest
from compaction_proxy.core.checkpoint_ids import predict_checkpoint_id
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.planner import list_chain_records
from compaction_proxy.core.repair import repair_messages
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.strategies import Policy, SummaryShape
from compaction_proxy.recall.offer import should_offer_tool
from compaction_proxy.storage.keys import checkpoint_keys
from compaction_proxy.support.offload import run_in_worker

# The text of one summary call may take up to this share of the summary model's context window.
READ_SHARE = 0.7


class JobBuilder:
    """Turns drafts into jobs.

    Args:
        build_summary_instructions: Builds the system prompt of the summary call for a model's settings and a
            strategy.
        mint_conversation: Builds a conversation id from a tenant and a prefix digest. It is called if the
            client gave no id.
        ttl_s: How long checkpoints are kept, in seconds.
        has_archive: Whether removed messages are archived, so that they can be searched later.
    """

    def __init__(
        self,
        build_summary_instructions: Callable[[ModelSettings, Policy], str],
        mint_conversation: Callable[[str, bytes], str],
        ttl_s: float,
        *,
        has_archive: bool = True,
    ) -> None:
        self._build_instructions = build_summary_instructions
        self._mint_conversation = mint_conversation
        self.ttl_s = ttl_s
        self._has_archive = has_archive

    async def build_job(self, view: RequestView, draft: RoundDraft, due_reason: str) -> RoundJob:
        """Builds the job of a compaction in the worker thread. `view.root` must not be None."""
        return await run_in_worker(partial(self._build_job, view, draft, due_reason))

    def _build_job(self, view: RequestView, draft: RoundDraft, due_reason: str) -> RoundJob:
        ask, plan = view.request, draft.plan
        root = view.root or b""
        last_prefix = view.prefixes[plan.length - 1]
        exact = compute_exact_digest(view.unfixed_messages[: plan.length])
        checkpoint_id = predict_checkpoint_id(plan, view.checkpoint, view.prefixes, exact, extract=False)
        [key] = checkpoint_keys(ask.tenant, root, view.policy.name, [checkpoint_id])
        job = RoundJob(
            plan=plan,
            policy=view.policy,
            key=key,
            checkpoint_id=checkpoint_id,
            root=root,
            tenant=ask.tenant,
            conversation=view.conversation_id or self._mint_conversation(ask.tenant, last_prefix),
            strategy_thread=view.strategy_thread,
            messages=view.unfixed_messages,
            prefixes=view.prefixes,
            previous_checkpoint=view.checkpoint,
            ledger=draft.ledger,
            rules=draft.rules,
            outdated_statements=draft.outdated_statements,
            pins=merge_pins(view),
            model=ask.model,
            summary_tokens=draft.summary_tokens,
            summary_request=None,
            is_extractive=False,
            is_staged=view.policy.layout is not None and bool(plan.groups),
            counting_options=view.counting_options,
            calibration_ratio=view.calibration_ratio,
            trigger_tokens=view.plan_constraints.trigger_tokens,
            calibrated_trigger_tokens=view.marks.trigger_tokens if view.is_automatic else None,
            window=view.budget.window,
            client_message_count=len(view.messages),
            tokens_before=view.estimate_tokens(view.effective_messages),
            reason=due_reason,
            timeout_s=ask.settings.summary.timeout_s,
            ttl_s=self.ttl_s,
            price_basis=view.price_basis,
            is_searchable=self._has_archive and _should_mention_search_tool(ask),
            frontier=draft.frontier,
        )
        return replace(job, summary_request=self._build_summary_request(view, job)) if plan.groups else job

    def _build_summary_request(self, view: RequestView, job: RoundJob) -> SummaryRequest | None:
        """Builds the request for the summary model; None if there is no route or no summary is wanted."""
        shape, settings = view.policy.summary, view.request.settings
        routes = tuple(_with_known_window(each, view) for each in view.request.summary_routes)
        if shape is None or not routes:
            return None
        user_messages = job.user_messages
        groups, earlier = job.groups, _list_earlier_summaries(view, job)
        if _is_chain_rewritten(view, job) and not _can_fit_one_call(
            groups, shape, routes[0], view.calibration_ratio
        ):
            groups, earlier = _exclude_recorded_messages(job)
        aligned = (
            AlignedConversation(view.request.body, repair_messages(view.effective_messages))
            if shape.form == "aligned"
            else None
        )
        return SummaryRequest(
            shape=shape,
            instructions=self._build_instructions(settings, view.policy),
            groups=groups,
            task=format_task(job),
            earlier=earlier,
            language=detect_language(each.text for each in user_messages),
            tokens=job.summary_tokens,
            routes=routes,
            counting_options=view.counting_options,
            calibration_ratio=view.calibration_ratio,
            tenant=view.request.tenant,
            calls_per_hour=settings.summary.calls_per_hour,
            deadline_s=settings.summary.timeout_s,
            user_messages=user_messages,
            aligned=aligned,
            states=job.frontier.states,
        )


def _should_mention_search_tool(ask: FitRequest) -> bool:
    """Returns whether the model will probably be offered the search tool for removed messages.

    Only then does the replacement mention the tool. This is a guess, because the replacement never changes,
    but a later request may be unable to offer the tool: it may bring no tools or ask for several answers.
    """
    tool = ask.body.wire.search_tool
    if ask.settings.recall.tool == "none" or tool is None:
        return False
    try:
        inspection = tool.inspect_tool_support(ask.body.raw, TOOL_NAME)
    except UnreadableBodyError:
        return False
    has_tools = inspection.has_tools
    return inspection.can_add_tool and should_offer_tool(
        ask.settings, is_compacted=True, has_tools=has_tools, model=ask.model
    )


def _with_known_window(route: SummaryRoute, view: RequestView) -> SummaryRoute:
    """Returns the route, with the request's context window if both use the same model and this is smaller."""
    window = view.budget.window
    return (
        replace(route, window=window)
        if route.model == view.request.model and window < route.window
        else route
    )


def _is_chain_rewritten(view: RequestView, job: RoundJob) -> bool:
    """Returns whether the compaction writes the chain of records anew as one record."""
    return view.policy.earlier_rounds == "freeze" and not job.plan.frozen_record_count


def _can_fit_one_call(
    groups: Sequence[Group], shape: SummaryShape, route: SummaryRoute, calibration_ratio: float
) -> bool:
    characters = sum(count_shown_characters(each, shape) for each in groups)
    return characters / CHARACTERS_A_TOKEN * calibration_ratio <= READ_SHARE * route.window


def _exclude_recorded_messages(job: RoundJob) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Returns the groups without the messages that the chain already covers, and the texts of its records."""
    covered = job.previous_checkpoint.removed_indices if job.previous_checkpoint else frozenset[int]()
    records = list_chain_records(job.previous_checkpoint) if job.previous_checkpoint else ()
    new_groups = tuple(
        tuple(message for index, message in zip(indices, messages, strict=True) if index not in covered)
        for indices, messages in zip(job.plan.groups, job.groups, strict=True)
    )
    return new_groups, tuple(each.text for each in records)


def _list_earlier_summaries(view: RequestView, job: RoundJob) -> tuple[str, ...]:
    """Returns the earlier summary that the summary model must read; empty if there is none.

    The model reads no earlier summary if earlier records stay in place, or if a chain is written anew. In the
    latter case it reads the original messages. If they are too long for one call, it reads the texts of the
    records instead (`_exclude_recorded_messages`).
    """
    is_unread = _is_chain_rewritten(view, job) or view.policy.earlier_rounds == "leave"
    return (
        ()
        if is_unread or view.checkpoint is None or not view.checkpoint.summary
        else (view.checkpoint.summary,)
    )
