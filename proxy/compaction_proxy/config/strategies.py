"""The sections of `compaction.strategies`: every field of every strategy, its default taken from the row."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from compaction_proxy.config.row_fields import own
from compaction_proxy.config.types import STRICT, Number, Percent, Positive, Seconds, no_boolean
from compaction_proxy.core.strategies import (
    ANCHORED,
    CHAINED,
    FULL,
    ITERATIONS,
    PRUNE,
    SELECTIVE,
    SPLIT,
    StandInRole,
)


def _tag(tag: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tag):
        raise ValueError("a tag holds letters, digits, - and _ only")
    return tag


Tag = Annotated[str, AfterValidator(_tag)]
Take = Literal["until-under", "one"]
Target = Annotated[Percent, Field(gt=0, lt=100)]
Temperature = Annotated[float, BeforeValidator(no_boolean), Field(ge=0, le=2)] | None
WrittenBy = Literal["cheap", "same"]
Form = Literal["transcript", "aligned"]
PromptFile = Annotated[
    str | None, Field(description="File with this strategy's instructions; null: `summary.prompt_file`.")
]
Instructions = Annotated[str | None, Field(description="Text added to them; null: `summary.instructions`.")]


class AnchoredStrategy(BaseModel):
    """It masks and caps tool results, and freezes a record of each round; the ledger quotes the user."""

    model_config = STRICT
    percent: Percent = own(ANCHORED, "percent")
    soft_percent: Percent = own(ANCHORED, "soft_percent")
    hard_percent: Percent = own(ANCHORED, "hard_percent")
    target_percent: Target = own(ANCHORED, "target_percent")
    keep_messages: Number = own(ANCHORED, "keep_messages")
    tail_tokens: Positive = own(ANCHORED, "tail_tokens")
    tail_percent: Percent = own(ANCHORED, "tail_percent")
    keep_tool_results: Number = own(ANCHORED, "keep_tool_results")
    task_tokens: Positive = own(ANCHORED, "task_tokens")
    task_percent: Percent = own(ANCHORED, "task_percent")
    ledger_tokens: Positive = own(ANCHORED, "ledger_tokens")
    ledger_percent: Percent = own(ANCHORED, "ledger_percent")
    cap_tokens: Positive = own(ANCHORED, "cap_tokens")
    cap_percent: Percent = own(ANCHORED, "cap_percent")
    huge_percent: Percent = own(ANCHORED, "huge_percent")
    rounds: Positive = own(ANCHORED, "rounds")
    chain_percent: Percent = own(ANCHORED, "chain_percent")
    system_reserve_tokens: Number = own(ANCHORED, "system_reserve_tokens")
    output_reserve_tokens: Number = own(ANCHORED, "output_reserve_tokens")
    safety_tokens: Number = own(ANCHORED, "safety_tokens")
    summary_percent: Percent = own(ANCHORED, "summary_percent")
    summary_least_tokens: Positive = own(ANCHORED, "summary_least_tokens")
    summary_tokens: Positive = own(ANCHORED, "summary_tokens")
    summary_max_tokens: Positive = own(ANCHORED, "summary_max_tokens")
    temperature: Temperature = own(ANCHORED, "temperature")
    tool_characters: Positive = own(ANCHORED, "tool_characters")
    message_characters: Positive = own(ANCHORED, "message_characters")
    summary_model: WrittenBy = own(ANCHORED, "summary_model")
    summary_input: Form = own(ANCHORED, "summary_input")
    stand_in_role: StandInRole = own(ANCHORED, "stand_in_role")
    max_block_s: Seconds | None = own(ANCHORED, "max_block_s")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class FullStrategy(BaseModel):
    """One summary of everything, and the latest request of the user."""

    model_config = STRICT
    tokens: Number = own(FULL, "tokens")
    keep_messages: Number = own(FULL, "keep_messages")
    system_reserve_tokens: Number = own(FULL, "system_reserve_tokens")
    output_reserve_tokens: Number = own(FULL, "output_reserve_tokens")
    safety_tokens: Number = own(FULL, "safety_tokens")
    summary_tokens: Positive = own(FULL, "summary_tokens")
    summary_max_tokens: Positive = own(FULL, "summary_max_tokens")
    temperature: Temperature = own(FULL, "temperature")
    tool_characters: Positive = own(FULL, "tool_characters")
    message_characters: Positive = own(FULL, "message_characters")
    summary_model: WrittenBy = own(FULL, "summary_model")
    summary_input: Form = own(FULL, "summary_input")
    stand_in_role: StandInRole = own(FULL, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class SelectiveStrategy(BaseModel):
    """Runs of assistant messages and tool results, the earliest first; what users say stays."""

    model_config = STRICT
    tokens: Number = own(SELECTIVE, "tokens")
    messages: Number | None = own(SELECTIVE, "messages")
    turns: Number | None = own(SELECTIVE, "turns")
    keep_messages: Number = own(SELECTIVE, "keep_messages")
    take: Take = own(SELECTIVE, "take")
    tag: Tag = own(SELECTIVE, "tag")
    system_reserve_tokens: Number = own(SELECTIVE, "system_reserve_tokens")
    output_reserve_tokens: Number = own(SELECTIVE, "output_reserve_tokens")
    safety_tokens: Number = own(SELECTIVE, "safety_tokens")
    summary_tokens: Positive = own(SELECTIVE, "summary_tokens")
    summary_max_tokens: Positive = own(SELECTIVE, "summary_max_tokens")
    temperature: Temperature = own(SELECTIVE, "temperature")
    tool_characters: Positive = own(SELECTIVE, "tool_characters")
    message_characters: Positive = own(SELECTIVE, "message_characters")
    summary_model: WrittenBy = own(SELECTIVE, "summary_model")
    summary_input: Form = own(SELECTIVE, "summary_input")
    stand_in_role: StandInRole = own(SELECTIVE, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class SplitStrategy(BaseModel):
    """Everything before a point that is found from the end."""

    model_config = STRICT
    percent_of_window: Percent = own(SPLIT, "percent_of_window")
    keep_messages: Number = own(SPLIT, "keep_messages")
    target_tokens: Positive | None = own(SPLIT, "target_tokens")
    system_reserve_tokens: Number = own(SPLIT, "system_reserve_tokens")
    output_reserve_tokens: Number = own(SPLIT, "output_reserve_tokens")
    safety_tokens: Number = own(SPLIT, "safety_tokens")
    summary_tokens: Positive = own(SPLIT, "summary_tokens")
    summary_max_tokens: Positive = own(SPLIT, "summary_max_tokens")
    temperature: Temperature = own(SPLIT, "temperature")
    tool_characters: Positive = own(SPLIT, "tool_characters")
    message_characters: Positive = own(SPLIT, "message_characters")
    summary_model: WrittenBy = own(SPLIT, "summary_model")
    summary_input: Form = own(SPLIT, "summary_input")
    stand_in_role: StandInRole = own(SPLIT, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class PruneStrategy(BaseModel):
    """The oldest messages go; nothing stands in for them."""

    model_config = STRICT
    percent_of_window: Percent = own(PRUNE, "percent_of_window")
    keep_messages: Number = own(PRUNE, "keep_messages")
    system_reserve_tokens: Number = own(PRUNE, "system_reserve_tokens")
    output_reserve_tokens: Number = own(PRUNE, "output_reserve_tokens")
    safety_tokens: Number = own(PRUNE, "safety_tokens")


class IterationsStrategy(BaseModel):
    """Everything before the newest iterations, every few of them."""

    model_config = STRICT
    iterations: Number = own(ITERATIONS, "iterations")
    tokens: Number = own(ITERATIONS, "tokens")
    keep_iterations: Number = own(ITERATIONS, "keep_iterations")
    system_reserve_tokens: Number = own(ITERATIONS, "system_reserve_tokens")
    output_reserve_tokens: Number = own(ITERATIONS, "output_reserve_tokens")
    safety_tokens: Number = own(ITERATIONS, "safety_tokens")
    summary_tokens: Positive = own(ITERATIONS, "summary_tokens")
    summary_max_tokens: Positive = own(ITERATIONS, "summary_max_tokens")
    temperature: Temperature = own(ITERATIONS, "temperature")
    tool_characters: Positive = own(ITERATIONS, "tool_characters")
    message_characters: Positive = own(ITERATIONS, "message_characters")
    summary_model: WrittenBy = own(ITERATIONS, "summary_model")
    summary_input: Form = own(ITERATIONS, "summary_input")
    stand_in_role: StandInRole = own(ITERATIONS, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class ChainedStrategy(BaseModel):
    """One summary, which each round integrates and extends."""

    model_config = STRICT
    percent: Percent = own(CHAINED, "percent")
    keep_messages: Number = own(CHAINED, "keep_messages")
    system_reserve_tokens: Number = own(CHAINED, "system_reserve_tokens")
    output_reserve_tokens: Number = own(CHAINED, "output_reserve_tokens")
    safety_tokens: Number = own(CHAINED, "safety_tokens")
    summary_tokens: Positive = own(CHAINED, "summary_tokens")
    summary_max_tokens: Positive = own(CHAINED, "summary_max_tokens")
    task_tokens: Positive = own(CHAINED, "task_tokens")
    temperature: Temperature = own(CHAINED, "temperature")
    tool_characters: Positive = own(CHAINED, "tool_characters")
    message_characters: Positive = own(CHAINED, "message_characters")
    summary_model: WrittenBy = own(CHAINED, "summary_model")
    summary_input: Form = own(CHAINED, "summary_input")
    stand_in_role: StandInRole = own(CHAINED, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class StrategiesSection(BaseModel):
    """Every field of every strategy."""

    model_config = STRICT
    anchored: AnchoredStrategy = AnchoredStrategy()
    full: FullStrategy = FullStrategy()
    selective: SelectiveStrategy = SelectiveStrategy()
    split: SplitStrategy = SplitStrategy()
    prune: PruneStrategy = PruneStrategy()
    iterations: IterationsStrategy = IterationsStrategy()
    chained: ChainedStrategy = ChainedStrategy()
