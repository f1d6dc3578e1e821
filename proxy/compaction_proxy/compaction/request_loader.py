"""Taking views: a request is read, sized, and matched with what is stored of its conversation."""

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
    find_deepest_checkpoint,
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

# After each overflow the request is made to fit in this share of its limit: the estimate was wrong.
TIGHT_SHARE = 0.85
# Up to this share of the window nothing that matters is cut, by the number of refusals so far. Estimates are
# wrong by about a percent; a refusal mostly tells the count.
DOUBT_SHARES = (0.99, 1.02, 0.95, 0.85)
# The share before the upstream has reported what it counts.
UNSURE_SHARE = 1.02
# Shortened instructions of projects are held up to this many bytes.
MAX_SHORT_BYTES = 1024 * 1024
# Checkpoints that are held as they were read from their records.
MAX_CHECKPOINTS = 1_000


class _CheckpointQuery(NamedTuple):
    """A request for which something may be stored: what `RequestView` says of it."""

    ask: FitRequest
    strategy: str
    root: bytes | None
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]


class _StoredState(NamedTuple):
    """What is stored for a request: what `RequestView` says of it."""

    checkpoint: Checkpoint | None = None
    checkpoint_id: bytes = b""
    anchor: UsageBaseline | None = None
    directives: Directives = NO_DIRECTIVES


class RequestLoader:
    """Takes views of requests."""

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
            MAX_SHORT_BYTES
        )

    async def load_view(self, ask: FitRequest, *, refusals: int = 0, fresh: bool = False) -> RequestView:
        """The request as it stands, after so many overflow errors.

        What other replicas have made of the conversation may be two seconds old, unless it is to be `fresh`.

        Raises:
            Unreadable: A message is none.
        """
        gauge = build_counting_options(ask)
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        listed = await self._reader.read_request(ask.body, gauge, client)
        overhead = await self._reader.count_overhead(ask.body.prompt_members, gauge)
        learned = await self._model_limits.get(ask.tenant, ask.origin, ask.model)
        window = learned.get_effective_window(ask.model, ask.settings.window)
        root = resolve_root(ask, listed.prefixes)
        aims, basis = self._resolve_price_triggers(ask, root, listed, learned.calibration, overhead)
        output, lower = ask.body.max_output, ask.trigger_tokens
        terms = compute_limits(
            ask.settings, ask.strategy, window, output, lower, aims, adds_output=learned.adds_output
        )
        spent = terms.budget
        if refusals:
            tight = TIGHT_SHARE**refusals
            limit, input_limit = int(spent.limit * tight), int(spent.input_limit * tight)
            spent = replace(spent, limit=limit, input_limit=input_limit)
        sought = _CheckpointQuery(ask, terms.policy.name, root, listed.body, listed.prefixes)
        matched = await self._find_stored_state(sought, fresh=fresh)
        is_sure = refusals or learned.calibration.observations
        share = DOUBT_SHARES[refusals] if is_sure else UNSURE_SHARE
        moving = 0
        if ask.uses_checkpoints:
            seed = gauge.wire.digest_seed
            moving = self._previous.count_moving_messages(
                _format_scope(ask), listed.body, listed.prefixes, seed
            )
        shorter = await self._shorten_instructions(
            listed.messages, spent.input_limit, matched.directives.removed, gauge
        )
        await self._record_instructions(ask, matched.checkpoint, listed.messages)
        return RequestView(
            request=ask,
            limits=terms,
            root=root,
            messages=listed.messages,
            body=listed.body,
            prefixes=listed.prefixes,
            tokens=listed.tokens,
            overhead=overhead,
            has_guessed_tokens=listed.has_guessed_tokens,
            calibration=learned.calibration,
            budget=spent,
            max_prompt_tokens=int(spent.prompt_limit * share),
            checkpoint=matched.checkpoint,
            effective=apply_checkpoint(matched.checkpoint, listed.messages, shorter),
            checkpoint_id=matched.checkpoint_id,
            anchor=matched.anchor,
            directives=matched.directives,
            drift=self._model_limits.get_drift(ask.tenant, ask.origin, ask.model),
            basis=basis,
            moving_count=moving,
            shortened_instructions=shorter,
        )

    async def find_conversation(self, ask: FitRequest, *, has_tools: bool) -> FitRequest | None:
        """Returns the request with the conversation that its messages continue; None if it is beside one.

        Raises:
            Unreadable: A message is none.
        """
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        listed = await self._reader.read_request(ask.body, build_counting_options(ask), client)
        if self._conversations is None or not listed.body:
            return ask

        async def find_recorded_conversation() -> str | None:
            earlier = (await self.load_view(ask)).checkpoint
            return earlier.conversation if earlier else None

        found = await self._conversations.find_conversation(
            ask.tenant,
            listed.body,
            listed.prefixes,
            has_tools=has_tools,
            find_recorded_conversation=find_recorded_conversation,
        )
        return replace(ask, continued_conversation=found) if found else None

    def _resolve_price_triggers(
        self,
        ask: FitRequest,
        root: bytes | None,
        message_list: MessageList,
        calibration: Calibration,
        overhead: int,
    ) -> PriceTriggerSizes:
        """What the trigger comes to where it is about money: few are."""
        if self._price_triggers is None or not has_price_trigger(ask.settings, ask.strategy):
            return NO_PRICE_TRIGGERS
        policy = resolve_policy(ask.settings, ask.strategy)
        fixed = message_list.tokens - sum(each.tokens for each in message_list.body) + overhead
        whose = format_strategy_thread(ask, root or b"", policy.name)
        return self._price_triggers.resolve_sizes(ask, policy, whose, calibration.predict_tokens(fixed))

    async def _shorten_instructions(
        self, messages: Sequence[Message], limit: int, removed: Collection[str], options: CountingOptions
    ) -> dict[int, Message | None]:
        """What instructions of the project become in a list that is rewritten (`RequestView.shorter`)."""
        if not any(each.instruction for each in messages):
            return {}
        allowed = allocate_instruction_tokens(messages, compute_instruction_budget(limit), removed)
        return {
            k: await self._shorten_instruction(messages[k], tokens, options) for k, tokens in allowed.items()
        }

    async def _shorten_instruction(
        self, record: Message, tokens: int, options: CountingOptions
    ) -> Message | None:
        """Head and tail of an instruction, in about so many tokens; None for 0."""
        if not tokens or record.instruction is None:
            return None
        key = (record.digest, tokens, options)
        held = self._short_instructions.get(key)
        if held is None:
            share = max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / max(1, record.tokens)
            handle = record.instruction.path or record.instruction.kind
            made = options.wire.shorten_message(record, share, handle)
            [held] = await self._reader.add_token_counts([made], options)
            self._short_instructions.put(key, held, len(held.raw) + len(held.text))
        return replace(held, instruction=record.instruction, source=None)

    async def _record_instructions(
        self, ask: FitRequest, checkpoint: Checkpoint | None, messages: Sequence[Message]
    ) -> None:
        """Keep which instructions the conversation holds, for people to see."""
        conversation = ask.known_conversation or (checkpoint.conversation if checkpoint else None)
        found = {each.instruction: each.tokens for each in messages if each.instruction is not None}
        if conversation is not None and found:
            noted = [NotedInstruction(*instruction, tokens) for instruction, tokens in found.items()]
            await self._directives.record_instructions(ask.tenant, conversation, noted)

    async def refresh_view(self, view: RequestView) -> RequestView:
        """The view with what other replicas have made of the conversation by now."""
        matched = await self._find_stored_state(_build_query(view), fresh=True)
        return replace(
            view,
            checkpoint=matched.checkpoint,
            effective=apply_checkpoint(matched.checkpoint, view.messages, view.shortened_instructions),
            checkpoint_id=matched.checkpoint_id,
            anchor=matched.anchor,
            directives=matched.directives,
            has_new_round=False,
        )

    async def store_pins(self, ask: FitRequest, conversation: str | None) -> None:
        """Keep what the request pins, so that whatever comes after it finds that."""
        if conversation is not None:
            for text in ask.pins:
                await self._directives.add_pin(ask.tenant, conversation, text)

    async def find_staged_checkpoint(self, view: RequestView, *, late: bool = False) -> Checkpoint | None:
        """The deepest checkpoint that was made ahead of need and stands for this request.

        One that leads further than what is in force; or, if `late`, one that covers just the same.
        """
        root = view.root
        if root is None:
            return None
        places = await self._index.load_checkpoint_ids(
            staged_checkpoints_key(view.request.tenant, root, view.policy.name)
        )
        found = await self._find_deepest_checkpoint(
            _build_query(view), root, places.difference(view.directives.undone)
        )
        done = view.checkpoint.length if view.checkpoint else 0
        fitting = found is not None and (found.length == done if late else found.length > done)
        return found if fitting else None

    async def _find_stored_state(self, sought: _CheckpointQuery, *, fresh: bool) -> _StoredState:
        """What is stored of a request's conversation, and stands for it."""
        ask, root = sought.ask, sought.root
        if root is None:
            return _StoredState()
        places, wishes = await self._load_index_and_directives(sought, root, fresh=fresh)
        checkpoint = await self._find_deepest_checkpoint(sought, root, places)
        if ask.known_conversation is None and checkpoint is not None:
            wishes = await self._directives.get(ask.tenant, checkpoint.conversation)
        if checkpoint is not None and wishes.undone:
            checkpoint = await self._find_deepest_checkpoint(sought, root, places.difference(wishes.undone))
        place = compute_checkpoint_id(checkpoint, sought.prefixes)
        standing = build_baseline_key(ask.origin, ask.model, place)
        anchor = self._anchors.peek_deepest(ask.tenant, root, sought.prefixes, standing)
        return _StoredState(checkpoint, place, anchor, wishes)

    async def _load_index_and_directives(
        self, sought: _CheckpointQuery, root: bytes, *, fresh: bool
    ) -> tuple[frozenset[bytes], Directives]:
        """Where there may be checkpoints, and what is asked of the conversation.

        The store is asked for all that is missing at once.
        """
        tenant, conversation = sought.ask.tenant, sought.ask.known_conversation
        key = checkpoint_list_key(tenant, root, sought.strategy)
        places = None if fresh else self._index.get_cached(key)
        wishes = self._directives.get_cached(tenant, conversation) if conversation else NO_DIRECTIVES
        if places is not None and wishes is not None and self._anchors.is_loaded(tenant, root):
            return places, wishes
        found, asked, _ = await asyncio.gather(
            self._index.load_checkpoint_ids(key),
            self._directives.get(tenant, conversation) if conversation else _get_no_directives(),
            self._anchors.load_root(tenant, root),
        )
        return found, asked

    async def _find_deepest_checkpoint(
        self, sought: _CheckpointQuery, root: bytes, places: Collection[bytes]
    ) -> Checkpoint | None:
        """The deepest checkpoint at these places that stands for the request."""
        if not places:
            return None
        ours = set(sought.prefixes)
        candidates = sorted(each for each in places if get_prefix_digest(each) in ours)
        if not candidates:
            return None
        keys = checkpoint_keys(sought.ask.tenant, root, sought.strategy, candidates)
        found = await self._records.get_many(keys)
        read = [
            self._parse_checkpoint(key, fields) for key, fields in zip(keys, found, strict=True) if fields
        ]
        return find_deepest_checkpoint(read, sought.body, sought.ask.conversation)

    def _parse_checkpoint(self, key: str, fields: Fields) -> Checkpoint | None:
        """The checkpoint in a record, read once for as long as the process holds the record."""
        held = self._parsed_checkpoints.get(key)
        if held is None or held[0] is not fields:
            held = self._parsed_checkpoints[key] = (fields, from_fields(fields))
            if len(self._parsed_checkpoints) > MAX_CHECKPOINTS:
                self._parsed_checkpoints.popitem(last=False)
        self._parsed_checkpoints.move_to_end(key)
        return held[1]


def _format_scope(ask: FitRequest) -> str:
    """What requests have in common that may follow one another."""
    return f"{ask.tenant}/{ask.conversation or ''}"


def _build_query(view: RequestView) -> _CheckpointQuery:
    return _CheckpointQuery(view.request, view.policy.name, view.root, view.body, view.prefixes)


async def _get_no_directives() -> Directives:
    return NO_DIRECTIVES
