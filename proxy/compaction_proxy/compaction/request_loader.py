"""Taking views: a request is read, sized, and matched with what is stored of its conversation."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.compaction.directives import NONE as NO_WISHES
from compaction_proxy.compaction.directives import NotedInstruction, Wishes, Wishing
from compaction_proxy.compaction.fallback_cut import CUT_MARGIN, NOTICE_TOKENS
from compaction_proxy.compaction.message_reader import Gauge, Listed, Reading
from compaction_proxy.compaction.previous_requests import PreviousRequests
from compaction_proxy.compaction.price_triggers import UNAIMED, Aimed, Aiming
from compaction_proxy.compaction.request_limits import about_money, policy_for, terms_for
from compaction_proxy.compaction.request_view import View, applied, gauge_of, remembered_as, thread
from compaction_proxy.compaction.types import Ask
from compaction_proxy.core.checkpoint import Checkpoint, deepest, found_by, from_fields
from compaction_proxy.core.checkpoint_ids import place_of
from compaction_proxy.core.message import Message
from compaction_proxy.core.project_instructions import budget_tokens, select
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.usage_baseline import Anchor, Anchors
from compaction_proxy.providers.usage_baseline import place_of as counted_at
from compaction_proxy.storage.keys import checkpoint_keys, checkpoints_key, staged_key
from compaction_proxy.storage.records import Fields, Records
from compaction_proxy.support.lru import Lru
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


class _Sought(NamedTuple):
    """A request for which something may be stored: what `View` says of it."""

    ask: Ask
    strategy: str
    root: bytes | None
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]


class _Matched(NamedTuple):
    """What is stored for a request: what `View` says of it."""

    checkpoint: Checkpoint | None = None
    place: bytes = b""
    anchor: Anchor | None = None
    wishes: Wishes = NO_WISHES


class Viewer:
    """Takes views of requests."""

    def __init__(
        self,
        reading: Reading,
        records: Records,
        index: CheckpointIndex,
        learning: Learning,
        anchors: Anchors,
        wishes: Wishing,
        aiming: Aiming | None = None,
        conversations: ConversationIndex | None = None,
    ) -> None:
        self._reading = reading
        self._records = records
        self._index = index
        self._learning = learning
        self._anchors = anchors
        self._wishes = wishes
        self._aiming = aiming
        self._previous = PreviousRequests()
        self._conversations = conversations
        self._read: OrderedDict[str, tuple[Fields, Checkpoint | None]] = OrderedDict()
        self._short: Lru[tuple[bytes, int, Gauge], Message] = Lru(MAX_SHORT_BYTES)

    async def view(self, ask: Ask, *, refusals: int = 0, fresh: bool = False) -> View:
        """The request as it stands, after so many overflow errors.

        What other replicas have made of the conversation may be two seconds old, unless it is to be `fresh`.

        Raises:
            Unreadable: A message is none.
        """
        gauge = gauge_of(ask)
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        listed = await self._reading.listed(ask.body, gauge, client)
        overhead = await self._reading.overhead(ask.body.prompt_members, gauge)
        learned = await self._learning.of(ask.tenant, ask.origin, ask.model)
        window = learned.window_for(ask.model, ask.settings.window)
        root = remembered_as(ask, listed.prefixes)
        aims, basis = self._aimed(ask, root, listed, learned.calibration, overhead)
        output, lower = ask.body.max_output, ask.trigger_tokens
        terms = terms_for(
            ask.settings, ask.strategy, window, output, lower, aims, adds_output=learned.adds_output
        )
        spent = terms.budget
        if refusals:
            tight = TIGHT_SHARE**refusals
            limit, input_limit = int(spent.limit * tight), int(spent.input_limit * tight)
            spent = replace(spent, limit=limit, input_limit=input_limit)
        sought = _Sought(ask, terms.policy.name, root, listed.body, listed.prefixes)
        matched = await self._matched(sought, fresh=fresh)
        is_sure = refusals or learned.calibration.observations
        share = DOUBT_SHARES[refusals] if is_sure else UNSURE_SHARE
        moving = 0
        if ask.remembered:
            seed = gauge.dialect.seed
            moving = self._previous.count_moving(_scope(ask), listed.body, listed.prefixes, seed)
        shorter = await self._shorten(listed.messages, spent.input_limit, matched.wishes.removed, gauge)
        await self._note_instructions(ask, matched.checkpoint, listed.messages)
        return View(
            ask=ask,
            terms=terms,
            root=root,
            messages=listed.messages,
            body=listed.body,
            prefixes=listed.prefixes,
            tokens=listed.tokens,
            overhead=overhead,
            guessed=listed.guessed,
            calibration=learned.calibration,
            budget=spent,
            most=int(spent.prompt_limit * share),
            earlier=matched.checkpoint,
            effective=applied(matched.checkpoint, listed.messages, shorter),
            place=matched.place,
            anchor=matched.anchor,
            wishes=matched.wishes,
            drift=self._learning.drift(ask.tenant, ask.origin, ask.model),
            basis=basis,
            moving=moving,
            shorter=shorter,
        )

    async def find_conversation(self, ask: Ask, *, has_tools: bool) -> Ask | None:
        """Returns the request with the conversation that its messages continue; None if it is beside one.

        Raises:
            Unreadable: A message is none.
        """
        client = find_client_by_members(ask.body.prompt_members) or ask.client
        listed = await self._reading.listed(ask.body, gauge_of(ask), client)
        if self._conversations is None or not listed.body:
            return ask

        async def recall() -> str | None:
            earlier = (await self.view(ask)).earlier
            return earlier.conversation if earlier else None

        found = await self._conversations.find(
            ask.tenant, listed.body, listed.prefixes, has_tools=has_tools, recall=recall
        )
        return replace(ask, continued=found) if found else None

    def _aimed(
        self, ask: Ask, root: bytes | None, listed: Listed, calibration: Calibration, overhead: int
    ) -> Aimed:
        """What the trigger comes to where it is about money: few are."""
        if self._aiming is None or not about_money(ask.settings, ask.strategy):
            return UNAIMED
        policy = policy_for(ask.settings, ask.strategy)
        fixed = listed.tokens - sum(each.tokens for each in listed.body) + overhead
        whose = thread(ask, root or b"", policy.name)
        return self._aiming.of(ask, policy, whose, calibration.size(fixed))

    async def _shorten(
        self, messages: Sequence[Message], limit: int, removed: Collection[str], gauge: Gauge
    ) -> dict[int, Message | None]:
        """What instructions of the project become in a list that is rewritten (`View.shorter`)."""
        if not any(each.instruction for each in messages):
            return {}
        allowed = select(messages, budget_tokens(limit), removed)
        return {k: await self._shortened(messages[k], tokens, gauge) for k, tokens in allowed.items()}

    async def _shortened(self, record: Message, tokens: int, gauge: Gauge) -> Message | None:
        """Head and tail of an instruction, in about so many tokens; None for 0."""
        if not tokens or record.instruction is None:
            return None
        key = (record.digest, tokens, gauge)
        held = self._short.get(key)
        if held is None:
            share = max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / max(1, record.tokens)
            handle = record.instruction.path or record.instruction.kind
            made = gauge.dialect.shortened(record, share, handle)
            [held] = await self._reading.counted([made], gauge)
            self._short.put(key, held, len(held.raw) + len(held.text))
        return replace(held, instruction=record.instruction, source=None)

    async def _note_instructions(
        self, ask: Ask, checkpoint: Checkpoint | None, messages: Sequence[Message]
    ) -> None:
        """Keep which instructions the conversation holds, for people to see."""
        conversation = ask.known_as or (checkpoint.conversation if checkpoint else None)
        found = {each.instruction: each.tokens for each in messages if each.instruction is not None}
        if conversation is not None and found:
            noted = [NotedInstruction(*instruction, tokens) for instruction, tokens in found.items()]
            await self._wishes.note_instructions(ask.tenant, conversation, noted)

    async def renewed(self, view: View) -> View:
        """The view with what other replicas have made of the conversation by now."""
        matched = await self._matched(_sought(view), fresh=True)
        return replace(
            view,
            earlier=matched.checkpoint,
            effective=applied(matched.checkpoint, view.messages, view.shorter),
            place=matched.place,
            anchor=matched.anchor,
            wishes=matched.wishes,
            drifting=False,
        )

    async def pin(self, ask: Ask, conversation: str | None) -> None:
        """Keep what the request pins, so that whatever comes after it finds that."""
        if conversation is not None:
            for text in ask.pins:
                await self._wishes.pin(ask.tenant, conversation, text)

    async def staged(self, view: View, *, late: bool = False) -> Checkpoint | None:
        """The deepest checkpoint that was made ahead of need and stands for this request.

        One that leads further than what is in force; or, if `late`, one that covers just the same.
        """
        root = view.root
        if root is None:
            return None
        places = await self._index.places(staged_key(view.ask.tenant, root, view.policy.name))
        found = await self._deepest(_sought(view), root, places.difference(view.wishes.undone))
        done = view.earlier.length if view.earlier else 0
        fitting = found is not None and (found.length == done if late else found.length > done)
        return found if fitting else None

    async def _matched(self, sought: _Sought, *, fresh: bool) -> _Matched:
        """What is stored of a request's conversation, and stands for it."""
        ask, root = sought.ask, sought.root
        if root is None:
            return _Matched()
        places, wishes = await self._stored(sought, root, fresh=fresh)
        checkpoint = await self._deepest(sought, root, places)
        if ask.known_as is None and checkpoint is not None:
            wishes = await self._wishes.of(ask.tenant, checkpoint.conversation)
        if checkpoint is not None and wishes.undone:
            checkpoint = await self._deepest(sought, root, places.difference(wishes.undone))
        place = place_of(checkpoint, sought.prefixes)
        standing = counted_at(ask.origin, ask.model, place)
        anchor = self._anchors.held(ask.tenant, root, sought.prefixes, standing)
        return _Matched(checkpoint, place, anchor, wishes)

    async def _stored(self, sought: _Sought, root: bytes, *, fresh: bool) -> tuple[frozenset[bytes], Wishes]:
        """Where there may be checkpoints, and what is asked of the conversation.

        The store is asked for all that is missing at once.
        """
        tenant, conversation = sought.ask.tenant, sought.ask.known_as
        key = checkpoints_key(tenant, root, sought.strategy)
        places = None if fresh else self._index.held(key)
        wishes = self._wishes.held(tenant, conversation) if conversation else NO_WISHES
        if places is not None and wishes is not None and self._anchors.knows(tenant, root):
            return places, wishes
        found, asked, _ = await asyncio.gather(
            self._index.places(key),
            self._wishes.of(tenant, conversation) if conversation else _nothing(),
            self._anchors.look(tenant, root),
        )
        return found, asked

    async def _deepest(self, sought: _Sought, root: bytes, places: Collection[bytes]) -> Checkpoint | None:
        """The deepest checkpoint at these places that stands for the request."""
        if not places:
            return None
        ours = set(sought.prefixes)
        candidates = sorted(each for each in places if found_by(each) in ours)
        if not candidates:
            return None
        keys = checkpoint_keys(sought.ask.tenant, root, sought.strategy, candidates)
        found = await self._records.find(keys)
        read = [self._checkpoint(key, fields) for key, fields in zip(keys, found, strict=True) if fields]
        return deepest(read, sought.body, sought.ask.conversation)

    def _checkpoint(self, key: str, fields: Fields) -> Checkpoint | None:
        """The checkpoint in a record, read once for as long as the process holds the record."""
        held = self._read.get(key)
        if held is None or held[0] is not fields:
            held = self._read[key] = (fields, from_fields(fields))
            if len(self._read) > MAX_CHECKPOINTS:
                self._read.popitem(last=False)
        self._read.move_to_end(key)
        return held[1]


def _scope(ask: Ask) -> str:
    """What requests have in common that may follow one another."""
    return f"{ask.tenant}/{ask.conversation or ''}"


def _sought(view: View) -> _Sought:
    return _Sought(view.ask, view.policy.name, view.root, view.body, view.prefixes)


async def _nothing() -> Wishes:
    return NO_WISHES
