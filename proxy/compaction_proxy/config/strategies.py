"""The sections of `compaction.strategies`: every field of every strategy, its default taken from the row."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from compaction_proxy.config.types import STRICT, Number, Percent, Positive, Seconds, no_boolean
from compaction_proxy.core.strategies import (
    ANCHORED,
    CHAINED,
    FULL,
    ITERATIONS,
    PRUNE,
    SELECTIVE,
    SPLIT,
    Frame,
    Keep,
    Limit,
    Policy,
    StandInRole,
    SummaryShape,
)
from compaction_proxy.core.trigger import Row

Rows = tuple[Row, ...]


def _as_it_is(held: Any) -> Any:  # noqa: ANN401 - a field may be anything
    return held


def _instead(value: Any, _: Any) -> Any:  # noqa: ANN401 - likewise
    return value


@dataclass(frozen=True, slots=True)
class RowField:
    """One field.

    Attributes:
        place: Attributes down to it, dotted; empty: it is about the whole row.
        meaning: What it means, with its unit.
        shown: From what stands in the place to the value that users see.
        stored: From the value that they set, and what stands in the place, to what shall stand there.
    """

    place: str
    meaning: str
    shown: Callable[[Any], Any] = _as_it_is
    stored: Callable[[Any, Any], Any] = _instead


def _percent(place: str, meaning: str) -> RowField:
    """A share of 0..1 that users see in percent."""
    return RowField(place, meaning, lambda share: round(share * 100, 6), lambda percent, _: percent / 100)


def _trigger(name: str, meaning: str) -> RowField:
    """A row of the trigger that names nothing but this; rows are alternatives."""

    def shown(rows: Rows) -> object:
        return next((value for row in rows if (value := getattr(row, name)) is not None), None)

    def stored(value: float | None, rows: Rows) -> Rows:
        threshold: dict[str, Any] = {name: value}
        ours = () if value is None else (Row(**threshold),)
        at = next((k for k, row in enumerate(rows) if getattr(row, name) is not None), len(rows))
        return (*rows[:at], *ours, *rows[at + 1 :])

    return RowField("trigger", meaning, shown, stored)


def _kept_messages(number: int, row: Policy) -> Policy:
    """A row that leaves lists of one message more than it keeps alone goes on doing so."""
    tied = row.least_messages == row.keep.messages + 1
    least = number + 1 if tied else row.least_messages
    return replace(row, keep=replace(row.keep, messages=number), least_messages=least)


def _kept_iterations(number: int, keep: Keep) -> Keep:
    """An iteration is two messages at least: what was said, and the answer to it."""
    return replace(keep, iterations=number, messages=2 * number)


def _tail(tokens: int | None, tail: Limit | None) -> Limit:
    return Limit(tokens, tail.share if tail else 1.0)


def _target(tokens: int | None, target: Limit | None) -> Limit | None:
    return target if tokens is None else Limit(tokens, 1.0)


def _asked(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """What is allowed grows along in proportion."""
    if shape is None:
        return None
    allowed = max(shape.max_tokens, tokens * shape.max_tokens // shape.tokens)
    return replace(shape, tokens=tokens, max_tokens=allowed, least_tokens=min(shape.least_tokens, tokens))


def _allowed(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """Never is more asked for than allowed."""
    if shape is None:
        return None
    asked = min(shape.tokens, tokens)
    return replace(shape, tokens=asked, max_tokens=tokens, least_tokens=min(shape.least_tokens, asked))


def _tagged(tag: str, frame: Frame) -> Frame:
    return replace(frame, opening=f"<{tag}>\n", closing=f"\n</{tag}>")


FIELDS: Mapping[str, RowField] = MappingProxyType(
    {
        "tokens": _trigger("tokens", "Trigger, in tokens of the conversation; 0 switches it off."),
        "percent": _trigger(
            "percent", "Trigger, in percent of the window without reserves; 0 switches it off."
        ),
        "percent_of_window": _trigger(
            "percent_of_window", "Trigger, in percent of the whole window; 0 switches it off."
        ),
        "messages": _trigger(
            "messages", "Further trigger: messages gained since the last round; null: none."
        ),
        "turns": _trigger("turns", "Further trigger: user messages gained since the last round; null: none."),
        "iterations": _trigger(
            "iterations", "Trigger, in assistant messages gained since the last round; 0 switches it off."
        ),
        "soft_percent": _percent(
            "soft_share", "Percent of the trigger from which on work is done ahead of need; 0: never."
        ),
        "hard_percent": RowField(
            "hard_percent", "Percent of the usable window above which rounds are made again after an undo."
        ),
        "target_percent": _percent("target.share", "What a round shrinks to, in percent of the trigger."),
        "target_tokens": RowField(
            "target",
            "What a round shrinks to, in tokens; null: half of the trigger.",
            lambda target: target.tokens if target else None,
            _target,
        ),
        "keep_messages": RowField(
            "", "Newest messages that stay.", lambda row: row.keep.messages, _kept_messages
        ),
        "keep_iterations": RowField(
            "keep",
            "Newest assistant messages that stay, with all that follows them.",
            lambda keep: keep.iterations,
            _kept_iterations,
        ),
        "keep_tool_results": RowField(
            "keep.tool_results", "Newest tool results that are never masked; 0: those of the tail."
        ),
        "tail_tokens": RowField(
            "keep.tail",
            "Tokens of the newest messages that stay, or `tail_percent` where that is less.",
            lambda tail: tail.tokens if tail else None,
            _tail,
        ),
        "tail_percent": _percent("keep.tail.share", "The same in percent of the trigger."),
        "task_tokens": RowField(
            "task_tokens.tokens",
            "Tokens of the task that are quoted verbatim; a longer one keeps its head and tail.",
        ),
        "task_percent": _percent(
            "task_tokens.share", "The same in percent of the trigger; the smaller counts."
        ),
        "ledger_tokens": RowField(
            "layout.ledger.tokens", "Tokens of the ledger: rules, requests, facts and user text of what went."
        ),
        "ledger_percent": _percent(
            "layout.ledger.share", "The same in percent of the trigger; the smaller counts."
        ),
        "cap_tokens": RowField("layout.cap.tokens", "Tokens that are left of a huge tool result."),
        "cap_percent": _percent(
            "layout.cap.share", "The same in percent of the trigger; the smaller counts."
        ),
        "huge_percent": _percent(
            "layout.huge_share",
            "Percent of usable above which a new result is huge, and capped where no round makes room.",
        ),
        "rounds": RowField(
            "layout.rounds", "Rounds that stay as they are before they are written anew as one."
        ),
        "chain_percent": _percent(
            "layout.chain_share", "Percent of the target that rounds may take before they are written anew."
        ),
        "summary_percent": _percent(
            "summary.share", "Size that a summary is asked to have, in percent of what is removed."
        ),
        "summary_least_tokens": RowField("summary.least_tokens", "The least of that, in tokens."),
        "summary_tokens": RowField(
            "summary", "Tokens that a summary is asked to stay under.", lambda shape: shape.tokens, _asked
        ),
        "summary_max_tokens": RowField(
            "summary", "Tokens that a summary may take.", lambda shape: shape.max_tokens, _allowed
        ),
        "summary_model": RowField(
            "summary.model",
            "Who writes it where `summary.model` is null: a `cheap` model, or the `same` as the request's.",
        ),
        "summary_input": RowField(
            "summary.form",
            "`transcript`: fenced text; `aligned`: the very conversation, the request behind it.",
        ),
        "temperature": RowField(
            "summary.temperature", "Sampling temperature of the summary call, 0 to 2; null: the provider's."
        ),
        "tool_characters": RowField(
            "summary.tool_characters", "Characters of a tool result that the summary model sees."
        ),
        "message_characters": RowField(
            "summary.message_characters", "Characters of any other message that the summary model sees."
        ),
        "stand_in_role": RowField(
            "stand_in_role", "Role of the message that stands in for what was removed."
        ),
        "max_block_s": RowField(
            "max_block_s", "Longest time, in seconds, that a request waits; null: `summary.timeout_s`."
        ),
        "take": RowField(
            "one_run",
            "`until-under`: as many runs as bring the request under the trigger; `one`: one a request.",
            lambda one: "one" if one else "until-under",
            lambda take, _: take == "one",
        ),
        "tag": RowField(
            "frame",
            "Tag around a summary: letters, digits, - and _.",
            lambda frame: frame.opening[1:-2],
            _tagged,
        ),
        "system_reserve_tokens": RowField("reserves.system", "Tokens set aside for system prompt and tools."),
        "output_reserve_tokens": RowField(
            "reserves.output", "Tokens set aside for the answer; the request's own `max_tokens` where larger."
        ),
        "safety_tokens": RowField(
            "reserves.safety",
            "Tokens set aside for errors of the estimate; all reserves together take a quarter at most.",
        ),
    }
)


def _steps(place: str) -> list[str]:
    return place.split(".") if place else []


def shown(row: Policy, name: str) -> Any:  # noqa: ANN401 - a field may be anything
    """The value of a row's field as users see it; a whole number without its `.0`."""
    held: Any = row
    for step in _steps(FIELDS[name].place):
        held = getattr(held, step)
    value = FIELDS[name].shown(held)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def own(row: Policy, name: str) -> Any:  # noqa: ANN401 - it takes the type of the key that it is assigned to
    """A key of a section: the row's own value is its default."""
    return Field(default=shown(row, name), description=FIELDS[name].meaning)


def changed(row: Policy, name: str, value: object) -> Policy:
    """The row with one field set; one that has no such part (`prune` makes no summary) is left as it is."""
    field = FIELDS[name]
    made: Policy = _put(row, _steps(field.place), lambda held: field.stored(value, held))
    return made


def _put(record: Any, steps: list[str], store: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - parts of a row
    if not steps:
        return store(record)
    first, *rest = steps
    held = getattr(record, first)
    if held is None and rest:
        return record
    return replace(record, **{first: _put(held, rest, store)})


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
