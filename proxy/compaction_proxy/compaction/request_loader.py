"""Builds views of requests: reads and counts their messages, and loads what is stored for them."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.compaction.directives import NO_DIRECTIVES, Directives, DirectiveStore, NotedInstruction
from compaction_proxy.compaction.fallback_cut import CUT_MARGIN, NOTICE_TOKENS
from compaction_proxy.compaction.message_reader import CountingOptions, MessageList, MessageReader
from compaction_proxy.compaction.previous_requests import PreviousRequests
from compaction_proxy.compaction.price_triggers import NO_PRICE_TRIGGERS, PriceTriggers, PriceTriggerSizes
from compaction_proxy.compaction.request_limits import compute_limits, has_price_trigger, resolve_policy
from compaction_proxy.compaction.request_view import (
    RequestView,
    apply_checkpoint,
    build_counting_options,
    format_strategy_thread,
    resolve_root,
)
from compaction_proxy.compaction.types import FitRequest
from compaction_proxy.core.checkpoint import (
    Checkpoint,
    find_longest_applicable_checkpoint,
    from_fields,
    get_prefix_digest,
)
from compaction_proxy.core.checkpoint_ids import compute_checkpoint_id
from compaction_proxy.core.message import Message
from compaction_proxy.core.project_instructions import allocate_instruction_tokens, compute_instruction_budget
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import UsageBaseline, UsageBaselineStore, build_baseline_key
from compaction_proxy.storage.keys import checkpoint_keys, checkpoint_list_key, staged_checkpoints_key
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.support.lru import LruCache
from compaction_proxy.wires.project_instructions import find_client_by_members

# After each refusal of a request as too large, its limits are multiplied by this factor, because the estimate
# of its size was wrong.
TIGHT_SHARE = 0.85
# A request that is estimated at no more than this share of the upstream's prompt limit counts as acceptable,
# so no important content is cut from it. The index is the number of refusals so far. Before a refusal, one
# percent is left for the error of estimates. The share after the first refusal is higher, because a refusal
# usually names the counted size.
DOUBT_SHARES = (0.99, 1.02, 0.95, 0.85)
# This share is used in place of `DOUBT_SHARES` until the upstream has reported a token count.
UNSURE_SHARE = 1.02
# Size of the cache of shortened project instructions, in bytes.
MAX_INSTRUCTION_CACHE_BYTES = 1024 * 1024
# The cache holds at most this many parsed checkpoints.
MAX_CHECKPOINTS = 1_000


class _CheckpointQuery(NamedTuple):
    """The values by which the stored state for a request is found.

    `ask` is the request, `strategy` the name of its strategy, and `body` its messages that are not fixed
    (`RequestView.unfixed_messages`). The other fields have the same meaning as those of `RequestView`.
    """

    ask: FitRequest
    strategy: str
    root: bytes | None
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]


class _StoredState(NamedTuple):
    """The stored state for a request. The fields have the same meaning as those of `RequestView`."""

    checkpoint: Checkpoint | None = None
    checkpoint_id: bytes = b""
    anchor: UsageBaseline | None = None
    directives: Directives = NO_DIRECTIVES


class RequestLoader:
    """Builds request views from requests and stored state."""

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
        self._parsed_checkpoints: OrderedDict[str, tuple[Fields, Checkpoint | None]] = OrderedDict()
        self._short_instructions: LruCache[tuple[bytes, int, CountingOptions], Message] = LruCache(
            MAX_INSTRUCTION_CACHE_BYTES
        )

    async def load_view(
        self, ask: FitRequest, *, refusals: int = 0, bypass_cache: bool = False
    ) -> RequestView:
        """Returns the view of a request: its messages, their sizes, its limits and the stored state for it.

        Args:
            ask: The request.
            refusals: How often the upstream has refused the request as too large. Each refusal makes the
                limits smaller.
            bypass_cache: Whether to read checkpoints and directives from the store. Otherwise, what other
                replicas have stored in the last two seconds may be missing.

        Raises:
            UnreadableBodyError: A message cannot be read.
        """
        options = build_counting_options(ask)
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        message_list = await self._reader.read_request(ask.body, options, client)
        overhead = await self._reader.count_overhead(ask.body.prompt_members, options)
        learned = await self._model_limits.get(ask.tenant, ask.origin, ask.model)
        window = learned.get_effective_window(ask.model, ask.settings.window)
        root = resolve_root(ask, message_list.prefixes)
        price_thresholds, basis = self._resolve_price_triggers(
            ask, root, message_list, learned.calibration, overhead
        )
        output, trigger_tokens = ask.body.max_output, ask.trigger_tokens
        limits = compute_limits(
            ask.settings,
            ask.strategy,
            window,
            output,
            trigger_tokens,
            price_thresholds,
            adds_output=learned.adds_output,
        )
        budget = limits.budget
        if refusals:
            shrink_factor = TIGHT_SHARE**refusals
            limit, input_limit = (
                int(budget.compaction_limit * shrink_factor),
                int(budget.input_limit * shrink_factor),
            )
            budget = replace(budget, compaction_limit=limit, input_limit=input_limit)
        query = _CheckpointQuery(
            ask, limits.policy.name, root, message_list.unfixed_messages, message_list.prefixes
        )
        stored = await self._find_stored_state(query, bypass_cache=bypass_cache)
        is_calibrated = refusals or learned.calibration.observations
        share = DOUBT_SHARES[refusals] if is_calibrated else UNSURE_SHARE
        moving_count = 0
        if ask.uses_checkpoints:
            seed = options.wire.digest_seed
            moving_count = self._previous.record_and_count_moving_messages(
                _format_mover_scope(ask), message_list.unfixed_messages, message_list.prefixes, seed
            )
        shorter = await self._shorten_instructions(
            message_list.messages, budget.input_limit, stored.directives.removed, options
        )
        await self._record_instructions(ask, stored.checkpoint, message_list.messages)
        return RequestView(
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
            checkpoint=stored.checkpoint,
            effective_messages=apply_checkpoint(stored.checkpoint, message_list.messages, shorter),
            checkpoint_id=stored.checkpoint_id,
            anchor=stored.anchor,
            directives=stored.directives,
            drift_ratio=self._model_limits.get_post_compaction_factor(ask.tenant, ask.origin, ask.model),
            price_basis=basis,
            moving_count=moving_count,
            shortened_instructions=shorter,
        )

    async def find_conversation(self, ask: FitRequest, *, has_tools: bool) -> FitRequest | None:
        """Returns the request with the id of the conversation that it continues.

        Returns the request unchanged if it has no messages by which it could be recognised, or if the
        recognition of conversations is switched off. Returns None if the request belongs to no conversation.
        An example is a request for a title.

        Raises:
            UnreadableBodyError: A message cannot be read.
        """
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        message_list = await self._reader.read_request(ask.body, build_counting_options(ask), client)
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

    async def _shorten_instructions(
        self,
        messages: Sequence[Message],
        limit_tokens: int,
        removed_ids: Collection[str],
        options: CountingOptions,
    ) -> dict[int, Message | None]:
        """Returns replacements for project instructions that users removed or a compacted list must shorten.

        The keys are message indices. The value None leaves the message out.
        """
        if not any(each.instruction for each in messages):
            return {}
        allowed = allocate_instruction_tokens(messages, compute_instruction_budget(limit_tokens), removed_ids)
        return {
            k: await self._shorten_instruction(messages[k], tokens, options) for k, tokens in allowed.items()
        }

    async def _shorten_instruction(
        self, message: Message, max_tokens: int, options: CountingOptions
    ) -> Message | None:
        """Returns a message with the head and the tail of an instruction, of about `max_tokens` tokens.

        Returns None if `max_tokens` is 0.
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

    async def _record_instructions(
        self, ask: FitRequest, checkpoint: Checkpoint | None, messages: Sequence[Message]
    ) -> None:
        """Records which project instructions the conversation holds, so that users can list them.

        Does nothing if the id of the conversation is unknown.
        """
        conversation = ask.known_conversation or (checkpoint.conversation if checkpoint else None)
        tokens_by_instruction = {
            each.instruction: each.tokens for each in messages if each.instruction is not None
        }
        if conversation is not None and tokens_by_instruction:
            noted = [
                NotedInstruction(*instruction, tokens)
                for instruction, tokens in tokens_by_instruction.items()
            ]
            await self._directives.record_instructions(ask.tenant, conversation, noted)

    async def refresh_view(self, view: RequestView) -> RequestView:
        """Returns the view with the newest checkpoint and directives that any replica has stored."""
        stored = await self._find_stored_state(_build_query(view), bypass_cache=True)
        return replace(
            view,
            checkpoint=stored.checkpoint,
            effective_messages=apply_checkpoint(
                stored.checkpoint, view.messages, view.shortened_instructions
            ),
            checkpoint_id=stored.checkpoint_id,
            anchor=stored.anchor,
            directives=stored.directives,
            has_new_round=False,
        )

    async def store_pins(self, ask: FitRequest, conversation: str | None) -> None:
        """Stores the pins of a request for later requests of the conversation, if its id is known."""
        if conversation is not None:
            for text in ask.pins:
                await self._directives.add_pin(ask.tenant, conversation, text)

    async def find_staged_checkpoint(
        self, view: RequestView, *, same_length: bool = False
    ) -> Checkpoint | None:
        """Returns the staged checkpoint that matches this request and covers most messages.

        Returns None unless this checkpoint covers more messages than the checkpoint in force. With
        `same_length`, returns None unless both cover the same number of messages. The staged checkpoint then
        holds a summary that came too late, so that the checkpoint in force holds an extract.
        """
        root = view.root
        if root is None:
            return None
        checkpoint_ids = await self._index.load_checkpoint_ids(
            staged_checkpoints_key(view.request.tenant, root, view.policy.name)
        )
        checkpoint = await self._find_deepest_checkpoint(
            _build_query(view), root, checkpoint_ids.difference(view.directives.undone)
        )
        covered_count = view.checkpoint.length if view.checkpoint else 0
        is_usable = checkpoint is not None and (
            checkpoint.length == covered_count if same_length else checkpoint.length > covered_count
        )
        return checkpoint if is_usable else None

    async def _find_stored_state(self, query: _CheckpointQuery, *, bypass_cache: bool) -> _StoredState:
        """Finds the checkpoint, anchor and directives that apply to a request."""
        ask, root = query.ask, query.root
        if root is None:
            return _StoredState()
        checkpoint_ids, directives = await self._load_index_and_directives(
            query, root, bypass_cache=bypass_cache
        )
        checkpoint = await self._find_deepest_checkpoint(query, root, checkpoint_ids)
        if ask.known_conversation is None and checkpoint is not None:
            directives = await self._directives.get(ask.tenant, checkpoint.conversation)
        if checkpoint is not None and directives.undone:
            checkpoint = await self._find_deepest_checkpoint(
                query, root, checkpoint_ids.difference(directives.undone)
            )
        checkpoint_id = compute_checkpoint_id(checkpoint, query.prefixes)
        baseline_key = build_baseline_key(ask.origin, ask.model, checkpoint_id)
        anchor = self._anchors.peek_deepest(ask.tenant, root, query.prefixes, baseline_key)
        return _StoredState(checkpoint, checkpoint_id, anchor, directives)

    async def _load_index_and_directives(
        self, query: _CheckpointQuery, root: bytes, *, bypass_cache: bool
    ) -> tuple[frozenset[bytes], Directives]:
        """Returns the ids of all checkpoints with this root digest, and the directives of the conversation.

        Also makes sure that the anchors with this root digest are loaded. If the ids, the directives or the
        anchors are not cached, all three are loaded from the store concurrently.
        """
        tenant, conversation = query.ask.tenant, query.ask.known_conversation
        key = checkpoint_list_key(tenant, root, query.strategy)
        checkpoint_ids = None if bypass_cache else self._index.get_cached(key)
        directives = self._directives.get_cached(tenant, conversation) if conversation else NO_DIRECTIVES
        if checkpoint_ids is not None and directives is not None and self._anchors.is_loaded(tenant, root):
            return checkpoint_ids, directives
        loaded_ids, loaded_directives, _ = await asyncio.gather(
            self._index.load_checkpoint_ids(key),
            self._directives.get(tenant, conversation) if conversation else _get_no_directives(),
            self._anchors.load_baselines(tenant, root),
        )
        return loaded_ids, loaded_directives

    async def _find_deepest_checkpoint(
        self, query: _CheckpointQuery, root: bytes, checkpoint_ids: Collection[bytes]
    ) -> Checkpoint | None:
        """Returns the checkpoint that matches the request and covers most messages; None if none matches.

        Only checkpoints with one of the given ids are considered.
        """
        if not checkpoint_ids:
            return None
        request_prefixes = set(query.prefixes)
        candidates = sorted(each for each in checkpoint_ids if get_prefix_digest(each) in request_prefixes)
        if not candidates:
            return None
        keys = checkpoint_keys(query.ask.tenant, root, query.strategy, candidates)
        records = await self._records.get_many(keys)
        checkpoints = [
            self._parse_checkpoint(key, fields) for key, fields in zip(keys, records, strict=True) if fields
        ]
        return find_longest_applicable_checkpoint(checkpoints, query.body, query.ask.conversation)

    def _parse_checkpoint(self, key: str, fields: Fields) -> Checkpoint | None:
        """Returns the checkpoint in a record; None if the record cannot be read.

        The result is cached under the store key. It is used again as long as the store returns the identical
        record object.
        """
        held = self._parsed_checkpoints.get(key)
        if held is None or held[0] is not fields:
            held = self._parsed_checkpoints[key] = (fields, from_fields(fields))
            if len(self._parsed_checkpoints) > MAX_CHECKPOINTS:
                self._parsed_checkpoints.popitem(last=False)
        self._parsed_checkpoints.move_to_end(key)
        return held[1]


def _format_mover_scope(ask: FitRequest) -> str:
    """Formats the key shared by requests of one tenant and conversation id.

    The request is compared only with requests of the same key, to recognise which messages its client moves.
    """
    return f"{ask.tenant}/{ask.conversation or ''}"


def _build_query(view: RequestView) -> _CheckpointQuery:
    return _CheckpointQuery(view.request, view.policy.name, view.root, view.unfixed_messages, view.prefixes)


async def _get_no_directives() -> Directives:
    return NO_DIRECTIVES
