"""Making one round: its texts, its checkpoint, and what is saved of it, all at once."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import structlog

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.ledger_cache import Gleanings
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.replacements import Put, stand_ins
from compaction_proxy.compaction.round_events import (
    APPLIED,
    SCHEDULED,
    Facts,
    facts_of,
    made_event,
    seen_after,
)
from compaction_proxy.compaction.round_job import Job
from compaction_proxy.compaction.summarizer import Summarising
from compaction_proxy.compaction.summary_request import SUMMARY_CHARACTERS
from compaction_proxy.core.checkpoint import (
    EXTRACT,
    Checkpoint,
    covered_results,
    exact_digest,
    from_fields,
    participant_names,
    to_fields,
)
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.event import Event
from compaction_proxy.core.ledger.ledger import has_every_rule
from compaction_proxy.core.summary.extractive import extractive
from compaction_proxy.recall.archive import Archive, Original, Place, Round, archived
from compaction_proxy.recall.retention import Holdings
from compaction_proxy.recall.round_detail import detail_item
from compaction_proxy.storage.keys import checkpoint_keys, checkpoints_key, staged_key
from compaction_proxy.storage.leases import turn
from compaction_proxy.storage.records import Item, Line, Records
from compaction_proxy.storage.store import Lease
from compaction_proxy.support.log_events import COMPACTION_STARTED
from compaction_proxy.support.offload import beside
from compaction_proxy.telemetry.event_bus import Listener, unheard
from compaction_proxy.telemetry.event_history import History, round_line

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Texts:
    """What a round says, and who wrote it."""

    texts: tuple[str, ...]
    writer: str


@dataclass(frozen=True, slots=True)
class _Account:
    """What is kept of a round beside its checkpoint.

    Attributes:
        made: The round.
        facts: Which facts of what it replaced are still seen.
        archive: What it took out; None: nothing.
        detail: What making it took.
    """

    made: Round
    facts: Facts
    archive: Archive | None
    detail: Item

    @property
    def items(self) -> tuple[Item | Line, ...]:
        """What is committed."""
        return (*self.archive.items, self.archive.line, self.detail) if self.archive else (self.detail,)


class Making:
    """Makes rounds.

    Args:
        summarising: Who writes summaries.
        records: Where checkpoints are kept.
        index: Where they are found again.
        history: Where a conversation's roots are noted.
        reading: What counts.
        holdings: Know what is archived; None: nothing of it is listed, or let go of.
        announce: Told of rounds that were made, and put in force.

    Attributes:
        summarising: Who writes summaries.
        gleanings: What messages say and show.
    """

    def __init__(
        self,
        summarising: Summarising,
        records: Records,
        index: CheckpointIndex,
        history: History,
        reading: Reading,
        *,
        holdings: Holdings | None = None,
        announce: Listener = unheard,
    ) -> None:
        self.summarising = summarising
        self.gleanings = Gleanings()
        self._holdings = holdings
        self._announce = announce
        self._records = records
        self._index = index
        self._history = history
        self._reading = reading

    async def make(self, job: Job, awaited: Callable[[], bool]) -> Checkpoint:
        """The round: another replica's if one is there or being made, else ours.

        Args:
            job: What to make.
            awaited: Says whether a request waits for it, so that it is in force as soon as it is made.

        Raises:
            SummaryFailed: There is no summary, or one that makes nothing shorter.
        """
        started = time.monotonic()
        made: Checkpoint | None = None
        while True:
            async with turn(self._records, job.key) as current:
                known = from_fields(current.made) if current.made else None
                if known is not None:
                    return known
                if made is None:
                    made = await self._checkpoint(job)
                seconds = time.monotonic() - started
                kept = await self._save(job, made, current.lease, seconds=seconds, awaited=awaited)
            if kept is not None:  # else the lease was lost, and a successor is at it
                return kept

    async def install(
        self,
        checkpoint: Checkpoint,
        *,
        tenant: str,
        root: bytes,
        place: bytes,
        ttl_s: float,
        told: Callable[[float], Event] | None = None,
    ) -> None:
        """Put a checkpoint that was made ahead of need in force, for every replica.

        `told` gives the event of that for the time it is, in seconds since the epoch; None where the round
        was told of as one in force already.
        """
        [key] = checkpoint_keys(tenant, root, checkpoint.strategy, [place])
        listed = checkpoints_key(tenant, root, checkpoint.strategy)
        if self._index.knows(listed, place):  # somebody else in this process is at it
            return
        line = self._index.line(listed, place, ttl_s)
        await self._records.save(key, to_fields(checkpoint), ttl_s=ttl_s)
        await self._records.append(line.key, line.fields, ttl_s=line.ttl_s, keep=line.keep)
        if told is not None:
            event = told(time.time())
            await self._history.note(tenant, event)
            self._announce(tenant, event)

    async def _texts(self, job: Job) -> _Texts:
        """The texts of the round's groups."""
        _log.info(
            COMPACTION_STARTED,
            conversation=job.conversation,
            strategy=job.policy.name,
            round=job.plan.round,
            reason=job.reason,
            messages=len(job.taken),
            tokens_before=job.tokens_before,
        )
        if not job.plan.groups:
            return _Texts((), "")
        if job.extract:
            return _Texts(await beside(partial(_extracts, job)), EXTRACT)
        if job.brief is None:
            raise SummaryFailed("no-summary-model")
        try:
            async with asyncio.timeout(job.timeout_s):
                written = await self.summarising.write(job.brief)
        except TimeoutError:
            raise SummaryFailed("timeout") from None
        return _Texts(written.texts, written.model)

    async def _checkpoint(self, job: Job) -> Checkpoint:
        said = await self._texts(job)
        puts = await stand_ins(job, said.texts, self._reading)
        return await beside(partial(_checkpoint, job, said, puts))

    async def _save(
        self,
        job: Job,
        made: Checkpoint,
        lease: Lease | None,
        *,
        seconds: float,
        awaited: Callable[[], bool],
    ) -> Checkpoint | None:
        """The checkpoint that all use from now on; None if the lease was lost and nothing was written."""
        await self._history.rooted(job.tenant, job.conversation, job.root)
        at = time.time()
        account = await beside(partial(self._account, job, made, at))
        price = self.summarising.price
        outcome = APPLIED if awaited() else SCHEDULED
        event = made_event(job, made, account.facts, price, at=at, seconds=seconds, outcome=outcome)
        listed = (staged_key if job.staged else checkpoints_key)(job.tenant, job.root, made.strategy)
        told = round_line(job.tenant, job.root, event, job.ttl_s)
        also = [told, self._index.line(listed, job.place, job.ttl_s), *account.items]
        ours = to_fields(made)
        fields = await self._records.save(job.key, ours, ttl_s=job.ttl_s, also=also, lease=lease)
        if fields == ours and not self._records.outdated.covers(job.key):
            self._announce(job.tenant, event)
            if self._holdings is not None and account.archive is not None:
                await self._holdings.added(job.tenant, Place(job.root, account.made), account.archive)
        return None if fields is None else from_fields(fields) or made

    def _account(self, job: Job, made: Checkpoint, at: float) -> _Account:
        """What this round took out or shortened, what that took, and what the model sees then."""
        about = Round(job.conversation, made.strategy, job.place, made.round, at)
        originals = _originals(job)
        archive = archived(job.tenant, job.root, about, originals, job.ttl_s) if originals else None
        prompts = tuple(job.brief.spent.prompts) if job.brief else ()
        seen = tuple(seen_after(job, made))
        detail = detail_item(job.tenant, job.root, about, prompts, seen, job.ttl_s)
        return _Account(about, facts_of(job, seen, self.gleanings), archive, detail)


def _originals(job: Job) -> list[Original]:
    """What the round takes out or shortens, to be archived."""
    turns = list(accumulate(int(each.role == "user") for each in job.messages))
    return [Original(k, message_id(job.prefixes[k]), turns[k], job.messages[k]) for k in job.taken]


def _checkpoint(job: Job, said: _Texts, puts: tuple[Put, ...]) -> Checkpoint:
    """The round as it will be kept.

    Raises:
        SummaryFailed: It has lost a rule, or makes nothing shorter.
    """
    if not has_every_rule("\n".join(each.text for put in puts for each in put.messages), job.rules):
        raise SummaryFailed("rules-lost")
    before, after = job.forwarded_tokens, _tokens(job, puts)
    if after >= before:
        raise SummaryFailed("longer")
    plan = job.plan
    spans = tuple(put.span for put in puts)
    chained = any(fill.kind == "records" for fill in plan.fills)
    earlier = job.earlier.rounds if job.earlier else ()
    return Checkpoint(
        strategy=job.policy.name,
        conversation=job.conversation,
        round=plan.round,
        length=plan.length,
        exact=exact_digest(job.messages[: plan.length]),
        results=covered_results(job.messages, spans),
        names=participant_names(job.messages[: plan.length]),
        spans=spans,
        stand_ins=tuple(put.messages for put in puts),
        summary="\n\n".join(said.texts) or (job.earlier.summary if job.earlier else ""),
        tokens_before=job.tokens_before,
        tokens_after=job.tokens_before - int((before - after) * job.ratio),
        listed=len(job.messages),
        carried=plan.carried,
        rounds=(*earlier[: plan.frozen], *((plan.length,) if chained and said.texts else ())),
        writer=said.writer,
        edited=frozenset(put.span.start for put in puts if put.edited),
    )


def _tokens(job: Job, puts: tuple[Put, ...]) -> int:
    """Counted tokens of the conversation's messages as they will be forwarded."""
    covered = {index for put in puts for index in range(*put.span)}
    whole = sum(each.tokens for index, each in enumerate(job.messages) if index not in covered)
    return whole + sum(each.tokens for put in puts for each in put.messages)


def _extracts(job: Job) -> tuple[str, ...]:
    """The texts of the round's groups without a model, and with the ledger where no record holds it."""
    characters = int(max(1, job.asked) * SUMMARY_CHARACTERS)
    share = characters // max(1, len(job.plan.groups))
    made = []
    for group, messages in zip(job.plan.groups, job.groups, strict=True):
        names = {k: message_id(job.prefixes[index]) for k, index in enumerate(group)}
        made.append(extractive(messages, share, names.__getitem__))
    chained = any(fill.kind == "records" for fill in job.plan.fills)
    if job.ledger and not chained and made:
        made[0] = f"{job.ledger}\n\n{made[0]}"
    return tuple(made)
