"""What is told of a round: its event, whatever became of it, and what the model sees once it is made."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compaction_proxy.compaction.ledger_cache import Gleanings
from compaction_proxy.compaction.request_view import View
from compaction_proxy.compaction.round_job import Job
from compaction_proxy.compaction.summary_client import Price, Spent
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, MAX_MESSAGE_IDS, Event
from compaction_proxy.core.ledger.cues import Kind
from compaction_proxy.core.ledger.ledger import flat
from compaction_proxy.core.summary.retention import survived
from compaction_proxy.recall.archive import readable
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, Shown
from compaction_proxy.telemetry.event_bus import event_id
from compaction_proxy.telemetry.logs import REQUEST

# How a round ended: a request goes on with it, or waits for one that will.
APPLIED, SCHEDULED = "applied", "scheduled"

Facts = Mapping[str, tuple[int, int]]


def made_event(
    job: Job, made: Checkpoint, facts: Facts, price: Price, *, at: float, seconds: float, outcome: str
) -> Event:
    """A round was made."""
    taken = job.taken
    return Event(
        COMPACTED,
        at,
        **_about(job, price),
        place=job.place.hex(),
        reason=job.reason,
        outcome=outcome,
        model=made.writer,
        tokens_after=made.tokens_after,
        messages=len(taken),
        message_ids=tuple(message_id(job.prefixes[index]) for index in taken[:MAX_MESSAGE_IDS]),
        seconds=round(seconds, 3),
        facts=facts,
        summary=made.summary,
    )


def failed_event(job: Job, reason: str, price: Price, *, at: float) -> Event:
    """A round was due and was not made; its calls cost what they cost."""
    return Event(FAILED, at, **_about(job, price), reason=reason)


def installed_event(view: View, ready: Checkpoint, place: bytes, due: str, at: float) -> Event:
    """A round that was made ahead of need is in force, since a request was in need of it."""
    installed = view.with_checkpoint(ready)
    return Event(
        INSTALLED,
        at,
        conversation=view.conversation or ready.conversation,
        id=event_id(),
        request=REQUEST.get(""),
        strategy=ready.strategy,
        round=ready.round,
        place=place.hex(),
        reason=due,
        outcome=APPLIED,
        asked=view.ask.model,
        tokens_before=view.size(view.effective),
        tokens_after=installed.size(installed.effective),
        trigger=view.marks.trigger if view.automatic else None,
        window=view.budget.window,
        basis=view.basis,
        listed=len(view.messages),
    )


def _about(job: Job, price: Price) -> dict[str, Any]:
    """What is told of every round."""
    spent = job.brief.spent if job.brief else Spent()
    told = {
        "conversation": job.conversation,
        "id": event_id(),
        "request": REQUEST.get(""),
        "strategy": job.policy.name,
        "round": job.plan.round,
        "asked": job.model,
        "tokens_before": job.tokens_before,
        "trigger": job.fires_at,
        "window": job.window,
        "basis": job.basis,
        "listed": job.listed,
    }
    return {**told, **_cost(spent, price)} if spent.calls else told


def _cost(spent: Spent, price: Price) -> dict[str, Any]:
    return {
        "calls": spent.calls,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "cached_tokens": spent.cached_tokens,
        "cost_usd": spent.cost_usd(price),
    }


def facts_of(job: Job, seen: Sequence[Shown], gleanings: Gleanings) -> Facts:
    """Which facts of the replaced messages the model still sees (`core.summary.retention`)."""
    taken = job.taken
    if not taken:
        return {}
    removed = [job.messages[index] for index in taken]
    standing = gleanings.standing(job.messages).of(frozenset(taken))
    rules = [flat(spoken.said.text) for _, spoken in standing if spoken.kind is Kind.RULE]
    stand_ins_first = sorted(seen, key=lambda each: each.origin == KEPT)
    return survived(removed, [each.text for each in stand_ins_first], rules, gleanings.seen)


def seen_after(job: Job, made: Checkpoint) -> Iterator[Shown]:
    """The conversation's messages as they are forwarded with a round, the privileged ones left out."""
    put_at = {span.start: (span, put) for span, put in made.pieces}
    index = 0
    while index < len(job.messages):
        name = message_id(job.prefixes[index])
        if index in put_at:
            span, put = put_at[index]
            own = name if index in made.edited else ""
            yield from (Shown(each.role, readable(each), STAND_IN, own) for each in put)
            index = span.stop
        else:
            message = job.messages[index]
            yield Shown(message.role, readable(message), KEPT, name)
            index += 1
