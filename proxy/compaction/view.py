"""One request as it stands: read, digested, matched with what is stored of it, and sized."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.fitting import Ask
from proxy.compaction.policies import policy_for
from proxy.core.budget import Budget, budget
from proxy.core.calibration import Calibration
from proxy.core.checkpoint import Checkpoint, deepest, found_by, from_fields
from proxy.core.digest import prefix_digests
from proxy.core.keys import checkpoint_keys, checkpoints_key, root_of
from proxy.core.message import Message
from proxy.core.planner import gained
from proxy.core.policy import Policy, known_window
from proxy.core.render import render
from proxy.core.trigger import Row, automatic, fired, mark
from proxy.learning import Learning
from proxy.reading import Gauge, Reading
from proxy.storage.records import Records

# After each overflow the request is made to fit in this share of its limit: the estimate was wrong.
TIGHT_SHARE = 0.85
# What matters is cut only where the estimate is over the window by more than it may be wrong; if it was right
# after all, the upstream refuses, and it is cut then. By the number of refusals so far.
DOUBT_SHARES = (1.02, 1.02, 0.95, 0.85)


@dataclass(frozen=True, slots=True)
class View:
    """A request as it stands. Sizes are counted tokens unless they are said to be calibrated.

    Attributes:
        ask: The request.
        policy: The strategy that holds.
        messages: The client's list.
        body: Its non-privileged messages.
        prefixes: Their prefix digests.
        overhead: Tokens beside the messages.
        calibration: What the upstream's count is to ours.
        budget: What may be spent, calibrated.
        most: What could be taken at best, calibrated: nothing is kept free for the error of estimates.
        earlier: The checkpoint in force.
        effective: The list with the checkpoint applied.
    """

    ask: Ask
    policy: Policy
    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    overhead: int
    calibration: Calibration
    budget: Budget
    most: int
    earlier: Checkpoint | None
    effective: tuple[Message, ...]

    @property
    def gauge(self) -> Gauge:
        """How this request is counted."""
        return gauge_of(self.ask)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Trigger rows in force; the client may lower the trigger, never raise it."""
        asked = self.ask.trigger_tokens
        lower = asked is not None and asked < (mark(self.policy.trigger, self.budget) or 0)
        return (Row(tokens=asked), *self.policy.trigger) if lower else self.policy.trigger

    @property
    def automatic(self) -> bool:
        """Whether anything may be done that was not asked for."""
        return automatic(self.rows)

    def counted(self, messages: Sequence[Message]) -> int:
        """Tokens of a request with these messages."""
        return sum(each.tokens for each in messages) + self.overhead

    def size(self, messages: Sequence[Message]) -> int:
        """The same, calibrated."""
        return self.calibration.size(self.counted(messages))

    def over(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages might not fit, estimates being what they are."""
        return self.calibration.bound(self.counted(messages)) > self.budget.limit

    def hopeless(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages will not fit, as far as we can tell."""
        return self.size(messages) > max(self.budget.limit, self.most)

    def due(self) -> str | None:
        """What makes a round due now, or None."""
        size = self.size(self.effective)
        row = fired(self.rows, size, gained(self.body, self.earlier), self.budget)
        if row is not None:
            return ",".join(name for name in Row.__slots__ if getattr(row, name) is not None)
        return "limit" if self.automatic and self.over(self.effective) else None

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        """The view with another checkpoint in force."""
        effective = render(self.messages, checkpoint.spans, checkpoint.stand_ins)
        return replace(self, earlier=checkpoint, effective=effective)


def gauge_of(ask: Ask) -> Gauge:
    """How a request is counted."""
    return Gauge(ask.model, ask.settings.compaction.counter)


class Viewer:
    """Takes views of requests."""

    def __init__(
        self, reading: Reading, records: Records, index: CheckpointIndex, learning: Learning
    ) -> None:
        self._reading = reading
        self._records = records
        self._index = index
        self._learning = learning

    async def view(self, ask: Ask, *, refusals: int = 0) -> View:
        """The request as it stands, after so many overflow errors.

        Raises:
            Unreadable: A message is none.
        """
        gauge = gauge_of(ask)
        policy = policy_for(ask.settings)
        messages = await self._reading.messages(ask.body.messages, gauge)
        overhead = await self._reading.overhead(ask.body.prompt_members, gauge)
        body = tuple(message for message in messages if not message.privileged)
        prefixes = tuple(prefix_digests(body))
        learned = await self._learning.of(ask.tenant, ask.origin, ask.model)
        known = [window for window in (ask.settings.window, learned.window) if window]
        window = min(known, default=known_window(ask.model))
        spent = budget(window, policy.reserves, ask.body.max_output)
        most = max(spent.limit, window - (ask.body.max_output or 0))
        view = View(
            ask=ask,
            policy=policy,
            messages=messages,
            body=body,
            prefixes=prefixes,
            overhead=overhead,
            calibration=learned.calibration,
            budget=replace(spent, limit=int(spent.limit * TIGHT_SHARE**refusals)),
            most=int(most * DOUBT_SHARES[refusals]),
            earlier=None,
            effective=messages,
        )
        checkpoint = await self._checkpoint(view)
        return view.with_checkpoint(checkpoint) if checkpoint else view

    async def _checkpoint(self, view: View) -> Checkpoint | None:
        """The deepest checkpoint that stands for this request."""
        root = root_of(view.prefixes)
        if root is None or not view.ask.remembered:
            return None
        ask = view.ask
        places = await self._index.places(checkpoints_key(ask.tenant, root, view.policy.name))
        ours = set(view.prefixes)
        candidates = sorted(each for each in places if found_by(each) in ours)
        if not candidates:
            return None
        found = await self._records.find(checkpoint_keys(ask.tenant, root, view.policy.name, candidates))
        return deepest((from_fields(fields) if fields else None for fields in found), view.body)
