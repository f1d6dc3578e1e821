"""What holds for a request whatever its messages are: strategy, what it may spend, when rounds are due."""

from functools import lru_cache
from typing import NamedTuple

from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.policy import build_policy
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
    """A strategy's row with what the configuration changes of it.

    Args:
        settings: What is configured for the model; compared by identity.
        strategy: Name of the row that a request asked for; None: the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    return build_policy(settings, strategy)


class RequestLimits(NamedTuple):
    """What holds for a request whatever its messages are; sizes are calibrated tokens.

    Attributes:
        policy: The strategy.
        budget: What may be spent.
        rows: Trigger rows in force; the client may lower the trigger, never raise it.
        is_automatic: Whether anything may be done that was not asked for.
        uses_gains: Whether it matters what the conversation has gained.
        lowest_trigger: The fewest tokens at which a row can fire; None if none can.
        marks: Where things happen.
    """

    policy: Policy
    budget: Budget
    rows: tuple[TriggerRule, ...]
    is_automatic: bool
    uses_gains: bool
    lowest_trigger: int | None
    marks: TriggerMarks


@lru_cache(maxsize=1_024)
def has_price_trigger(settings: ModelSettings, strategy: str | None) -> bool:
    """Whether it matters for the trigger what the model costs.

    The arguments are those of `compute_limits`.
    """
    return any(row.depends_on_price for row in resolve_policy(settings, strategy).trigger)


@lru_cache(maxsize=1_024)
def compute_limits(
    settings: ModelSettings,
    strategy: str | None,
    window: int,
    max_output: int | None,
    trigger: int | None,
    aims: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS,
    *,
    adds_output: bool = False,
) -> RequestLimits:
    """The terms of requests that are alike in all of this; they follow from nothing else.

    Args:
        settings: What is configured for the model; compared by identity.
        strategy: Name of the row that the request asked for; None: the configured one.
        window: Of the model, in tokens, as it is known now.
        max_output: The largest output asked for, in tokens; None if the request does not say.
        trigger: A lower trigger that the client asked for, in tokens.
        aims: What the trigger's fields about money come to.
        adds_output: Whether the upstream counts the output asked for, too.

    Raises:
        KeyError: There is no strategy of that name.
    """
    policy = resolve_policy(settings, strategy)
    spent = compute_budget(window, policy.reserves, max_output, adds_output=adds_output)
    rows = set_price_thresholds(policy.trigger, aims)
    if trigger is not None and trigger < (compute_min_trigger(rows, spent) or 0):
        rows = (TriggerRule(tokens=trigger), *rows)
    return RequestLimits(
        policy=policy,
        budget=spent,
        rows=rows,
        is_automatic=has_active_rule(rows),
        uses_gains=any(row.depends_on_counts for row in rows),
        lowest_trigger=compute_min_trigger(rows, spent),
        marks=compute_trigger_marks(rows, spent, policy.soft_share, policy.hard_percent),
    )
