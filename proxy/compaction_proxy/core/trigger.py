"""Decides when to compact, by rows of thresholds.

A row is reached if the thresholds of all its fields are reached. A compaction is due if at least one row is
reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from compaction_proxy.core.budget import Budget, Reserves, compute_budget

TRIGGER_FIELDS = (
    "tokens", "percent", "percent_of_window", "messages", "turns", "iterations", "price_tier", "cost_optimal",
)  # fmt: skip
# A surcharge applies to requests above a certain size. The threshold of `price_tier` is lower than that size
# by these reserves. So a reply of usual length and the error of estimates do not take the next request above
# that size. As with context windows, the reserves take at most a quarter of that size.
TIER_RESERVES = Reserves(system=0, output=8_000, safety=2_000)
# Lower limit (in tokens) and upper limit (as a share of usable) of the threshold of `cost_optimal`. Below the
# lower limit, compactions cost more than they can save. A larger threshold than the upper limit would leave
# too little room in the context window.
MIN_OPTIMUM_TOKENS = 32_000
MAX_OPTIMUM_SHARE = 0.75


class PriceThresholds(NamedTuple):
    """The thresholds of the fields `price_tier` and `cost_optimal`, in tokens, at the prices of a model.

    Attributes:
        tier_tokens: Input size above which each token of a request costs more; None if there is no such size
            or it is unknown.
        optimum_tokens: Trigger T at which a conversation costs least; None if unknown.
    """

    tier_tokens: int | None = None
    optimum_tokens: int | None = None


UNKNOWN_PRICE_THRESHOLDS = PriceThresholds()


@dataclass(frozen=True, slots=True)
class TriggerRule:
    """One row of thresholds.

    A threshold that is None does not count. A threshold that is 0 or False switches the row off. A row
    without thresholds is never reached.

    Attributes:
        tokens: Size of the effective list, in tokens.
        percent: Size of the effective list, in percent of usable.
        percent_of_window: Size of the effective list, in percent of the context window.
        messages: Number of messages added since the last compaction.
        turns: Number of turns added since the last compaction.
        iterations: Number of iterations (assistant messages) added since the last compaction.
        price_tier: Whether the row is reached just below the size above which each token costs more.
        cost_optimal: Whether the row is reached at the size at which the conversation costs least.
        rework_tokens: Tokens that the model is expected to read again after each compaction. `cost_optimal`
            adds them to the cost of a compaction. None uses the default.
        price_thresholds: The thresholds of `price_tier` and `cost_optimal` at the prices of the model.
        active: Whether the row can be reached at all. The other fields decide this.
    """

    tokens: int | None = None
    percent: float | None = None
    percent_of_window: float | None = None
    messages: int | None = None
    turns: int | None = None
    iterations: int | None = None
    price_tier: bool | None = None
    cost_optimal: bool | None = None
    rework_tokens: int | None = None
    price_thresholds: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS
    active: bool = field(init=False, repr=False, compare=False)  # stored, because it is read often

    def __post_init__(self) -> None:
        """Sets `active`: whether the row can be reached at all."""
        values = [getattr(self, name) for name in TRIGGER_FIELDS]
        object.__setattr__(self, "active", 0 not in values and any(values))

    @property
    def named_fields(self) -> tuple[str, ...]:
        """Names of the threshold fields that are not None."""
        return tuple(name for name in TRIGGER_FIELDS if getattr(self, name) is not None)

    @property
    def depends_on_price(self) -> bool:
        """Whether the row depends on the prices of the model."""
        return self.active and bool(self.price_tier or self.cost_optimal)

    @property
    def depends_on_counts(self) -> bool:
        """Whether the row depends on how many messages, turns or iterations were added."""
        return bool(self.messages or self.turns or self.iterations)

    def compute_token_threshold(self, budget: Budget, fixed_tokens: int = 0) -> int:
        """Computes the size, in tokens, at which all thresholds of size are reached; 0 if the row has none.

        `fixed_tokens` is the size of the parts that no compaction removes. `percent` applies to the rest of
        usable.
        """
        percent = self.percent or 0
        return max(
            self.tokens or 0,
            fixed_tokens + int((budget.usable - fixed_tokens) * percent / 100) if percent else 0,
            int(budget.window * (self.percent_of_window or 0) / 100),
            _compute_tier_threshold(self.price_thresholds.tier_tokens, budget) if self.price_tier else 0,
            _clamp_optimum(self.price_thresholds.optimum_tokens, budget) if self.cost_optimal else 0,
        )


def _compute_tier_threshold(tier_tokens: int | None, budget: Budget) -> int:
    """Returns the threshold of `price_tier`, in tokens: a size at which a request pays no surcharge yet.

    Returns the whole usable size if the model has no surcharge.
    """
    if tier_tokens is None:
        return budget.usable
    return min(compute_budget(tier_tokens, TIER_RESERVES, None).usable, budget.usable)


def _clamp_optimum(optimum_tokens: int | None, budget: Budget) -> int:
    """Returns the threshold of `cost_optimal`, in tokens, within its lower and upper limit.

    Returns the upper limit if the optimum is unknown.
    """
    upper = int(MAX_OPTIMUM_SHARE * budget.usable)
    return upper if optimum_tokens is None else min(max(optimum_tokens, MIN_OPTIMUM_TOKENS), upper)


def set_price_thresholds(
    rules: Sequence["TriggerRule"], thresholds: PriceThresholds
) -> tuple["TriggerRule", ...]:
    """Returns the rows, with `thresholds` set in each row that depends on prices."""
    return tuple(replace(row, price_thresholds=thresholds) if row.depends_on_price else row for row in rules)


@dataclass(frozen=True, slots=True)
class GrowthCounts:
    """The numbers of messages, turns and iterations that were added since the last compaction."""

    messages: int
    turns: int
    iterations: int


NO_GROWTH = GrowthCounts(messages=0, turns=0, iterations=0)


def has_active_rule(rules: Sequence[TriggerRule]) -> bool:
    """Returns whether at least one row can be reached.

    If no row can be reached, the proxy never compacts by itself, not even if the upstream refuses a request
    as too long.
    """
    return any(row.active for row in rules)


@dataclass(frozen=True, slots=True)
class TriggerMarks:
    """The sizes of the effective list, in tokens, from which the proxy acts.

    Attributes:
        soft_tokens: From this size, compactions are prepared ahead of need. None if the soft mark is
            disabled, or if no row has a threshold of size.
        trigger_tokens: T; the whole usable size if no row has a threshold of size.
        hard_tokens: From this size, automatic compactions are made again after an undo.
    """

    soft_tokens: int | None
    trigger_tokens: int
    hard_tokens: int


def compute_trigger_marks(
    rules: Sequence[TriggerRule],
    budget: Budget,
    soft_share: float,
    hard_percent: float,
    fixed_tokens: int = 0,
) -> TriggerMarks:
    """Computes T, the soft mark and the hard mark for the rows of a strategy.

    Args:
        rules: The rows.
        budget: The budget of the request.
        soft_share: The soft mark as a share of T, 0..1; 0 disables the soft mark.
        hard_percent: The hard mark, in percent of usable.
        fixed_tokens: Size of the parts that no compaction removes. The share and the percentages apply to the
            remaining size.
    """
    fixed_tokens = min(fixed_tokens, budget.usable)
    thresholds = [
        tokens
        for row in rules
        if row.active and (tokens := row.compute_token_threshold(budget, fixed_tokens))
    ]
    trigger = min([*thresholds, budget.usable])
    floor = fixed_tokens if trigger > fixed_tokens else 0
    soft = floor + int(soft_share * (trigger - floor)) if soft_share and thresholds else None
    hard = fixed_tokens + int((budget.usable - fixed_tokens) * hard_percent / 100)
    return TriggerMarks(soft, trigger, min(max(hard, trigger), budget.usable))


def compute_min_trigger(rules: Sequence[TriggerRule], budget: Budget) -> int | None:
    """Returns the smallest size, in tokens, from which a row can start a compaction.

    Returns 0 if an active row has only thresholds for numbers of messages, turns or iterations. Returns None
    if no row is active.
    """
    return min((row.compute_token_threshold(budget) for row in rules if row.active), default=None)


def find_reached_rule(
    rules: Sequence[TriggerRule], tokens: int, growth: GrowthCounts, budget: Budget, fixed_tokens: int = 0
) -> TriggerRule | None:
    """Returns the first row that is reached, or None if no row is reached.

    Args:
        rules: The rows.
        tokens: Size of the effective list, in tokens.
        growth: The numbers of messages, turns and iterations that were added since the last compaction.
        budget: The budget of the request.
        fixed_tokens: Size of the parts that no compaction removes. `percent` applies to the rest of usable.
    """
    fixed_tokens = min(fixed_tokens, budget.usable)
    for row in rules:
        if (
            row.active
            and tokens >= row.compute_token_threshold(budget, fixed_tokens)
            and growth.messages >= (row.messages or 0)
            and growth.turns >= (row.turns or 0)
            and growth.iterations >= (row.iterations or 0)
        ):
            return row
    return None
