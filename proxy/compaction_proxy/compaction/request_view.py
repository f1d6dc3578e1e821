"""Describes one request with the checkpoint, directives and size estimates that apply to it."""

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
from compaction_proxy.storage.keys import get_conversation_root
from compaction_proxy.support.cached import cached_attribute

# If the tokens that no compaction removes exceed this share of T, a compaction is not worth its cost.
FLOOR_SHARE = 0.80

_tokens: Callable[[Message], int] = attrgetter("tokens")


@dataclass(frozen=True)  # no slots: cached attributes are stored in `__dict__`
class RequestView:
    """A request with everything that is known about it.

    Sizes are tokens as the proxy counts them. Where a size is called calibrated, it is an estimate of the
    upstream's count.

    Attributes:
        request: The request.
        limits: The limits that do not depend on the messages.
        root: Root digest of the conversation; None if the conversation is too short to be stored, or must not
            be stored.
        messages: The client's list.
        unfixed_messages: The messages of the list that are not fixed (`core.message`).
        prefixes: Prefix digests of `unfixed_messages`.
        tokens: Tokens of the client's list.
        overhead_tokens: Tokens of the request outside its messages, such as those of tool definitions.
        has_guessed_tokens: Whether a message holds parts such as images, whose tokens may be overestimated.
        calibration: Converts counted tokens to calibrated tokens.
        budget: The token budget, calibrated.
        max_prompt_tokens: Calibrated size of the largest prompt that the upstream may still accept. It
            includes no margin for the error of estimates.
        checkpoint: The checkpoint in force; None if there is none.
        effective_messages: The effective list: the client's list with the checkpoint applied.
        cut_goal_tokens: If a request exceeds `max_prompt_tokens`, it is cut to this calibrated size. After a
            refusal, this size may be smaller than `max_prompt_tokens`. 0 means `max_prompt_tokens`.
        checkpoint_id: Id of the checkpoint (`core.checkpoint_ids`); empty if there is none.
        anchor: The provider's count of an earlier request of the conversation; None if there is none.
        directives: What users have asked for in this conversation, such as pins and undone compactions.
        drift_ratio: Learned ratio of the actual to the estimated size of a request that was just compacted.
        has_new_round: Whether a compaction is in force that was not in force for the previous request.
        price_basis: The named numbers from which T was computed, if T depends on prices.
        expected_growth_tokens: Calibrated tokens by which the conversation will grow before its next
            compaction is applied; 0 if the compaction is applied at once.
        moving_count: How many of the last messages of `unfixed_messages` the client moves. It is set to 0 if
            a compaction must cover these messages as well.
        shortened_instructions: The messages that replace project instructions when a compaction is applied,
            by index in `messages`. None leaves an instruction out. Instructions that stay whole are not
            listed.
    """

    request: FitRequest
    limits: RequestLimits
    root: bytes | None
    messages: tuple[Message, ...]
    unfixed_messages: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    tokens: int
    overhead_tokens: int
    has_guessed_tokens: bool
    calibration: Calibration
    budget: Budget
    max_prompt_tokens: int
    checkpoint: Checkpoint | None
    effective_messages: tuple[Message, ...]
    cut_goal_tokens: int = 0
    checkpoint_id: bytes = b""
    anchor: UsageBaseline | None = None
    directives: Directives = NO_DIRECTIVES
    drift_ratio: float = 1.0
    has_new_round: bool = False
    price_basis: Mapping[str, float] = field(default_factory=dict)
    expected_growth_tokens: int = 0
    moving_count: int = 0
    shortened_instructions: Mapping[int, Message | None] = field(default_factory=dict)

    @property
    def counting_options(self) -> CountingOptions:
        """Options for counting the tokens of this request."""
        return build_counting_options(self.request)

    @property
    def policy(self) -> Policy:
        """The strategy of this request."""
        return self.limits.policy

    @property
    def is_automatic(self) -> bool:
        """Whether compactions may be made although nobody asks for one, because a trigger rule is active."""
        return self.limits.is_automatic

    @cached_attribute
    def marks(self) -> TriggerMarks:
        """T, the soft mark and the hard mark, in calibrated tokens."""
        policy = self.policy
        if not self._calibrated_fixed_tokens:
            return self.limits.marks
        return compute_trigger_marks(
            self.limits.trigger_rules,
            self.budget,
            policy.soft_share,
            policy.hard_percent,
            fixed_tokens=self._calibrated_fixed_tokens,
        )

    @cached_attribute
    def _calibrated_fixed_tokens(self) -> int:
        """Calibrated tokens that no compaction removes. Percentages in triggers apply to the rest of usable.

        The value is 0 if the strategy has no layout or no percentage trigger, because it is not needed then.
        """
        percent = self.policy.layout is not None and any(row.percent for row in self.limits.trigger_rules)
        return (
            int(self.fixed_tokens / self._counted_per_calibrated)
            if percent and self._counted_per_calibrated
            else 0
        )

    @property
    def baseline_key(self) -> bytes:
        """Key shared by requests whose token counts can be compared (`build_baseline_key`)."""
        return build_baseline_key(self.request.origin, self.request.model, self.checkpoint_id)

    @property
    def strategy_thread(self) -> str:
        """Key of this conversation with this strategy, under which its failures and growth are remembered.

        Conversations that begin with the same messages have different keys only if their ids are known.
        """
        return format_strategy_thread(self.request, self.root or b"", self.policy.name)

    @property
    def conversation_id(self) -> str | None:
        """The conversation id, given by the client, found by the messages or read from the checkpoint.

        None if it is unknown.
        """
        return self.request.known_conversation or (self.checkpoint.conversation if self.checkpoint else None)

    @cached_attribute
    def fixed_tokens(self) -> int:
        """Counted tokens that no compaction removes. Messages that the client moves do not count.

        These are the tokens of fixed messages, of everything outside the messages, of the latest user
        message, and of the task if the strategy keeps it.
        """
        fixed_message_tokens = self.tokens - sum(map(_tokens, self.unfixed_messages))
        saved_tokens = sum(
            self.messages[k].tokens - (put.tokens if put is not None else 0)
            for k, put in self.shortened_instructions.items()
        )
        return (
            fixed_message_tokens
            - saved_tokens
            + self.overhead_tokens
            + sum(self.unfixed_messages[index].tokens for index in self._staying_indices)
        )

    @cached_attribute
    def _staying_indices(self) -> frozenset[int]:
        """Indices of the latest user message and, if the strategy keeps it, of the task."""
        latest = find_latest_user_message(self.unfixed_messages)
        task = find_task_index(self.unfixed_messages) if self.policy.keep.keeps_task else None
        return frozenset(index for index in (latest, task) if index is not None)

    @property
    def _moving_indices(self) -> frozenset[int]:
        """Indices of the messages that the client moves."""
        return frozenset(range(len(self.unfixed_messages) - self.moving_count, len(self.unfixed_messages)))

    @cached_attribute
    def _moving_tokens(self) -> int:
        """Counted tokens of the messages that the client moves, except those that `fixed_tokens` includes."""
        return sum(
            self.unfixed_messages[index].tokens for index in self._moving_indices - self._staying_indices
        )

    @cached_attribute
    def plan_constraints(self) -> PlanConstraints:
        """The sizes that the planner works with, in counted tokens like the sizes of messages."""
        target = self.policy.target.compute_tokens(self.marks.trigger_tokens) if self.policy.target else None
        return PlanConstraints(
            trigger_tokens=self.trigger_tokens,
            target_tokens=None if target is None else int(target * self._counted_per_calibrated),
            request_tokens=self.count_tokens(self.effective_messages),
            fixed_tokens=self.fixed_tokens + self._moving_tokens if self.policy.layout else 0,
            growth_tokens=int(self.expected_growth_tokens * self._counted_per_calibrated),
            staying_indices=self._moving_indices | self._staying_indices
            if self.policy.layout
            else frozenset(),
            moving_count=self.moving_count,
        )

    @property
    def trigger_tokens(self) -> int:
        """The trigger T, in counted tokens."""
        return int(self.marks.trigger_tokens * self._counted_per_calibrated)

    @property
    def _counted_per_calibrated(self) -> float:
        return self.count_tokens(self.effective_messages) / max(
            1, self.estimate_tokens(self.effective_messages)
        )

    @property
    def calibration_ratio(self) -> float:
        """Calibrated tokens per counted token."""
        return self.estimate_tokens(self.effective_messages) / max(
            1, self.count_tokens(self.effective_messages)
        )

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Counts the tokens of a request with these messages."""
        if messages is self.messages:
            return self.tokens + self.overhead_tokens
        return self._effective_tokens if messages is self.effective_messages else self._sum_tokens(messages)

    @cached_attribute
    def _effective_tokens(self) -> int:
        return self._sum_tokens(self.effective_messages)

    def _sum_tokens(self, messages: Sequence[Message]) -> int:
        return sum(map(_tokens, messages)) + self.overhead_tokens

    def estimate_tokens(self, messages: Sequence[Message]) -> int:
        """Estimates the calibrated tokens of a request with these messages.

        If the provider has counted the previous request, only the difference from that request is estimated.
        """
        return (
            self._effective_estimate
            if messages is self.effective_messages
            else self._estimate_tokens(messages)
        )

    @cached_attribute
    def _effective_estimate(self) -> int:
        return self._estimate_tokens(self.effective_messages)

    def _estimate_tokens(self, messages: Sequence[Message]) -> int:
        counted = self.count_tokens(messages)
        if self.anchor is None:
            return self.calibration.predict_tokens(counted)
        size = predict_tokens(self.anchor, counted, self.calibration)
        return int(size * self.drift_ratio) if self.has_new_round and messages is not self.messages else size

    def estimate_upper_bound(self, messages: Sequence[Message]) -> int:
        """Estimates the calibrated tokens of a request with these messages, and adds a margin for errors."""
        return (
            self._effective_bound
            if messages is self.effective_messages
            else self._estimate_upper_bound(messages)
        )

    @cached_attribute
    def _effective_bound(self) -> int:
        return self._estimate_upper_bound(self.effective_messages)

    def _estimate_upper_bound(self, messages: Sequence[Message]) -> int:
        counted = self.count_tokens(messages)
        return (
            predict_upper_bound(self.anchor, counted, self.calibration)
            if self.anchor
            else self.calibration.predict_upper_bound(counted)
        )

    def exceeds_compaction_limit(self, messages: Sequence[Message]) -> bool:
        """Returns whether a request with these messages might not fit together with room for an answer."""
        return self.estimate_upper_bound(messages) > self.budget.compaction_limit

    def exceeds_window(self, messages: Sequence[Message]) -> bool:
        """Returns whether a request with these messages might not fit, even without room for an answer."""
        return self.estimate_upper_bound(messages) > self.budget.input_limit

    def leaves_too_little_output(self) -> bool:
        """Returns whether too little room is left for the requested output, and a compaction can help."""
        round_limit = self.budget.output_compaction_limit
        return (
            round_limit is not None
            and self.fixed_tokens <= round_limit < self.estimate_tokens(self.effective_messages)
            and not self.is_suppressed
        )

    def is_too_large(self, messages: Sequence[Message]) -> bool:
        """Returns whether a request with these messages will not fit, according to the estimate."""
        return self.estimate_tokens(messages) > max(self.budget.input_limit, self.max_prompt_tokens)

    @property
    def is_suppressed(self) -> bool:
        """Whether automatic compactions are suspended because a user has undone one.

        They are made again once the request reaches the hard mark.
        """
        return (
            self.directives.suppressed
            and self.estimate_tokens(self.effective_messages) < self.marks.hard_tokens
        )

    @property
    def is_irreducible(self) -> bool:
        """Whether the request holds hardly anything that a compaction could remove."""
        return max(self.fixed_tokens, self.plan_constraints.fixed_tokens) > FLOOR_SHARE * self.trigger_tokens

    def find_due_reason(self) -> str | None:
        """Returns why a compaction is due now; None if none is due."""
        if self.is_automatic and self.exceeds_compaction_limit(self.effective_messages):
            return "limit"
        if self.is_automatic and self.leaves_too_little_output():
            return "output"
        limits, size = self.limits, self.estimate_tokens(self.effective_messages)
        if limits.lowest_trigger is None or size < limits.lowest_trigger or self.is_suppressed:
            return None
        growth = (
            count_growth(self.unfixed_messages, self.checkpoint) if limits.uses_growth_counts else NO_GROWTH
        )
        rule = find_reached_rule(
            limits.trigger_rules, size, growth, self.budget, self._calibrated_fixed_tokens
        )
        if rule is None:
            return None
        return ",".join(rule.named_fields)

    def should_prepare_round(self) -> bool:
        """Returns whether a compaction should be made ahead of need."""
        mark = self.marks.soft_tokens
        return (
            mark is not None
            and not self.is_suppressed
            and self.estimate_tokens(self.effective_messages) >= mark
        )

    def build_usage_basis(self) -> UsageBasis | None:
        """Builds the object that identifies the effective list when the upstream reports its usage.

        Returns None if the conversation has no root digest, because nothing is stored for it then.
        """
        if self.root is None:
            return None
        return UsageBasis(
            self.root, self.prefixes, self.baseline_key, int(self.fixed_tokens * self.calibration_ratio)
        )

    def with_expected_growth(self) -> Self:
        """Returns the view for planning a compaction that is applied only when the request has grown to T."""
        return replace(
            self,
            expected_growth_tokens=max(
                0, self.marks.trigger_tokens - self.estimate_tokens(self.effective_messages)
            ),
        )

    def with_checkpoint(self, checkpoint: Checkpoint | None) -> Self:
        """Returns the view with another checkpoint in force, or with none."""
        return replace(
            self,
            checkpoint=checkpoint,
            effective_messages=apply_checkpoint(checkpoint, self.messages, self.shortened_instructions),
            checkpoint_id=compute_checkpoint_id(checkpoint, self.prefixes),
            has_new_round=self.has_new_round if checkpoint is None else self.anchor is not None,
        )


def apply_checkpoint(
    checkpoint: Checkpoint | None,
    messages: tuple[Message, ...],
    shortened_instructions: Mapping[int, Message | None],
) -> tuple[Message, ...]:
    """Returns the client's list with the checkpoint applied and project instructions shortened.

    Without a checkpoint the list is returned unchanged.
    """
    if checkpoint is None:
        return messages
    return build_effective_list(
        replace_messages(messages, shortened_instructions),
        checkpoint.spans,
        checkpoint.stand_ins,
        checkpoint.edited,
    )


def replace_messages(
    messages: tuple[Message, ...], replacements: Mapping[int, Message | None]
) -> tuple[Message, ...]:
    """Returns the list with some messages replaced by index. None as a replacement leaves the message out."""
    if not replacements:
        return messages
    replaced = (replacements.get(k, each) for k, each in enumerate(messages))
    return tuple(each for each in replaced if each is not None)


def resolve_root(ask: FitRequest, prefixes: Sequence[bytes]) -> bytes | None:
    """Returns the root digest of the conversation.

    Returns None if the conversation is too short to be stored or must not be stored.
    """
    return get_conversation_root(prefixes) if ask.uses_checkpoints else None


def format_strategy_thread(ask: FitRequest, root: bytes, strategy: str) -> str:
    """Formats the key under which a conversation's failures and growth with a strategy are remembered."""
    return "/".join((ask.tenant, root.hex(), strategy, ask.known_conversation or ""))


def build_counting_options(ask: FitRequest) -> CountingOptions:
    """Builds the options for counting the tokens of a request."""
    return CountingOptions(ask.model, ask.settings.compaction.counter, ask.body.wire)
