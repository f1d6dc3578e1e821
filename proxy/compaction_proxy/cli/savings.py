"""`savings`: what compaction has saved, in tokens and dollars, after what it has cost."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, fail
from compaction_proxy.cli.options import ConfigOption, JsonOption, KeyOption, UrlOption

if TYPE_CHECKING:
    from compaction_proxy.cli.output import Column

Row = Mapping[str, Any]
GROUPS = ("model", "day", "hour", "key", "total")


def savings(
    since: Annotated[str, typer.Option(help="From when: 90m, 24h, 7d, or seconds since 1970.")] = "7d",
    by: Annotated[str, typer.Option(help=f"A row for each: {', '.join(GROUPS)}.")] = "model",
    as_csv: Annotated[bool, typer.Option("--csv", help="Every figure of each row, comma-separated.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Five lines to paste.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was saved, after what summaries and broken caches have cost."""
    from compaction_proxy.cli.admin_client import admin, rows
    from compaction_proxy.cli.output import say, say_json, width

    if by not in GROUPS:
        fail(f"--by: one of {', '.join(GROUPS)}", BAD_CONFIG)
    if as_csv + share + as_json > 1:
        fail("--csv, --share and --json: one of them", BAD_CONFIG)
    answer = admin(url, key_file, config).get("/stats", since=since, by=by)
    found = rows(answer, "rows")
    total = answer.get("total") if isinstance(answer, dict) else None
    total = total if isinstance(total, dict) else {}
    if as_json:
        say_json(answer)
    elif as_csv:
        say(comma_separated(found))
    elif share:
        say(receipt(since, total))
    else:
        say(overview(by, found, total, width()))


def _columns(by: str) -> "tuple[Column, ...]":
    from compaction_proxy.cli.output import Column

    figures = ("requests", "sent", "forwarded", "less", "cached", "cost", "saved", "cache loss", "summaries")
    return (Column(by), *(Column(title, right=True) for title in figures), Column("net saved", right=True))


def overview(by: str, rows: list[dict[str, Any]], total: Row, most: int | None) -> Iterator[str]:
    """A table with a line for each row, and the total below."""
    from compaction_proxy.cli.output import table, text_of

    lines = [_line(text_of(row, "of"), row) for row in rows]
    if by != "total" or not lines:
        lines.append(_line("total", total))
    yield from table(_columns(by), lines, most)
    unpriced = total.get("unpriced")
    if isinstance(unpriced, int) and unpriced > 0:
        yield f"{unpriced:,} requests have no known price, and are in no amount; see `models`"


def _line(of: str, row: Row) -> list[str]:
    from compaction_proxy.cli.output import dollars, percent, whole

    money = [dollars(row.get(f"{name}_usd")) for name in ("cost", "gross", "cache_loss", "summary", "net")]
    return [
        of,
        whole(row.get("requests")),
        whole(row.get("tokens_before")),
        whole(row.get("tokens_after")),
        percent(_less(row), row.get("tokens_before")),
        percent(row.get("cached_tokens"), row.get("prompt_tokens")),
        *money,
    ]


def _less(row: Row) -> int | None:
    """Tokens that were not forwarded."""
    before, after = row.get("tokens_before"), row.get("tokens_after")
    return before - after if isinstance(before, int) and isinstance(after, int) else None


def receipt(since: str, total: Row) -> list[str]:
    """Five lines to show around; they name no model, key or conversation."""
    from compaction_proxy.cli.output import clean, dollars, percent, whole

    sent, forwarded = whole(total.get("tokens_before")), whole(total.get("tokens_after"))
    less = percent(_less(total), total.get("tokens_before"))
    cached = percent(total.get("cached_tokens"), total.get("prompt_tokens"))
    names = ("net", "gross", "cache_loss", "summary")
    net, gross, loss, summary = (dollars(total.get(f"{name}_usd")) for name in names)
    return [
        f"compaction-proxy, since {clean(since)}",
        f"{whole(total.get('requests'))} requests, {whole(total.get('rounds'))} rounds of compaction",
        f"{sent} tokens sent, {forwarded} forwarded ({less} less)",
        f"{cached} of the input came from the provider's cache",
        f"{net} net saved: {gross}, less {loss} of cache and {summary} of summaries"
        if total.get("net_usd") is not None
        else "no price is known for the models that were asked",
    ]


def comma_separated(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row and one of titles; of the overhead its quantiles, not the buckets they are from."""
    from compaction_proxy.admin.api.export import line
    from compaction_proxy.cli.output import clean

    told = [dict(_singles(row)) for row in rows]
    names = list(dict.fromkeys(name for row in told for name in row))
    lines = [line(names), *(line(row.get(name) for name in names) for row in told)] if names else []
    return [clean(each.removesuffix("\r\n")) for each in lines]


def _singles(row: Row) -> Iterator[tuple[str, str | float | None]]:
    """The single values of a row; those of a mapping, such as requests by status, as `NAME.KEY`."""
    for name, value in row.items():
        if value is None or isinstance(value, str | int | float):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", held) for key, held in _singles(value))
