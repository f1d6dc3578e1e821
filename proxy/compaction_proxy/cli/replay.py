"""Defines the command `replay`, which applies strategies to recorded conversations without a provider."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compaction_proxy.cli.console import (
    BAD_CONFIG,
    Column,
    ConfigOption,
    JsonOption,
    exit_with_error,
    format_dollars,
    format_percent,
    format_quantity,
    format_table,
    get_terminal_width,
    load_config_and_print_warnings,
    print_json,
    print_lines,
    show_progress,
)
from compaction_proxy.support.formatting import escape_unprintable

if TYPE_CHECKING:
    from compaction_proxy.config.config import Config
    from compaction_proxy.replay.runner import ReplayBill, ReplayOptions, ReplayResult

TITLES = (
    "strategy", "trigger", "rounds", "calls", "forwarded", "less", "cached", "largest", "over", "failed",
    "cost", "summaries", "net saved", "pays back",
)  # fmt: skip
NEVER = "(never)"
UNITS_NOTE = "The price of a model is unknown, so costs are in thousands of uncached input tokens."
# Columns that the table has only where the terminal is wide enough.
OPTIONAL_TITLES = frozenset({"trigger", "calls", "cached", "largest", "summaries", "pays back"})


def _list_strategies() -> Iterable[str]:
    from compaction_proxy.core.strategies import STRATEGIES

    return STRATEGIES


def replay(  # noqa: PLR0913, PLR0917 - one parameter for each option
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="JSON file with a request body, or JSON Lines with one body per line."
        ),
    ],
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Strategy to replay. Repeat the option for several.",
            autocompletion=_list_strategies,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the requests. Default: the recorded model.")
    ] = None,
    trigger_tokens: Annotated[int | None, typer.Option(min=1, help="Trigger threshold in tokens.")] = None,
    target_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size after a compaction, in tokens.")
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Context window of the model, in tokens.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Replay only every Nth request.")] = 1,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how strategies would compact a recorded conversation, and at what cost. Calls no model."""
    import asyncio
    import logging

    from compaction_proxy.core.strategies import STRATEGIES
    from compaction_proxy.replay.runner import ReplayOptions
    from compaction_proxy.telemetry import logs

    settings = load_config_and_print_warnings(config).config
    names = strategy or [settings.compaction.strategy]
    for name in names:
        if name not in STRATEGIES:
            exit_with_error(f"--strategy: {name} is not one of {', '.join(STRATEGIES)}", BAD_CONFIG)
    logs.configure_logging("console", logging.CRITICAL)
    options = ReplayOptions(model, trigger_tokens, target_tokens, window, every)
    results = asyncio.run(_play_recordings(settings, file, list(dict.fromkeys(names)), options))
    if as_json:
        print_json(
            {
                "results": [each.to_fields() for played in results for each in played],
                "total": [each.to_fields() for each in _sum_results(results)],
            }
        )
    else:
        print_lines(format_report(results, get_terminal_width()))


async def _play_recordings(
    config: "Config", file: Path, names: Sequence[str], options: "ReplayOptions"
) -> "list[list[ReplayResult]]":
    """Replays each conversation in a file with each strategy.

    Returns:
        A list for each conversation. Each list has one result for each strategy.
    """
    from compaction_proxy.cli.replay_worker import open_components
    from compaction_proxy.replay.recordings import read_recordings
    from compaction_proxy.replay.runner import replay_recording

    results = []
    with show_progress("reading the recording") as report:
        async with open_components(config) as stage:
            for recording in read_recordings(file):
                conversation_results = [
                    await replay_recording(
                        stage, recording, name, options, partial(report, f"{name} {recording.name}")
                    )
                    for name in names
                ]
                results.append(conversation_results)
    return results


def format_report(results: "Sequence[Sequence[ReplayResult]]", max_cells: int | None) -> Iterator[str]:
    """Yields the lines of one table per conversation and, for several conversations, of a table of sums.

    If a price is unknown, a last line names the unit of the costs.

    Args:
        results: A list for each conversation, with one result for each strategy.
        max_cells: Largest width of a table, in terminal cells; see `format_table`.
    """
    for played in results:
        yield from _format_results(played, max_cells)
        yield ""
    sums = _sum_results(results)
    if sums:
        yield from _format_results(sums, max_cells)
        yield ""
    if any(each.dollars is None for played in results for each in played):
        yield UNITS_NOTE


def _sum_results(results: "Sequence[Sequence[ReplayResult]]") -> "list[ReplayResult]":
    """Returns one result for each strategy. The result is the sum of the results of all conversations.

    Returns an empty list if there is only one conversation.
    """
    from compaction_proxy.replay.runner import sum_results

    several = len(results) > 1
    return [sum_results(each, f"{len(each)} conversations") for each in zip(*results, strict=True) if several]


def _format_results(played: "Sequence[ReplayResult]", max_cells: int | None) -> Iterator[str]:

    first = played[0]
    window = f", window {first.window:,}" if first.window else ""
    model = f" ({first.model}{window})" if first.model else ""
    yield escape_unprintable(
        f"{first.conversation}{model}: {format_quantity(first.requests, 'request')}, "
        f"{first.sent_tokens:,} tokens sent"
    )
    columns = [
        Column(title, is_right_aligned=title != "strategy", is_optional=title in OPTIONAL_TITLES)
        for title in TITLES
    ]
    yield from format_table(
        columns, [_format_uncompacted_row(first), *map(_format_strategy_row, played)], max_cells
    )


def _format_uncompacted_row(result: "ReplayResult") -> tuple[str, ...]:
    """Formats the row for the conversation as the client sent it, without compaction."""
    largest = f"{max(each.before for each in result.points):,}" if result.points else ""
    over = f"{result.over_without:,}"
    cost = _format_amount(result, lambda bill: bill.uncompacted)
    cached = format_percent(result.cached_without_tokens, result.sent_tokens)
    return (NEVER, "", "", "", f"{result.sent_tokens:,}", "", cached, largest, over, "", cost, "", "", "")


def _format_strategy_row(result: "ReplayResult") -> tuple[str, ...]:

    bill = result.dollars or result.tokens
    payback = "never" if bill.net < 0 else ""
    if bill.pays_back_after is not None:
        payback = f"{bill.pays_back_after:,} req."
    return (
        result.strategy,
        f"{result.trigger:,}" if result.trigger else "",
        f"{result.rounds:,}",
        f"{result.summary_calls:,}",
        f"{result.forwarded_tokens:,}",
        format_percent(result.sent_tokens - result.forwarded_tokens, result.sent_tokens),
        format_percent(result.cached_tokens, result.forwarded_tokens),
        f"{result.largest_tokens:,}",
        f"{result.over_with:,}",
        f"{result.failed:,}",
        _format_amount(result, lambda bill: bill.compacted),
        _format_amount(result, lambda bill: bill.summaries),
        _format_amount(result, lambda bill: bill.net),
        payback,
    )


def _format_amount(result: "ReplayResult", get_amount: "Callable[[ReplayBill], float]") -> str:
    """Formats an amount in dollars or, if a price is unknown, in thousands of uncached input tokens."""
    return (
        format_dollars(get_amount(result.dollars))
        if result.dollars
        else f"{get_amount(result.tokens) / 1_000:,.0f}"
    )
