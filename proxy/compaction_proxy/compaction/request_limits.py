"""Computes the limits of a request that do not depend on its messages: strategy, budget and triggers."""

from functools import lru_cache
from typing import NamedTuple

from compaction_proxy.config.config import ModelSettings, build_policy
from compaction_proxy.core.budget import Budget, compute_budget
from compaction_proxy.core.strategies import Policy
from compaction_proxy.core.trigger import (
    UNKNOWN_PRICE_THRESHOLDS,
    PriceThresholds,
    TriggerMarks,
    TriggerRule,
    compute_min_trigger,
    compute_trigger_marks,
    has_active_rule,
    set_price_thresholds,
)


@lru_cache(maxsize=512)
def resolve_policy(settings: ModelSettings, strategy: str | None = None) -> Policy:
    """Returns a strategy with the changes that the configuration makes to it. The result is cached.

    Args:
        settings: The configuration for the model. The cache compares it by identity.
        strategy: Name of the strategy that a request asked for. None selects the configured strategy.

    Raises:
        KeyError: There is no strategy of that name.
    """
    return build_policy(settings, strategy)


class RequestLimits(NamedTuple):
    """The limits of a request that do not depend on its messages; sizes are calibrated tokens.

    Attributes:
        policy: The strategy.
        budget: The token budget.
        trigger_rules: The trigger rules in force. They include a trigger that the client asked for, but only
            if it is lower than the configured one.
        is_automatic: Whether compactions may be made although nobody asks for one. That is so if a trigger
            rule is active.
        uses_growth_counts: Whether a trigger depends on how many messages, turns or iterations have been
            added since the last compaction.
        lowest_trigger: The size of the smallest request for which a trigger rule can hold; None if no rule
            can ever hold.
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

    The arguments are the same as those of `compute_limits`.
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
    """Computes the limits of a request. They depend only on the arguments, so the result is cached.

    Args:
        settings: The configuration for the model. The cache compares it by identity.
        strategy: Name of the strategy that the request asked for. None selects the configured strategy.
        window_tokens: The currently known context window of the model, in tokens.
        max_output_tokens: The output limit that the request sets, in tokens; None if it sets none.
        trigger_tokens: The trigger that the client asked for, in tokens; None if it asked for none. It has an
            effect only if it is lower than the configured trigger.
        price_thresholds: The token thresholds of triggers that depend on prices.
        adds_output: Whether the upstream counts prompt and requested output together against the context
            window.

    Raises:
        KeyError: There is no strategy of that name.
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
