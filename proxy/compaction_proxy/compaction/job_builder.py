"""From a draft to a job: everything that making a round needs, and what to ask the summary model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from compaction_proxy.compaction.chunking import Group, shown
from compaction_proxy.compaction.replacements import task_text
from compaction_proxy.compaction.request_view import View
from compaction_proxy.compaction.round_job import Job
from compaction_proxy.compaction.round_planning import CHARACTERS_A_TOKEN, Draft, pins_of
from compaction_proxy.compaction.summary_request import Aligned, Brief, SummaryRoute
from compaction_proxy.compaction.types import Ask
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.core.checkpoint import exact_digest
from compaction_proxy.core.checkpoint_ids import place_to_be
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.ledger.language import language
from compaction_proxy.core.planner import chain_records
from compaction_proxy.core.repair import repair
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.strategies import Policy, SummaryShape
from compaction_proxy.recall.offer import offered
from compaction_proxy.storage.keys import checkpoint_keys
from compaction_proxy.support.offload import beside

# One call can read what takes this share of the summary model's window.
READ_SHARE = 0.7


class Ordering:
    """Turns drafts into jobs.

    Args:
        instructions: System prompt of the summary call for a model's settings and a strategy.
        minted: A conversation's id, for a tenant and a prefix digest, where the client gave none.
        ttl_s: Seconds that checkpoints are kept.
        keeps: Whether what rounds take out can be searched afterwards.
    """

    def __init__(
        self,
        instructions: Callable[[ModelSettings, Policy], str],
        minted: Callable[[str, bytes], str],
        ttl_s: float,
        *,
        keeps: bool = True,
    ) -> None:
        self._instructions = instructions
        self._minted = minted
        self.ttl_s = ttl_s
        self._keeps = keeps

    async def job(self, view: View, draft: Draft, due: str) -> Job:
        """Everything that making the round needs; `view.root` is there."""
        return await beside(partial(self._job, view, draft, due))

    def _job(self, view: View, draft: Draft, due: str) -> Job:
        ask, plan = view.ask, draft.plan
        root = view.root or b""
        last = view.prefixes[plan.length - 1]
        exact = exact_digest(view.body[: plan.length])
        place = place_to_be(plan, view.earlier, view.prefixes, exact, extract=False)
        [key] = checkpoint_keys(ask.tenant, root, view.policy.name, [place])
        job = Job(
            plan=plan,
            policy=view.policy,
            key=key,
            place=place,
            root=root,
            tenant=ask.tenant,
            conversation=view.conversation or self._minted(ask.tenant, last),
            thread=view.thread,
            messages=view.body,
            prefixes=view.prefixes,
            earlier=view.earlier,
            ledger=draft.ledger,
            rules=draft.rules,
            outdated=draft.outdated,
            pins=pins_of(view),
            model=ask.model,
            asked=draft.asked,
            brief=None,
            extract=False,
            staged=view.policy.layout is not None and bool(plan.groups),
            gauge=view.gauge,
            ratio=view.ratio,
            trigger=view.room.trigger,
            fires_at=view.marks.trigger if view.automatic else None,
            window=view.budget.window,
            listed=len(view.messages),
            tokens_before=view.size(view.effective),
            reason=due,
            timeout_s=ask.settings.summary.timeout_s,
            ttl_s=self.ttl_s,
            basis=view.basis,
            searchable=self._keeps and _searchable(ask),
            frontier=draft.frontier,
        )
        return replace(job, brief=self._brief(view, job)) if plan.groups else job

    def _brief(self, view: View, job: Job) -> Brief | None:
        """What to ask the summary model; None where there is nobody to ask."""
        shape, settings = view.policy.summary, view.ask.settings
        routes = tuple(_with_known_window(each, view) for each in view.ask.routes)
        if shape is None or not routes:
            return None
        said = job.said
        groups, earlier = job.groups, _earlier(view, job)
        if _is_rewritten(view, job) and not _fits_one_call(groups, shape, routes[0], view.ratio):
            groups, earlier = _replace_by_records(job)
        aligned = Aligned(view.ask.body, repair(view.effective)) if shape.form == "aligned" else None
        return Brief(
            shape=shape,
            instructions=self._instructions(settings, view.policy),
            groups=groups,
            task=task_text(job),
            earlier=earlier,
            language=language(each.text for each in said),
            tokens=job.asked,
            routes=routes,
            gauge=view.gauge,
            ratio=view.ratio,
            tenant=view.ask.tenant,
            calls_per_hour=settings.summary.calls_per_hour,
            deadline_s=settings.summary.timeout_s,
            said=said,
            aligned=aligned,
            states=job.frontier.states,
        )


def _searchable(ask: Ask) -> bool:
    """Whether the model will be offered the tool that finds what is removed, as far as it can be known now.

    What is written of it stands for good; a later request may yet bring no tools, or ask for several answers.
    """
    tool = ask.body.dialect.search_tool
    if ask.settings.recall.tool == "none" or tool is None:
        return False
    try:
        found = tool.find_place(ask.body.raw, TOOL_NAME)
    except Unreadable:
        return False
    has_tools = found.has_tools
    return found.possible and offered(ask.settings, compacted=True, has_tools=has_tools, model=ask.model)


def _with_known_window(route: SummaryRoute, view: View) -> SummaryRoute:
    """The route with what is known of its window, where it asks the conversation's own model."""
    known = view.budget.window
    return replace(route, window=known) if route.model == view.ask.model and known < route.window else route


def _is_rewritten(view: View, job: Job) -> bool:
    """Whether the round writes a chain of records anew."""
    return view.policy.earlier == "freeze" and not job.plan.frozen


def _fits_one_call(groups: Sequence[Group], shape: SummaryShape, route: SummaryRoute, ratio: float) -> bool:
    characters = sum(shown(each, shape) for each in groups)
    return characters / CHARACTERS_A_TOKEN * ratio <= READ_SHARE * route.window


def _replace_by_records(job: Job) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """What is to be summarised without what the chain covers already, and the chain's texts for that."""
    covered = job.earlier.gone if job.earlier else frozenset[int]()
    records = chain_records(job.earlier) if job.earlier else ()
    late = tuple(
        tuple(message for index, message in zip(indices, messages, strict=True) if index not in covered)
        for indices, messages in zip(job.plan.groups, job.groups, strict=True)
    )
    return late, tuple(each.text for each in records)


def _earlier(view: View, job: Job) -> tuple[str, ...]:
    """Texts of earlier rounds that the model reads.

    Rounds that stay where they are it does not need. A chain that is written anew is made of the originals
    if one call can read them.
    """
    unread = _is_rewritten(view, job) or view.policy.earlier == "leave"
    return () if unread or view.earlier is None or not view.earlier.summary else (view.earlier.summary,)
