"""Defines the command `savings`, which shows what compaction has saved and what it has cost."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from compaction_proxy.cli.admin_client import create_admin_client
from compaction_proxy.cli.console import (
    BAD_CONFIG,
    Column,
    ConfigOption,
    JsonOption,
    KeyOption,
    UrlOption,
    exit_with_error,
    format_count,
    format_dollars,
    format_percent,
    format_quantity,
    format_table,
    get_terminal_width,
    get_text,
    print_json,
    print_lines,
    read_rows,
)
from compaction_proxy.core.event import parse_number
from compaction_proxy.support.formatting import (
    describe_missing_dollars,
    describe_missing_price,
    escape_unprintable,
    format_iso_time,
)

SavingsFields = Mapping[str, Any]
HOUR_S = 3_600
GROUPS = ("model", "day", "hour", "key", "total")
OPTIONAL_FIGURES = frozenset(
    {"counted", "tokens saved", "cached", "cost", "saved", "cache loss", "summaries"}
)
FIGURES = (
    "requests", "counted", "sent", "read", "tokens saved", "less", "cached", "cost", "saved", "cache loss",
    "summaries", "net saved",
)  # fmt: skip

# The sums that exclude something. Each row has the unit of the sums, the field that counts what they exclude,
# the field that counts the total, and the unknown values that are the reason.
_LEFT_OUT = (
    ("tokens", "uncounted", "requests", "token counts"),
    ("dollars", "unpriced", "requests", "prices or token counts"),
    ("dollars", "unpriced_summary_calls", "summary_calls", "prices or token counts"),
)


def savings(
    since: Annotated[
        str, typer.Option(help="Start of the period: an age such as 90m, 24h or 7d, or Unix seconds.")
    ] = "7d",
    by: Annotated[
        str, typer.Option(help=f"Print one row per {', '.join(GROUPS)}.", autocompletion=lambda: GROUPS)
    ] = "model",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all figures as CSV.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Print a summary in five lines, to share.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show net savings in tokens and dollars, after the cost of summaries and cache misses."""
    if by not in GROUPS:
        exit_with_error(f"--by: choose one of {', '.join(GROUPS)}", BAD_CONFIG)
    if as_csv + share + as_json > 1:
        exit_with_error("--csv, --share and --json: choose one of them", BAD_CONFIG)
    answer = create_admin_client(url, key_file, config).get("/stats", since=since, by=by)
    rows = read_rows(answer, "rows")
    total = answer.get("total") if isinstance(answer, dict) else None
    total = total if isinstance(total, dict) else {}
    list_prices = not (isinstance(answer, dict) and answer.get("list_prices") is False)
    if as_json:
        print_json(answer)
    elif as_csv:
        print_lines(format_csv(rows))
    elif share:
        print_lines(format_shareable_summary(since, total, list_prices=list_prices))
    else:
        start = parse_number(answer.get("since")) if isinstance(answer, dict) else None
        print_lines(
            format_overview(by, rows, total, get_terminal_width(), list_prices=list_prices, start=start)
        )


def format_overview(
    by: str,
    rows: list[dict[str, Any]],
    total: SavingsFields,
    max_cells: int | None,
    *,
    list_prices: bool,
    start: float | None,
) -> Iterator[str]:
    """Yields the lines of a table with one line for each row of the statistics and one for the total.

    If `by` is `total`, the only row of the statistics is the total, and the table has only one line for it.
    The lines after the table say which requests the sums do not include, and the period.

    Args:
        by: What each row sums up.
        rows: The rows of the statistics.
        total: The total of the statistics.
        max_cells: Largest width of the table, in terminal cells; see `format_table`.
        list_prices: Whether the proxy uses its list of prices.
        start: Start of the requested period, in seconds since the epoch; None if unknown. The sums include
            the whole hour in which it lies.
    """
    lines = [_format_figures(get_text(row, "of"), row) for row in rows]
    if by != "total" or not lines:
        lines.append(_format_figures("total", total))
    columns = (
        Column(by),
        *(Column(each, is_right_aligned=True, is_optional=each in OPTIONAL_FIGURES) for each in FIGURES),
    )
    yield from format_table(columns, lines, max_cells)
    for sums, name, of, unknown in _LEFT_OUT:
        if total.get(name):
            counts = f"{format_count(total[name])} of {_format_total(total, of)}"
            yield f"the {sums} exclude {counts}, because their {unknown} are unknown"
    if total.get("unpriced") or total.get("unpriced_summary_calls"):
        yield (
            "`compaction-proxy models` lists the known prices"
            if list_prices
            else describe_missing_price(list_prices=False)
        )
    begin = None if start is None else start // HOUR_S * HOUR_S
    until = "now"
    if total.get("last_at"):  # no earlier version has stored it
        until = f"{_format_last_time(total)}, the time of the latest counted request"
    yield f"from {format_iso_time(begin)} to {until}"


def _format_last_time(total: SavingsFields) -> str:
    """Formats the time of the latest request in the sums as UTC."""
    return format_iso_time(parse_number(total.get("last_at")))


def _format_figures(label: str, row: SavingsFields) -> list[str]:
    money = [
        format_dollars(row.get(f"{name}_usd")) for name in ("cost", "gross", "cache_loss", "summary", "net")
    ]
    return [
        label,
        format_count(row.get("requests")),
        format_count(_subtract(row.get("requests"), row.get("uncounted"))),
        format_count(row.get("tokens_before")),
        format_count(_subtract(row.get("tokens_before"), row.get("net_tokens"))),
        format_count(row.get("net_tokens")),
        format_percent(row.get("net_tokens"), row.get("tokens_before")),
        format_percent(row.get("cached_tokens"), row.get("prompt_tokens")),
        *money,
    ]


def _subtract(count: object, part: object) -> int | None:
    """Returns a count less a part of it, or None if one of them is unknown."""
    return count - part if isinstance(count, int) and isinstance(part, int) else None


def _format_coverage(total: SavingsFields, missing: str, of: str = "requests") -> str:
    """Returns text such as `, of 9 of 12 requests`; an empty text if a sum includes all of them.

    Args:
        total: The total of the statistics.
        missing: Name of the field that counts what the sum does not include.
        of: Name of the field that counts all of it.
    """
    if not total.get(missing):
        return ""
    return f", of {format_count(_subtract(total.get(of), total[missing]))} of {_format_total(total, of)}"


def _format_total(total: SavingsFields, name: str) -> str:
    """Formats a field of the total with its name, such as `1 request` or `12 summary calls`."""
    return format_quantity(total.get(name), name.removesuffix("s").replace("_", " "))


def format_shareable_summary(since: str, total: SavingsFields, *, list_prices: bool) -> list[str]:
    """Formats five lines that users can share. The lines contain no name of a model, key or conversation.

    `list_prices` says whether the proxy uses its list of prices.
    """
    before, saved = total.get("tokens_before"), total.get("net_tokens")
    sent, read = format_count(before), format_count(_subtract(before, saved))
    less = f"{format_percent(saved, before)} less"
    if isinstance(saved, int) and saved < 0:
        less = f"{format_percent(-saved, before)} more"
    cached = format_percent(total.get("cached_tokens"), total.get("prompt_tokens"))
    names = ("net", "gross", "cache_loss", "summary")
    net, gross, loss, summary = (format_dollars(total.get(f"{name}_usd")) for name in names)
    unpriced = describe_missing_dollars(
        total.get("requests"), total.get("failed"), total.get("prompt_tokens"), list_prices=list_prices
    )
    until = f", up to {_format_last_time(total)}" if total.get("last_at") else ""
    return [
        f"compaction-proxy, since {escape_unprintable(since)}{until}",
        (
            f"{format_quantity(total.get('requests'), 'request')}, "
            f"{format_quantity(total.get('rounds'), 'compaction')}"
        ),
        f"{sent} tokens sent, {read} read including summaries ({less}){_format_coverage(total, 'uncounted')}",
        f"{cached} of the input came from the provider's cache",
        f"{net} net saved: {gross}, minus {loss} for cache misses and {summary} for summaries"
        f"{_format_coverage(total, 'unpriced')}"
        f"{_format_coverage(total, 'unpriced_summary_calls', 'summary_calls')}"
        if total.get("net_usd") is not None
        else f"savings in dollars are unknown: {unpriced}",
    ]


def format_csv(rows: list[dict[str, Any]]) -> list[str]:
    """Formats rows as CSV, with a line of column titles first.

    Leaves out lists, such as the histogram of the overhead (the time that the proxy adds to requests).
    """
    from compaction_proxy.admin.api.overview import format_csv_line

    records = [dict(_flatten_row(row)) for row in rows]
    names = list(dict.fromkeys(name for row in records for name in row))
    lines = (
        [format_csv_line(names), *(format_csv_line(row.get(name) for name in names) for row in records)]
        if names
        else []
    )
    return [escape_unprintable(line.removesuffix("\r\n")) for line in lines]


def _flatten_row(row: SavingsFields) -> Iterator[tuple[str, str | float | None]]:
    """Yields the names and values of a row's fields. Lists are left out.

    A field in a nested object gets the name `NAME.KEY`, such as `statuses.applied`.
    """
    for name, value in row.items():
        if value is None or isinstance(value, str | int | float):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _flatten_row(value))
