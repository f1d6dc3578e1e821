"""What the configuration makes of a strategy's row."""

from collections.abc import Iterator
from dataclasses import replace

from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.strategies import FIELDS, set_field
from compaction_proxy.core.strategies import ANCHORED, STRATEGIES, Policy
from compaction_proxy.core.trigger import TriggerRule


def build_policy(settings: ModelSettings, strategy: str | None = None) -> Policy:
    """A strategy's row with what the configuration changes of it.

    The strategy's own keys come first; a key for all strategies beats them where it is set.

    Args:
        settings: What is configured for the model.
        strategy: Name of the row that a request asked for; None: the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    compaction = settings.compaction
    policy = STRATEGIES[strategy or compaction.strategy]
    fields = getattr(compaction.strategies, policy.name)
    own = ((name, value) for name, value in fields if name in FIELDS and name in fields.model_fields_set)
    for name, value in (*own, *_list_shared_fields(settings)):
        policy = set_field(policy, name, value)
    if compaction.trigger is not None:
        policy = replace(policy, trigger=tuple(TriggerRule(**dict(row)) for row in compaction.trigger))
    if compaction.background is not None:
        ahead = policy.soft_share or ANCHORED.soft_share
        policy = replace(policy, soft_share=ahead if compaction.background else 0.0)
    if policy.summary and (fields.prompt_file or settings.summary.prompt_file):
        policy = replace(
            policy, summary=replace(policy.summary, sections=())
        )  # the user's prompt has its own
    return policy


def _list_shared_fields(settings: ModelSettings) -> Iterator[tuple[str, object]]:
    """The fields that a key for all strategies sets, whichever has them."""
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
