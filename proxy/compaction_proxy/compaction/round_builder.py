"""Making one round: its texts, its checkpoint, and what is saved of it, all at once."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import structlog

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.ledger_cache import LedgerCache
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.replacements import Replacement, build_replacements
from compaction_proxy.compaction.round_events import (
    APPLIED,
    SCHEDULED,
    Facts,
    build_created_event,
    find_retained_facts,
    list_messages_after_round,
)
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_request import SUMMARY_CHARACTERS
from compaction_proxy.core.checkpoint import (
    EXTRACT,
    Checkpoint,
    compute_exact_digest,
    from_fields,
    list_covered_results,
    list_participant_names,
    to_fields,
)
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.event import Event
from compaction_proxy.core.ledger.ledger import has_every_rule
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.recall.archive import Archive, ArchivedRound, ArchiveRef, OriginalMessage, build_archive
from compaction_proxy.recall.retention import ArchiveRetention
from compaction_proxy.recall.round_detail import build_detail_item
from compaction_proxy.storage.keys import checkpoint_keys, checkpoint_list_key, staged_checkpoints_key
from compaction_proxy.storage.leases import wait_for_lease_or_record
from compaction_proxy.storage.records import ListItem, RecordItem, RecordStore
from compaction_proxy.storage.store import Lease
from compaction_proxy.support.log_events import COMPACTION_STARTED
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.telemetry.event_bus import EventListener, ignore_event
from compaction_proxy.telemetry.event_history import EventHistory, build_round_line

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _RoundTexts:
    """What a round says, and who wrote it."""

    texts: tuple[str, ...]
    writer: str


@dataclass(frozen=True, slots=True)
class _RoundRecords:
    """What is kept of a round beside its checkpoint.

    Attributes:
        made: The round.
        facts: Which facts of what it replaced are still seen.
        archive: What it took out; None: nothing.
        detail: What making it took.
    """

    made: ArchivedRound
    facts: Facts
    archive: Archive | None
    detail: RecordItem

    @property
    def committed_items(self) -> tuple[RecordItem | ListItem, ...]:
        """What is committed."""
        return (*self.archive.items, self.archive.line, self.detail) if self.archive else (self.detail,)


class RoundBuilder:
    """Makes rounds.

    Args:
        summarizer: Who writes summaries.
        records: Where checkpoints are kept.
        index: Where they are found again.
        history: Where a conversation's roots are noted.
        reader: What counts.
        holdings: Know what is archived; None: nothing of it is listed, or let go of.
        announce: Told of rounds that were made, and put in force.

    Attributes:
        summarizer: Who writes summaries.
        gleanings: What messages say and show.
    """

    def __init__(
        self,
        summarizer: Summarizer,
        records: RecordStore,
        index: CheckpointIndex,
        history: EventHistory,
        reader: MessageReader,
        *,
        holdings: ArchiveRetention | None = None,
        announce: EventListener = ignore_event,
    ) -> None:
        self.summarizer = summarizer
        self.ledger_cache = LedgerCache()
        self._retention = holdings
        self._announce = announce
        self._records = records
        self._index = index
        self._history = history
        self._reader = reader

    async def make_round(self, job: RoundJob, is_awaited: Callable[[], bool]) -> Checkpoint:
        """The round: another replica's if one is there or being made, else ours.

        Args:
            job: What to make.
            is_awaited: Says whether a request waits for it, so that it is in force as soon as it is made.

        Raises:
            SummaryFailed: There is no summary, or one that makes nothing shorter.
        """
        started = time.monotonic()
        made: Checkpoint | None = None
        while True:
            async with wait_for_lease_or_record(self._records, job.key) as current:
                known = from_fields(current.record) if current.record else None
                if known is not None:
                    return known
                if made is None:
                    made = await self._make_checkpoint(job)
                seconds = time.monotonic() - started
                kept = await self._save_round(
                    job, made, current.lease, seconds=seconds, is_awaited=is_awaited
                )
            if kept is not None:  # else the lease was lost, and a successor is at it
                return kept

    async def install_checkpoint(
        self,
        checkpoint: Checkpoint,
        *,
        tenant: str,
        root: bytes,
        checkpoint_id: bytes,
        ttl_s: float,
        build_event: Callable[[float], Event] | None = None,
    ) -> None:
        """Put a checkpoint that was made ahead of need in force, for every replica.

        `build_event` gives the event of that for the time it is, in seconds since the epoch; None where the
        round was told of as one in force already.
        """
        [key] = checkpoint_keys(tenant, root, checkpoint.strategy, [checkpoint_id])
        listed = checkpoint_list_key(tenant, root, checkpoint.strategy)
        if self._index.has_checkpoint(listed, checkpoint_id):  # somebody else in this process is at it
            return
        line = self._index.build_line(listed, checkpoint_id, ttl_s)
        await self._records.save_if_absent(key, to_fields(checkpoint), ttl_s=ttl_s)
        await self._records.append_line(line.key, line.fields, ttl_s=line.ttl_s, max_lines=line.max_lines)
        if build_event is not None:
            event = build_event(time.time())
            await self._history.record_event(tenant, event)
            self._announce(tenant, event)

    async def _write_texts(self, job: RoundJob) -> _RoundTexts:
        """The texts of the round's groups."""
        _log.info(
            COMPACTION_STARTED,
            conversation=job.conversation,
            strategy=job.policy.name,
            round=job.plan.round,
            reason=job.reason,
            messages=len(job.affected_indices),
            tokens_before=job.tokens_before,
        )
        if not job.plan.groups:
            return _RoundTexts((), "")
        if job.is_extractive:
            return _RoundTexts(await run_in_worker(partial(_extract_texts, job)), EXTRACT)
        if job.summary_request is None:
            raise SummaryError("no-summary-model")
        try:
            async with asyncio.timeout(job.timeout_s):
                written = await self.summarizer.write_summary(job.summary_request)
        except TimeoutError:
            raise SummaryError("timeout") from None
        return _RoundTexts(written.texts, written.model)

    async def _make_checkpoint(self, job: RoundJob) -> Checkpoint:
        said = await self._write_texts(job)
        puts = await build_replacements(job, said.texts, self._reader)
        return await run_in_worker(partial(_build_checkpoint, job, said, puts))

    async def _save_round(
        self,
        job: RoundJob,
        made: Checkpoint,
        lease: Lease | None,
        *,
        seconds: float,
        is_awaited: Callable[[], bool],
    ) -> Checkpoint | None:
        """The checkpoint that all use from now on; None if the lease was lost and nothing was written."""
        await self._history.record_root(job.tenant, job.conversation, job.root)
        at = time.time()
        account = await run_in_worker(partial(self._build_records, job, made, at))
        price = self.summarizer.price
        outcome = APPLIED if is_awaited() else SCHEDULED
        event = build_created_event(job, made, account.facts, price, at=at, seconds=seconds, outcome=outcome)
        listed = (staged_checkpoints_key if job.is_staged else checkpoint_list_key)(
            job.tenant, job.root, made.strategy
        )
        told = build_round_line(job.tenant, job.root, event, job.ttl_s)
        also = [told, self._index.build_line(listed, job.checkpoint_id, job.ttl_s), *account.committed_items]
        ours = to_fields(made)
        fields = await self._records.save_if_absent(job.key, ours, ttl_s=job.ttl_s, also=also, lease=lease)
        if fields == ours and not self._records.deletion_fence.is_deleted(job.key):
            self._announce(job.tenant, event)
            if self._retention is not None and account.archive is not None:
                await self._retention.add_archive(
                    job.tenant, ArchiveRef(job.root, account.made), account.archive
                )
        return None if fields is None else from_fields(fields) or made

    def _build_records(self, job: RoundJob, made: Checkpoint, at: float) -> _RoundRecords:
        """What this round took out or shortened, what that took, and what the model sees then."""
        about = ArchivedRound(job.conversation, made.strategy, job.checkpoint_id, made.round, at)
        originals = _list_originals(job)
        archive = build_archive(job.tenant, job.root, about, originals, job.ttl_s) if originals else None
        prompts = tuple(job.summary_request.usage.prompts) if job.summary_request else ()
        seen = tuple(list_messages_after_round(job, made))
        detail = build_detail_item(job.tenant, job.root, about, prompts, seen, job.ttl_s)
        return _RoundRecords(about, find_retained_facts(job, seen, self.ledger_cache), archive, detail)


def _list_originals(job: RoundJob) -> list[OriginalMessage]:
    """What the round takes out or shortens, to be archived."""
    turns = list(accumulate(int(each.role == "user") for each in job.messages))
    return [
        OriginalMessage(k, format_message_id(job.prefixes[k]), turns[k], job.messages[k])
        for k in job.affected_indices
    ]


def _build_checkpoint(job: RoundJob, said: _RoundTexts, puts: tuple[Replacement, ...]) -> Checkpoint:
    """The round as it will be kept.

    Raises:
        SummaryFailed: It has lost a rule, or makes nothing shorter.
    """
    if not has_every_rule("\n".join(each.text for put in puts for each in put.messages), job.rules):
        raise SummaryError("rules-lost")
    before, after = job.forwarded_tokens, _count_forwarded_tokens(job, puts)
    if after >= before:
        raise SummaryError("longer")
    plan = job.plan
    spans = tuple(put.span for put in puts)
    chained = any(fill.kind == "records" for fill in plan.fills)
    earlier = job.previous_checkpoint.rounds if job.previous_checkpoint else ()
    return Checkpoint(
        strategy=job.policy.name,
        conversation=job.conversation,
        round=plan.round,
        length=plan.length,
        exact=compute_exact_digest(job.messages[: plan.length]),
        results=list_covered_results(job.messages, spans),
        names=list_participant_names(job.messages[: plan.length]),
        spans=spans,
        stand_ins=tuple(put.messages for put in puts),
        summary="\n\n".join(said.texts)
        or (job.previous_checkpoint.summary if job.previous_checkpoint else ""),
        tokens_before=job.tokens_before,
        tokens_after=job.tokens_before - int((before - after) * job.calibration_ratio),
        listed=len(job.messages),
        carried=plan.carried,
        rounds=(*earlier[: plan.frozen], *((plan.length,) if chained and said.texts else ())),
        writer=said.writer,
        edited=frozenset(put.span.start for put in puts if put.is_edited),
    )


def _count_forwarded_tokens(job: RoundJob, puts: tuple[Replacement, ...]) -> int:
    """Counted tokens of the conversation's messages as they will be forwarded."""
    covered = {index for put in puts for index in range(*put.span)}
    whole = sum(each.tokens for index, each in enumerate(job.messages) if index not in covered)
    return whole + sum(each.tokens for put in puts for each in put.messages)


def _extract_texts(job: RoundJob) -> tuple[str, ...]:
    """The texts of the round's groups without a model, and with the ledger where no record holds it."""
    characters = int(max(1, job.summary_tokens) * SUMMARY_CHARACTERS)
    share = characters // max(1, len(job.plan.groups))
    made = []
    for group, messages in zip(job.plan.groups, job.groups, strict=True):
        names = {k: format_message_id(job.prefixes[index]) for k, index in enumerate(group)}
        made.append(build_extractive_summary(messages, share, names.__getitem__))
    chained = any(fill.kind == "records" for fill in job.plan.fills)
    if job.ledger and not chained and made:
        made[0] = f"{job.ledger}\n\n{made[0]}"
    return tuple(made)
