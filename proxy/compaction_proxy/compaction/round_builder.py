"""Makes one compaction: writes its texts, builds its checkpoint, and saves it with the original messages.

It also builds the events that report compactions, and lists the messages that the model sees after one.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import structlog

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.ledger_cache import LedgerCache
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.replacements import Replacement, build_replacements
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_client import PriceLookup, SummaryUsage
from compaction_proxy.compaction.summary_request import SUMMARY_CHARACTERS
from compaction_proxy.core.checkpoint import (
    EXTRACT_WRITER,
    Checkpoint,
    compute_exact_digest,
    from_fields,
    list_covered_results,
    list_participant_names,
    to_fields,
)
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, MAX_MESSAGE_IDS, Event
from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.ledger import flatten_text, has_every_rule
from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.core.summary.retention import count_retained_facts
from compaction_proxy.recall.archive import (
    Archive,
    ArchivedRound,
    ArchiveRef,
    OriginalMessage,
    build_archive,
    format_message_text,
)
from compaction_proxy.recall.retention import ArchiveRetention
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, VisibleMessage, build_detail_item
from compaction_proxy.storage.keys import checkpoint_keys, checkpoint_list_key, staged_checkpoints_key
from compaction_proxy.storage.leases import wait_for_lease_or_record
from compaction_proxy.storage.records import ListItem, RecordItem, RecordStore
from compaction_proxy.storage.store import Lease
from compaction_proxy.support.log_events import COMPACTION_STARTED
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.telemetry.event_history import (
    EventHistory,
    EventListener,
    build_round_event_line,
    generate_event_id,
    ignore_event,
)
from compaction_proxy.telemetry.logs import REQUEST_ID

# The outcome of a compaction. `APPLIED`: a waiting request uses it at once. `SCHEDULED`: it is stored for a
# later request.
APPLIED, SCHEDULED = "applied", "scheduled"

# For each kind of fact: how many facts of this kind the model still sees after a compaction, and how many the
# replaced messages held.
Facts = Mapping[str, tuple[int, int]]


def build_created_event(
    job: RoundJob,
    checkpoint: Checkpoint,
    facts: Facts,
    price: PriceLookup,
    *,
    created_at_s: float,
    duration_s: float,
    outcome: str,
) -> Event:
    """Builds the event that reports a compaction that was made.

    Args:
        job: The compaction.
        checkpoint: The checkpoint of the compaction.
        facts: How many facts of the replaced messages the model still sees.
        price: Returns what a summary call costs.
        created_at_s: Time of the event, in seconds since the epoch.
        duration_s: How long the compaction took, in seconds.
        outcome: `APPLIED` or `SCHEDULED`.
    """
    affected = job.affected_indices
    return Event(
        COMPACTED,
        created_at_s,
        **_build_common_fields(job, price),
        place=job.checkpoint_id.hex(),
        reason=job.reason,
        outcome=outcome,
        model=checkpoint.writer,
        tokens_after=checkpoint.tokens_after,
        messages=len(affected),
        message_ids=tuple(
            format_message_id(job.view.prefixes[index]) for index in affected[:MAX_MESSAGE_IDS]
        ),
        seconds=round(duration_s, 3),
        facts=facts,
        summary=checkpoint.summary,
    )


def build_failed_event(job: RoundJob, reason: str, price: PriceLookup, *, failed_at_s: float) -> Event:
    """Builds the event that reports a failed compaction, with the cost of its summary calls."""
    return Event(FAILED, failed_at_s, **_build_common_fields(job, price), reason=reason)


def build_installed_event(
    view: RequestView, checkpoint: Checkpoint, checkpoint_id: bytes, due_reason: str, installed_at_s: float
) -> Event:
    """Builds the event that reports that a checkpoint made ahead of need is now in force."""
    installed = view.with_checkpoint(checkpoint)
    return Event(
        INSTALLED,
        installed_at_s,
        conversation=view.conversation_id or checkpoint.conversation,
        id=generate_event_id(),
        request=REQUEST_ID.get(""),
        strategy=checkpoint.strategy,
        round=checkpoint.round,
        place=checkpoint_id.hex(),
        reason=due_reason,
        outcome=APPLIED,
        asked=view.request.model,
        tokens_before=view.effective_estimate,
        tokens_after=installed.effective_estimate,
        trigger=view.automatic_trigger_tokens,
        window=view.budget.window,
        basis=view.price_basis,
        listed=len(view.messages),
    )


def _build_common_fields(job: RoundJob, price: PriceLookup) -> dict[str, Any]:
    """Builds the event fields that are the same for compactions that were made and for failed ones."""
    usage = job.summary_request.usage if job.summary_request else SummaryUsage()
    fields = {
        "conversation": job.conversation,
        "id": generate_event_id(),
        "request": REQUEST_ID.get(""),
        "strategy": job.view.policy.name,
        "round": job.draft.plan.round,
        "asked": job.view.request.model,
        "tokens_before": job.view.effective_estimate,
        "trigger": job.view.automatic_trigger_tokens,
        "window": job.view.budget.window,
        "basis": job.view.price_basis,
        "listed": len(job.view.messages),
    }
    return {**fields, **_build_cost_fields(usage, price)} if usage.calls else fields


def _build_cost_fields(usage: SummaryUsage, price: PriceLookup) -> dict[str, Any]:
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cost_usd": usage.compute_cost_usd(price),
    }


def find_retained_facts(
    job: RoundJob, visible_messages: Sequence[VisibleMessage], ledger_cache: LedgerCache
) -> Facts:
    """Counts how many facts of the replaced messages the model still sees (`core.summary.retention`).

    Returns an empty mapping if no message is replaced.
    """
    affected = job.affected_indices
    if not affected:
        return {}
    removed = [job.view.unfixed_messages[index] for index in affected]
    statements = ledger_cache.get_active_statements(job.view.unfixed_messages).list_statements_in_messages(
        frozenset(affected)
    )
    rules = [
        flatten_text(spoken.statement.text) for _, spoken in statements if spoken.kind is StatementKind.RULE
    ]
    replacements_first = sorted(visible_messages, key=lambda each: each.origin == KEPT)
    return count_retained_facts(
        removed, [each.text for each in replacements_first], rules, ledger_cache.get_shown_facts
    )


def list_messages_after_round(job: RoundJob, checkpoint: Checkpoint) -> Iterator[VisibleMessage]:
    """Yields the messages that are forwarded after the compaction, without fixed messages."""
    replacements = {span.start: (span, replaced) for span, replaced in checkpoint.span_replacements}
    index = 0
    while index < len(job.view.unfixed_messages):
        message_id = format_message_id(job.view.prefixes[index])
        if index in replacements:
            span, replaced = replacements[index]
            own_id = message_id if index in checkpoint.edited else ""
            yield from (
                VisibleMessage(each.role, format_message_text(each), STAND_IN, own_id) for each in replaced
            )
            index = span.stop
        else:
            message = job.view.unfixed_messages[index]
            yield VisibleMessage(message.role, format_message_text(message), KEPT, message_id)
            index += 1


_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _RoundTexts:
    """The texts of a compaction, one for each group, and who wrote them.

    `writer` is the name of a model, `EXTRACT_WRITER` for extracts, or empty if there are no texts.
    """

    texts: tuple[str, ...]
    writer: str


@dataclass(frozen=True, slots=True)
class _RoundRecords:
    """The records that are saved together with a checkpoint.

    Attributes:
        archived_round: The compaction, as the archive describes it.
        facts: How many facts of the replaced messages the model still sees (`core.summary.retention`).
        archive: The removed and shortened messages; None if there are none.
        detail: Record with the prompts of the summary calls and the messages that the model then sees.
    """

    archived_round: ArchivedRound
    facts: Facts
    archive: Archive | None
    detail: RecordItem

    @property
    def committed_items(self) -> tuple[RecordItem | ListItem, ...]:
        """The items to save: the archive, if there is one, and the detail."""
        return (*self.archive.items, self.archive.list_line, self.detail) if self.archive else (self.detail,)


class RoundBuilder:
    """Makes compactions and installs checkpoints.

    Args:
        summarizer: Writes summaries.
        records: Stores checkpoints.
        index: Lists the ids of checkpoints.
        history: Stores the events and roots of conversations.
        reader: Counts tokens.
        retention: Records which archives exist, so that old ones can be deleted. None disables this.
        announce: Receives an event for each compaction that was made or installed.

    Attributes:
        summarizer: Writes summaries.
        ledger_cache: Reads statements and facts from messages, and caches them.
    """

    def __init__(
        self,
        summarizer: Summarizer,
        records: RecordStore,
        index: CheckpointIndex,
        history: EventHistory,
        reader: MessageReader,
        *,
        retention: ArchiveRetention | None = None,
        announce: EventListener = ignore_event,
    ) -> None:
        self.summarizer = summarizer
        self.ledger_cache = LedgerCache()
        self._retention = retention
        self._announce = announce
        self._records = records
        self._index = index
        self._history = history
        self._reader = reader

    async def make_round(self, job: RoundJob, is_awaited: Callable[[], bool]) -> Checkpoint:
        """Makes the compaction, or returns the checkpoint that another replica has made.

        Args:
            job: The compaction to make.
            is_awaited: Returns whether a request waits for the compaction. If one does, the event reports the
                compaction as applied, else as scheduled.

        Raises:
            SummaryError: No summary could be written, the replacements lack a rule of the user, or they would
                not shorten the request.
        """
        started = time.monotonic()
        made: Checkpoint | None = None
        while True:
            async with wait_for_lease_or_record(self._records, job.key) as current:
                existing = from_fields(current.record) if current.record else None
                if existing is not None:
                    return existing
                if made is None:
                    made = await self._make_checkpoint(job)
                seconds = time.monotonic() - started
                saved = await self._save_round(
                    job, made, current.lease, duration_s=seconds, is_awaited=is_awaited
                )
            if saved is not None:  # otherwise the lease was lost, and another replica may hold it now
                return saved

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
        """Installs a checkpoint that was made ahead of need, so that every replica applies it.

        `build_event` takes the time in seconds since the epoch and builds the event that reports the
        installation. It is None if the installation must not be reported.
        """
        [key] = checkpoint_keys(tenant, root, checkpoint.strategy, [checkpoint_id])
        listed = checkpoint_list_key(tenant, root, checkpoint.strategy)
        # If the id is known, another request in this process has installed the checkpoint or is doing so.
        if self._index.has_checkpoint(listed, checkpoint_id):
            return
        line = self._index.cache_id_and_build_line(listed, checkpoint_id, ttl_s)
        await self._records.save_if_absent(key, to_fields(checkpoint), ttl_s=ttl_s)
        await self._records.append_line(line.key, line.fields, ttl_s=line.ttl_s, max_lines=line.max_lines)
        if build_event is not None:
            event = build_event(time.time())
            await self._history.record_event(tenant, event)
            self._announce(tenant, event)

    async def _write_texts(self, job: RoundJob) -> _RoundTexts:
        """Writes one text for each group of the plan.

        Raises:
            SummaryError: There is no summary model, it fails, or the time limit is exceeded.
        """
        _log.info(
            COMPACTION_STARTED,
            conversation=job.conversation,
            strategy=job.view.policy.name,
            round=job.draft.plan.round,
            reason=job.reason,
            messages=len(job.affected_indices),
            tokens_before=job.view.effective_estimate,
        )
        if not job.draft.plan.groups:
            return _RoundTexts((), "")
        if job.is_extractive:
            return _RoundTexts(await run_in_worker(partial(_write_extracts, job)), EXTRACT_WRITER)
        if job.summary_request is None:
            raise SummaryError("no-summary-model")
        try:
            async with asyncio.timeout(job.view.request.settings.summary.timeout_s):
                summary = await self.summarizer.write_summary(job.summary_request)
        except TimeoutError:
            raise SummaryError("timeout") from None
        return _RoundTexts(summary.texts, summary.model)

    async def _make_checkpoint(self, job: RoundJob) -> Checkpoint:
        texts = await self._write_texts(job)
        replacements = await build_replacements(job, texts.texts, self._reader)
        return await run_in_worker(partial(_build_checkpoint, job, texts, replacements))

    async def _save_round(
        self,
        job: RoundJob,
        checkpoint: Checkpoint,
        lease: Lease | None,
        *,
        duration_s: float,
        is_awaited: Callable[[], bool],
    ) -> Checkpoint | None:
        """Saves the checkpoint together with its records and event, and announces the event.

        Returns the checkpoint that every replica uses from now on. If another replica has saved a checkpoint
        first, it is that one. Returns None if the lease was lost and nothing was written.
        """
        await self._history.record_root(job.tenant, job.conversation, job.root)
        at = time.time()
        round_records = await run_in_worker(partial(self._build_records, job, checkpoint, at))
        price = self.summarizer.price
        outcome = APPLIED if is_awaited() else SCHEDULED
        event = build_created_event(
            job,
            checkpoint,
            round_records.facts,
            price,
            created_at_s=at,
            duration_s=duration_s,
            outcome=outcome,
        )
        list_key = (staged_checkpoints_key if job.is_staged else checkpoint_list_key)(
            job.tenant, job.root, checkpoint.strategy
        )
        event_line = build_round_event_line(job.tenant, job.root, event, job.ttl_s)
        other_items = [
            event_line,
            self._index.cache_id_and_build_line(list_key, job.checkpoint_id, job.ttl_s),
            *round_records.committed_items,
        ]
        own_fields = to_fields(checkpoint)
        fields = await self._records.save_if_absent(
            job.key, own_fields, ttl_s=job.ttl_s, other_items=other_items, lease=lease
        )
        if fields == own_fields and not self._records.deletion_fence.is_deleted(job.key):
            self._announce(job.tenant, event)
            if self._retention is not None and round_records.archive is not None:
                await self._retention.add_archive(
                    job.tenant, ArchiveRef(job.root, round_records.archived_round), round_records.archive
                )
        return None if fields is None else from_fields(fields) or checkpoint

    def _build_records(self, job: RoundJob, checkpoint: Checkpoint, created_at_s: float) -> _RoundRecords:
        """Builds the records of a compaction: the archived messages, the retained facts and the detail."""
        archived_round = ArchivedRound(
            job.conversation, checkpoint.strategy, job.checkpoint_id, checkpoint.round, created_at_s
        )
        originals = _list_originals(job)
        archive = (
            build_archive(job.tenant, job.root, archived_round, originals, job.ttl_s) if originals else None
        )
        prompts = tuple(job.summary_request.usage.prompts) if job.summary_request else ()
        visible = tuple(list_messages_after_round(job, checkpoint))
        detail = build_detail_item(job.tenant, job.root, archived_round, prompts, visible, job.ttl_s)
        return _RoundRecords(
            archived_round, find_retained_facts(job, visible, self.ledger_cache), archive, detail
        )


def _list_originals(job: RoundJob) -> list[OriginalMessage]:
    """Lists the messages that the compaction removes or shortens, as they are archived."""
    turns = list(accumulate(int(each.role == "user") for each in job.view.unfixed_messages))
    return [
        OriginalMessage(k, format_message_id(job.view.prefixes[k]), turns[k], job.view.unfixed_messages[k])
        for k in job.affected_indices
    ]


def _build_checkpoint(
    job: RoundJob, round_texts: _RoundTexts, replacements: tuple[Replacement, ...]
) -> Checkpoint:
    """Builds the checkpoint of a compaction.

    Raises:
        SummaryError: `rules-lost`: a rule is missing from the replacements. `longer`: they are not shorter
            than what they replace.
    """
    if not has_every_rule(
        "\n".join(each.text for put in replacements for each in put.messages), job.draft.rules
    ):
        raise SummaryError("rules-lost")
    messages, previous = job.view.unfixed_messages, job.view.checkpoint
    before = _count_forwarded_tokens(messages, previous.span_replacements if previous else ())
    after = _count_forwarded_tokens(messages, [(put.span, put.messages) for put in replacements])
    if after >= before:
        raise SummaryError("longer")
    plan = job.draft.plan
    spans = tuple(put.span for put in replacements)
    is_chain = any(fill.kind == "records" for fill in plan.planned_replacements)
    earlier = job.view.checkpoint.rounds if job.view.checkpoint else ()
    return Checkpoint(
        strategy=job.view.policy.name,
        conversation=job.conversation,
        round=plan.round,
        length=plan.length,
        exact=compute_exact_digest(job.view.unfixed_messages[: plan.length]),
        results=list_covered_results(job.view.unfixed_messages, spans),
        names=list_participant_names(job.view.unfixed_messages[: plan.length]),
        spans=spans,
        stand_ins=tuple(put.messages for put in replacements),
        summary="\n\n".join(round_texts.texts)
        or (job.view.checkpoint.summary if job.view.checkpoint else ""),
        tokens_before=job.view.effective_estimate,
        tokens_after=job.view.effective_estimate - int((before - after) * job.view.calibration_ratio),
        listed=len(job.view.unfixed_messages),
        carried=plan.carried_index,
        rounds=(
            *earlier[: plan.frozen_record_count],
            *((plan.length,) if is_chain and round_texts.texts else ()),
        ),
        writer=round_texts.writer,
        edited=frozenset(put.span.start for put in replacements if put.is_edited),
    )


def _count_forwarded_tokens(
    messages: Sequence[Message], replacements: Sequence[tuple[Span, Sequence[Message]]]
) -> int:
    """Counts the tokens that are forwarded with these replacements, without fixed messages."""
    covered = {index for span, _ in replacements for index in range(*span)}
    unchanged_tokens = sum(each.tokens for index, each in enumerate(messages) if index not in covered)
    return unchanged_tokens + sum(each.tokens for _, put in replacements for each in put)


def _write_extracts(job: RoundJob) -> tuple[str, ...]:
    """Writes an extract for each group.

    The first extract begins with the ledger. If the strategy keeps a chain of records, the ledger follows the
    records instead.
    """
    characters = int(max(1, job.draft.summary_tokens) * SUMMARY_CHARACTERS)
    characters_per_group = characters // max(1, len(job.draft.plan.groups))
    extracts = []
    for group, messages in zip(job.draft.plan.groups, job.groups, strict=True):
        names = {k: format_message_id(job.view.prefixes[index]) for k, index in enumerate(group)}
        extracts.append(build_extractive_summary(messages, characters_per_group, names.__getitem__))
    is_chain = any(fill.kind == "records" for fill in job.draft.plan.planned_replacements)
    if job.draft.ledger and not is_chain and extracts:
        extracts[0] = f"{job.draft.ledger}\n\n{extracts[0]}"
    return tuple(extracts)
