"""When to compact: rows of thresholds. Rows are alternatives; the fields of one row must all be reached."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from compaction_proxy.core.budget import Budget, Reserves, compute_budget

TRIGGER_FIELDS = (
    "tokens", "percent", "percent_of_window", "messages", "turns", "iterations", "price_tier", "cost_optimal",
)  # fmt: skip
# What a request leaves free below a surcharge: with an answer of usual length, the estimate's error included,
# the conversation is still below it. As with windows, no more than a quarter of it.
TIER_RESERVES = Reserves(system=0, output=8_000, safety=2_000)
# Where a conversation costs least is looked for between these: below, rounds take more than is to be had;
# above, a round must not wait. In tokens, and as a share of usable.
LEAST_OPTIMUM_TOKENS = 32_000
MOST_OPTIMUM_SHARE = 0.75


class PriceThresholds(NamedTuple):
    """What the fields of a row that are about money come to.

    Attributes:
        tier: Input tokens above which a request costs more a token; None: nowhere, or not known.
        optimum: Tokens at which rounds cost least; None: not known.
    """

    tier: int | None = None
    optimum: int | None = None


UNKNOWN_PRICE_THRESHOLDS = PriceThresholds()


@dataclass(frozen=True, slots=True)
class TriggerRule:
    """One alternative. A field that is None does not count; a field that is 0 switches the row off.

    Attributes:
        tokens: Tokens of the effective list.
        percent: The same, in percent of the usable tokens.
        percent_of_window: The same, in percent of the window.
        messages: Messages gained since the last round.
        turns: Turns gained since the last round.
        iterations: Iterations (assistant messages) gained since the last round.
        price_tier: Tokens of the effective list, just below the size from which on the model costs more.
        cost_optimal: The same, where the conversation costs least.
        rework_tokens: What that reckons with for each round, beside its price; None: the usual.
        aims: What the two come to.
        active: Whether the row can fire at all; follows from the others.
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
    aims: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS
    active: bool = field(init=False, repr=False, compare=False)  # asked several times for each request

    def __post_init__(self) -> None:
        """Work out whether the row can fire."""
        named = [getattr(self, name) for name in TRIGGER_FIELDS]
        object.__setattr__(self, "active", 0 not in named and any(named))

    @property
    def named_fields(self) -> tuple[str, ...]:
        """The fields that count."""
        return tuple(name for name in TRIGGER_FIELDS if getattr(self, name) is not None)

    @property
    def depends_on_price(self) -> bool:
        """Whether it matters what the model costs."""
        return self.active and bool(self.price_tier or self.cost_optimal)

    @property
    def depends_on_counts(self) -> bool:
        """Whether it matters what the conversation has gained."""
        return bool(self.messages or self.turns or self.iterations)

    def compute_token_threshold(self, budget: Budget, fixed: int = 0) -> int:
        """Tokens at which the token fields are all reached; 0 if the row has none.

        `fixed` tokens of usable are no part of what `percent` is about.
        """
        percent = self.percent or 0
        return max(
            self.tokens or 0,
            fixed + int((budget.usable - fixed) * percent / 100) if percent else 0,
            int(budget.window * (self.percent_of_window or 0) / 100),
            _compute_tier_threshold(self.aims.tier, budget) if self.price_tier else 0,
            _clamp_optimum(self.aims.optimum, budget) if self.cost_optimal else 0,
        )


def _compute_tier_threshold(tier: int | None, budget: Budget) -> int:
    """Where a request is still below a surcharge; all that is usable where there is none."""
    if tier is None:
        return budget.usable
    return min(compute_budget(tier, TIER_RESERVES, None).usable, budget.usable)


def _clamp_optimum(optimum: int | None, budget: Budget) -> int:
    """Where a conversation costs least, within bounds; the upper one where that is not known."""
    most = int(MOST_OPTIMUM_SHARE * budget.usable)
    return most if optimum is None else min(max(optimum, LEAST_OPTIMUM_TOKENS), most)


def set_price_thresholds(
    rules: Sequence["TriggerRule"], thresholds: PriceThresholds
) -> tuple["TriggerRule", ...]:
    """The rows where what is about money comes to this."""
    return tuple(replace(row, aims=thresholds) if row.depends_on_price else row for row in rules)


@dataclass(frozen=True, slots=True)
class GrowthCounts:
    """What a conversation has gained since its last round, in counts."""

    messages: int
    turns: int
    iterations: int


NO_GROWTH = GrowthCounts(messages=0, turns=0, iterations=0)


def has_active_rule(rules: Sequence[TriggerRule]) -> bool:
    """Whether anything may compact on its own: with no active row, not even overflow recovery does."""
    return any(row.active for row in rules)


@dataclass(frozen=True, slots=True)
class TriggerMarks:
    """Where things happen, in tokens of the effective list.

    Attributes:
        soft: Work ahead of need begins; None: never.
        trigger: T; where no row names tokens, all that is usable.
        hard: A request above it cannot wait for a better moment.
    """

    soft: int | None
    trigger: int
    hard: int


def compute_trigger_marks(
    rules: Sequence[TriggerRule], budget: Budget, soft_share: float, hard_percent: float, fixed: int = 0
) -> TriggerMarks:
    """The marks of a strategy's rows (DESIGN.md §5.6); those of `percent` lie between `fixed` and usable."""
    fixed = min(fixed, budget.usable)
    named = [tokens for row in rules if row.active and (tokens := row.compute_token_threshold(budget, fixed))]
    trigger = min([*named, budget.usable])
    below = fixed if trigger > fixed else 0
    soft = below + int(soft_share * (trigger - below)) if soft_share and named else None
    hard = fixed + int((budget.usable - fixed) * hard_percent / 100)
    return TriggerMarks(soft, trigger, min(max(hard, trigger), budget.usable))


def compute_min_trigger(rules: Sequence[TriggerRule], budget: Budget) -> int | None:
    """T: the fewest tokens at which a row can fire; 0 if one asks for counts only, None if none is active."""
    return min((row.compute_token_threshold(budget) for row in rules if row.active), default=None)


def find_reached_rule(
    rules: Sequence[TriggerRule], tokens: int, growth: GrowthCounts, budget: Budget, fixed: int = 0
) -> TriggerRule | None:
    """The first row that is reached, or None. `tokens` is the size of the effective list."""
    fixed = min(fixed, budget.usable)
    for row in rules:
        if (
            row.active
            and tokens >= row.compute_token_threshold(budget, fixed)
            and growth.messages >= (row.messages or 0)
            and growth.turns >= (row.turns or 0)
            and growth.iterations >= (row.iterations or 0)
        ):
            return row
    return None
