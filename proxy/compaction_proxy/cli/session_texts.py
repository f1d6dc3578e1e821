"""What `sessions` and `search` print, from what the admin API answers. Unknown figures are `n/a`, never 0."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from compaction_proxy.cli.output import (
    Column,
    ago,
    clean,
    cut,
    dollars,
    moment,
    percent,
    table,
    text_of,
    whole,
)

Row = Mapping[str, Any]

_LISTED = (
    Column("id"), Column("model"), Column("status"), Column("used", right=True),
    Column("requests", right=True), Column("rounds", right=True), Column("sent", right=True),
    Column("forwarded", right=True), Column("cached", right=True), Column("cost", right=True),
    Column("net saved", right=True),
)  # fmt: skip
_ROUNDS = (
    Column("round", right=True), Column("made"), Column("strategy"), Column("reason"),
    Column("messages", right=True), Column("before", right=True), Column("after", right=True),
    Column("cost", right=True), Column("pays back after", right=True), Column("state"),
)  # fmt: skip
_PINS = (Column("pin"), Column("text"))
_HITS = (
    Column("message"), Column("turn", right=True), Column("round", right=True), Column("role"),
    Column("text"),
)  # fmt: skip
_MONEY = (
    ("cost", "cost_usd"),
    ("saved before losses", "gross_usd"),
    ("lost by broken cache", "cache_loss_usd"),
    ("summaries", "summary_usd"),
    ("net saved", "net_usd"),
)


def listing(rows: Iterable[Row], most: int | None) -> list[str]:
    """A line for each conversation; sizes are tokens of its last exchange."""
    return table(_LISTED, [_listed(row) for row in rows], most)


def _listed(row: Row) -> list[str]:
    return [
        text_of(row, "id"),
        text_of(row, "model"),
        text_of(row, "status"),
        ago(row.get("last_at")),
        whole(row.get("requests")),
        whole(row.get("rounds")),
        whole(row.get("tokens_before")),
        whole(row.get("tokens_after")),
        percent(row.get("cached_tokens"), row.get("prompt_tokens")),
        dollars(row.get("cost_usd")),
        dollars(row.get("net_usd")),
    ]


def portrait(seen: Row, rounds: Iterable[Row], most: int | None) -> Iterator[str]:
    """A conversation: a line a figure, then its rounds and pins."""
    totals = _inner(seen, "totals")
    figures = {
        "id": text_of(seen, "id"),
        "model": text_of(totals, "model"),
        "last used": moment(totals.get("last_at")),
        "requests": whole(totals.get("requests")),
        "input tokens": whole(totals.get("prompt_tokens")),
        "cached": percent(totals.get("cached_tokens"), totals.get("prompt_tokens")),
        "output tokens": whole(totals.get("completion_tokens")),
        **_recalls(totals),
        **{title: dollars(_inner(seen, "money").get(name)) for title, name in _MONEY},
        "asked of it": ", ".join(_wishes(seen)) or "nothing",
    }
    wide = max(map(len, figures))
    yield from (cut(f"{title:{wide}}  {clean(value)}", most) for title, value in figures.items())
    made = [_round(row) for row in rounds]
    if made:
        yield ""
        yield from table(_ROUNDS, made, most)
    pins = [each for each in seen.get("pins") or () if isinstance(each, dict)]
    if pins:
        yield ""
        yield from pinned(pins, most)


def _recalls(totals: Row) -> dict[str, str]:
    """How often the model has searched what was removed; no line where it never did."""
    recalls = totals.get("recalls")
    return {"searches by the model": whole(recalls)} if recalls else {}


def _wishes(seen: Row) -> Iterator[str]:
    """What people have asked of a conversation."""
    if seen.get("compact"):
        yield "compact the next request"
    if seen.get("bypass"):
        yield "bypass"
    if seen.get("suppressed"):
        yield "no round by itself"


def _inner(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _round(row: Row) -> list[str]:
    return [
        text_of(row, "round"),
        moment(row.get("at")),
        text_of(row, "strategy"),
        text_of(row, "reason"),
        whole(row.get("messages")),
        whole(row.get("tokens_before")),
        whole(row.get("tokens_after")),
        dollars(row.get("cost_usd")),
        _turns(row.get("pays_back_after")),
        "undone" if row.get("undone") else text_of(row, "outcome"),
    ]


def _turns(value: object) -> str:
    return f"{value:.1f} turns" if isinstance(value, int | float) else "n/a"


def pinned(pins: Iterable[Row], most: int | None) -> list[str]:
    """A line for each pin, or one that says that there are none."""
    rows = [[text_of(each, "id"), text_of(each, "text")] for each in pins]
    return table(_PINS, rows, most) if rows else ["no pins"]


def hits(found: Iterable[Row], most: int | None, *, everywhere: bool = False) -> list[str]:
    """A line for each message that was found; where it was looked for `everywhere`, with its conversation."""
    rows = [
        [
            *([text_of(each, "conversation")] if everywhere else []),
            text_of(each, "message_id"),
            text_of(each, "turn"),
            text_of(each, "round"),
            text_of(each, "role"),
            " ".join(text_of(each, "snippet").split()),
        ]
        for each in found
    ]
    columns = (Column("conversation"), *_HITS) if everywhere else _HITS
    return table(columns, rows, most) if rows else ["nothing found"]
