"""One request as it stands: read, digested, matched with what is stored of it, and sized."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Self

from compaction_proxy.compaction.directives import NO_DIRECTIVES, Directives
from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.request_limits import RequestLimits
from compaction_proxy.compaction.types import FitRequest, UsageBasis
from compaction_proxy.core.budget import Budget
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.checkpoint_ids import compute_checkpoint_id
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.planner import PlanConstraints, count_growth, find_task_index
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.strategies import Policy
from compaction_proxy.core.trigger import NO_GROWTH, TriggerMarks, compute_trigger_marks, find_reached_rule
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.usage_baseline import (
    UsageBaseline,
    build_baseline_key,
    predict_tokens,
    predict_upper_bound,
)
from compaction_proxy.storage.keys import conversation_root
from compaction_proxy.support.cached import cached_attribute

# What no round removes leaves nothing worth a round where it passes this share of T.
FLOOR_SHARE = 0.80

_tokens: Callable[[Message], int] = attrgetter("tokens")


@dataclass(frozen=True)  # no slots: what follows from the fields is worked out when asked for, and once
class RequestView:
    """A request as it stands. Sizes are counted tokens unless they are said to be calibrated.

    Attributes:
        request: The request.
        limits: What holds for it whatever its messages are.
        root: The conversation's root; None if it is too short to be remembered, or must not be.
        messages: The client's list.
        body: Those that are not fixed (`core.message`).
        prefixes: Their prefix digests.
        tokens: Tokens of the client's list.
        overhead: Tokens beside the messages.
        has_guessed_tokens: Whether a message holds images and the like, which we may price too high.
        calibration: What the upstream's count is to ours.
        budget: What may be spent, calibrated.
        max_prompt_tokens: What could be taken at best, calibrated: nothing is kept free for the error of
            estimates.
        cut_goal_tokens: What is cut to where that does not fit: less than `max_prompt_tokens` after a
            refusal; 0: as much.
        checkpoint: The checkpoint in force.
        effective: The list with the checkpoint applied.
        checkpoint_id: Where the checkpoint is kept (`core.checkpoint.place`); empty for none.
        anchor: The real size of the request before.
        directives: What people have asked of the conversation.
        drift: How much of its estimated size a request has once a round was made for it, learned.
        has_new_round: Whether such a round is in force, which the request before did not have.
        basis: The numbers that T follows from where it is about money, each with its name.
        expected_growth: What will have come by the time a round of it is put in force, calibrated.
        moving_count: How many of the last messages of `body` the client moves; 0 also where a round must take
            them.
        shortened_instructions: What instructions of the project become in a list that is rewritten, by index
            in `messages`;
            None: they are left out. Those that stay whole are not in it.
    """

    request: FitRequest
    limits: RequestLimits
    root: bytes | None
    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    overhead: int
    has_guessed_tokens: bool
    calibration: Calibration
    budget: Budget
    max_prompt_tokens: int
    checkpoint: Checkpoint | None
    effective: tuple[Message, ...]
    cut_goal_tokens: int = 0
    checkpoint_id: bytes = b""
    anchor: UsageBaseline | None = None
    directives: Directives = NO_DIRECTIVES
    drift: float = 1.0
    has_new_round: bool = False
    basis: Mapping[str, float] = field(default_factory=dict)
    expected_growth: int = 0
    moving_count: int = 0
    shortened_instructions: Mapping[int, Message | None] = field(default_factory=dict)

    @property
    def counting_options(self) -> CountingOptions:
        """How this request is counted."""
        return build_counting_options(self.request)

    @property
    def policy(self) -> Policy:
        """The strategy that holds."""
        return self.limits.policy

    @property
    def is_automatic(self) -> bool:
        """Whether anything may be done that was not asked for."""
        return self.limits.is_automatic

    @cached_attribute
    def marks(self) -> TriggerMarks:
        """Where things happen, calibrated."""
        policy = self.policy
        if not self._calibrated_fixed_tokens:
            return self.limits.marks
        return compute_trigger_marks(
            self.limits.rows,
            self.budget,
            policy.soft_share,
            policy.hard_percent,
            fixed=self._calibrated_fixed_tokens,
        )

    @cached_attribute
    def _calibrated_fixed_tokens(self) -> int:
        """Calibrated tokens that percentages of usable are not about: what no round removes."""
        percent = self.policy.layout is not None and any(row.percent for row in self.limits.rows)
        return (
            int(self.fixed_tokens / self._counted_per_calibrated)
            if percent and self._counted_per_calibrated
            else 0
        )

    @property
    def baseline_key(self) -> bytes:
        """What makes the sizes of two requests comparable (`providers.usage_baseline.place_of`)."""
        return build_baseline_key(self.request.origin, self.request.model, self.checkpoint_id)

    @property
    def strategy_thread(self) -> str:
        """What tells conversations that begin alike apart, as far as their clients name them."""
        return format_strategy_thread(self.request, self.root or b"", self.policy.name)

    @property
    def conversation_id(self) -> str | None:
        """The id that the client or the messages gave, else the one that the stored rounds carry along."""
        return self.request.known_conversation or (self.checkpoint.conversation if self.checkpoint else None)

    @cached_attribute
    def fixed_tokens(self) -> int:
        """Counted tokens of what no round removes, whatever the client moves."""
        whole = self.tokens - sum(map(_tokens, self.body))
        less = sum(
            self.messages[k].tokens - (put.tokens if put is not None else 0)
            for k, put in self.shortened_instructions.items()
        )
        return whole - less + self.overhead + sum(self.body[index].tokens for index in self._staying_indices)

    @cached_attribute
    def _staying_indices(self) -> frozenset[int]:
        """Indices of the latest user message and of the task."""
        latest = find_latest_user_message(self.body)
        task = find_task_index(self.body) if self.policy.keep.task else None
        return frozenset(index for index in (latest, task) if index is not None)

    @property
    def _moving_indices(self) -> frozenset[int]:
        """Indices of what the client moves."""
        return frozenset(range(len(self.body) - self.moving_count, len(self.body)))

    @cached_attribute
    def _moving_tokens(self) -> int:
        """Counted tokens of what the client moves beside what `fixed_tokens` counts."""
        return sum(self.body[index].tokens for index in self._moving_indices - self._staying_indices)

    @cached_attribute
    def plan_constraints(self) -> PlanConstraints:
        """How large things are for the planner: counted, because the messages are."""
        target = self.policy.target.compute_tokens(self.marks.trigger) if self.policy.target else None
        return PlanConstraints(
            trigger=self.trigger_tokens,
            target=None if target is None else int(target * self._counted_per_calibrated),
            size=self.count_tokens(self.effective),
            fixed=self.fixed_tokens + self._moving_tokens if self.policy.layout else 0,
            growth=int(self.expected_growth * self._counted_per_calibrated),
            stay=self._moving_indices | self._staying_indices if self.policy.layout else frozenset(),
            moving=self.moving_count,
        )

    @property
    def trigger_tokens(self) -> int:
        """T, counted."""
        return int(self.marks.trigger * self._counted_per_calibrated)

    @property
    def _counted_per_calibrated(self) -> float:
        return self.count_tokens(self.effective) / max(1, self.estimate_tokens(self.effective))

    @property
    def calibration_ratio(self) -> float:
        """Calibrated tokens for each counted one."""
        return self.estimate_tokens(self.effective) / max(1, self.count_tokens(self.effective))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a request with these messages."""
        if messages is self.messages:
            return self.tokens + self.overhead
        return self._effective_tokens if messages is self.effective else self._sum_tokens(messages)

    @cached_attribute
    def _effective_tokens(self) -> int:
        return self._sum_tokens(self.effective)

    def _sum_tokens(self, messages: Sequence[Message]) -> int:
        return sum(map(_tokens, messages)) + self.overhead

    def estimate_tokens(self, messages: Sequence[Message]) -> int:
        """The same, calibrated; where the request before is known, by what this one has more or less."""
        return self._effective_estimate if messages is self.effective else self._estimate_tokens(messages)

    @cached_attribute
    def _effective_estimate(self) -> int:
        return self._estimate_tokens(self.effective)

    def _estimate_tokens(self, messages: Sequence[Message]) -> int:
        counted = self.count_tokens(messages)
        if self.anchor is None:
            return self.calibration.predict_tokens(counted)
        size = predict_tokens(self.anchor, counted, self.calibration)
        return int(size * self.drift) if self.has_new_round and messages is not self.messages else size

    def estimate_upper_bound(self, messages: Sequence[Message]) -> int:
        """The same, with a margin for the error of estimates."""
        return self._effective_bound if messages is self.effective else self._estimate_upper_bound(messages)

    @cached_attribute
    def _effective_bound(self) -> int:
        return self._estimate_upper_bound(self.effective)

    def _estimate_upper_bound(self, messages: Sequence[Message]) -> int:
        counted = self.count_tokens(messages)
        return (
            predict_upper_bound(self.anchor, counted, self.calibration)
            if self.anchor
            else self.calibration.predict_upper_bound(counted)
        )

    def exceeds_limit(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages may leave too little room for its answer, or not fit."""
        return self.estimate_upper_bound(messages) > self.budget.limit

    def exceeds_window(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages may not fit, even if it leaves no room for its answer."""
        return self.estimate_upper_bound(messages) > self.budget.input_limit

    def leaves_too_little_output(self) -> bool:
        """Whether the upstream will refuse the request for the output it asks for, and a round may help."""
        most = self.budget.round_limit
        return (
            most is not None
            and self.fixed_tokens <= most < self.estimate_tokens(self.effective)
            and not self.is_held_back
        )

    def is_too_large(self, messages: Sequence[Message]) -> bool:
        """Whether a request with these messages will not fit, as far as we can tell."""
        return self.estimate_tokens(messages) > max(self.budget.input_limit, self.max_prompt_tokens)

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is to be done by itself, because a round was undone; not for ever (hard mark)."""
        return self.directives.suppressed and self.estimate_tokens(self.effective) < self.marks.hard

    @property
    def is_irreducible(self) -> bool:
        """Whether there is hardly anything but what no round removes."""
        return max(self.fixed_tokens, self.plan_constraints.fixed) > FLOOR_SHARE * self.trigger_tokens

    def find_due_reason(self) -> str | None:
        """What makes a round due now, or None."""
        if self.is_automatic and self.exceeds_limit(self.effective):
            return "limit"
        if self.is_automatic and self.leaves_too_little_output():
            return "output"
        terms, size = self.limits, self.estimate_tokens(self.effective)
        if terms.lowest_trigger is None or size < terms.lowest_trigger or self.is_held_back:
            return None
        more = count_growth(self.body, self.checkpoint) if terms.uses_gains else NO_GROWTH
        row = find_reached_rule(terms.rows, size, more, self.budget, self._calibrated_fixed_tokens)
        if row is None:
            return None
        return ",".join(row.named_fields)

    def should_prepare_round(self) -> bool:
        """Whether it is time to work ahead of need."""
        mark = self.marks.soft
        return mark is not None and not self.is_held_back and self.estimate_tokens(self.effective) >= mark

    def build_usage_basis(self) -> UsageBasis | None:
        """What the effective list stands on."""
        if self.root is None:
            return None
        return UsageBasis(
            self.root, self.prefixes, self.baseline_key, int(self.fixed_tokens * self.calibration_ratio)
        )

    def with_expected_growth(self) -> Self:
        """Returns the view for a round that is put in force only when the request has grown to T."""
        return replace(
            self, expected_growth=max(0, self.marks.trigger - self.estimate_tokens(self.effective))
        )

    def with_checkpoint(self, checkpoint: Checkpoint | None) -> Self:
        """The view with another checkpoint in force, or with none."""
        return replace(
            self,
            checkpoint=checkpoint,
            effective=apply_checkpoint(checkpoint, self.messages, self.shortened_instructions),
            checkpoint_id=compute_checkpoint_id(checkpoint, self.prefixes),
            has_new_round=self.has_new_round if checkpoint is None else self.anchor is not None,
        )


def apply_checkpoint(
    checkpoint: Checkpoint | None, messages: tuple[Message, ...], shorter: Mapping[int, Message | None]
) -> tuple[Message, ...]:
    """The client's list with a checkpoint applied, and instructions of the project as they are to be then."""
    if checkpoint is None:
        return messages
    return build_effective_list(
        replace_messages(messages, shorter), checkpoint.spans, checkpoint.stand_ins, checkpoint.edited
    )


def replace_messages(
    messages: tuple[Message, ...], shorter: Mapping[int, Message | None]
) -> tuple[Message, ...]:
    """A list with some messages replaced, or left out where they become None."""
    if not shorter:
        return messages
    put = (shorter.get(k, each) for k, each in enumerate(messages))
    return tuple(each for each in put if each is not None)


def resolve_root(ask: FitRequest, prefixes: Sequence[bytes]) -> bytes | None:
    """The root of a request's conversation; None if it is too short to be remembered, or must not be."""
    return conversation_root(prefixes) if ask.uses_checkpoints else None


def format_strategy_thread(ask: FitRequest, root: bytes, strategy: str) -> str:
    """What happened in one conversation under one strategy is known by this, and by nothing less."""
    return "/".join((ask.tenant, root.hex(), strategy, ask.known_conversation or ""))


def build_counting_options(ask: FitRequest) -> CountingOptions:
    """How a request is counted."""
    return CountingOptions(ask.model, ask.settings.compaction.counter, ask.body.wire)
