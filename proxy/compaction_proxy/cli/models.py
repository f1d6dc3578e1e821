"""Defines the command `models`, which shows context windows and prices of models, with their sources."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction_proxy.cli.admin_client import AdminUnreachableError, create_admin_client
from compaction_proxy.cli.console import (
    Column,
    ConfigOption,
    JsonOption,
    KeyOption,
    UrlOption,
    format_count,
    format_dollars,
    format_table,
    get_terminal_width,
    get_text,
    print_json,
    print_lines,
    read_rows,
)
from compaction_proxy.support.formatting import describe_missing_price

if TYPE_CHECKING:
    from compaction_proxy.config.config import Config

_GLOB = frozenset("*?[")


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a model, or a part of it.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Include all models of the shipped table.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show context windows and prices of the models that are configured or that a running proxy has seen.

    With NAME, shows only models whose name contains NAME, and the model NAME itself. If there are no such
    models and NAME is not given, shows the shipped table of models. Works without a running proxy, too.
    """
    import os

    from compaction_proxy.config.loader import load_config
    from compaction_proxy.providers.pricing import uses_list_prices
    from compaction_proxy.providers.windows import WINDOWS

    try:
        answer = create_admin_client(url, key_file, config).get("/models")
    except AdminUnreachableError:
        if url is not None:
            raise
        answer = None
    proxy_rows = read_rows(answer, "models") if answer is not None else []
    rows_by_name = {str(row.get("model")): row for row in proxy_rows}
    settings = load_config(config, os.environ).config
    names = dict.fromkeys(_iter_model_names(settings, name, all_=all_)) or (WINDOWS if not proxy_rows else {})
    missing = [each for each in names if each not in rows_by_name]
    rows = [*proxy_rows, *_describe_models(settings, missing)] if missing else proxy_rows
    selected = [row for row in rows if name is None or name.lower() in str(row.get("model", "")).lower()]
    if as_json:
        print_json({"models": selected})
    else:
        print_lines(_format_models(selected, get_terminal_width()))
        if any(not row.get("price_source") for row in selected):
            told = answer.get("list_prices") if isinstance(answer, dict) else uses_list_prices(settings)
            print(f"n/a: {describe_missing_price(list_prices=told is not False)}")


def _iter_model_names(config: "Config", name: str | None, *, all_: bool) -> Iterator[str]:
    """Yields the names of models that the command shows even if the running proxy has not seen them.

    These are `name`, the configured summary models, the keys of `models` in the configuration that are not
    globs and, with `all_`, the models of the shipped table.
    """
    from compaction_proxy.providers.windows import WINDOWS

    if name is not None:
        yield name
    summaries = (row.settings.summary.model for row in config.settings_by_glob)
    yield from (each for each in summaries if each not in {None, "same", "none"} and each)
    yield from (glob for glob in config.models if not _GLOB & set(glob))
    if all_:
        yield from WINDOWS


def _describe_models(config: "Config", names: Iterable[str]) -> list[dict[str, Any]]:
    """Returns a row for each model, in the form of the admin API. Sends no request to a proxy."""
    from dataclasses import asdict

    from compaction_proxy.admin.queries import build_model_row
    from compaction_proxy.gateway.identity import format_origin
    from compaction_proxy.providers.pricing import PriceBook

    pricing, upstream_origin = PriceBook(config), format_origin(config.upstream.base_url)
    return [asdict(build_model_row(config, name, pricing.get_price(name, upstream_origin))) for name in names]


def _format_models(rows: Iterable[dict[str, Any]], max_cells: int | None) -> list[str]:
    """Formats a table with a line for each model. Prices are in dollars per million tokens."""
    columns = (
        Column("model"),
        Column("window", is_right_aligned=True),
        Column("from", is_optional=True),
        Column("input $/M", is_right_aligned=True),
        Column("cached", is_right_aligned=True, is_optional=True),
        Column("output", is_right_aligned=True),
        Column("higher price above", is_right_aligned=True, is_optional=True),
        Column("prices from", is_optional=True),
        Column("date", is_optional=True),
    )
    lines = [
        [
            get_text(row, "model"),
            format_count(row.get("window")),
            get_text(row, "window_source"),
            *(format_dollars(row.get(f"{kind}_usd")) for kind in ("input", "cached", "output")),
            format_count(row["surcharge_tokens"]) if row.get("surcharge_tokens") else "-",
            get_text(row, "price_source"),
            get_text(row, "price_date"),
        ]
        for row in rows
    ]
    return format_table(columns, lines, max_cells)
