"""`models`: window and prices of models, and where these figures are from."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction_proxy.cli.options import ConfigOption, JsonOption, KeyOption, UrlOption

if TYPE_CHECKING:
    from compaction_proxy.config.config import Config

_GLOB = frozenset("*?[")


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A model's name, or a part of it.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every model of the shipped table, too.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what models take and cost: those configured, those that a running proxy has seen, or one by name.

    Works without a running proxy. Where none is configured, seen or named, the shipped table is shown.
    """
    import os

    from compaction_proxy.cli.admin_client import Unreachable, admin, rows
    from compaction_proxy.cli.output import say, say_json, width
    from compaction_proxy.config.loader import load
    from compaction_proxy.providers.window_table import WINDOWS

    try:
        seen = rows(admin(url, key_file, config).get("/models"), "models")
    except Unreachable:
        if url is not None:
            raise
        seen = []
    known = {str(row.get("model")): row for row in seen}
    settings = load(config, os.environ).config
    asked = dict.fromkeys(_asked(settings, name, all_=all_)) or (WINDOWS if not seen else {})
    missing = [each for each in asked if each not in known]
    found = [*seen, *_described(settings, missing)] if missing else seen
    chosen = [row for row in found if name is None or name.lower() in str(row.get("model", "")).lower()]
    if as_json:
        say_json({"models": chosen})
    else:
        say(_listing(chosen, width()))


def _asked(config: "Config", name: str | None, *, all_: bool) -> Iterator[str]:
    """Names of the models to describe, whether a proxy has seen them or not."""
    from compaction_proxy.providers.window_table import WINDOWS

    if name is not None:
        yield name
    summaries = (row.settings.summary.model for row in config.by_glob)
    yield from (each for each in summaries if each not in {None, "same", "none"} and each)
    yield from (glob for glob in config.models if not _GLOB & set(glob))
    if all_:
        yield from WINDOWS


def _described(config: "Config", names: Iterable[str]) -> list[dict[str, Any]]:
    """What is known of models without asking anybody, as the admin API has it."""
    import asyncio
    from dataclasses import asdict

    from compaction_proxy.admin.api import schemas
    from compaction_proxy.admin.queries import model_of
    from compaction_proxy.gateway.identity import origin
    from compaction_proxy.providers.price_process import PriceProcess
    from compaction_proxy.providers.pricing import Pricing

    pricing = Pricing(config, PriceProcess())
    where, names = origin(config.upstream.base_url), list(names)
    asyncio.run(pricing.ready((name, where) for name in names))
    return [asdict(schemas.model(model_of(config, name, pricing.of(name, where)))) for name in names]


def _listing(rows: Iterable[dict[str, Any]], most: int | None) -> list[str]:
    """A line for each model; prices are dollars per million tokens."""
    from compaction_proxy.cli.output import Column, dollars, table, text_of, whole

    columns = (
        Column("model"), Column("window", right=True), Column("from"), Column("input $/M", right=True),
        Column("cached", right=True), Column("output", right=True), Column("dearer above", right=True),
        Column("prices from"), Column("date"),
    )  # fmt: skip
    lines = [
        [
            text_of(row, "model"),
            whole(row.get("window")),
            text_of(row, "window_source"),
            *(dollars(row.get(f"{kind}_usd")) for kind in ("input", "cached", "output")),
            whole(row["surcharge_tokens"]) if row.get("surcharge_tokens") else "-",
            text_of(row, "price_source"),
            text_of(row, "price_date"),
        ]
        for row in rows
    ]
    return table(columns, lines, most)
