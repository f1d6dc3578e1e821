"""Taking views: a request is read, sized, and matched with what is stored of its conversation."""

from collections.abc import Collection
from dataclasses import replace

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
from proxy.storage.records import Records
from proxy.wishes import NONE as NO_WISHES
from proxy.wishes import Wishing

# After each overflow the request is made to fit in this share of its limit: the estimate was wrong.
TIGHT_SHARE = 0.85
# What matters is cut only where the estimate is over the window by more than it may be wrong; if it was right
# after all, the upstream refuses, and it is cut then. By the number of refusals so far.
DOUBT_SHARES = (1.02, 1.02, 0.95, 0.85)


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

    async def view(self, ask: Ask, *, refusals: int = 0) -> View:
        """The request as it stands, after so many overflow errors.

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
        view = View(
            ask=ask,
            policy=policy,
            messages=listed.messages,
            body=listed.body,
            prefixes=listed.prefixes,
            overhead=overhead,
            calibration=learned.calibration,
            budget=replace(spent, limit=int(spent.limit * TIGHT_SHARE**refusals)),
            most=int(most * DOUBT_SHARES[refusals]),
            earlier=None,
            effective=listed.messages,
        )
        return await self._matched(view)

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

    async def _matched(self, view: View) -> View:
        """The view with what is stored of its conversation."""
        root = view.root
        if root is None:
            return view
        places = await self._index.places(checkpoints_key(view.ask.tenant, root, view.policy.name))
        checkpoint = await self._deepest(view, places)
        named = view.ask.conversation or (checkpoint.conversation if checkpoint else None)
        wishes = await self._wishes.of(view.ask.tenant, named) if named else NO_WISHES
        if checkpoint is not None and wishes.undone:
            checkpoint = await self._deepest(view, places.difference(wishes.undone))
        matched = replace(view.with_checkpoint(checkpoint), wishes=wishes)
        anchor = await self._anchors.find(view.ask.tenant, root, view.prefixes, matched.standing)
        drift = self._learning.drift(view.ask.tenant, view.ask.origin, view.ask.model)
        return replace(matched, anchor=anchor, drift=drift)

    async def _deepest(self, view: View, places: Collection[bytes]) -> Checkpoint | None:
        """The deepest checkpoint at these places that stands for the request."""
        ours = set(view.prefixes)
        candidates = sorted(each for each in places if found_by(each) in ours)
        root = view.root
        if not candidates or root is None:
            return None
        keys = checkpoint_keys(view.ask.tenant, root, view.policy.name, candidates)
        found = await self._records.find(keys)
        read = (from_fields(fields) if fields else None for fields in found)
        return deepest(read, view.body, view.ask.conversation)
