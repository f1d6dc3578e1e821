"""`replay`: what strategies would do with recorded conversations, without a provider and without a key."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, fail, loaded
from compaction_proxy.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from compaction_proxy.config.config import Config
    from compaction_proxy.replay.result import Bill, Result
    from compaction_proxy.replay.runner import Wanted

TITLES = (
    "strategy", "trigger", "rounds", "calls", "forwarded", "less", "cached", "largest", "over", "failed",
    "cost", "summaries", "net saved", "pays back",
)  # fmt: skip
NEVER = "(never)"
UNITS = "Costs are in thousand uncached input tokens: no price is known for a model that would be asked."
_BAR_CELLS = 24


def replay(  # noqa: PLR0913, PLR0917 - one for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A request body, or a line for each: JSON.")],
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Strategy to play; again for another.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model asked; default: the recorded one.")] = None,
    trigger_tokens: Annotated[int | None, typer.Option(min=1, help="T, in tokens.")] = None,
    target_tokens: Annotated[int | None, typer.Option(min=1, help="What to shrink to, in tokens.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Of the model, in tokens.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Play every so many requests only.")] = 1,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what strategies would do with a conversation, and what that would cost. Asks no model."""
    import asyncio
    import logging

    from compaction_proxy.cli.output import say, say_json, width
    from compaction_proxy.core.strategies import STRATEGIES
    from compaction_proxy.replay.runner import Wanted
    from compaction_proxy.telemetry import logs

    found = loaded(config).config
    names = strategy or [found.compaction.strategy]
    for name in names:
        if name not in STRATEGIES:
            fail(f"--strategy: {name} is none of {', '.join(STRATEGIES)}", BAD_CONFIG)
    logs.configure("console", logging.CRITICAL)
    wanted = Wanted(model, trigger_tokens, target_tokens, window, every)
    results = asyncio.run(_played(found, file, list(dict.fromkeys(names)), wanted))
    if as_json:
        say_json(_fields(results))
    else:
        say(report(results, width()))


async def _played(
    config: "Config", file: Path, names: Sequence[str], wanted: "Wanted"
) -> "list[list[Result]]":
    """The results of each conversation, a list for each."""
    from functools import partial

    from compaction_proxy.cli.replay_worker import staged
    from compaction_proxy.replay.recordings import recordings
    from compaction_proxy.replay.runner import play

    results = []
    try:
        async with staged(config) as stage:
            for recording in recordings(file):
                show = partial(_show, recording.name)
                played = [await play(stage, recording, name, wanted, partial(show, name)) for name in names]
                results.append(played)
    finally:
        _clear()
    return results


def _show(conversation: str, strategy: str, done: int, total: int) -> None:
    """Draw how far a conversation has been played, if anybody sees it."""
    from compaction_proxy.cli.output import clean, cut

    if sys.stderr.isatty():
        filled = _BAR_CELLS * done // total
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        said = cut(f"[{bar}] {done}/{total} {strategy} {clean(conversation)}", 78)
        print(f"\r\x1b[K{said}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def report(results: "Sequence[Sequence[Result]]", most: int | None) -> Iterator[str]:
    """A table for each conversation, and one of all of them together."""
    for played in results:
        yield from _table(played, most)
        yield ""
    sums = _sums(results)
    if sums:
        yield from _table(sums, most)
        yield ""
    if any(each.dollars is None for played in results for each in played):
        yield UNITS


def _sums(results: "Sequence[Sequence[Result]]") -> "list[Result]":
    """What the conversations come to, a result for each strategy; nothing for a single one."""
    from compaction_proxy.replay.result import summed

    several = len(results) > 1
    return [summed(each, f"{len(each)} conversations") for each in zip(*results, strict=True) if several]


def _table(played: "Sequence[Result]", most: int | None) -> Iterator[str]:
    from compaction_proxy.cli.output import Column, clean, table

    first = played[0]
    window = f", window {first.window:,}" if first.window else ""
    model = f" ({first.model}{window})" if first.model else ""
    yield clean(
        f"{first.conversation}{model}: {first.requests:,} requests, {first.sent_tokens:,} tokens sent"
    )
    columns = [Column(title, right=title != "strategy") for title in TITLES]
    yield from table(columns, [_never(first), *map(_line, played)], most)


def _never(told: "Result") -> tuple[str, ...]:
    """The line of the conversation as it came."""
    from compaction_proxy.cli.output import percent

    largest = f"{max(each.before for each in told.points):,}" if told.points else ""
    over = f"{told.over_without:,}"
    cost = _amount(told, lambda bill: bill.without)
    cached = percent(told.cached_without_tokens, told.sent_tokens)
    return (NEVER, "", "", "", f"{told.sent_tokens:,}", "", cached, largest, over, "", cost, "", "", "")


def _line(told: "Result") -> tuple[str, ...]:
    from compaction_proxy.cli.output import percent

    bill = told.dollars or told.tokens
    back = "" if bill.pays_back_after is None else f"{bill.pays_back_after:,} req."
    return (
        told.strategy,
        f"{told.trigger:,}" if told.trigger else "",
        f"{told.rounds:,}",
        f"{told.summary_calls:,}",
        f"{told.forwarded_tokens:,}",
        percent(told.sent_tokens - told.forwarded_tokens, told.sent_tokens),
        percent(told.cached_tokens, told.forwarded_tokens),
        f"{told.largest_tokens:,}",
        f"{told.over_with:,}",
        f"{told.failed:,}",
        _amount(told, lambda bill: bill.compacted),
        _amount(told, lambda bill: bill.summaries),
        _amount(told, lambda bill: bill.net),
        back,
    )


def _amount(told: "Result", of: "Callable[[Bill], float]") -> str:
    """An amount in dollars, or in thousand tokens where no price is known."""
    from compaction_proxy.cli.output import dollars

    return dollars(of(told.dollars)) if told.dollars else f"{of(told.tokens) / 1_000:,.0f}"


def _fields(results: "Sequence[Sequence[Result]]") -> dict[str, object]:
    from compaction_proxy.replay.result import to_fields

    return {
        "results": [to_fields(each) for played in results for each in played],
        "total": [to_fields(each) for each in _sums(results)],
    }
