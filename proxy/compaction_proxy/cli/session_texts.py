"""Formats the output of `sessions` and `search` from admin API answers. Unknown figures appear as `n/a`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from compaction_proxy.cli.output import (
    Column,
    escape_unprintable,
    format_age,
    format_count,
    format_dollars,
    format_percent,
    format_table,
    format_time,
    get_text,
    truncate_text,
)

JsonRow = Mapping[str, Any]

_CONVERSATION_COLUMNS = (
    Column("id"),
    Column("model"),
    Column("status"),
    Column("used", is_right_aligned=True),
    Column("requests", is_right_aligned=True),
    Column("rounds", is_right_aligned=True),
    Column("sent", is_right_aligned=True),
    Column("forwarded", is_right_aligned=True),
    Column("cached", is_right_aligned=True),
    Column("cost", is_right_aligned=True),
    Column("net saved", is_right_aligned=True),
)
_ROUND_COLUMNS = (
    Column("round", is_right_aligned=True),
    Column("made"),
    Column("strategy"),
    Column("reason"),
    Column("messages", is_right_aligned=True),
    Column("before", is_right_aligned=True),
    Column("after", is_right_aligned=True),
    Column("cost", is_right_aligned=True),
    Column("pays back after", is_right_aligned=True),
    Column("state"),
)
_PIN_COLUMNS = (Column("pin"), Column("text"))
_HIT_COLUMNS = (
    Column("message"),
    Column("turn", is_right_aligned=True),
    Column("round", is_right_aligned=True),
    Column("role"),
    Column("text"),
)
_MONEY_FIELDS = (
    ("cost", "cost_usd"),
    ("saved before losses", "gross_usd"),
    ("lost by broken cache", "cache_loss_usd"),
    ("summaries", "summary_usd"),
    ("net saved", "net_usd"),
)


def format_conversations(rows: Iterable[JsonRow], max_cells: int | None) -> list[str]:
    """Formats a table with a line for each conversation.

    The columns `sent` and `forwarded` show the tokens of the last exchange.
    """
    return format_table(_CONVERSATION_COLUMNS, [_format_conversation_row(row) for row in rows], max_cells)


def _format_conversation_row(row: JsonRow) -> list[str]:
    return [
        get_text(row, "id"),
        get_text(row, "model"),
        get_text(row, "status"),
        format_age(row.get("last_at")),
        format_count(row.get("requests")),
        format_count(row.get("rounds")),
        format_count(row.get("tokens_before")),
        format_count(row.get("tokens_after")),
        format_percent(row.get("cached_tokens"), row.get("prompt_tokens")),
        format_dollars(row.get("cost_usd")),
        format_dollars(row.get("net_usd")),
    ]


def format_conversation(record: JsonRow, rounds: Iterable[JsonRow], max_cells: int | None) -> Iterator[str]:
    """Yields the lines of one conversation: its figures, then its compactions and pins."""
    totals = _get_mapping(record, "totals")
    figures = {
        "id": get_text(record, "id"),
        "model": get_text(totals, "model"),
        "last used": format_time(totals.get("last_at")),
        "requests": format_count(totals.get("requests")),
        "input tokens": format_count(totals.get("prompt_tokens")),
        "cached": format_percent(totals.get("cached_tokens"), totals.get("prompt_tokens")),
        "output tokens": format_count(totals.get("completion_tokens")),
        **_format_recalls(totals),
        **{title: format_dollars(_get_mapping(record, "money").get(name)) for title, name in _MONEY_FIELDS},
        "asked of it": ", ".join(_describe_directives(record)) or "nothing",
    }
    width = max(map(len, figures))
    yield from (
        truncate_text(f"{title:{width}}  {escape_unprintable(value)}", max_cells)
        for title, value in figures.items()
    )
    round_rows = [_format_round_row(row) for row in rounds]
    if round_rows:
        yield ""
        yield from format_table(_ROUND_COLUMNS, round_rows, max_cells)
    pins = [each for each in record.get("pins") or () if isinstance(each, dict)]
    if pins:
        yield ""
        yield from format_pins(pins, max_cells)


def _format_recalls(totals: JsonRow) -> dict[str, str]:
    """Returns how often the model searched the archive, as a title and a text. Empty if it never did."""
    recalls = totals.get("recalls")
    return {"searches by the model": format_count(recalls)} if recalls else {}


def _describe_directives(record: JsonRow) -> Iterator[str]:
    """Yields the instructions that users have given for a conversation, such as `bypass`."""
    if record.get("compact"):
        yield "compact the next request"
    if record.get("bypass"):
        yield "bypass"
    if record.get("suppressed"):
        yield "no round by itself"


def _get_mapping(row: JsonRow, name: str) -> JsonRow:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _format_round_row(row: JsonRow) -> list[str]:
    return [
        get_text(row, "round"),
        format_time(row.get("at")),
        get_text(row, "strategy"),
        get_text(row, "reason"),
        format_count(row.get("messages")),
        format_count(row.get("tokens_before")),
        format_count(row.get("tokens_after")),
        format_dollars(row.get("cost_usd")),
        _format_turns(row.get("pays_back_after")),
        "undone" if row.get("undone") else get_text(row, "outcome"),
    ]


def _format_turns(value: object) -> str:
    return f"{value:.1f} turns" if isinstance(value, int | float) else "n/a"


def format_pins(pins: Iterable[JsonRow], max_cells: int | None) -> list[str]:
    """Formats a line for each pin, or a line that says that there are none."""
    rows = [[get_text(each, "id"), get_text(each, "text")] for each in pins]
    return format_table(_PIN_COLUMNS, rows, max_cells) if rows else ["no pins"]


def format_hits(hits: Iterable[JsonRow], max_cells: int | None, *, everywhere: bool = False) -> list[str]:
    """Formats a line for each message found.

    Args:
        hits: The messages found, as the admin API returns them.
        max_cells: Largest width of a line, in terminal cells. None does not cut lines.
        everywhere: Whether the search covered all conversations of a tenant. If so, each line names the
            conversation of the message.
    """
    rows = [
        [
            *([get_text(each, "conversation")] if everywhere else []),
            get_text(each, "message_id"),
            get_text(each, "turn"),
            get_text(each, "round"),
            get_text(each, "role"),
            " ".join(get_text(each, "snippet").split()),
        ]
        for each in hits
    ]
    columns = (Column("conversation"), *_HIT_COLUMNS) if everywhere else _HIT_COLUMNS
    return format_table(columns, rows, max_cells) if rows else ["nothing found"]
