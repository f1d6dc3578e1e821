"""Builds a `RequestView` for each request: counts its messages and loads its checkpoint and directives.

The module also remembers the end (the last messages) of each request, because some clients, called movers,
move their last messages with each request (`core.mover`). A comparison with the end of an earlier request
shows which messages these are. Each process keeps the ends in its own memory. So after a restart, it
recognises a mover at the second request at the earliest.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.compaction.directives import DirectiveStore, NotedInstruction
from compaction_proxy.compaction.fallback_cut import CUT_MARGIN, NOTICE_TOKENS
from compaction_proxy.compaction.message_reader import CountingOptions, MessageList, MessageReader
from compaction_proxy.compaction.price_triggers import NO_PRICE_TRIGGERS, PriceTriggers, PriceTriggerSizes
from compaction_proxy.compaction.request_view import (
    RequestView,
    compute_limits,
    format_strategy_thread,
    has_price_trigger,
    resolve_policy,
)
from compaction_proxy.compaction.types import FitRequest
from compaction_proxy.core.checkpoint import (
    EXTRACT_WRITER,
    Checkpoint,
    find_longest_applicable_checkpoint,
    from_fields,
    get_prefix_digest,
)
from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import find_shown_files_message
from compaction_proxy.core.message import Message
from compaction_proxy.core.mover import RequestEnd, build_request_end, find_moving_start, is_continuation
from compaction_proxy.core.planner import compute_checkpoint_id
from compaction_proxy.core.project_instructions import allocate_instruction_tokens, compute_instruction_budget
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import UsageBaselineStore, build_baseline_key
from compaction_proxy.storage.keys import (
    checkpoint_keys,
    checkpoint_list_key,
    get_conversation_root,
    staged_checkpoints_key,
)
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.support.lru import LruCache
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.wires.project_instructions import find_client_by_members

# The proxy remembers the end (the last messages) of each request. This is the largest size of all remembered
# ends together, in bytes. If it is exceeded, the least recently used ends are dropped.
MAX_HELD_BYTES = 4 * 1024 * 1024
# The end (the last messages) of a request is stored under several keys, one for each of its last prefix
# digests. Each entry is assumed to take this many bytes of memory.
PREFIX_BYTES = 400
# In a request of very many messages, only this many first and this many last prefixes are compared.
MAX_COMPARED_PREFIXES = 1_024


class PreviousRequests:
    """Remembers the end (the last messages) of each request, to find out which messages a client moves.

    Some clients (movers) move their last messages to the end of each new request (`core.mover`). A new
    request is compared with the earlier request that has the longest prefix in common with it. Use an
    instance on one event loop only.

    Args:
        max_held_bytes: Largest size of all remembered ends together, in bytes. If it is exceeded, the least
            recently used ends are dropped.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        # Maps a sender and a prefix digest to the end (the last messages) of a request, and to the number of
        # messages that the digest covers.
        self._ends: LruCache[tuple[str, bytes], tuple[RequestEnd, int]] = LruCache(max_held_bytes)

    def record_and_count_moving_messages(
        self, sender: str, messages: Sequence[Message], prefixes: Sequence[bytes], seed: bytes
    ) -> int:
        """Returns how many of the last messages of a request the client moves.

        Also remembers the end of the request (its last messages), for the comparison with later requests.

        Args:
            sender: A text made from the tenant, and from the conversation id if the client gave one. The
                request is compared only with earlier requests with the same text.
            messages: The messages of the request that are not fixed.
            prefixes: Prefix digests of these messages.
            seed: The start value for computing prefix digests, which depends on the wire.
        """
        if not messages:
            return 0
        previous = self._find_longest_prefix(sender, prefixes)
        files_index = find_shown_files_message(messages)
        moving_from = len(messages) if files_index is None else files_index
        if previous is not None and is_continuation(previous[0], messages, previous[1]):
            moving_from = min(moving_from, find_moving_start(messages, *previous))
        end = build_request_end(messages, moving_from)
        for length in range(max(1, end.start_index), end.message_count + 1):
            self._ends.put((sender, prefixes[length - 1]), (end, length), PREFIX_BYTES)
        if (
            end.start_index == 0
        ):  # all messages may move, so the last one may be the first of the next request
            [first] = compute_prefix_digests(messages[-1:], seed)
            if self._ends.get((sender, first)) is None:
                self._ends.put((sender, first), (end, 0), PREFIX_BYTES)
        return len(messages) - moving_from

    def _find_longest_prefix(self, sender: str, prefixes: Sequence[bytes]) -> tuple[RequestEnd, int] | None:
        """Finds the longest prefix that this request has in common with an earlier request.

        Returns the end of the earlier request, and the number of messages in the prefix. If several earlier
        requests have this prefix, returns the end of the latest one. Returns None if there is no such
        request.
        """
        latest = prefixes[-MAX_COMPARED_PREFIXES:]
        first = prefixes[: min(MAX_COMPARED_PREFIXES, len(prefixes) - len(latest))]
        for prefix in chain(reversed(latest), reversed(first)):
            stored_end = self._ends.get((sender, prefix))
            if stored_end is not None:
                return stored_end
        return None


# Each time the upstream refuses a request as too large, the limits of the request are multiplied by this
# factor for the next attempt, because the estimated size was too low.
TIGHT_SHARE = 0.85
# Important content such as the task is cut only if the estimated size of the request exceeds this share of
# the largest prompt that the upstream accepts. The index in the tuple is the number of refusals so far.
# Without a refusal, one percent is a margin for errors of the estimate. After the first refusal, the share is
# higher, because a refusal usually reports the true size. After further refusals, it is lower.
DOUBT_SHARES = (0.99, 1.02, 0.95, 0.85)
# As long as the upstream has neither reported any token count for the model nor refused the request, this
# share is used in place of the first share in `DOUBT_SHARES`.
UNSURE_SHARE = 1.02
# Largest size of the cache of shortened project instructions, in bytes. If it is exceeded, the least recently
# used ones are dropped.
MAX_INSTRUCTION_CACHE_BYTES = 1024 * 1024
# Largest size of the cache of parsed checkpoints with their records, in bytes of memory. If it is full, the
# least recently used ones are dropped. The texts of a checkpoint are in its record, too.
MAX_CHECKPOINTS_BYTES = 16 * 1024 * 1024
# Bytes of memory that a checkpoint, and each of its tool results, takes with its part of the record.
CHECKPOINT_BYTES, RESULT_BYTES = 4_000, 1_000


def _measure_checkpoint(checkpoint: Checkpoint | None) -> int:
    """Returns how many bytes of memory a parsed checkpoint takes together with its record."""
    if checkpoint is None:
        return CHECKPOINT_BYTES
    texts = (each for replacements in checkpoint.stand_ins for each in replacements)
    size = len(checkpoint.summary) + sum(len(each.raw) + len(each.text) for each in texts)
    return CHECKPOINT_BYTES + 2 * size + RESULT_BYTES * len(checkpoint.results)


class RequestLoader:
    """Builds a `RequestView` from a request and from the records of its conversation in the store."""

    def __init__(
        self,
        reader: MessageReader,
        records: RecordStore,
        index: CheckpointIndex,
        model_limits: ModelLimits,
        anchors: UsageBaselineStore,
        directives: DirectiveStore,
        price_triggers: PriceTriggers | None = None,
        conversations: ConversationIndex | None = None,
    ) -> None:
        self._reader = reader
        self._records = records
        self._index = index
        self._model_limits = model_limits
        self._anchors = anchors
        self._directives = directives
        self._price_triggers = price_triggers
        self._previous = PreviousRequests()
        self._conversations = conversations
        self._parsed_checkpoints: LruCache[str, tuple[Fields, Checkpoint | None]] = LruCache(
            MAX_CHECKPOINTS_BYTES
        )
        self._short_instructions: LruCache[tuple[bytes, int, CountingOptions], Message] = LruCache(
            MAX_INSTRUCTION_CACHE_BYTES
        )

    async def load_view(
        self, ask: FitRequest, *, refusals: int = 0, bypass_cache: bool = False
    ) -> RequestView:
        """Builds the view of a request: its messages and their sizes, its limits, and its stored records.

        Args:
            ask: The request.
            refusals: How often the upstream has refused the request as too large. Each refusal makes the
                limits smaller.
            bypass_cache: Whether the ids of checkpoints are read from the store even if they are cached. If
                False, checkpoints that other processes have stored in the last two seconds may be missing.

        Raises:
            UnreadableBodyError: If a message cannot be read.
        """
        message_list = await self._read_messages(ask)
        overhead = await self._reader.count_overhead(ask.body.prompt_members, ask.counting_options)
        learned = await self._model_limits.get(ask.tenant, ask.origin, ask.model)
        root = get_conversation_root(message_list.prefixes) if ask.uses_checkpoints else None
        price_thresholds, basis = self._resolve_price_triggers(
            ask, root, message_list, learned.calibration, overhead
        )
        limits = compute_limits(
            ask.settings,
            ask.strategy,
            learned.get_effective_window(ask.model, ask.settings.window),
            ask.body.max_output,
            ask.trigger_tokens,
            price_thresholds,
            adds_output=learned.adds_output,
        )
        budget = limits.budget
        if refusals:
            shrink_factor = TIGHT_SHARE**refusals
            budget = replace(
                budget,
                compaction_limit=int(budget.compaction_limit * shrink_factor),
                input_limit=int(budget.input_limit * shrink_factor),
            )
        is_calibrated = refusals or learned.calibration.observations
        share = DOUBT_SHARES[refusals] if is_calibrated else UNSURE_SHARE
        moving_count = 0
        if ask.uses_checkpoints:
            moving_count = self._previous.record_and_count_moving_messages(
                f"{ask.tenant}/{ask.conversation or ''}",
                message_list.unfixed_messages,
                message_list.prefixes,
                ask.body.wire.digest_seed,
            )
        view = RequestView(
            request=ask,
            limits=limits,
            root=root,
            messages=message_list.messages,
            unfixed_messages=message_list.unfixed_messages,
            prefixes=message_list.prefixes,
            tokens=message_list.tokens,
            overhead_tokens=overhead,
            has_guessed_tokens=message_list.has_guessed_tokens,
            calibration=learned.calibration,
            budget=budget,
            max_prompt_tokens=int(budget.prompt_limit * share),
            drift_ratio=self._model_limits.get_post_compaction_factor(ask.tenant, ask.origin, ask.model),
            price_basis=basis,
            moving_count=moving_count,
        )
        view = await self.refresh_view(view, bypass_cache=bypass_cache)
        if message_list.has_instructions:
            view = replace(view, shortened_instructions=await self._shorten_instructions(view))
            await self._record_instructions(view)
        return view

    async def _read_messages(self, ask: FitRequest) -> MessageList:
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        return await self._reader.read_request(ask.body, ask.counting_options, client)

    async def find_conversation(self, ask: FitRequest, *, has_tools: bool) -> FitRequest | None:
        """Returns the request with the id of the conversation that the request continues or starts.

        Returns the request unchanged if all its messages are fixed, or if the recognition of conversations is
        switched off. Returns None if the request belongs to no conversation, for example because it only asks
        for a title.

        Raises:
            UnreadableBodyError: If a message cannot be read.
        """
        message_list = await self._read_messages(ask)
        if self._conversations is None or not message_list.unfixed_messages:
            return ask

        async def find_recorded_conversation() -> str | None:
            checkpoint = (await self.load_view(ask)).checkpoint
            return checkpoint.conversation if checkpoint else None

        conversation = await self._conversations.find_conversation(
            ask.tenant,
            message_list.unfixed_messages,
            message_list.prefixes,
            has_tools=has_tools,
            find_recorded_conversation=find_recorded_conversation,
        )
        return replace(ask, continued_conversation=conversation) if conversation else None

    def _resolve_price_triggers(
        self,
        ask: FitRequest,
        root: bytes | None,
        message_list: MessageList,
        calibration: Calibration,
        overhead_tokens: int,
    ) -> PriceTriggerSizes:
        """Computes the token thresholds of the strategy's triggers that depend on prices.

        Returns `NO_PRICE_TRIGGERS` if the strategy has no such trigger.
        """
        if self._price_triggers is None or not has_price_trigger(ask.settings, ask.strategy):
            return NO_PRICE_TRIGGERS
        policy = resolve_policy(ask.settings, ask.strategy)
        fixed_tokens = (
            message_list.tokens - sum(each.tokens for each in message_list.unfixed_messages) + overhead_tokens
        )
        thread = format_strategy_thread(ask, root or b"", policy.name)
        return self._price_triggers.compute_thresholds(
            ask, policy, thread, calibration.predict_tokens(fixed_tokens)
        )

    async def _shorten_instructions(self, view: RequestView) -> dict[int, Message | None]:
        """Shortens project instructions that are too long, for use when a compaction is applied.

        The result maps the index of each message with such instructions to the shortened message. If users
        have removed the instructions, it maps the index to None.
        """
        max_tokens = compute_instruction_budget(view.budget.input_limit)
        allowed = allocate_instruction_tokens(view.messages, max_tokens, view.directives.removed)
        options = view.request.counting_options
        return {
            k: await self._shorten_instruction(view.messages[k], tokens, options)
            for k, tokens in allowed.items()
        }

    async def _shorten_instruction(
        self, message: Message, max_tokens: int, options: CountingOptions
    ) -> Message | None:
        """Shortens project instructions to their beginning and end, about `max_tokens` tokens in all.

        Returns None if `max_tokens` is 0, which means that the instructions must be left out.
        """
        if not max_tokens or message.instruction is None:
            return None
        key = (message.digest, max_tokens, options)
        short = self._short_instructions.get(key)
        if short is None:
            share = max(0, CUT_MARGIN * max_tokens - NOTICE_TOKENS) / max(1, message.tokens)
            handle = message.instruction.path or message.instruction.kind
            uncounted = options.wire.shorten_message(message, share, handle)
            [short] = await self._reader.add_token_counts([uncounted], options)
            self._short_instructions.put(key, short, len(short.raw) + len(short.text))
        return replace(short, instruction=message.instruction, source=None)

    async def _record_instructions(self, view: RequestView) -> None:
        """Stores which project instructions the conversation contains, so that users can list them.

        Does nothing if the conversation id is unknown.
        """
        if view.conversation_id is not None:
            tokens = {each.instruction: each.tokens for each in view.messages if each.instruction}
            noted = [NotedInstruction(*instruction, size) for instruction, size in tokens.items()]
            await self._directives.record_instructions(view.request.tenant, view.conversation_id, noted)

    async def refresh_view(self, view: RequestView, *, bypass_cache: bool = True) -> RequestView:
        """Returns the view with the newest stored checkpoint, directives and anchor.

        The anchor is the provider's token count of an earlier request of the conversation.

        If `bypass_cache` is False, checkpoints that other processes have stored in the last two seconds may
        be missing. If checkpoint ids, directives or anchors are not cached, the method reads all three from
        the store, concurrently.
        """
        root, tenant, conversation = view.root, view.request.tenant, view.request.known_conversation
        if root is None:
            return view
        key = checkpoint_list_key(tenant, root, view.policy.name)
        checkpoint_ids = None if bypass_cache else self._index.get_cached(key)
        directives = self._directives.get_cached(tenant, conversation)
        if checkpoint_ids is None or directives is None or not self._anchors.is_loaded(tenant, root):
            loaded = await asyncio.gather(
                self._index.load_checkpoint_ids(key),
                self._directives.get(tenant, conversation),
                self._anchors.load_baselines(tenant, root),
            )
            checkpoint_ids, directives = loaded[:2]
        checkpoint = await self._find_deepest_checkpoint(view, root, checkpoint_ids)
        if conversation is None and checkpoint is not None:
            directives = await self._directives.get(tenant, checkpoint.conversation)
        if checkpoint is not None and directives.undone:
            checkpoint = await self._find_deepest_checkpoint(
                view, root, checkpoint_ids.difference(directives.undone)
            )
        checkpoint_id = compute_checkpoint_id(checkpoint, view.prefixes)
        baseline_key = build_baseline_key(view.request.origin, view.request.model, checkpoint_id)
        anchor = self._anchors.peek_deepest(tenant, root, view.prefixes, baseline_key)
        return replace(view, checkpoint=checkpoint, directives=directives, anchor=anchor, has_new_round=False)

    async def store_pins(self, ask: FitRequest, conversation: str | None) -> None:
        """Stores the pins that the client has sent with a request, so that they also apply to later requests.

        Does nothing if `conversation`, the conversation id, is None.
        """
        if conversation is not None:
            for text in ask.pins:
                await self._directives.add_pin(ask.tenant, conversation, text)

    async def find_staged_checkpoint(
        self, view: RequestView, *, same_length: bool = False
    ) -> Checkpoint | None:
        """Returns the staged checkpoint that matches this request and covers the most messages.

        Returns None if there is none, or if it does not cover more messages than the checkpoint of the view.
        Also returns None after an undo until a new compaction is made, because the staged checkpoint may
        build on the compaction that was undone.

        Args:
            view: The request.
            same_length: Whether to look for a late summary instead. If a summary is not ready in time, the
                proxy applies a checkpoint with an extract. Once the summary is ready, the proxy stages a
                second checkpoint, which contains the summary and covers the same number of messages. If the
                view has the checkpoint with the extract, the method returns the one with the summary.
                Otherwise it returns None.
        """
        root, current = view.root, view.checkpoint
        if root is None or view.directives.suppressed:
            return None
        if same_length and (current is None or current.writer != EXTRACT_WRITER):
            return None
        checkpoint_ids = await self._index.load_checkpoint_ids(
            staged_checkpoints_key(view.request.tenant, root, view.policy.name)
        )
        checkpoint = await self._find_deepest_checkpoint(
            view, root, checkpoint_ids.difference(view.directives.undone)
        )
        if checkpoint is None:
            return None
        covered_count = current.length if current else 0
        is_usable = checkpoint.length == covered_count if same_length else checkpoint.length > covered_count
        return checkpoint if is_usable else None

    async def _find_deepest_checkpoint(
        self, view: RequestView, root: bytes, checkpoint_ids: Collection[bytes]
    ) -> Checkpoint | None:
        """Returns the checkpoint that matches the request and covers the most messages.

        Considers only the checkpoints whose ids are in `checkpoint_ids`. Returns None if none of them
        matches.
        """
        if not checkpoint_ids:
            return None
        request_prefixes = set(view.prefixes)
        candidates = sorted(each for each in checkpoint_ids if get_prefix_digest(each) in request_prefixes)
        if not candidates:
            return None
        keys = checkpoint_keys(view.request.tenant, root, view.policy.name, candidates)
        records = await self._records.get_many(keys)
        found = [(key, fields) for key, fields in zip(keys, records, strict=True) if fields]
        # A parsed checkpoint is cached with its record. It is used only for the same object.
        held = [self._parsed_checkpoints.get(key) for key, _ in found]

        def parse_and_find() -> tuple[list[Checkpoint | None], Checkpoint | None]:
            checkpoints = [
                known[1] if known is not None and known[0] is fields else from_fields(fields)
                for known, (_, fields) in zip(held, found, strict=True)
            ]
            return checkpoints, find_longest_applicable_checkpoint(
                checkpoints, view.unfixed_messages, view.request.conversation
            )

        count = len(view.unfixed_messages)
        checkpoints, deepest = await run_in_worker_if_large(0, parse_and_find, message_count=count)
        for (key, fields), checkpoint in zip(found, checkpoints, strict=True):
            self._parsed_checkpoints.put(key, (fields, checkpoint), _measure_checkpoint(checkpoint))
        return deepest
