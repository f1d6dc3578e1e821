"""The sections of `compaction.strategies`: every field of each strategy, with its built-in default.

The built-in numbers and rules of a strategy are a `Policy` in `core.strategies`. Each field of a section maps
to one part of this policy. Fields of the same name in several sections share one entry of `POLICY_FIELDS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from compaction_proxy.config.types import (
    STRICT,
    Number,
    Percent,
    Positive,
    Seconds,
    reject_boolean,
    require_pattern,
)
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
        value_type: Type of the values that users set.
        attribute_path: Dotted path of attributes from the policy to the part that the key sets; empty for the
            whole policy.
        description: Description of the key, with its unit.
        to_setting: Converts the part to the value that users see.
        from_setting: Computes the new part from the value that users set and the current part.
    """

    value_type: Any
    attribute_path: str
    description: str
    to_setting: Callable[[Any], Any] = _return_unchanged
    from_setting: Callable[[Any, Any], Any] = _replace_value


def _build_percent_field(value_type: Any, attribute_path: str, description: str) -> PolicyField:  # noqa: ANN401
    """Builds the `PolicyField` for a share from 0 to 1, which users set in percent."""
    return PolicyField(
        value_type,
        attribute_path,
        description,
        lambda share: round(share * 100, 6),
        lambda percent, _: percent / 100,
    )


def _build_trigger_field(value_type: Any, name: str, description: str) -> PolicyField:  # noqa: ANN401
    """Builds the `PolicyField` for one threshold of the trigger, such as `tokens`.

    The value becomes a `TriggerRule` without other thresholds, so that reaching this threshold is enough to
    start a compaction. The new rule replaces the first rule that has this threshold. The value None only
    removes that first rule.
    """

    def read_threshold(rows: Rows) -> object:
        return next((value for row in rows if (value := getattr(row, name)) is not None), None)

    def write_threshold(value: float | None, rows: Rows) -> Rows:
        threshold: dict[str, Any] = {name: value}
        new_rows = () if value is None else (TriggerRule(**threshold),)
        position = next((k for k, row in enumerate(rows) if getattr(row, name) is not None), len(rows))
        return (*rows[:position], *new_rows, *rows[position + 1 :])

    return PolicyField(value_type, "trigger", description, read_threshold, write_threshold)


def _set_keep_messages(message_count: int, row: Policy) -> Policy:
    """Sets the number of newest messages to keep.

    `least_messages` is the number of messages up to which the strategy does not compact. If it is one more
    than the number of messages to keep, it remains one more.
    """
    tied = row.least_messages == row.keep.messages + 1
    least_messages = message_count + 1 if tied else row.least_messages
    return replace(row, keep=replace(row.keep, messages=message_count), least_messages=least_messages)


def _set_keep_iterations(iteration_count: int, keep: KeepRules) -> KeepRules:
    """Sets the number of iterations to keep. Also sets the number of messages to keep, to two per iteration.

    An iteration usually has at least two messages: a tool call and its result.
    """
    return replace(keep, iterations=iteration_count, messages=2 * iteration_count)


def _set_tail_tokens(tokens: int | None, tail: ScaledLimit | None) -> ScaledLimit:
    return ScaledLimit(tokens, tail.share if tail else 1.0)


def _set_target_tokens(tokens: int | None, target: ScaledLimit | None) -> ScaledLimit | None:
    return target if tokens is None else ScaledLimit(tokens, 1.0)


def _set_summary_tokens(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """Sets the requested size of a summary (`tokens`), in tokens.

    Raises the allowed size (`max_tokens`) by the same factor, but never lowers it. Lowers the smallest size
    (`least_tokens`) if it exceeds the requested size.
    """
    if shape is None:
        return None
    allowed = max(shape.max_tokens, tokens * shape.max_tokens // shape.tokens)
    return replace(shape, tokens=tokens, max_tokens=allowed, least_tokens=min(shape.least_tokens, tokens))


def _set_summary_max_tokens(tokens: int, shape: SummaryShape | None) -> SummaryShape | None:
    """Sets the allowed size of a summary (`max_tokens`), in tokens. Lowers other sizes that exceed it."""
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
            Number, "tokens", "Size of the conversation, in tokens, that starts a compaction. 0: off."
        ),
        "percent": _build_trigger_field(
            Percent, "percent", "Size that starts a compaction, as a percentage of the usable window. 0: off."
        ),
        "percent_of_window": _build_trigger_field(
            Percent,
            "percent_of_window",
            "Size that starts a compaction, as a percentage of the whole window. 0: off.",
        ),
        "messages": _build_trigger_field(
            Number | None, "messages", "Messages since the last compaction that start another one. Null: off."
        ),
        "turns": _build_trigger_field(
            Number | None,
            "turns",
            "User messages since the last compaction that start another one. Null: off.",
        ),
        "iterations": _build_trigger_field(
            Number,
            "iterations",
            "Assistant messages since the last compaction that start another one. 0: off.",
        ),
        "soft_percent": _build_percent_field(
            Percent,
            "soft_share",
            "Percentage of the trigger at which the proxy prepares a compaction early. 0: never.",
        ),
        "hard_percent": PolicyField(
            Percent,
            "hard_percent",
            "Percentage of the usable window above which compaction resumes after an undo.",
        ),
        "target_percent": _build_percent_field(
            Annotated[Percent, Field(gt=0, lt=100)],
            "target.share",
            "Size after a compaction, as a percentage of the trigger.",
        ),
        "target_tokens": PolicyField(
            Positive | None,
            "target",
            "Size after a compaction, in tokens. Null: half of the trigger.",
            lambda target: target.tokens if target else None,
            _set_target_tokens,
        ),
        "keep_messages": PolicyField(
            Number,
            "",
            "Number of newest messages that no compaction removes.",
            lambda row: row.keep.messages,
            _set_keep_messages,
        ),
        "keep_iterations": PolicyField(
            Number,
            "keep",
            "Number of newest assistant messages to keep, with everything after them.",
            lambda keep: keep.iterations,
            _set_keep_iterations,
        ),
        "keep_tool_results": PolicyField(
            Number,
            "keep.tool_results",
            "Number of newest tool results that are never masked. 0: those in the tail.",
        ),
        "tail_tokens": PolicyField(
            Positive,
            "keep.tail",
            "Maximum tokens of the tail, the newest messages that no compaction removes.",
            lambda tail: tail.tokens if tail else None,
            _set_tail_tokens,
        ),
        "tail_percent": _build_percent_field(
            Percent, "keep.tail.share", "Maximum size of the tail, as a percentage of the trigger."
        ),
        "task_tokens": PolicyField(
            Positive,
            "task_tokens.tokens",
            "Maximum tokens of the quoted task. A longer task keeps its beginning and end.",
        ),
        "task_percent": _build_percent_field(
            Percent, "task_tokens.share", "Maximum size of the quoted task, as a percentage of the trigger."
        ),
        "ledger_tokens": PolicyField(
            Positive,
            "layout.ledger.tokens",
            "Maximum tokens of the ledger: rules, requests, facts and text of users.",
        ),
        "ledger_percent": _build_percent_field(
            Percent, "layout.ledger.share", "Maximum size of the ledger, as a percentage of the trigger."
        ),
        "cap_tokens": PolicyField(
            Positive, "layout.cap.tokens", "Maximum tokens of a huge tool result after it was capped."
        ),
        "cap_percent": _build_percent_field(
            Percent,
            "layout.cap.share",
            "Maximum size of a capped tool result, as a percentage of the trigger.",
        ),
        "huge_percent": _build_percent_field(
            Percent,
            "layout.huge_share",
            "Percentage of the usable window above which a new tool result counts as huge.",
        ),
        "rounds": PolicyField(
            Positive, "layout.rounds", "Number of records kept before they are merged into one."
        ),
        "chain_percent": _build_percent_field(
            Percent,
            "layout.chain_share",
            "Percentage of the target above which records are merged into one.",
        ),
        "summary_percent": _build_percent_field(
            Percent, "summary.share", "Target summary length as a percentage of the removed text."
        ),
        "summary_least_tokens": PolicyField(
            Positive, "summary.least_tokens", "Minimum of the target summary length, in tokens."
        ),
        "summary_tokens": PolicyField(
            Positive,
            "summary",
            "Maximum length of a summary that the prompt asks for, in tokens.",
            lambda shape: shape.tokens,
            _set_summary_tokens,
        ),
        "summary_max_tokens": PolicyField(
            Positive,
            "summary",
            "Maximum output tokens of a summary call.",
            lambda shape: shape.max_tokens,
            _set_summary_max_tokens,
        ),
        "summary_model": PolicyField(
            Literal["cheap", "same"],
            "summary.model",
            "Default of `summary.model`: a `cheap` model, or the `same` model as the request.",
        ),
        "summary_input": PolicyField(
            Literal["transcript", "aligned"],
            "summary.form",
            "`transcript`: a quoted transcript; `aligned`: the conversation's own messages.",
        ),
        "temperature": PolicyField(
            Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=2)] | None,
            "summary.temperature",
            "Sampling temperature of summary calls, 0 to 2. Null: the provider's default.",
        ),
        "tool_characters": PolicyField(
            Positive, "summary.tool_characters", "Characters of each tool result that the summary model sees."
        ),
        "message_characters": PolicyField(
            Positive,
            "summary.message_characters",
            "Characters of each other message that the summary model sees.",
        ),
        "stand_in_role": PolicyField(
            StandInRole, "stand_in_role", "Role of the message that replaces removed messages."
        ),
        "max_block_s": PolicyField(
            Seconds | None,
            "max_block_s",
            "Maximum seconds that a request waits for a summary. Null: `summary.timeout_s`.",
        ),
        "take": PolicyField(
            Literal["until-under", "one"],
            "one_run",
            "`until-under`: summarise runs until the request fits; `one`: one run per request.",
            lambda one: "one" if one else "until-under",
            lambda take, _: take == "one",
        ),
        "tag": PolicyField(
            Annotated[
                str,
                require_pattern(r"[A-Za-z0-9_-]{1,64}", "a tag can contain only letters, digits, - and _"),
            ],
            "frame",
            "Name of the tag around a summary: letters, digits, - and _.",
            lambda frame: frame.opening[1:-2],
            _set_tag,
        ),
        "system_reserve_tokens": PolicyField(
            Number, "reserves.system", "Tokens to reserve for system prompt and tools."
        ),
        "output_reserve_tokens": PolicyField(
            Number,
            "reserves.output",
            "Tokens to reserve for the answer, or the request's `max_tokens` if that is more.",
        ),
        "safety_tokens": PolicyField(
            Number,
            "reserves.safety",
            "Tokens to reserve for estimation errors. All reserves take at most a quarter of the window.",
        ),
    }
)


def get_policy_setting(row: Policy, name: str) -> Any:  # noqa: ANN401 - a field may be of any type
    """Returns the value that the configuration key `name` has in the policy `row`, in the key's unit.

    A float without a fraction is returned as an `int`.
    """
    field = POLICY_FIELDS[name]
    value = field.to_setting(attrgetter(field.attribute_path)(row) if field.attribute_path else row)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def replace_policy_field(row: Policy, name: str, value: object) -> Policy:
    """Returns the policy `row`, changed to the value `value` of the configuration key `name`.

    If the policy lacks the part that the key sets, returns the policy unchanged. For example, the strategy
    `prune` has no summary.
    """
    field = POLICY_FIELDS[name]

    def replace_part(record: Any, path: str) -> Any:  # noqa: ANN401 - a record is any part of a row
        first, _, rest = path.partition(".")
        if not first:
            return field.from_setting(value, record)
        part = getattr(record, first)
        if part is None and rest:
            return record
        return replace(record, **{first: replace_part(part, rest)})

    changed: Policy = replace_part(row, field.attribute_path)
    return changed


def _build_section(policy: Policy, description: str, *names: str) -> Any:  # noqa: ANN401 - mypy knows no built models
    """Builds the section of a strategy with the keys `names`. Their defaults are the values of the policy.

    A strategy that writes summaries also gets the key `prompt_file`.
    """
    fields: dict[str, Any] = {
        name: (
            POLICY_FIELDS[name].value_type,
            Field(default=get_policy_setting(policy, name), description=POLICY_FIELDS[name].description),
        )
        for name in names
    }
    if policy.summary:
        fields["prompt_file"] = (
            str | None,
            Field(
                default=None,
                description="File with instructions for this strategy. Null: `summary.prompt_file`.",
            ),
        )
        fields["instructions"] = (
            str | None,
            Field(
                default=None, description="Text to append to the instructions. Null: `summary.instructions`."
            ),
        )
    return create_model(
        f"{policy.name.title()}Strategy",
        __config__={**STRICT, "use_attribute_docstrings": False},  # pydantic would search the source
        __doc__=description,
        __module__=__name__,
        **fields,
    )


_RESERVE_KEYS = ("system_reserve_tokens", "output_reserve_tokens", "safety_tokens")
_SUMMARY_KEYS = (
    "temperature", "tool_characters", "message_characters", "summary_model", "summary_input", "stand_in_role",
)  # fmt: skip
AnchoredStrategy = _build_section(
    ANCHORED,
    "Keys of `anchored`, which masks and caps tool results, and keeps a record of each compaction.",
    "percent", "soft_percent", "hard_percent", "target_percent", "keep_messages", "tail_tokens",
    "tail_percent", "keep_tool_results", "task_tokens", "task_percent", "ledger_tokens", "ledger_percent",
    "cap_tokens", "cap_percent", "huge_percent", "rounds", "chain_percent", *_RESERVE_KEYS, "summary_percent",
    "summary_least_tokens", "summary_tokens", "summary_max_tokens", *_SUMMARY_KEYS, "max_block_s",
)  # fmt: skip
FullStrategy = _build_section(
    FULL,
    "Keys of `full`, which replaces everything by one summary and the latest request of the user.",
    "tokens", "keep_messages", *_RESERVE_KEYS, "summary_tokens", "summary_max_tokens", *_SUMMARY_KEYS,
)  # fmt: skip
SelectiveStrategy = _build_section(
    SELECTIVE,
    "Keys of `selective`, which summarises runs of messages without user messages, the earliest first.",
    "tokens", "messages", "turns", "keep_messages", "take", "tag", *_RESERVE_KEYS, "summary_tokens",
    "summary_max_tokens", *_SUMMARY_KEYS,
)  # fmt: skip
SplitStrategy = _build_section(
    SPLIT,
    "Keys of `split`, which summarises all messages before the newest ones.",
    "percent_of_window", "keep_messages", "target_tokens", *_RESERVE_KEYS, "summary_tokens",
    "summary_max_tokens", *_SUMMARY_KEYS,
)  # fmt: skip
PruneStrategy = _build_section(
    PRUNE,
    "Keys of `prune`, which removes the oldest messages without a replacement.",
    "percent_of_window", "keep_messages", *_RESERVE_KEYS,
)  # fmt: skip
IterationsStrategy = _build_section(
    ITERATIONS,
    "Keys of `iterations`, which summarises all but the newest iterations every few iterations.",
    "iterations", "tokens", "keep_iterations", *_RESERVE_KEYS, "summary_tokens", "summary_max_tokens",
    *_SUMMARY_KEYS,
)  # fmt: skip
ChainedStrategy = _build_section(
    CHAINED,
    "Keys of `chained`, which keeps a single summary and extends it with each compaction.",
    "percent", "keep_messages", *_RESERVE_KEYS, "summary_tokens", "summary_max_tokens", "task_tokens",
    *_SUMMARY_KEYS,
)  # fmt: skip


StrategiesSection = create_model(
    "StrategiesSection",
    __config__=STRICT,
    __doc__="Every field of every strategy.",
    __module__=__name__,
    anchored=(AnchoredStrategy, AnchoredStrategy()),
    full=(FullStrategy, FullStrategy()),
    selective=(SelectiveStrategy, SelectiveStrategy()),
    split=(SplitStrategy, SplitStrategy()),
    prune=(PruneStrategy, PruneStrategy()),
    iterations=(IterationsStrategy, IterationsStrategy()),
    chained=(ChainedStrategy, ChainedStrategy()),
)
