"""One request as it stands: read, digested, matched with what is stored of it, and sized."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Self

from compaction_proxy.compaction.directives import NONE as NO_WISHES
from compaction_proxy.compaction.directives import Wishes
from compaction_proxy.compaction.message_reader import Gauge
from compaction_proxy.compaction.request_limits import Terms
from compaction_proxy.compaction.types import Ask, Footing
from compaction_proxy.core.budget import Budget
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.checkpoint_ids import place_of
from compaction_proxy.core.message import Message, latest_user
from compaction_proxy.core.planner import Room, gained, task_index
from compaction_proxy.core.render import render
from compaction_proxy.core.strategies import Policy
from compaction_proxy.core.trigger import NOTHING_GAINED, Marks, fired, marks
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.usage_baseline import Anchor, bound, predicted
from compaction_proxy.providers.usage_baseline import place_of as counted_at
from compaction_proxy.storage.keys import root_of
from compaction_proxy.support.cached import kept

# What no round removes leaves nothing worth a round where it passes this share of T.
FLOOR_SHARE = 0.80

_tokens: Callable[[Message], int] = attrgetter("tokens")


@dataclass(frozen=True)  # no slots: what follows from the fields is worked out when asked for, and once
class View:
    """A request as it stands. Sizes are counted tokens unless they are said to be calibrated.

    Attributes:
        ask: The request.
        terms: What holds for it whatever its messages are.
        root: The conversation's root; None if it is too short to be remembered, or must not be.
        messages: The client's list.
        body: Those that are not fixed (`core.message`).
        prefixes: Their prefix digests.
        tokens: Tokens of the client's list.
        overhead: Tokens beside the messages.
        guessed: Whether a message holds images and the like, which we may price too high.
        calibration: What the upstream's count is to ours.
        budget: What may be spent, calibrated.
        most: What could be taken at best, calibrated: nothing is kept free for the error of estimates.
        goal: What is cut to where that does not fit: less than `most` after a refusal; 0: as much.
        earlier: The checkpoint in force.
        effective: The list with the checkpoint applied.
        place: Where the checkpoint is kept (`core.checkpoint.place`); empty for none.
        anchor: The real size of the request before.
        wishes: What people have asked of the conversation.
        drift: How much of its estimated size a request has once a round was made for it, learned.
        drifting: Whether such a round is in force, which the request before did not have.
        basis: The numbers that T follows from where it is about money, each with its name.
        growth: What will have come by the time a round of it is put in force, calibrated.
        moving: How many of the last messages of `body` the client moves; 0 also where a round must take them.
        shorter: What instructions of the project become in a list that is rewritten, by index in `messages`;
            None: they are left out. Those that stay whole are not in it.
    """

    ask: Ask
    terms: Terms
    root: bytes | None
    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    overhead: int
    guessed: bool
    calibration: Calibration
    budget: Budget
    most: int
    earlier: Checkpoint | None
    effective: tuple[Message, ...]
    goal: int = 0
    place: bytes = b""
    anchor: Anchor | None = None
    wishes: Wishes = NO_WISHES
    drift: float = 1.0
    drifting: bool = False
    basis: Mapping[str, float] = field(default_factory=dict)
    growth: int = 0
    moving: int = 0
    shorter: Mapping[int, Message | None] = field(default_factory=dict)

    @property
    def gauge(self) -> Gauge:
        """How this request is counted."""
        return gauge_of(self.ask)

    @property
    def policy(self) -> Policy:
        """The strategy that holds."""
        return self.terms.policy

    @property
    def automatic(self) -> bool:
        """Whether anything may be done that was not asked for."""
        return self.terms.automatic

    @kept
    def marks(self) -> Marks:
        """Where things happen, calibrated."""
        policy = self.policy
        if not self._fixed_size:
            return self.terms.marks
        return marks(
            self.terms.rows, self.budget, policy.soft_share, policy.hard_percent, fixed=self._fixed_size
        )

    @kept
    def _fixed_size(self) -> int:
        """Calibrated tokens that percentages of usable are not about: what no round removes."""
        percent = self.policy.layout is not None and any(row.percent for row in self.terms.rows)
        return int(self.fixed / self._scale) if percent and self._scale else 0

    @property
    def standing(self) -> bytes:
        """What makes the sizes of two requests comparable (`providers.usage_baseline.place_of`)."""
        return counted_at(self.ask.origin, self.ask.model, self.place)

    @property
    def thread(self) -> str:
        """What tells conversations that begin alike apart, as far as their clients name them."""
        return thread(self.ask, self.root or b"", self.policy.name)

    @property
    def conversation(self) -> str | None:
        """The id that the client or the messages gave, else the one that the stored rounds carry along."""
        return self.ask.known_as or (self.earlier.conversation if self.earlier else None)

    @kept
    def fixed(self) -> int:
        """Counted tokens of what no round removes, whatever the client moves."""
        whole = self.tokens - sum(map(_tokens, self.body))
        less = sum(
            self.messages[k].tokens - (put.tokens if put is not None else 0)
            for k, put in self.shorter.items()
        )
        return whole - less + self.overhead + sum(self.body[index].tokens for index in self._stay)

    @kept
    def _stay(self) -> frozenset[int]:
        """Indices of the latest user message and of the task."""
        latest = latest_user(self.body)
        task = task_index(self.body) if self.policy.keep.task else None
        return frozenset(index for index in (latest, task) if index is not None)

    @property
    def _moving_indices(self) -> frozenset[int]:
        """Indices of what the client moves."""
        return frozenset(range(len(self.body) - self.moving, len(self.body)))

    @kept
    def _moving_tokens(self) -> int:
        """Counted tokens of what the client moves beside what `fixed` counts."""
        return sum(self.body[index].tokens for index in self._moving_indices - self._stay)

    @kept
    def room(self) -> Room:
        """How large things are for the planner: counted, because the messages are."""
        target = self.policy.target.of(self.marks.trigger) if self.policy.target else None
        return Room(
            trigger=self.trigger,
            target=None if target is None else int(target * self._scale),
            size=self.counted(self.effective),
            fixed=self.fixed + self._moving_tokens if self.policy.layout else 0,
            growth=int(self.growth * self._scale),
            stay=self._moving_indices | self._stay if self.policy.layout else frozenset(),
            moving=self.moving,
        )

    @property
    def trigger(self) -> int:
        """T, counted."""
        return int(self.marks.trigger * self._scale)

    @property
    def _scale(self) -> float:
        return self.counted(self.effective) / max(1, self.size(self.effective))

    @property
    def ratio(self) -> float:
        """Calibrated tokens for each counted one."""
        return self.size(self.effective) / max(1, self.counted(self.effective))

    def counted(self, messages: Sequence[Message]) -> int:
        """Tokens of a request with these messages."""
        if messages is self.messages:
            return self.tokens + self.overhead
        return self._effective_tokens if messages is self.effective else self._sum(messages)

    @kept
    def _effective_tokens(self) -> int:
        return self._sum(self.effective)

    def _sum(self, messages: Sequence[Message]) -> int:
        return sum(map(_tokens, messages)) + self.overhead

    def size(self, messages: Sequence[Message]) -> int:
        """The same, calibrated; where the request before is known, by what this one has more or less."""
        return self._effective_size if messages is self.effective else self._size(messages)

    @kept
    def _effective_size(self) -> int:
        return self._size(self.effective)

    def _size(self, messages: Sequence[Message]) -> int:
        counted = self.counted(messages)
        if self.anchor is None:
            return self.calibration.size(counted)
        size = predicted(self.anchor, counted, self.calibration)
        return int(size * self.drift) if self.drifting and messages is not self.messages else size

    def bound(self, messages: Sequence[Message]) -> int:
        """The same, with a margin for the error of estimates."""
        return self._effective_bound if messages is self.effective else self._bound(messages)

    @kept
    def _effective_bound(self) -> int:
        return self._bound(self.effective)

    def _bound(self, messages: Sequence[Message]) -> int:
        counted = self.counted(messages)
        return (
            bound(self.anchor, counted, self.calibration) if self.anchor else self.calibration.bound(counted)
        )

    def over(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages may leave too little room for its answer, or not fit."""
        return self.bound(messages) > self.budget.limit

    def exceeds_window(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages may not fit, even if it leaves no room for its answer."""
        return self.bound(messages) > self.budget.input_limit

    def leaves_too_little_output(self) -> bool:
        """Whether the upstream will refuse the request for the output it asks for, and a round may help."""
        most = self.budget.round_limit
        return most is not None and self.fixed <= most < self.size(self.effective) and not self.held_back

    def hopeless(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages will not fit, as far as we can tell."""
        return self.size(messages) > max(self.budget.input_limit, self.most)

    @property
    def held_back(self) -> bool:
        """Whether nothing is to be done by itself, because a round was undone; not for ever (hard mark)."""
        return self.wishes.suppressed and self.size(self.effective) < self.marks.hard

    @property
    def irreducible(self) -> bool:
        """Whether there is hardly anything but what no round removes."""
        return max(self.fixed, self.room.fixed) > FLOOR_SHARE * self.trigger

    def due(self) -> str | None:
        """What makes a round due now, or None."""
        if self.automatic and self.over(self.effective):
            return "limit"
        if self.automatic and self.leaves_too_little_output():
            return "output"
        terms, size = self.terms, self.size(self.effective)
        if terms.least is None or size < terms.least or self.held_back:
            return None
        more = gained(self.body, self.earlier) if terms.counts else NOTHING_GAINED
        row = fired(terms.rows, size, more, self.budget, self._fixed_size)
        if row is None:
            return None
        return ",".join(row.named)

    def soft(self) -> bool:
        """Whether it is time to work ahead of need."""
        mark = self.marks.soft
        return mark is not None and not self.held_back and self.size(self.effective) >= mark

    def footing(self) -> Footing | None:
        """What the effective list stands on."""
        if self.root is None:
            return None
        return Footing(self.root, self.prefixes, self.standing, int(self.fixed * self.ratio))

    def expect_growth(self) -> Self:
        """Returns the view for a round that is put in force only when the request has grown to T."""
        return replace(self, growth=max(0, self.marks.trigger - self.size(self.effective)))

    def with_checkpoint(self, checkpoint: Checkpoint | None) -> Self:
        """The view with another checkpoint in force, or with none."""
        return replace(
            self,
            earlier=checkpoint,
            effective=applied(checkpoint, self.messages, self.shorter),
            place=place_of(checkpoint, self.prefixes),
            drifting=self.drifting if checkpoint is None else self.anchor is not None,
        )


def applied(
    checkpoint: Checkpoint | None, messages: tuple[Message, ...], shorter: Mapping[int, Message | None]
) -> tuple[Message, ...]:
    """The client's list with a checkpoint applied, and instructions of the project as they are to be then."""
    if checkpoint is None:
        return messages
    return render(with_shorter(messages, shorter), checkpoint.spans, checkpoint.stand_ins, checkpoint.edited)


def with_shorter(messages: tuple[Message, ...], shorter: Mapping[int, Message | None]) -> tuple[Message, ...]:
    """A list with some messages replaced, or left out where they become None."""
    if not shorter:
        return messages
    put = (shorter.get(k, each) for k, each in enumerate(messages))
    return tuple(each for each in put if each is not None)


def remembered_as(ask: Ask, prefixes: Sequence[bytes]) -> bytes | None:
    """The root of a request's conversation; None if it is too short to be remembered, or must not be."""
    return root_of(prefixes) if ask.remembered else None


def thread(ask: Ask, root: bytes, strategy: str) -> str:
    """What happened in one conversation under one strategy is known by this, and by nothing less."""
    return "/".join((ask.tenant, root.hex(), strategy, ask.known_as or ""))


def gauge_of(ask: Ask) -> Gauge:
    """How a request is counted."""
    return Gauge(ask.model, ask.settings.compaction.counter, ask.body.dialect)
