"""The sections of `compaction.strategies`: every field of each strategy, with its built-in default.

The built-in numbers and rules of a strategy are a `Policy` in `core.strategies`. Each field of a section maps
to one part of it. Fields of the same name in several sections share one entry of `POLICY_FIELDS`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from compaction_proxy.config.types import STRICT, Number, Percent, Positive, Seconds, reject_boolean
from compaction_proxy.core.strategies import (
    ANCHORED,
    CHAINED,
    FULL,
    ITERATIONS,
    PRUNE,
    SELECTIVE,
    SPLIT,
    KeepRules,
    Policy,
    ScaledLimit,
    StandInRole,
    SummaryFrame,
    SummaryShape,
)
from compaction_proxy.core.trigger import TriggerRule

Rows = tuple[TriggerRule, ...]


def _return_unchanged(value: Any) -> Any:  # noqa: ANN401 - a field may be of any type
    return value


def _replace_value(value: Any, _: Any) -> Any:  # noqa: ANN401 - a field may be of any type
    return value


@dataclass(frozen=True, slots=True)
class PolicyField:
    """A configuration key that sets one part of a strategy's `Policy`.

    Attributes:
        attribute_path: Dotted path of attributes that leads to the part; empty for the whole policy.
        description: Description of the key, with its unit.
        to_setting: Converts the part to the value that users see.
        from_setting: Converts the value that users set, and the current part, to the new part.
    """

    attribute_path: str
    description: str
    to_setting: Callable[[Any], Any] = _return_unchanged
    from_setting: Callable[[Any, Any], Any] = _replace_value


def _build_percent_field(attribute_path: str, description: str) -> PolicyField:
    """Builds the field for a share from 0 to 1, which users set in percent."""
    return PolicyField(
        attribute_path, description, lambda share: round(share * 100, 6), lambda percent, _: percent / 100
    )


def _build_trigger_field(name: str, description: str) -> PolicyField:
    """Builds the field for one threshold of the trigger, such as `tokens`.

    The value is stored as a `TriggerRule` without other thresholds, so that it alone starts a compaction.
    """

    def read_threshold(rows: Rows) -> object:
        return next((value for row in rows if (value := getattr(row, name)) is not None), None)

    def write_threshold(value: float | None, rows: Rows) -> Rows:
        threshold: dict[str, Any] = {name: value}
        new_rows = () if value is None else (TriggerRule(**threshold),)
        position = next((k for k, row in enumerate(rows) if getattr(row, name) is not None), len(rows))
        return (*rows[:position], *new_rows, *rows[position + 1 :])

    return PolicyField("trigger", description, read_threshold, write_threshold)


def _set_keep_messages(message_count: int, row: Policy) -> Policy:
    """Sets the number of newest messages to keep.

    If the strategy's `least_messages` is one more than the number of messages that it keeps, it stays so.
    """
    tied = row.least_messages == row.keep.messages + 1
    least_messages = message_count + 1 if tied else row.least_messages
    return replace(row, keep=replace(row.keep, messages=message_count), least_messages=least_messages)


def _set_keep_iterations(iteration_count: int, keep: KeepRules) -> KeepRules:
    """Sets the number of iterations to keep, and the number of messages to keep to two for each iteration.

    An iteration usually has at least two messages: a tool call and its result.
    """
    return replace(keep, iterations=iteration_count, messages=2 * iteration_count)


def _set_tail_tokens(tokens: int | None, tail: ScaledLimit | None) -> ScaledLimit:
    return ScaledLimit(tokens, tail.share if tail else 1.0)


def _set_target_tokens(tokens: int | None, target: ScaledLimit | None) -> ScaledLimit | None:
    return target if tokens is None else ScaledLimit(tokens, 1.0)


def _set_summary_tokens(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """Sets the requested size of a summary. The allowed size grows in proportion, but never shrinks."""
    if shape is None:
        return None
    allowed = max(shape.max_tokens, tokens * shape.max_tokens // shape.tokens)
    return replace(shape, tokens=tokens, max_tokens=allowed, least_tokens=min(shape.least_tokens, tokens))


def _set_summary_max_tokens(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """Sets the allowed size of a summary, and lowers the requested size to it if that is larger."""
    if shape is None:
        return None
    requested = min(shape.tokens, tokens)
    return replace(
        shape, tokens=requested, max_tokens=tokens, least_tokens=min(shape.least_tokens, requested)
    )


def _set_tag(tag: str, frame: SummaryFrame) -> SummaryFrame:
    return replace(frame, opening=f"<{tag}>\n", closing=f"\n</{tag}>")


POLICY_FIELDS: Mapping[str, PolicyField] = MappingProxyType(
    {
        "tokens": _build_trigger_field(
            "tokens", "Trigger, in tokens of the conversation; 0 switches it off."
        ),
        "percent": _build_trigger_field(
            "percent", "Trigger, in percent of the window without reserves; 0 switches it off."
        ),
        "percent_of_window": _build_trigger_field(
            "percent_of_window", "Trigger, in percent of the whole window; 0 switches it off."
        ),
        "messages": _build_trigger_field(
            "messages", "Further trigger: messages gained since the last round; null: none."
        ),
        "turns": _build_trigger_field(
            "turns", "Further trigger: user messages gained since the last round; null: none."
        ),
        "iterations": _build_trigger_field(
            "iterations", "Trigger, in assistant messages gained since the last round; 0 switches it off."
        ),
        "soft_percent": _build_percent_field(
            "soft_share", "Percent of the trigger from which on work is done ahead of need; 0: never."
        ),
        "hard_percent": PolicyField(
            "hard_percent", "Percent of the usable window above which rounds are made again after an undo."
        ),
        "target_percent": _build_percent_field(
            "target.share", "What a round shrinks to, in percent of the trigger."
        ),
        "target_tokens": PolicyField(
            "target",
            "What a round shrinks to, in tokens; null: half of the trigger.",
            lambda target: target.tokens if target else None,
            _set_target_tokens,
        ),
        "keep_messages": PolicyField(
            "", "Newest messages that stay.", lambda row: row.keep.messages, _set_keep_messages
        ),
        "keep_iterations": PolicyField(
            "keep",
            "Newest assistant messages that stay, with all that follows them.",
            lambda keep: keep.iterations,
            _set_keep_iterations,
        ),
        "keep_tool_results": PolicyField(
            "keep.tool_results", "Newest tool results that are never masked; 0: those of the tail."
        ),
        "tail_tokens": PolicyField(
            "keep.tail",
            "Tokens of the newest messages that stay, or `tail_percent` where that is less.",
            lambda tail: tail.tokens if tail else None,
            _set_tail_tokens,
        ),
        "tail_percent": _build_percent_field("keep.tail.share", "The same in percent of the trigger."),
        "task_tokens": PolicyField(
            "task_tokens.tokens",
            "Tokens of the task that are quoted verbatim; a longer one keeps its head and tail.",
        ),
        "task_percent": _build_percent_field(
            "task_tokens.share", "The same in percent of the trigger; the smaller counts."
        ),
        "ledger_tokens": PolicyField(
            "layout.ledger.tokens", "Tokens of the ledger: rules, requests, facts and user text of what went."
        ),
        "ledger_percent": _build_percent_field(
            "layout.ledger.share", "The same in percent of the trigger; the smaller counts."
        ),
        "cap_tokens": PolicyField("layout.cap.tokens", "Tokens that are left of a huge tool result."),
        "cap_percent": _build_percent_field(
            "layout.cap.share", "The same in percent of the trigger; the smaller counts."
        ),
        "huge_percent": _build_percent_field(
            "layout.huge_share",
            "Percent of usable above which a new result is huge, and capped where no round makes room.",
        ),
        "rounds": PolicyField(
            "layout.rounds", "Rounds that stay as they are before they are written anew as one."
        ),
        "chain_percent": _build_percent_field(
            "layout.chain_share", "Percent of the target that rounds may take before they are written anew."
        ),
        "summary_percent": _build_percent_field(
            "summary.share", "Size that a summary is asked to have, in percent of what is removed."
        ),
        "summary_least_tokens": PolicyField("summary.least_tokens", "The least of that, in tokens."),
        "summary_tokens": PolicyField(
            "summary",
            "Tokens that a summary is asked to stay under.",
            lambda shape: shape.tokens,
            _set_summary_tokens,
        ),
        "summary_max_tokens": PolicyField(
            "summary",
            "Tokens that a summary may take.",
            lambda shape: shape.max_tokens,
            _set_summary_max_tokens,
        ),
        "summary_model": PolicyField(
            "summary.model",
            "Who writes it where `summary.model` is null: a `cheap` model, or the `same` as the request's.",
        ),
        "summary_input": PolicyField(
            "summary.form",
            "`transcript`: fenced text; `aligned`: the very conversation, the request behind it.",
        ),
        "temperature": PolicyField(
            "summary.temperature", "Sampling temperature of the summary call, 0 to 2; null: the provider's."
        ),
        "tool_characters": PolicyField(
            "summary.tool_characters", "Characters of a tool result that the summary model sees."
        ),
        "message_characters": PolicyField(
            "summary.message_characters", "Characters of any other message that the summary model sees."
        ),
        "stand_in_role": PolicyField(
            "stand_in_role", "Role of the message that stands in for what was removed."
        ),
        "max_block_s": PolicyField(
            "max_block_s", "Longest time, in seconds, that a request waits; null: `summary.timeout_s`."
        ),
        "take": PolicyField(
            "one_run",
            "`until-under`: as many runs as bring the request under the trigger; `one`: one a request.",
            lambda one: "one" if one else "until-under",
            lambda take, _: take == "one",
        ),
        "tag": PolicyField(
            "frame",
            "Tag around a summary: letters, digits, - and _.",
            lambda frame: frame.opening[1:-2],
            _set_tag,
        ),
        "system_reserve_tokens": PolicyField(
            "reserves.system", "Tokens set aside for system prompt and tools."
        ),
        "output_reserve_tokens": PolicyField(
            "reserves.output", "Tokens set aside for the answer; the request's own `max_tokens` where larger."
        ),
        "safety_tokens": PolicyField(
            "reserves.safety",
            "Tokens set aside for errors of the estimate; all reserves together take a quarter at most.",
        ),
    }
)


def _split_path(attribute_path: str) -> list[str]:
    return attribute_path.split(".") if attribute_path else []


def get_policy_setting(row: Policy, name: str) -> Any:  # noqa: ANN401 - a field may be of any type
    """Returns the value of a policy's field in the unit of the configuration. A whole number has no `.0`."""
    part: Any = row
    for step in _split_path(POLICY_FIELDS[name].attribute_path):
        part = getattr(part, step)
    value = POLICY_FIELDS[name].to_setting(part)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def build_setting_field(row: Policy, name: str) -> Any:  # noqa: ANN401 - it takes the type of the key that it is assigned to
    """Builds the pydantic field for a key of a section. Its default is the value in the policy `row`."""
    return Field(default=get_policy_setting(row, name), description=POLICY_FIELDS[name].description)


def replace_policy_field(row: Policy, name: str, value: object) -> Policy:
    """Returns the policy `row` with one field set.

    A policy without the part that holds the field is returned unchanged. For example, `prune` has no summary.
    """
    field = POLICY_FIELDS[name]
    changed: Policy = _replace_part(
        row, _split_path(field.attribute_path), lambda old: field.from_setting(value, old)
    )
    return changed


def _replace_part(record: Any, steps: list[str], build_part: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a record is any part of a row
    if not steps:
        return build_part(record)
    first, *rest = steps
    part = getattr(record, first)
    if part is None and rest:
        return record
    return replace(record, **{first: _replace_part(part, rest, build_part)})


def _check_tag(tag: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tag):
        raise ValueError("a tag holds letters, digits, - and _ only")
    return tag


Tag = Annotated[str, AfterValidator(_check_tag)]
Take = Literal["until-under", "one"]
Target = Annotated[Percent, Field(gt=0, lt=100)]
Temperature = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=2)] | None
WrittenBy = Literal["cheap", "same"]
Form = Literal["transcript", "aligned"]
PromptFile = Annotated[
    str | None, Field(description="File with this strategy's instructions; null: `summary.prompt_file`.")
]
Instructions = Annotated[str | None, Field(description="Text added to them; null: `summary.instructions`.")]


class AnchoredStrategy(BaseModel):
    """Keys of `anchored`, which masks and caps tool results, and keeps a record of each compaction."""

    model_config = STRICT
    percent: Percent = build_setting_field(ANCHORED, "percent")
    soft_percent: Percent = build_setting_field(ANCHORED, "soft_percent")
    hard_percent: Percent = build_setting_field(ANCHORED, "hard_percent")
    target_percent: Target = build_setting_field(ANCHORED, "target_percent")
    keep_messages: Number = build_setting_field(ANCHORED, "keep_messages")
    tail_tokens: Positive = build_setting_field(ANCHORED, "tail_tokens")
    tail_percent: Percent = build_setting_field(ANCHORED, "tail_percent")
    keep_tool_results: Number = build_setting_field(ANCHORED, "keep_tool_results")
    task_tokens: Positive = build_setting_field(ANCHORED, "task_tokens")
    task_percent: Percent = build_setting_field(ANCHORED, "task_percent")
    ledger_tokens: Positive = build_setting_field(ANCHORED, "ledger_tokens")
    ledger_percent: Percent = build_setting_field(ANCHORED, "ledger_percent")
    cap_tokens: Positive = build_setting_field(ANCHORED, "cap_tokens")
    cap_percent: Percent = build_setting_field(ANCHORED, "cap_percent")
    huge_percent: Percent = build_setting_field(ANCHORED, "huge_percent")
    rounds: Positive = build_setting_field(ANCHORED, "rounds")
    chain_percent: Percent = build_setting_field(ANCHORED, "chain_percent")
    system_reserve_tokens: Number = build_setting_field(ANCHORED, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(ANCHORED, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(ANCHORED, "safety_tokens")
    summary_percent: Percent = build_setting_field(ANCHORED, "summary_percent")
    summary_least_tokens: Positive = build_setting_field(ANCHORED, "summary_least_tokens")
    summary_tokens: Positive = build_setting_field(ANCHORED, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(ANCHORED, "summary_max_tokens")
    temperature: Temperature = build_setting_field(ANCHORED, "temperature")
    tool_characters: Positive = build_setting_field(ANCHORED, "tool_characters")
    message_characters: Positive = build_setting_field(ANCHORED, "message_characters")
    summary_model: WrittenBy = build_setting_field(ANCHORED, "summary_model")
    summary_input: Form = build_setting_field(ANCHORED, "summary_input")
    stand_in_role: StandInRole = build_setting_field(ANCHORED, "stand_in_role")
    max_block_s: Seconds | None = build_setting_field(ANCHORED, "max_block_s")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class FullStrategy(BaseModel):
    """Keys of `full`, which replaces everything by one summary and the latest request of the user."""

    model_config = STRICT
    tokens: Number = build_setting_field(FULL, "tokens")
    keep_messages: Number = build_setting_field(FULL, "keep_messages")
    system_reserve_tokens: Number = build_setting_field(FULL, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(FULL, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(FULL, "safety_tokens")
    summary_tokens: Positive = build_setting_field(FULL, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(FULL, "summary_max_tokens")
    temperature: Temperature = build_setting_field(FULL, "temperature")
    tool_characters: Positive = build_setting_field(FULL, "tool_characters")
    message_characters: Positive = build_setting_field(FULL, "message_characters")
    summary_model: WrittenBy = build_setting_field(FULL, "summary_model")
    summary_input: Form = build_setting_field(FULL, "summary_input")
    stand_in_role: StandInRole = build_setting_field(FULL, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class SelectiveStrategy(BaseModel):
    """Keys of `selective`, which summarises runs of messages without user messages, the earliest first."""

    model_config = STRICT
    tokens: Number = build_setting_field(SELECTIVE, "tokens")
    messages: Number | None = build_setting_field(SELECTIVE, "messages")
    turns: Number | None = build_setting_field(SELECTIVE, "turns")
    keep_messages: Number = build_setting_field(SELECTIVE, "keep_messages")
    take: Take = build_setting_field(SELECTIVE, "take")
    tag: Tag = build_setting_field(SELECTIVE, "tag")
    system_reserve_tokens: Number = build_setting_field(SELECTIVE, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(SELECTIVE, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(SELECTIVE, "safety_tokens")
    summary_tokens: Positive = build_setting_field(SELECTIVE, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(SELECTIVE, "summary_max_tokens")
    temperature: Temperature = build_setting_field(SELECTIVE, "temperature")
    tool_characters: Positive = build_setting_field(SELECTIVE, "tool_characters")
    message_characters: Positive = build_setting_field(SELECTIVE, "message_characters")
    summary_model: WrittenBy = build_setting_field(SELECTIVE, "summary_model")
    summary_input: Form = build_setting_field(SELECTIVE, "summary_input")
    stand_in_role: StandInRole = build_setting_field(SELECTIVE, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class SplitStrategy(BaseModel):
    """Keys of `split`, which summarises all messages before the newest ones."""

    model_config = STRICT
    percent_of_window: Percent = build_setting_field(SPLIT, "percent_of_window")
    keep_messages: Number = build_setting_field(SPLIT, "keep_messages")
    target_tokens: Positive | None = build_setting_field(SPLIT, "target_tokens")
    system_reserve_tokens: Number = build_setting_field(SPLIT, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(SPLIT, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(SPLIT, "safety_tokens")
    summary_tokens: Positive = build_setting_field(SPLIT, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(SPLIT, "summary_max_tokens")
    temperature: Temperature = build_setting_field(SPLIT, "temperature")
    tool_characters: Positive = build_setting_field(SPLIT, "tool_characters")
    message_characters: Positive = build_setting_field(SPLIT, "message_characters")
    summary_model: WrittenBy = build_setting_field(SPLIT, "summary_model")
    summary_input: Form = build_setting_field(SPLIT, "summary_input")
    stand_in_role: StandInRole = build_setting_field(SPLIT, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class PruneStrategy(BaseModel):
    """Keys of `prune`, which removes the oldest messages without a replacement."""

    model_config = STRICT
    percent_of_window: Percent = build_setting_field(PRUNE, "percent_of_window")
    keep_messages: Number = build_setting_field(PRUNE, "keep_messages")
    system_reserve_tokens: Number = build_setting_field(PRUNE, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(PRUNE, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(PRUNE, "safety_tokens")


class IterationsStrategy(BaseModel):
    """Keys of `iterations`, which every few iterations summarises all but the newest ones."""

    model_config = STRICT
    iterations: Number = build_setting_field(ITERATIONS, "iterations")
    tokens: Number = build_setting_field(ITERATIONS, "tokens")
    keep_iterations: Number = build_setting_field(ITERATIONS, "keep_iterations")
    system_reserve_tokens: Number = build_setting_field(ITERATIONS, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(ITERATIONS, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(ITERATIONS, "safety_tokens")
    summary_tokens: Positive = build_setting_field(ITERATIONS, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(ITERATIONS, "summary_max_tokens")
    temperature: Temperature = build_setting_field(ITERATIONS, "temperature")
    tool_characters: Positive = build_setting_field(ITERATIONS, "tool_characters")
    message_characters: Positive = build_setting_field(ITERATIONS, "message_characters")
    summary_model: WrittenBy = build_setting_field(ITERATIONS, "summary_model")
    summary_input: Form = build_setting_field(ITERATIONS, "summary_input")
    stand_in_role: StandInRole = build_setting_field(ITERATIONS, "stand_in_role")
    prompt_file: PromptFile = None
    instructions: Instructions = None


class ChainedStrategy(BaseModel):
    """Keys of `chained`, which keeps a single summary and extends it with each compaction."""

    model_config = STRICT
    percent: Percent = build_setting_field(CHAINED, "percent")
    keep_messages: Number = build_setting_field(CHAINED, "keep_messages")
    system_reserve_tokens: Number = build_setting_field(CHAINED, "system_reserve_tokens")
    output_reserve_tokens: Number = build_setting_field(CHAINED, "output_reserve_tokens")
    safety_tokens: Number = build_setting_field(CHAINED, "safety_tokens")
    summary_tokens: Positive = build_setting_field(CHAINED, "summary_tokens")
    summary_max_tokens: Positive = build_setting_field(CHAINED, "summary_max_tokens")
    task_tokens: Positive = build_setting_field(CHAINED, "task_tokens")
    temperature: Temperature = build_setting_field(CHAINED, "temperature")
    tool_characters: Positive = build_setting_field(CHAINED, "tool_characters")
    message_characters: Positive = build_setting_field(CHAINED, "message_characters")
    summary_model: WrittenBy = build_setting_field(CHAINED, "summary_model")
    summary_input: Form = build_setting_field(CHAINED, "summary_input")
    stand_in_role: StandInRole = build_setting_field(CHAINED, "stand_in_role")
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
