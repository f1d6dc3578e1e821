"""Taking views: a request is read, sized, and matched with what is stored of its conversation."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from proxy.anchors import Anchors
from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.fitting import Ask
from proxy.compaction.policies import policy_for
from proxy.compaction.view import View, gauge_of
from proxy.core.budget import budget
from proxy.core.checkpoint import Checkpoint, deepest, found_by
from proxy.core.checkpoint_fields import from_fields
from proxy.core.keys import checkpoint_keys, checkpoints_key, staged_key
from proxy.learning import Learning
from proxy.reading import Reading
from proxy.storage.records import Fields, Records
from proxy.wishes import NONE as NO_WISHES
from proxy.wishes import Wishes, Wishing

# After each overflow the request is made to fit in this share of its limit: the estimate was wrong.
TIGHT_SHARE = 0.85
# What matters is cut only where the estimate is over the window by more than it may be wrong; if it was right
# after all, the upstream refuses, and it is cut then. By the number of refusals so far.
DOUBT_SHARES = (1.02, 1.02, 0.95, 0.85)
# Checkpoints that are held as they were read from their records.
MAX_CHECKPOINTS = 1_000


class _Stored(NamedTuple):
    """What is stored of a conversation: the places of its checkpoints, and what is asked of it."""

    places: frozenset[bytes]
    wishes: Wishes


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
    ) -> None:
        self._reading = reading
        self._records = records
        self._index = index
        self._learning = learning
        self._anchors = anchors
        self._wishes = wishes
        self._read: OrderedDict[str, tuple[Fields, Checkpoint | None]] = OrderedDict()

    async def view(self, ask: Ask, *, refusals: int = 0, fresh: bool = False) -> View:
        """The request as it stands, after so many overflow errors.

        What other replicas have made of the conversation may be two seconds old, unless it is to be `fresh`.

        Raises:
            Unreadable: A message is none.
        """
        gauge = gauge_of(ask)
        policy = policy_for(ask.settings, ask.strategy)
        listed = await self._reading.listed(ask.body, gauge)
        overhead = await self._reading.overhead(ask.body.prompt_members, gauge)
        learned = await self._learning.of(ask.tenant, ask.origin, ask.model)
        window = learned.window_for(ask.model, ask.settings.window)
        spent = budget(window, policy.reserves, ask.body.max_output)
        most = max(spent.limit, window - (ask.body.max_output or 0))
        if refusals:
            spent = replace(spent, limit=int(spent.limit * TIGHT_SHARE**refusals))
        view = View(
            ask=ask,
            policy=policy,
            messages=listed.messages,
            body=listed.body,
            prefixes=listed.prefixes,
            tokens=listed.tokens,
            overhead=overhead,
            calibration=learned.calibration,
            budget=spent,
            most=int(most * DOUBT_SHARES[refusals]),
            earlier=None,
            effective=listed.messages,
            drift=self._learning.drift(ask.tenant, ask.origin, ask.model),
        )
        return await self._matched(view, fresh=fresh)

    async def renewed(self, view: View) -> View:
        """The view with what other replicas have made of the conversation by now."""
        return await self._matched(view.with_checkpoint(None), fresh=True)

    async def staged(self, view: View, *, late: bool = False) -> Checkpoint | None:
        """The deepest checkpoint that was made ahead of need and stands for this request.

        One that leads further than what is in force; or, if `late`, one that covers just the same.
        """
        root = view.root
        if root is None:
            return None
        places = await self._index.places(staged_key(view.ask.tenant, root, view.policy.name))
        found = await self._deepest(view, places.difference(view.wishes.undone))
        done = view.earlier.length if view.earlier else 0
        fitting = found is not None and (found.length == done if late else found.length > done)
        return found if fitting else None

    async def _matched(self, view: View, *, fresh: bool) -> View:
        """The view with what is stored of its conversation."""
        root = view.root
        if root is None:
            return view
        ask = view.ask
        stored = await self._stored(view, root, fresh=fresh)
        checkpoint = await self._deepest(view, stored.places)
        wishes = stored.wishes
        if ask.conversation is None and checkpoint is not None:
            wishes = await self._wishes.of(ask.tenant, checkpoint.conversation)
        if checkpoint is not None and wishes.undone:
            checkpoint = await self._deepest(view, stored.places.difference(wishes.undone))
        if checkpoint is not None:
            view = view.with_checkpoint(checkpoint)
        anchor = self._anchors.held(ask.tenant, root, view.prefixes, view.standing)
        same = anchor == view.anchor and wishes == view.wishes and not view.drifting
        return view if same else replace(view, anchor=anchor, wishes=wishes, drifting=False)

    async def _stored(self, view: View, root: bytes, *, fresh: bool) -> _Stored:
        """What is stored of the conversation; the store is asked for all that is missing at once."""
        tenant, conversation = view.ask.tenant, view.ask.conversation
        key = checkpoints_key(tenant, root, view.policy.name)
        places = None if fresh else self._index.held(key)
        wishes = self._wishes.held(tenant, conversation) if conversation else NO_WISHES
        if places is not None and wishes is not None and self._anchors.knows(tenant, root):
            return _Stored(places, wishes)
        found, asked, _ = await asyncio.gather(
            self._index.places(key),
            self._wishes.of(tenant, conversation) if conversation else _nothing(),
            self._anchors.look(tenant, root),
        )
        return _Stored(found, asked)

    async def _deepest(self, view: View, places: Collection[bytes]) -> Checkpoint | None:
        """The deepest checkpoint at these places that stands for the request."""
        root = view.root
        if not places or root is None:
            return None
        ours = set(view.prefixes)
        candidates = sorted(each for each in places if found_by(each) in ours)
        if not candidates:
            return None
        keys = checkpoint_keys(view.ask.tenant, root, view.policy.name, candidates)
        found = await self._records.find(keys)
        read = [self._checkpoint(key, fields) for key, fields in zip(keys, found, strict=True) if fields]
        return deepest(read, view.body, view.ask.conversation)

    def _checkpoint(self, key: str, fields: Fields) -> Checkpoint | None:
        """The checkpoint in a record, read once for as long as the process holds the record."""
        held = self._read.get(key)
        if held is None or held[0] is not fields:
            held = self._read[key] = (fields, from_fields(fields))
            if len(self._read) > MAX_CHECKPOINTS:
                self._read.popitem(last=False)
        self._read.move_to_end(key)
        return held[1]


async def _nothing() -> Wishes:
    return NO_WISHES
