"""The fields of a strategy that can be set: where each stands in its row (`core.strategies`), its meaning.

A field is read from a row to be shown as a default, and written into it where it is set, by the same entry
of one table. So no number stands in two places, and a field of one name means the same in every strategy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import Field

from compaction_proxy.core.strategies import Frame, Keep, Limit, Policy, SummaryShape
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
