"""Describes one request, together with the checkpoint, directives and size estimates that apply to it.

The module also computes those limits of a request that do not depend on its messages, such as the token
budget and the trigger sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, Self

from compaction_proxy.compaction.directives import NO_DIRECTIVES, Directives
from compaction_proxy.compaction.types import FitRequest, UsageBasis
from compaction_proxy.config.config import ModelSettings, build_policy
from compaction_proxy.core.budget import Budget, compute_budget
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.planner import (
    PlanConstraints,
    compute_checkpoint_id,
    count_growth,
    find_task_index,
)
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.strategies import Policy
from compaction_proxy.core.trigger import (
    NO_GROWTH,
    UNKNOWN_PRICE_THRESHOLDS,
    PriceThresholds,
    TriggerMarks,
    TriggerRule,
    compute_min_trigger,
    compute_trigger_marks,
    find_reached_rule,
    has_active_rule,
    set_price_thresholds,
)
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.usage_baseline import (
    UsageBaseline,
    build_baseline_key,
    predict_tokens,
    predict_upper_bound,
)
from compaction_proxy.support.cached import cached_attribute


@lru_cache(maxsize=512)
def resolve_policy(settings: ModelSettings, strategy: str | None = None) -> Policy:
    """Returns the numbers and rules of a strategy, as changed by the configuration. The result is cached.

    Args:
        settings: The configuration for the model. The cache compares it by identity.
        strategy: Name of the strategy that the request asks for. None selects the configured strategy.

    Raises:
        KeyError: If there is no strategy with this name.
    """
    return build_policy(settings, strategy)


class RequestLimits(NamedTuple):
    """The limits of a request that do not depend on its messages. All sizes are calibrated tokens.

    Attributes:
        policy: The numbers and rules of the strategy.
        budget: The token budget.
        trigger_rules: The trigger rules that apply. They include a trigger that the client asked for, but
            only if it is lower than the configured one.
        is_automatic: Whether compactions may start automatically, because at least one trigger rule is
            active.
        uses_growth_counts: Whether a trigger depends on how many messages, turns or iterations have been
            added since the last compaction.
        lowest_trigger: The smallest request size at which a trigger rule can start a compaction; None if no
            rule ever can.
        marks: T, the soft mark and the hard mark (`core.trigger.TriggerMarks`).
    """

    policy: Policy
    budget: Budget
    trigger_rules: tuple[TriggerRule, ...]
    is_automatic: bool
    uses_growth_counts: bool
    lowest_trigger: int | None
    marks: TriggerMarks


@lru_cache(maxsize=1_024)
def has_price_trigger(settings: ModelSettings, strategy: str | None) -> bool:
    """Returns whether a trigger of the strategy depends on the prices of the model.

    The function `compute_limits` describes the arguments.
    """
    return any(row.depends_on_price for row in resolve_policy(settings, strategy).trigger)


@lru_cache(maxsize=1_024)
def compute_limits(
    settings: ModelSettings,
    strategy: str | None,
    window_tokens: int,
    max_output_tokens: int | None,
    trigger_tokens: int | None,
    price_thresholds: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS,
    *,
    adds_output: bool = False,
) -> RequestLimits:
    """Computes those limits of a request that do not depend on its messages. The result is cached.

    Args:
        settings: The configuration for the model. The cache compares it by identity.
        strategy: Name of the strategy that the request asks for. None selects the configured strategy.
        window_tokens: The context window of the model, in tokens, as far as the proxy knows it.
        max_output_tokens: The output limit that the request sets, in tokens; None if it sets none.
        trigger_tokens: The trigger that the client asked for, in tokens; None if there is none. It has an
            effect only if it is lower than the configured trigger.
        price_thresholds: The token thresholds of triggers that depend on prices.
        adds_output: Whether the upstream counts prompt and requested output together against the context
            window.

    Raises:
        KeyError: If there is no strategy with this name.
    """
    policy = resolve_policy(settings, strategy)
    budget = compute_budget(window_tokens, policy.reserves, max_output_tokens, adds_output=adds_output)
    rows = set_price_thresholds(policy.trigger, price_thresholds)
    if trigger_tokens is not None and trigger_tokens < (compute_min_trigger(rows, budget) or 0):
        rows = (TriggerRule(tokens=trigger_tokens), *rows)
    return RequestLimits(
        policy=policy,
        budget=budget,
        trigger_rules=rows,
        is_automatic=has_active_rule(rows),
        uses_growth_counts=any(row.depends_on_counts for row in rows),
        lowest_trigger=compute_min_trigger(rows, budget),
        marks=compute_trigger_marks(rows, budget, policy.soft_share, policy.hard_percent),
    )


# If the part of a request that no compaction can remove is larger than this share of the trigger size, a
# compaction saves too little to be worth its cost.
FLOOR_SHARE = 0.80

_tokens: Callable[[Message], int] = attrgetter("tokens")


@dataclass(frozen=True)  # no slots: cached attributes are stored in `__dict__`
class RequestView:
    """A request with its sizes and limits, and with the checkpoint and directives of its conversation.

    Sizes are tokens as the proxy counts them. A size that is called calibrated is an estimate of the
    upstream's count.

    Attributes:
        request: The request.
        limits: The limits that do not depend on the messages.
        root: Digest of the first messages of the conversation (`storage.keys.get_conversation_root`), by
            which its records are stored. None if nothing may be stored, or if the conversation is too short.
        messages: All messages that the client sent.
        unfixed_messages: Those messages that are not fixed (`core.message`).
        prefixes: Prefix digests of `unfixed_messages`.
        tokens: Tokens of all messages that the client sent.
        overhead_tokens: Tokens of the request outside its messages, such as those of tool definitions.
        has_guessed_tokens: Whether a message contains parts such as images, whose tokens may be
            overestimated.
        calibration: Converts counted tokens to calibrated tokens.
        budget: The token budget, calibrated.
        max_prompt_tokens: Calibrated size of the largest prompt that the upstream will probably accept,
            without a safety margin.
        checkpoint: The checkpoint that is applied to the request; None if there is none.
        cut_goal_tokens: Calibrated size to which a request is cut if it exceeds `max_prompt_tokens`. After a
            refusal, it may be smaller than `max_prompt_tokens`. 0 means `max_prompt_tokens`.
        anchor: The provider's count of an earlier request of the conversation; None if there is none.
        directives: What users have asked for in this conversation, such as pins and undone compactions.
        drift_ratio: Learned factor that corrects the estimated size of a request that was just compacted.
        has_new_round: Whether the checkpoint is new: it was not yet applied to the previous request.
        price_basis: The numbers from which the trigger size was computed, by name; empty if the trigger does
            not depend on prices.
        expected_growth_tokens: Calibrated tokens that the client will probably add to the conversation before
            the compaction that is now planned is applied; 0 if it is applied to this request.
        moving_count: Number of messages at the end of `unfixed_messages` that the client moves with each
            request. The number is set to 0 if a compaction must remove these messages as well.
        shortened_instructions: The messages that replace project instructions when a compaction is applied,
            by index in `messages`. The value None means that the instructions are left out. Instructions that
            stay whole have no entry.
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
    checkpoint: Checkpoint | None = None
    cut_goal_tokens: int = 0
    anchor: UsageBaseline | None = None
    directives: Directives = NO_DIRECTIVES
    drift_ratio: float = 1.0
    has_new_round: bool = False
    price_basis: Mapping[str, float] = field(default_factory=dict)
    expected_growth_tokens: int = 0
    moving_count: int = 0
    shortened_instructions: Mapping[int, Message | None] = field(default_factory=dict)

    @cached_attribute
    def effective_messages(self) -> tuple[Message, ...]:
        """The effective list: the client's messages after the checkpoint is applied.

        Project instructions that are too long are shortened as well. If there is no checkpoint, these are the
        unchanged messages of the client.
        """
        if self.checkpoint is None:
            return self.messages
        return build_effective_list(
            replace_messages(self.messages, self.shortened_instructions),
            self.checkpoint.spans,
            self.checkpoint.stand_ins,
            self.checkpoint.edited,
        )

    @cached_attribute
    def checkpoint_id(self) -> bytes:
        """Id of `checkpoint` (`core.planner.compute_checkpoint_id`); empty if `checkpoint` is None."""
        return compute_checkpoint_id(self.checkpoint, self.prefixes)

    @property
    def policy(self) -> Policy:
        """The numbers and rules of the strategy that applies to this request."""
        return self.limits.policy

    @property
    def is_automatic(self) -> bool:
        """Whether compactions may start automatically, because at least one trigger rule is active."""
        return self.limits.is_automatic

    @cached_attribute
    def marks(self) -> TriggerMarks:
        """The trigger size T, the soft mark and the hard mark, in calibrated tokens.

        If a request has reached the soft mark, a compaction is prepared for later requests. If a request has
        reached the hard mark, a compaction is made even if a user has undone an earlier one.
        """
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
        """Calibrated tokens that no compaction removes. Only percentage triggers need this size.

        The percentage of such a trigger applies only to the usable tokens (the context window less the
        reserves) that remain after these tokens are subtracted. The value is 0 if the strategy has no
        percentage trigger or no layout (`Policy.layout`).
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
        """Key under which the proxy remembers failures and growth of this conversation with this strategy.

        Conversations that begin with the same messages have the same key if their ids are unknown.
        """
        return format_strategy_thread(self.request, self.root or b"", self.policy.name)

    @property
    def conversation_id(self) -> str | None:
        """The conversation id; None if it is unknown.

        The client has sent the id, or the proxy has found it by the messages or in the checkpoint.
        """
        return self.request.known_conversation or (self.checkpoint.conversation if self.checkpoint else None)

    @cached_attribute
    def fixed_tokens(self) -> int:
        """Counted tokens that no compaction removes.

        These are the tokens of fixed messages, of tool definitions and other content outside the messages, of
        the latest user message, and of the task if the strategy keeps the task. Project instructions that
        the proxy has shortened count at their shortened size. Messages that the client moves from request to
        request are not included.
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
        """Indices of the latest user message, and of the task if the strategy keeps the task."""
        latest = find_latest_user_message(self.unfixed_messages)
        task = find_task_index(self.unfixed_messages) if self.policy.keep.keeps_task else None
        return frozenset(index for index in (latest, task) if index is not None)

    @cached_attribute
    def plan_constraints(self) -> PlanConstraints:
        """The sizes that a plan must respect, in counted tokens, and the messages that it must not remove."""
        target = self.policy.target.compute_tokens(self.marks.trigger_tokens) if self.policy.target else None
        fixed_tokens, staying_indices = 0, frozenset[int]()
        if self.policy.layout:
            count = len(self.unfixed_messages)
            moving_indices = frozenset(range(count - self.moving_count, count))
            staying_indices = moving_indices | self._staying_indices
            fixed_tokens = self.fixed_tokens + sum(
                self.unfixed_messages[index].tokens for index in moving_indices - self._staying_indices
            )
        return PlanConstraints(
            trigger_tokens=self.trigger_tokens,
            target_tokens=None if target is None else int(target * self._counted_per_calibrated),
            request_tokens=self.effective_tokens,
            fixed_tokens=fixed_tokens,
            growth_tokens=int(self.expected_growth_tokens * self._counted_per_calibrated),
            staying_indices=staying_indices,
            moving_count=self.moving_count,
        )

    @property
    def trigger_tokens(self) -> int:
        """The request size at which a compaction starts, in counted tokens."""
        return int(self.marks.trigger_tokens * self._counted_per_calibrated)

    @property
    def automatic_trigger_tokens(self) -> int | None:
        """The request size at which a compaction starts, in calibrated tokens.

        None if no compaction starts automatically.
        """
        return self.marks.trigger_tokens if self.is_automatic else None

    @property
    def _counted_per_calibrated(self) -> float:
        return self.effective_tokens / max(1, self.effective_estimate)

    @property
    def calibration_ratio(self) -> float:
        """Calibrated tokens per counted token."""
        return self.effective_estimate / max(1, self.effective_tokens)

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Counts the tokens that this request would have with these messages in place of its own."""
        if messages is self.messages:
            return self.tokens + self.overhead_tokens
        if messages is self.effective_messages:
            return self.effective_tokens
        return sum(map(_tokens, messages)) + self.overhead_tokens

    @cached_attribute
    def effective_tokens(self) -> int:
        """Counted tokens of the effective list and of content outside the messages, such as tools."""
        if self.checkpoint is None:
            return self.tokens + self.overhead_tokens
        return sum(map(_tokens, self.effective_messages)) + self.overhead_tokens

    def estimate_tokens(self, messages: Sequence[Message]) -> int:
        """Estimates how many tokens the provider would count for this request with these messages.

        If the provider has counted an earlier request (`anchor`), only the difference from that request is
        estimated. The estimate for a list that was just compacted is also multiplied by `drift_ratio`. But a
        list with fewer counted tokens than the client's own list is never estimated larger than that list.
        """
        counted = self.count_tokens(messages)
        if self.anchor is None:
            return self.calibration.predict_tokens(counted)
        size = predict_tokens(self.anchor, counted, self.calibration)
        if not self.has_new_round or messages is self.messages:
            return size
        return min(int(size * self.drift_ratio), max(size, self.estimate_tokens(self.messages)))

    @cached_attribute
    def effective_estimate(self) -> int:
        """Estimate of the tokens that the provider would count for this request with the effective list."""
        return self.estimate_tokens(self.effective_messages)

    def estimate_upper_bound(self, messages: Sequence[Message]) -> int:
        """Estimates how many tokens the provider would count for this request with these messages, at most.

        In contrast to `estimate_tokens`, the result includes a margin for errors of the estimate.
        """
        counted = self.count_tokens(messages)
        if self.anchor is None:
            return self.calibration.predict_upper_bound(counted)
        return predict_upper_bound(self.anchor, counted, self.calibration)

    @cached_attribute
    def effective_bound(self) -> int:
        """Upper bound for the tokens that the provider would count for this request with the effective list.

        It is an estimate that includes a margin for errors.
        """
        return self.estimate_upper_bound(self.effective_messages)

    @property
    def exceeds_compaction_limit(self) -> bool:
        """Whether the effective list may be so large that the proxy must compact it to leave room for output.

        The limit is `Budget.compaction_limit`.
        """
        return self.effective_bound > self.budget.compaction_limit

    @property
    def exceeds_window(self) -> bool:
        """Whether the effective list may be so large that content must be cut (`Budget.input_limit`)."""
        return self.effective_bound > self.budget.input_limit

    def is_too_large(self, messages: Sequence[Message]) -> bool:
        """Returns whether, according to the estimate, this request with these messages will not fit."""
        return self.estimate_tokens(messages) > max(self.budget.input_limit, self.max_prompt_tokens)

    @property
    def is_suppressed(self) -> bool:
        """Whether this request gets no automatic compaction because a user has undone a compaction.

        Always False if the request has reached the hard mark.
        """
        return self.directives.suppressed and self.effective_estimate < self.marks.hard_tokens

    @property
    def is_irreducible(self) -> bool:
        """Whether so much of the request cannot be removed that a compaction is not worth its cost.

        This is the case if the part that no compaction removes exceeds `FLOOR_SHARE` of the trigger size.
        """
        return max(self.fixed_tokens, self.plan_constraints.fixed_tokens) > FLOOR_SHARE * self.trigger_tokens

    def find_due_reason(self) -> str | None:
        """Returns why a compaction is due now; None if none is due.

        The reason is `limit` if the request may be too large, `output` if too few tokens are left for the
        requested output, or else the names of the thresholds of the trigger rule that the request has
        reached.
        """
        if self.is_automatic and self.exceeds_compaction_limit:
            return "limit"
        limits, size = self.limits, self.effective_estimate
        output_limit = self.budget.output_compaction_limit
        # Whether the prompt leaves too few tokens for the requested output, and a compaction can change this.
        is_output_short = output_limit is not None and self.fixed_tokens <= output_limit < size
        if self.is_automatic and is_output_short and not self.is_suppressed:
            return "output"
        if limits.lowest_trigger is None or size < limits.lowest_trigger or self.is_suppressed:
            return None
        growth = (
            count_growth(self.unfixed_messages, self.checkpoint) if limits.uses_growth_counts else NO_GROWTH
        )
        rule = find_reached_rule(
            limits.trigger_rules, size, growth, self.budget, self._calibrated_fixed_tokens
        )
        return ",".join(rule.named_fields) if rule else None

    def should_prepare_round(self) -> bool:
        """Returns whether to prepare a compaction for later requests.

        Returns True if the request has reached the soft mark and automatic compactions are not suppressed.
        """
        mark = self.marks.soft_tokens
        return mark is not None and not self.is_suppressed and self.effective_estimate >= mark

    def build_usage_basis(self) -> UsageBasis | None:
        """Builds the object that will identify this request when the upstream reports its token usage.

        Returns None if nothing is stored for the conversation (`root` is None).
        """
        if self.root is None:
            return None
        return UsageBasis(
            self.root, self.prefixes, self.baseline_key, int(self.fixed_tokens * self.calibration_ratio)
        )

    def with_checkpoint(self, checkpoint: Checkpoint | None) -> Self:
        """Returns the view with another checkpoint, or without one if `checkpoint` is None."""
        has_new_round = self.has_new_round if checkpoint is None else self.anchor is not None
        return replace(self, checkpoint=checkpoint, has_new_round=has_new_round)


def replace_messages(
    messages: tuple[Message, ...], replacements: Mapping[int, Message | None]
) -> tuple[Message, ...]:
    """Returns the list with some messages replaced or removed.

    `replacements` maps the index of a message to its replacement, or to None if the message is removed.
    """
    if not replacements:
        return messages
    replaced = (replacements.get(k, each) for k, each in enumerate(messages))
    return tuple(each for each in replaced if each is not None)


def format_strategy_thread(ask: FitRequest, root: bytes, strategy: str) -> str:
    """Formats the key under which the proxy remembers failures and growth of a conversation.

    The key also contains the strategy, because another strategy may succeed where this one fails.
    """
    return "/".join((ask.tenant, root.hex(), strategy, ask.known_conversation or ""))
