"""Decides when to compact, by rows of thresholds.

A row is reached if all its fields are reached. One row that is reached is enough for a compaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from compaction_proxy.core.budget import Budget, Reserves, compute_budget

TRIGGER_FIELDS = (
    "tokens", "percent", "percent_of_window", "messages", "turns", "iterations", "price_tier", "cost_optimal",
)  # fmt: skip
# A surcharge applies to requests above a certain size. The trigger `price_tier` is this many tokens below
# that size, so that an answer of usual length and the error of estimates do not take the next request above
# it. As with context windows, the reserves take at most a quarter of that size.
TIER_RESERVES = Reserves(system=0, output=8_000, safety=2_000)
# Lower and upper limit for the size at which a conversation costs least (`cost_optimal`), in tokens and as a
# share of usable. Below the lower limit, compactions cost more than they can save. Above the upper limit, a
# compaction must not wait.
MIN_OPTIMUM_TOKENS = 32_000
MAX_OPTIMUM_SHARE = 0.75


class PriceThresholds(NamedTuple):
    """The thresholds that follow from the price fields of a row, in tokens.

    Attributes:
        tier_tokens: Input size above which each token of a request costs more; None if there is no such size
            or it is unknown.
        optimum_tokens: Size at which compactions cost least; None if unknown.
    """

    tier_tokens: int | None = None
    optimum_tokens: int | None = None


UNKNOWN_PRICE_THRESHOLDS = PriceThresholds()


@dataclass(frozen=True, slots=True)
class TriggerRule:
    """One row of thresholds. A field that is None does not count; a field that is 0 switches the row off.

    Attributes:
        tokens: Size of the effective list, in tokens.
        percent: The same size, in percent of usable.
        percent_of_window: The same size, in percent of the context window.
        messages: Messages gained since the last compaction.
        turns: Turns gained since the last compaction.
        iterations: Iterations (assistant messages) gained since the last compaction.
        price_tier: Whether the row is reached just below the size above which each token costs more.
        cost_optimal: Whether the row is reached at the size at which the conversation costs least.
        rework_tokens: Tokens that the model is expected to read again after each compaction. `cost_optimal`
            adds them to the price of the compaction. None uses the default.
        price_thresholds: The thresholds of `price_tier` and `cost_optimal` at the model's prices.
        active: Whether the row can be reached at all, which follows from the other fields.
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
    active: bool = field(init=False, repr=False, compare=False)  # read several times for each request

    def __post_init__(self) -> None:
        """Computes whether the row can be reached at all."""
        values = [getattr(self, name) for name in TRIGGER_FIELDS]
        object.__setattr__(self, "active", 0 not in values and any(values))

    @property
    def named_fields(self) -> tuple[str, ...]:
        """Names of the fields that count."""
        return tuple(name for name in TRIGGER_FIELDS if getattr(self, name) is not None)

    @property
    def depends_on_price(self) -> bool:
        """Whether the row depends on what the model costs."""
        return self.active and bool(self.price_tier or self.cost_optimal)

    @property
    def depends_on_counts(self) -> bool:
        """Whether the row depends on how many messages the conversation has gained."""
        return bool(self.messages or self.turns or self.iterations)

    def compute_token_threshold(self, budget: Budget, fixed_tokens: int = 0) -> int:
        """Computes the size at which all token fields are reached, in tokens; 0 if the row has none.

        `fixed_tokens` is the size of what no compaction removes. `percent` applies to the rest of usable.
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
    """Returns a size at which a request still pays no surcharge; all of usable if there is no surcharge."""
    if tier_tokens is None:
        return budget.usable
    return min(compute_budget(tier_tokens, TIER_RESERVES, None).usable, budget.usable)


def _clamp_optimum(optimum_tokens: int | None, budget: Budget) -> int:
    """Returns the size at which a conversation costs least, within its limits.

    If the size is unknown, the upper limit is returned.
    """
    upper = int(MAX_OPTIMUM_SHARE * budget.usable)
    return upper if optimum_tokens is None else min(max(optimum_tokens, MIN_OPTIMUM_TOKENS), upper)


def set_price_thresholds(
    rules: Sequence["TriggerRule"], thresholds: PriceThresholds
) -> tuple["TriggerRule", ...]:
    """Returns the rows with these thresholds set in each row that depends on prices."""
    return tuple(replace(row, price_thresholds=thresholds) if row.depends_on_price else row for row in rules)


@dataclass(frozen=True, slots=True)
class GrowthCounts:
    """Counts of what a conversation has gained since its last compaction."""

    messages: int
    turns: int
    iterations: int


NO_GROWTH = GrowthCounts(messages=0, turns=0, iterations=0)


def has_active_rule(rules: Sequence[TriggerRule]) -> bool:
    """Returns whether any row can be reached at all.

    If none can, the proxy never compacts by itself, not even if the upstream refuses a request as too long.
    """
    return any(row.active for row in rules)


@dataclass(frozen=True, slots=True)
class TriggerMarks:
    """The sizes of the effective list from which the proxy acts, in tokens.

    Attributes:
        soft_tokens: From this size, compactions are prepared ahead of need; None disables this.
        trigger_tokens: T; all of usable if no row names tokens.
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
    """Computes the marks for the rows of a strategy (DESIGN.md §5.6).

    `fixed_tokens` is the size of what no compaction removes. Percentages apply to the rest of usable.
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
    """Returns T, the fewest tokens at which a row can be reached.

    Returns 0 if an active row has no token field but only counts, and None if no row is active.
    """
    return min((row.compute_token_threshold(budget) for row in rules if row.active), default=None)


def find_reached_rule(
    rules: Sequence[TriggerRule], tokens: int, growth: GrowthCounts, budget: Budget, fixed_tokens: int = 0
) -> TriggerRule | None:
    """Returns the first row that is reached, or None if none is.

    Args:
        rules: The rows.
        tokens: Size of the effective list.
        growth: What the conversation has gained since its last compaction.
        budget: The budget of the request.
        fixed_tokens: Size of what no compaction removes. `percent` applies to the rest of usable.
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
