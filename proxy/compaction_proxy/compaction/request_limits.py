"""What holds for a request whatever its messages are: strategy, what it may spend, when rounds are due."""

from functools import lru_cache
from typing import NamedTuple

from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.policy import row_for
from compaction_proxy.core.budget import Budget, budget
from compaction_proxy.core.strategies import Policy
from compaction_proxy.core.trigger import UNKNOWN, Aims, Marks, Row, aimed, automatic, mark, marks


@lru_cache(maxsize=512)
def policy_for(settings: ModelSettings, strategy: str | None = None) -> Policy:
    """A strategy's row with what the configuration changes of it.

    Args:
        settings: What is configured for the model; compared by identity.
        strategy: Name of the row that a request asked for; None: the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    return row_for(settings, strategy)


class Terms(NamedTuple):
    """What holds for a request whatever its messages are; sizes are calibrated tokens.

    Attributes:
        policy: The strategy.
        budget: What may be spent.
        rows: Trigger rows in force; the client may lower the trigger, never raise it.
        automatic: Whether anything may be done that was not asked for.
        counts: Whether it matters what the conversation has gained.
        least: The fewest tokens at which a row can fire; None if none can.
        marks: Where things happen.
    """

    policy: Policy
    budget: Budget
    rows: tuple[Row, ...]
    automatic: bool
    counts: bool
    least: int | None
    marks: Marks


@lru_cache(maxsize=1_024)
def about_money(settings: ModelSettings, strategy: str | None) -> bool:
    """Whether it matters for the trigger what the model costs; the arguments are those of `terms_for`."""
    return any(row.priced for row in policy_for(settings, strategy).trigger)


@lru_cache(maxsize=1_024)
def terms_for(
    settings: ModelSettings,
    strategy: str | None,
    window: int,
    max_output: int | None,
    trigger: int | None,
    aims: Aims = UNKNOWN,
    *,
    adds_output: bool = False,
) -> Terms:
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
    policy = policy_for(settings, strategy)
    spent = budget(window, policy.reserves, max_output, adds_output=adds_output)
    rows = aimed(policy.trigger, aims)
    if trigger is not None and trigger < (mark(rows, spent) or 0):
        rows = (Row(tokens=trigger), *rows)
    return Terms(
        policy=policy,
        budget=spent,
        rows=rows,
        automatic=automatic(rows),
        counts=any(row.counts for row in rows),
        least=mark(rows, spent),
        marks=marks(rows, spent, policy.soft_share, policy.hard_percent),
    )
