"""From the configuration of a model to the policy that holds for it."""

from dataclasses import replace
from functools import lru_cache

from proxy.config.model import ModelSettings
from proxy.core.budget import Reserves
from proxy.core.policy import STRATEGIES, Policy, SummaryShape
from proxy.core.trigger import Row


@lru_cache(maxsize=256)
def policy_for(settings: ModelSettings) -> Policy:
    """The strategy's row with what the configuration changes of it."""
    compaction = settings.compaction
    row = STRATEGIES[compaction.strategy]
    fields = compaction.strategies.chained
    trigger = (
        (Row(percent=fields.percent),)
        if compaction.trigger is None
        else tuple(Row(**dict(each)) for each in compaction.trigger)
    )
    kept = compaction.keep.messages
    return replace(
        row,
        trigger=trigger,
        reserves=Reserves(
            system=fields.system_reserve_tokens,
            output=fields.output_reserve_tokens
            if settings.reserve_output is None
            else settings.reserve_output,
            safety=fields.safety_tokens,
        ),
        keep_messages=fields.keep_messages if kept is None else kept,
        stand_in_role=compaction.stand_in_role or row.stand_in_role,
        task_tokens=fields.task_tokens,
        summary=SummaryShape(
            prompt=row.summary.prompt,
            tokens=fields.summary_tokens,
            max_tokens=settings.summary.max_tokens or fields.summary_max_tokens,
            temperature=fields.temperature,
            tool_characters=fields.tool_characters,
            message_characters=fields.message_characters,
        ),
    )
