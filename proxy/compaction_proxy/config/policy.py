"""Applies the configuration to the built-in numbers and rules of a strategy."""

from collections.abc import Iterator
from dataclasses import replace

from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.strategies import POLICY_FIELDS, replace_policy_field
from compaction_proxy.core.strategies import ANCHORED, STRATEGIES, Policy
from compaction_proxy.core.trigger import TriggerRule


def build_policy(settings: ModelSettings, strategy_name: str | None = None) -> Policy:
    """Builds a strategy's policy: its built-in numbers and rules, with the changes from the configuration.

    The strategy's own keys are applied first. A key for all strategies overrides them if it is set.

    Args:
        settings: Settings for the model.
        strategy_name: Name of the strategy that a request asked for; None uses the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    compaction = settings.compaction
    policy = STRATEGIES[strategy_name or compaction.strategy]
    fields = getattr(compaction.strategies, policy.name)
    own_fields = (
        (name, value) for name, value in fields if name in POLICY_FIELDS and name in fields.model_fields_set
    )
    for name, value in (*own_fields, *_list_shared_fields(settings)):
        policy = replace_policy_field(policy, name, value)
    if compaction.trigger is not None:
        policy = replace(policy, trigger=tuple(TriggerRule(**dict(row)) for row in compaction.trigger))
    if compaction.background is not None:
        soft_share = policy.soft_share or ANCHORED.soft_share
        policy = replace(policy, soft_share=soft_share if compaction.background else 0.0)
    if policy.summary and (fields.prompt_file or settings.summary.prompt_file):
        policy = replace(
            policy, summary=replace(policy.summary, sections=())
        )  # the user's prompt defines its own sections
    return policy


def _list_shared_fields(settings: ModelSettings) -> Iterator[tuple[str, object]]:
    """Returns name and value of each strategy field that is set by a key for all strategies.

    Such a key is, for example, `compaction.target_tokens`. A strategy may lack some of these fields.
    """
    compaction, keep, summary = settings.compaction, settings.compaction.keep, settings.summary
    keys = {
        "output_reserve_tokens": settings.reserve_output,
        "target_tokens": compaction.target_tokens,
        "max_block_s": compaction.max_block_s,
        "stand_in_role": compaction.stand_in_role,
        "keep_messages": keep.messages,
        "tail_tokens": keep.tail_tokens,
        "ledger_tokens": keep.user_tokens,
        "keep_tool_results": keep.tool_results,
        "summary_max_tokens": summary.max_tokens,
        "summary_input": summary.input,
    }
    return ((name, value) for name, value in keys.items() if value is not None)
