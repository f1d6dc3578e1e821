"""Builds a `RequestView` for each request: counts its messages and loads its checkpoint and directives.

It also remembers the last messages of earlier requests, called their ends, because some clients (movers) move
their last messages with each request (`core.mover`). A comparison with earlier requests shows which messages
these are. The ends are kept in the memory of one process. So after a restart, a mover is recognised at its
second request at the earliest.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

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
from compaction_proxy.wires.project_instructions import find_client_by_members

# Largest size of all remembered ends together, in bytes. If it is exceeded, the least recently used ends are
# dropped.
MAX_HELD_BYTES = 4 * 1024 * 1024
# The end of a request is stored under several prefix digests of the request. Each of these entries is assumed
# to take this many bytes of memory.
PREFIX_BYTES = 400


class PreviousRequests:
    """Remembers the last messages of requests, to recognise which messages a client moves.

    Some clients (movers) move their last messages to the end of each new request (`core.mover`). The earlier
    request with which a new request is compared is found by the prefix digests that both share. Use it on one
    event loop only.

    Args:
        max_held_bytes: Largest size of all remembered ends together, in bytes.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        # Maps a sender and a prefix digest to the end of a request and to the number of messages that the
        # digest covers.
        self._ends: LruCache[tuple[str, bytes], tuple[RequestEnd, int]] = LruCache(max_held_bytes)

    def record_and_count_moving_messages(
        self, sender: str, messages: Sequence[Message], prefixes: Sequence[bytes], seed: bytes
    ) -> int:
        """Returns how many of its last messages the client moves, and remembers the end of the request.

        Args:
            sender: Key made from the tenant, and from the conversation id if the client gave one. The request
                is compared only with requests of the same sender.
            messages: The messages of the request that are not fixed.
            prefixes: Prefix digests of these messages.
            seed: The digest from which the chain of prefix digests starts on this wire.
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
        """Returns the entry for the longest prefix that this request shares with an earlier one.

        If several earlier requests share this prefix, returns the entry of the latest one. Returns None if no
        prefix is shared.
        """
        for prefix in reversed(prefixes):
            stored_end = self._ends.get((sender, prefix))
            if stored_end is not None:
                return stored_end
        return None


# After each refusal of a request as too large, its limits are multiplied by this factor, because the estimate
# of its size was wrong.
TIGHT_SHARE = 0.85
# If the estimated size of a request is at most this share of the upstream's prompt limit, no important
# content is cut from it. The index in the tuple is the number of refusals so far. At index 0, one percent of
# the limit is left as a margin for errors of the estimate. At index 1, the share is higher, because a refusal
# usually reports the true size.
DOUBT_SHARES = (0.99, 1.02, 0.95, 0.85)
# This share is used in place of `DOUBT_SHARES` until the upstream has reported a token count.
UNSURE_SHARE = 1.02
# Size of the cache of shortened project instructions, in bytes.
MAX_INSTRUCTION_CACHE_BYTES = 1024 * 1024
# Largest number of parsed checkpoints in the cache.
MAX_CHECKPOINTS = 1_000


class RequestLoader:
    """Builds the `RequestView` of a request, from the request and from the records in the store."""

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
        self._parsed_checkpoints: LruCache[str, tuple[Fields, Checkpoint | None]] = LruCache(MAX_CHECKPOINTS)
        self._short_instructions: LruCache[tuple[bytes, int, CountingOptions], Message] = LruCache(
            MAX_INSTRUCTION_CACHE_BYTES
        )

    async def load_view(
        self, ask: FitRequest, *, refusals: int = 0, bypass_cache: bool = False
    ) -> RequestView:
        """Builds the view of a request: its messages and their sizes, its limits, and its stored state.

        Args:
            ask: The request.
            refusals: How often the upstream has refused the request as too large. Each refusal makes the
                limits smaller.
            bypass_cache: Whether to read the ids of checkpoints from the store. If not, checkpoints that
                other replicas have stored in the last two seconds may be missing.

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
        if any(each.instruction for each in view.messages):
            view = replace(view, shortened_instructions=await self._shorten_instructions(view))
            await self._record_instructions(view)
        return view

    async def _read_messages(self, ask: FitRequest) -> MessageList:
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        return await self._reader.read_request(ask.body, ask.counting_options, client)

    async def find_conversation(self, ask: FitRequest, *, has_tools: bool) -> FitRequest | None:
        """Returns the request with the id of the conversation that it continues.

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
        """Computes the token thresholds of price-dependent triggers, if the strategy has such triggers."""
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
        """Returns the messages that replace project instructions when a compaction is applied.

        Instructions that users have removed are left out, and instructions that are too long are shortened.
        The keys of the result are message indices. The value None means that the message is left out.
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
        """Shortens project instructions to their beginning and end, to about `max_tokens` tokens.

        Returns None if `max_tokens` is 0, so that the instructions are left out.
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
        """Records which project instructions the conversation contains, so that users can list them.

        Does nothing if the id of the conversation is unknown.
        """
        if view.conversation_id is not None:
            tokens = {each.instruction: each.tokens for each in view.messages if each.instruction}
            noted = [NotedInstruction(*instruction, size) for instruction, size in tokens.items()]
            await self._directives.record_instructions(view.request.tenant, view.conversation_id, noted)

    async def refresh_view(self, view: RequestView, *, bypass_cache: bool = True) -> RequestView:
        """Returns the view with the newest stored checkpoint, directives and anchor.

        The anchor is the provider's token count of an earlier request of the conversation.

        If `bypass_cache` is False, checkpoints that other replicas have stored in the last two seconds may be
        missing. If the ids of checkpoints, the directives or the anchors are not cached, all three are loaded
        from the store concurrently.
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
        """Stores the pins that a request asks for, so that they also apply to later requests.

        Does nothing if the conversation id is None.
        """
        if conversation is not None:
            for text in ask.pins:
                await self._directives.add_pin(ask.tenant, conversation, text)

    async def find_staged_checkpoint(
        self, view: RequestView, *, same_length: bool = False
    ) -> Checkpoint | None:
        """Returns the staged checkpoint that matches this request and covers the most messages.

        Returns None if it does not cover more messages than the checkpoint of the view.

        Args:
            view: The request.
            same_length: Whether to look for a late summary instead. If a summary is not ready in time, a
                checkpoint with an extract is used. The late summary is later staged in a checkpoint that
                covers the same number of messages. Returns None if there is no such checkpoint.
        """
        root, current = view.root, view.checkpoint
        if root is None or (same_length and (current is None or current.writer != EXTRACT_WRITER)):
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

        Considers only the checkpoints `checkpoint_ids`. Returns None if none of them matches.
        """
        if not checkpoint_ids:
            return None
        request_prefixes = set(view.prefixes)
        candidates = sorted(each for each in checkpoint_ids if get_prefix_digest(each) in request_prefixes)
        if not candidates:
            return None
        keys = checkpoint_keys(view.request.tenant, root, view.policy.name, candidates)
        records = await self._records.get_many(keys)
        checkpoints = [
            self._parse_checkpoint(key, fields) for key, fields in zip(keys, records, strict=True) if fields
        ]
        return find_longest_applicable_checkpoint(
            checkpoints, view.unfixed_messages, view.request.conversation
        )

    def _parse_checkpoint(self, key: str, fields: Fields) -> Checkpoint | None:
        """Returns the checkpoint in a record; None if the record cannot be read.

        The result is cached under the store key. The cached result is used if the store returns the identical
        record object again.
        """
        held = self._parsed_checkpoints.get(key)
        if held is None or held[0] is not fields:
            held = (fields, from_fields(fields))
            self._parsed_checkpoints.put(key, held, 1)
        return held[1]
