"""Makes compactions: writes their texts, builds their checkpoints, and saves them with the original messages.

Requests that need the same compaction share one summary call. If the configuration has
`on_disconnect: finish`, the compaction is finished and saved even if the client disconnects, so that the cost
of the summary is not wasted. After a failed summary call, the proxy requests no summary for the conversation
for a while. Otherwise each request of the conversation would wait for a summary model that does not answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from compaction_proxy.compaction.summary_request import SUMMARY_CHARACTERS, PriceLookup, SummaryUsage
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
from compaction_proxy.core.errors import OUT_OF_RESOURCES, SummaryError, is_resource_shortage
from compaction_proxy.core.event import (
    APPLIED,
    COMPACTED,
    FAILED,
    INSTALLED,
    MAX_MESSAGE_IDS,
    SCHEDULED,
    Event,
)
from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.ledger import flatten_text, has_every_rule
from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.planner import compute_checkpoint_id
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
from compaction_proxy.support.log_events import COMPACTION_FAILED, COMPACTION_STARTED, ROUND_CRASHED
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.support.offload import run_in_worker, run_in_worker_if_large
from compaction_proxy.telemetry.event_history import (
    EventHistory,
    EventListener,
    build_round_event_line,
    generate_event_id,
    ignore_event,
)
from compaction_proxy.telemetry.logs import REQUEST_ID

# For this many seconds after a failed summary call, the proxy requests no summary for the conversation. The
# conversation is then said to rest.
FAILURE_REST_S = 30.0
# Largest number of conversations whose failed summary calls are remembered. If there are more, the
# conversation whose call failed longest ago is forgotten, and the proxy may request a summary for this
# conversation again.
MAX_RESTING = 10_000

_log = structlog.get_logger()


def _build_common_fields(job: RoundJob, price: PriceLookup) -> dict[str, Any]:
    """Builds the fields that the events of successful and of failed compactions have in common."""
    usage = job.summary_request.usage if job.summary_request else SummaryUsage()
    fields: dict[str, Any] = {
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
    if usage.calls:
        fields["calls"] = usage.calls
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["completion_tokens"] = usage.completion_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["cost_usd"] = usage.compute_cost_usd(price)
    return fields


def find_retained_facts(
    job: RoundJob, visible_messages: Sequence[VisibleMessage], ledger_cache: LedgerCache
) -> Mapping[str, tuple[int, int]]:
    """Counts the facts in the messages that a compaction removes or shortens (`core.summary.retention`).

    The result maps each kind of fact to two numbers: how many of these facts the model still sees after the
    compaction, and how many there are in all. The result is empty if no message is removed or shortened.
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
    """Yields the messages that the model sees after the compaction, except fixed messages."""
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


class RoundBuilder:
    """Makes compactions and installs checkpoints.

    Each compaction is made only once, even if several requests wait for it.

    Args:
        summarizer: Writes summaries.
        records: Stores checkpoints.
        index: Lists the ids of checkpoints.
        history: Stores the events of conversations and the digests of their first messages (root digests).
        reader: Counts tokens.
        retention: Records which archives exist, so that old archives can be deleted. None disables this.
        announce: Called with an event for each compaction that was made or installed, or that failed.
        clock: Returns monotonic seconds.

    Attributes:
        summarizer: Writes summaries.
        ledger_cache: Finds statements and facts in messages, and caches them.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.summarizer = summarizer
        self.ledger_cache = LedgerCache()
        self._retention = retention
        self._announce = announce
        self._records = records
        self._index = index
        self._history = history
        self._reader = reader
        self._clock = clock
        self._running: dict[str, tuple[RoundJob, asyncio.Task[Checkpoint]]] = {}
        self._waiting_counts: Counter[str] = Counter()
        self._resting: BoundedDict[str, tuple[float, str]] = BoundedDict(MAX_RESTING)
        self._event_tasks: set[asyncio.Task[bool]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a compaction is running."""
        return bool(self._running)

    @property
    def waiting_count(self) -> int:
        """Number of requests that are waiting for a compaction."""
        return self._waiting_counts.total()

    async def wait_for_round(
        self, job: RoundJob, wait_s: float, *, finish_when_cancelled: bool
    ) -> Checkpoint:
        """Makes the compaction, or waits for the task that is already making it. Returns the checkpoint.

        Does not wait at all if the strategy limits the wait (`Policy.max_block_s`) and the average duration
        of recent summary calls exceeds `wait_s`.

        Args:
            job: The compaction to make.
            wait_s: Largest number of seconds to wait. After this time, the compaction continues in the
                background.
            finish_when_cancelled: Whether the compaction continues after all requests that were waiting for
                it have been cancelled.

        Raises:
            SummaryError: If no checkpoint was made within `wait_s`. The `reason` of the error says why.
        """
        task = self._find_or_start_task(job)
        if job.summary_request and job.view.policy.max_block_s is not None:
            expected_s = self.summarizer.estimate_call_duration_s(job.summary_request)
            wait_s = 0.0 if expected_s is not None and expected_s > wait_s else wait_s
        self._waiting_counts[job.key] += 1
        try:
            await asyncio.wait({task}, timeout=wait_s)
        except asyncio.CancelledError:
            if not finish_when_cancelled and self._waiting_counts[job.key] == 1:
                task.cancel()
            raise
        finally:
            self._waiting_counts[job.key] -= 1
            if not self._waiting_counts[job.key]:
                del self._waiting_counts[job.key]
        if not task.done():
            raise SummaryError("deadline")
        if task.cancelled():
            raise SummaryError("cancelled")
        error = task.exception()
        if error is not None and not isinstance(error, SummaryError):
            # The caller treats a `SummaryError` like a missing summary, and makes the request fit in another
            # way.
            raise SummaryError(_find_fault_reason(error)) from error
        return task.result()

    def begin_round(self, job: RoundJob) -> None:
        """Starts the compaction in the background.

        Does nothing if the compaction is already running. Also does nothing if it needs a summary and a
        summary call for the conversation has failed less than `FAILURE_REST_S` seconds ago.
        """
        with suppress(SummaryError):
            self._find_or_start_task(job)

    def list_pending_jobs(self, tenant: str, root: bytes, strategy: str) -> list[RoundJob]:
        """Lists the running compactions that request a summary, for one tenant, conversation and strategy.

        `root` is the digest of the first messages of the conversation. Conversations that begin with the same
        messages have the same root, so the result may include their compactions.
        """
        running = [job for job, _ in self._running.values() if job.summary_request is not None]
        wanted = (tenant, root, strategy)
        return [job for job in running if (job.tenant, job.root, job.view.policy.name) == wanted]

    async def close(self) -> None:
        """Cancels running compactions, and waits until the events of failed compactions are stored."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets a compaction that failed just now start storing its event
        await asyncio.gather(*self._event_tasks, return_exceptions=True)

    async def install_checkpoint(
        self, view: RequestView, checkpoint: Checkpoint, ttl_s: float, due_reason: str | None = None
    ) -> Checkpoint:
        """Installs a staged checkpoint, so that every proxy process applies it. Returns the checkpoint.

        An event reports the installation, with `due_reason` as its reason. If `due_reason` is None, no event
        is written.
        """
        request, root = view.request, view.root or b""
        checkpoint_id = compute_checkpoint_id(checkpoint, view.prefixes)
        [key] = checkpoint_keys(request.tenant, root, checkpoint.strategy, [checkpoint_id])
        listed = checkpoint_list_key(request.tenant, root, checkpoint.strategy)
        # If the cached list of installed checkpoints contains the id, another request in this process has
        # installed the checkpoint or is about to install it.
        if self._index.has_checkpoint(listed, checkpoint_id):
            return checkpoint
        line = self._index.cache_id_and_build_line(listed, checkpoint_id, ttl_s)
        fields = await run_in_worker_if_large(
            0, partial(to_fields, checkpoint), message_count=checkpoint.length
        )
        await self._records.save_if_absent(key, fields, ttl_s=ttl_s)
        await self._records.write([line])
        if due_reason is not None:
            event = Event(
                INSTALLED,
                time.time(),
                conversation=view.conversation_id or checkpoint.conversation,
                id=generate_event_id(),
                request=REQUEST_ID.get(""),
                strategy=checkpoint.strategy,
                round=checkpoint.round,
                place=checkpoint_id.hex(),
                reason=due_reason,
                outcome=APPLIED,
                asked=request.model,
                tokens_before=view.effective_estimate,
                tokens_after=view.with_checkpoint(checkpoint).effective_estimate,
                trigger=view.automatic_trigger_tokens,
                window=view.budget.window,
                basis=view.price_basis,
                listed=len(view.messages),
            )
            await self._history.record_event(request.tenant, event)
            self._announce(request.tenant, event)
        return checkpoint

    def _find_or_start_task(self, job: RoundJob) -> asyncio.Task[Checkpoint]:
        """Returns the task that makes the compaction. Starts the task if it is not running yet.

        Raises:
            SummaryError: If the compaction needs a summary, and a summary call for the conversation has
                failed less than `FAILURE_REST_S` seconds ago.
        """
        if job.key in self._running:
            return self._running[job.key][1]
        until, reason = self._resting.get(job.view.strategy_thread, (0.0, ""))
        if job.summary_request is not None and until > self._clock():
            raise SummaryError(reason)
        task = asyncio.create_task(self._build_round(job))
        self._running[job.key] = (job, task)
        task.add_done_callback(partial(self._finish_task, job))
        return task

    def _finish_task(self, job: RoundJob, task: asyncio.Task[Checkpoint]) -> None:
        """Handles the end of the task that made a compaction.

        If the summary call or the proxy has failed, records an event. The proxy then requests no summary for
        the conversation for `FAILURE_REST_S` seconds.
        """
        del self._running[job.key]
        error = None if task.cancelled() else task.exception()
        is_fault = not isinstance(error, SummaryError)
        if error is None or (job.summary_request is None and not is_fault):
            return
        reason = error.reason if isinstance(error, SummaryError) else _find_fault_reason(error)
        if reason == OUT_OF_RESOURCES:
            _log.warning(COMPACTION_FAILED, conversation=job.conversation, error=type(error).__name__)
        elif is_fault:
            _log.error(ROUND_CRASHED, conversation=job.conversation, exc_info=error)
        self._resting[job.view.strategy_thread] = (self._clock() + FAILURE_REST_S, reason)
        fields = _build_common_fields(job, self.summarizer.price)
        event = Event(FAILED, time.time(), **fields, reason=reason)
        self._announce(job.tenant, event)
        event_task = asyncio.create_task(self._history.record_event(job.tenant, event))
        self._event_tasks.add(event_task)
        event_task.add_done_callback(self._event_tasks.discard)

    async def _build_round(self, job: RoundJob) -> Checkpoint:
        """Makes the compaction, unless another process has already made it. Returns the checkpoint.

        Raises:
            SummaryError: If no summary could be written, if the replacements lack a rule of the user, or if
                the replacements would not shorten the request.
        """
        started = time.monotonic()
        made: Checkpoint | None = None
        while True:
            async with wait_for_lease_or_record(self._records, job.key) as current:
                existing = from_fields(current.record) if current.record else None
                if existing is not None:
                    return existing
                if made is None:
                    texts, writer = await self._write_texts(job)
                    replacements = await build_replacements(job, texts, self._reader)
                    made = await run_in_worker(partial(_build_checkpoint, job, texts, writer, replacements))
                saved = await self._save_round(job, made, current.lease, time.monotonic() - started)
            if saved is not None:  # otherwise the lease was lost, and another process may hold it now
                return saved

    async def _write_texts(self, job: RoundJob) -> tuple[tuple[str, ...], str]:
        """Writes a summary or an extract for each group of messages in the plan.

        Returns the texts and their writer: the name of the summary model, `EXTRACT_WRITER` for extracts, or
        an empty string if the plan has no groups.

        Raises:
            SummaryError: If there is no summary model, if the model fails, or if it exceeds the time limit.
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
            return (), ""
        if job.is_extractive:
            return await run_in_worker(partial(_write_extracts, job)), EXTRACT_WRITER
        if job.summary_request is None:
            raise SummaryError("no-summary-model")
        try:
            async with asyncio.timeout(job.view.request.settings.summary.timeout_s):
                return await self.summarizer.write_summary(job.summary_request)
        except TimeoutError:
            raise SummaryError("timeout") from None

    async def _save_round(
        self, job: RoundJob, checkpoint: Checkpoint, lease: Lease | None, duration_s: float
    ) -> Checkpoint | None:
        """Saves the checkpoint together with its event, archive and detail record (`_build_records`).

        If the store accepts this checkpoint, also announces the event. Returns the checkpoint that every
        process uses from now on. If another process has saved a checkpoint first, this is the other process's
        checkpoint. Returns None if the lease was lost and nothing was written.
        """
        await self._history.record_root(job.tenant, job.conversation, job.root)
        archived_round = ArchivedRound(
            job.conversation, checkpoint.strategy, job.checkpoint_id, checkpoint.round, time.time()
        )
        archive, detail, facts = await run_in_worker(
            partial(self._build_records, job, checkpoint, archived_round)
        )
        own_fields = await run_in_worker(partial(to_fields, checkpoint))
        affected = job.affected_indices
        event = Event(
            COMPACTED,
            archived_round.made_at,
            **_build_common_fields(job, self.summarizer.price),
            place=job.checkpoint_id.hex(),
            reason=job.reason,
            outcome=APPLIED if job.key in self._waiting_counts else SCHEDULED,
            model=checkpoint.writer,
            tokens_after=checkpoint.tokens_after,
            messages=len(affected),
            message_ids=tuple(format_message_id(job.view.prefixes[k]) for k in affected[:MAX_MESSAGE_IDS]),
            seconds=round(duration_s, 3),
            facts=facts,
            summary=checkpoint.summary,
        )
        build_list_key = staged_checkpoints_key if job.is_staged else checkpoint_list_key
        list_key = build_list_key(job.tenant, job.root, checkpoint.strategy)
        other_items: list[RecordItem | ListItem] = [
            build_round_event_line(job.tenant, job.root, event, job.ttl_s),
            self._index.cache_id_and_build_line(list_key, job.checkpoint_id, job.ttl_s),
            detail,
        ]
        if archive is not None:
            other_items += [*archive.items, archive.list_line]
        fields = await self._records.save_if_absent(
            job.key, own_fields, ttl_s=job.ttl_s, other_items=other_items, lease=lease
        )
        if fields == own_fields and not self._records.deletion_fence.is_deleted(job.key):
            self._announce(job.tenant, event)
            if self._retention is not None and archive is not None:
                await self._retention.add_archive(job.tenant, ArchiveRef(job.root, archived_round), archive)
        return None if fields is None else await run_in_worker(partial(from_fields, fields)) or checkpoint

    def _build_records(
        self, job: RoundJob, checkpoint: Checkpoint, archived_round: ArchivedRound
    ) -> tuple[Archive | None, RecordItem, Mapping[str, tuple[int, int]]]:
        """Builds the archive and the detail record of a compaction, and counts the facts that it keeps.

        The archive contains the originals of the messages that were removed or shortened. It is None if there
        are none. The detail record contains the prompts of the summary calls and the messages that the model
        sees after the compaction. `find_retained_facts` describes the counts of facts.
        """
        turns = list(accumulate(int(each.role == "user") for each in job.view.unfixed_messages))
        originals = [
            OriginalMessage(
                k, format_message_id(job.view.prefixes[k]), turns[k], job.view.unfixed_messages[k]
            )
            for k in job.affected_indices
        ]
        archive = (
            build_archive(job.tenant, job.root, archived_round, originals, job.ttl_s) if originals else None
        )
        prompts = tuple(job.summary_request.usage.prompts) if job.summary_request else ()
        visible = tuple(list_messages_after_round(job, checkpoint))
        detail = build_detail_item(job.tenant, job.root, archived_round, prompts, visible, job.ttl_s)
        return archive, detail, find_retained_facts(job, visible, self.ledger_cache)


def _build_checkpoint(
    job: RoundJob, texts: tuple[str, ...], writer: str, replacements: tuple[Replacement, ...]
) -> Checkpoint:
    """Builds the checkpoint of a compaction.

    Raises:
        SummaryError: If the replacements lack one of the user's rules (reason `rules-lost`), or if the
            replacements do not make the list of messages shorter (reason `longer`).
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
    earlier = previous.rounds if previous else ()
    return Checkpoint(
        strategy=job.view.policy.name,
        conversation=job.conversation,
        round=plan.round,
        length=plan.length,
        exact=compute_exact_digest(messages[: plan.length]),
        results=list_covered_results(messages, spans),
        names=list_participant_names(messages[: plan.length]),
        spans=spans,
        stand_ins=tuple(put.messages for put in replacements),
        summary="\n\n".join(texts) or (previous.summary if previous else ""),
        tokens_before=job.view.effective_estimate,
        tokens_after=job.view.effective_estimate - int((before - after) * job.view.calibration_ratio),
        listed=len(messages),
        carried=plan.carried_index,
        rounds=(
            *earlier[: plan.frozen_record_count],
            *((plan.length,) if is_chain and texts else ()),
        ),
        writer=writer,
        edited=frozenset(put.span.start for put in replacements if put.is_edited),
    )


def _count_forwarded_tokens(
    messages: Sequence[Message], replacements: Sequence[tuple[Span, Sequence[Message]]]
) -> int:
    """Returns how many tokens the messages have after each of the spans is replaced by its new messages."""
    covered = {index for span, _ in replacements for index in range(*span)}
    unchanged_tokens = sum(each.tokens for index, each in enumerate(messages) if index not in covered)
    return unchanged_tokens + sum(each.tokens for _, put in replacements for each in put)


def _write_extracts(job: RoundJob) -> tuple[str, ...]:
    """Writes an extract for each group of messages in the plan.

    The first extract begins with the ledger. If the strategy keeps a chain of records, no extract contains
    the ledger, because the ledger has a message of its own after the records.
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


def _find_fault_reason(error: BaseException) -> str:
    return OUT_OF_RESOURCES if is_resource_shortage(error) else "internal"
