"""Shows a run: the table in README.md, docs/performance.md and the chart.

python bench/report.py            writes them anew from docs/performance.json
python bench/report.py --check    says whether they are what it would write
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from chart import chart
from goals import BUSY, KIB, MB, MS, US, Goal, added_first_s, goals
from growth import Grown
from loads import LARGE, REFERENCE, SMALL_MANY, SMALL_ONE, STREAMED, STRICT
from results import Cell, Results, read
from targets import DIRECT, GATED, NGINX, OPEN, OPEN_FAST, PLAIN

KINDS = {
    REFERENCE: "**Reference load**: clients and a provider that decode the data.",
    STRICT: "**wrk**: clients that use almost no CPU.",
}
IDLE_MARK = "\\*"
GROWN: tuple[tuple[str, Callable[[Grown], float]], ...] = (
    ("a warm turn", lambda each: each.warm_s),
    ("a warm turn, the whole call", lambda each: each.warm_call_s),
    ("a warm turn, loop held", lambda each: each.warm_held_s),
    ("first sight", lambda each: each.cold_s),
    ("first sight, the whole call", lambda each: each.cold_call_s),
    ("first sight, loop held", lambda each: each.cold_held_s),
)
ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "docs/performance.json"
CHART = ROOT / "docs/performance.svg"
PAGES = (ROOT / "README.md", ROOT / "docs/performance.md")

# Above this load average of the machine before a run, its figures are marked as rough.
QUIET_LOAD = 0.5

_BLOCK = re.compile(
    r"(?P<start><!-- performance:(?P<part>\w+):start -->\n).*?(?P<end><!-- performance:end -->)", re.DOTALL
)


def _table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first row is its head, columns after the first `left` stand on the right."""
    rule = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])) + "\n"


def _shown(found: float | None, form: str) -> str:
    return "" if found is None else format(found, form)


def _rate(results: Results, by: str, target: str, load: str) -> str:
    """A rate, the multiple of nginx, and a mark where it was not the target that was the limit."""
    rate = results.median(by, target, load, lambda cell: cell.rate)
    times = results.times(by, target, NGINX, load)
    busy = results.median(by, target, load, lambda cell: cell.busy)
    mark = IDLE_MARK if busy is not None and busy < BUSY and target != DIRECT else ""
    beside = f" ({times:.2f}x)" if times is not None and target not in {DIRECT, NGINX} else ""
    return _shown(rate, ",.0f") + mark + beside


def _milliseconds(results: Results, by: str, target: str, load: str, figure: Callable[[Cell], float]) -> str:
    found = results.median(by, target, load, figure)
    return "" if found is None else f"{found * MS:.3f}"


def _loaded(results: Results, by: str, targets: Iterable[str]) -> str:
    """Returns a table of targets under every load."""
    rows = [["", "small c=1 p50 ms", "small c=32 req/s", "SSE c=32 streams/s", "853 KB c=4 req/s", "RSS MB"]]
    for target in targets:
        rss = results.rss_bytes.get(target, 0) / MB
        first = _milliseconds(results, by, target, SMALL_ONE, lambda cell: cell.p50_s)
        rates = [_rate(results, by, target, load) for load in (SMALL_MANY, STREAMED, LARGE)]
        rows.append([target, first, *rates, f"{rss:.0f}" if rss else ""])
    return _table(rows)


def _summary(results: Results) -> str:
    """Returns the tables of every target under every load, of either kind."""
    parts = [f"{KINDS[by]}\n\n{_loaded(results, by, results.targets)}" for by in results.generators]
    return "\n".join(parts) + "\n" + _origin(results)


def _headline(results: Results) -> str:
    """Returns README's table: the reference load on the targets that a reader compares."""
    left_out = {DIRECT, OPEN_FAST, PLAIN}
    targets = (target for target in results.targets if target not in left_out)
    return _loaded(results, REFERENCE, targets) + "\n" + _origin(results)


def _quiet(machine: Mapping[str, Any]) -> str:
    """A warning, if others were at work when the run began."""
    load = machine["load_average"][0]
    if load < QUIET_LOAD:
        return ""
    return f"**The machine was busy (load {load:.1f} at the start), so figures and ratios are rough.**\n"


def _origin(results: Results) -> str:
    machine, plan = results.environment, results.plan
    return (
        f"Measured on {machine['date']}: {machine['processor']}, one core for the target and one for "
        f"upstream and load, Python {machine['python']}. Medians of {plan['rounds']} runs of "
        f"{plan['window_s']} s, in which the targets take turns. In parentheses: the multiple of nginx in "
        f"the same run. {IDLE_MARK}: the target used less than {BUSY:.0%} of its core, so something else was "
        "the limit.\n"
        f"{_quiet(machine)}"
        "nginx only relays. Gated, the proxy sees by the size of a request that there is nothing to do. With "
        "the gate off, it parses, digests, counts and remembers each conversation.\n"
    )


def _loads(results: Results) -> str:
    """What the summary has no room for."""
    return "\n".join(f"{KINDS[by]}\n\n{_details(results, by)}" for by in results.generators)


def _details(results: Results, by: str) -> str:
    rows = [["", "p99 ms c=1", "p99 ms c=32", "CPU µs/req", "busy", "spread of req/s", "CPU µs/chunk"]]
    for target in results.targets:
        cpu = results.median(by, target, SMALL_MANY, lambda cell: cell.cpu_us)
        if cpu is None:
            continue
        busy = results.median(by, target, SMALL_MANY, lambda cell: cell.busy)
        stream_us = results.median(by, target, STREAMED, lambda cell: cell.cpu_us)
        chunk_us = None if stream_us is None else stream_us / results.environment["chunks"]
        rows.append(
            [
                target,
                _milliseconds(results, by, target, SMALL_ONE, lambda cell: cell.p99_s),
                _milliseconds(results, by, target, SMALL_MANY, lambda cell: cell.p99_s),
                _shown(cpu, ".0f"),
                _shown(busy, ".0%"),
                f"±{results.spread(by, target, SMALL_MANY, lambda cell: cell.rate):.0%}",
                _shown(chunk_us, ".1f"),
            ]
        )
    return _table(rows)


def _figure(goal: Goal, found: float) -> str:
    shown = f"{found:,.0f}" if found >= 100 or found == 0 else f"{found:.3g}"
    return f"{shown} {goal.unit}"


def _verdict(goal: Goal) -> str:
    return {True: "yes", False: "**no**", None: "not measured"}[goal.is_met]


def _goals(results: Results) -> str:
    rows = [["goal", "", "measured", "met"]]
    for goal in goals(results):
        limit = ("≥ " if goal.at_least else "≤ ") + _figure(goal, goal.limit)
        found = "" if goal.found is None else _figure(goal, goal.found)
        rows.append([goal.name, limit, found, _verdict(goal)])
    return _table(rows)


def _growth(results: Results) -> str:
    """What a turn costs by length."""
    rows = [["ms CPU", *(f"{tokens:,} tokens" for tokens in results.lengths()), "greatest / least"]]
    for target in (OPEN, OPEN_FAST, GATED):
        for name, figure in GROWN:
            found = [results.grown(target, tokens, figure) for tokens in results.lengths()]
            known = [each for each in found if each is not None]
            if known:
                row = [_shown(None if each is None else each * MS, ".2f") for each in found]
                rows.append([f"{target}: {name}", *row, f"{max(known) / min(known):.1f}"])
    return _table(rows)


def _streams(results: Results) -> str:
    """Many streams at once."""
    rows = [
        [
            *("", "first byte p50 ms", "p99", "added p99", "late p99 ms", "CPU µs/chunk"),
            *("KiB each", "joined", "wrong"),
        ]
    ]
    for target in results.targets:
        found = results.streamed(target)
        if not found:
            continue
        added_s = added_first_s(results, target)
        held = max(each.held_bytes for each in found) / found[0].streams
        rows.append(
            [
                target,
                f"{median(each.first_p50_s for each in found) * MS:.0f}",
                f"{median(each.first_p99_s for each in found) * MS:.0f}",
                "" if added_s is None or target == DIRECT else f"{added_s * MS:+.0f}",
                f"{median(each.late_p99_s for each in found) * MS:.1f}",
                "" if target == DIRECT else f"{median(each.chunk_cpu_s for each in found) * US:.0f}",
                "" if target == DIRECT else f"{held / KIB:.0f}",
                f"{median(each.joined for each in found):.1%}",
                str(sum(each.wrong for each in found)),
            ]
        )
    return _table(rows)


def _soak(results: Results) -> str:
    if not results.soak:
        return "Not part of this run.\n"
    targets = list(dict.fromkeys(each.target for each in results.soak))
    rows = [["requests", *targets]]
    for requests in sorted({each.requests for each in results.soak}):
        held = {each.target: each.rss_bytes for each in results.soak if each.requests == requests}
        rows.append([f"{requests:,}", *(f"{held.get(target, 0) / MB:.1f} MB" for target in targets)])
    return _table(rows)


def _run(results: Results) -> str:
    """Versions, and what was left out."""
    machine = results.environment
    libraries = ", ".join(f"{name} {held}" for name, held in machine["libraries"].items() if held)
    left_out = "; ".join(f"{name} ({why})" for name, why in results.skipped.items()) or "nothing"
    return f"{machine['system']}; {libraries}.\nLeft out: {left_out}.\n"


PARTS: dict[str, Callable[[Results], str]] = {
    "headline": _headline,
    "summary": _summary,
    "loads": _loads,
    "goals": _goals,
    "growth": _growth,
    "streams": _streams,
    "soak": _soak,
    "run": _run,
}


def updated(page: str, results: Results) -> str:
    """A page with what stands between its marks written anew."""
    return _BLOCK.sub(
        lambda found: found["start"] + PARTS[found["part"]](results) + found["end"],
        page,
    )


def everything(results: Results) -> str:
    """All tables, for the terminal."""
    return "\n".join(
        PARTS[name](results) for name in ("summary", "loads", "growth", "streams", "goals", "run")
    )


def _files(results: Results) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        yield page, updated(page.read_text("utf-8"), results)
    yield CHART, chart(results)


def write(results: Results) -> None:
    """Write all files that show a run."""
    for file, text in list(_files(results)):
        file.write_text(text, "utf-8")


def stale(results: Results) -> list[Path]:
    """Files that show something else than this run."""
    return [file for file, text in _files(results) if not file.exists() or file.read_text("utf-8") != text]


def main() -> int:
    parser = argparse.ArgumentParser(description="Show the stored run in README.md and docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is old")
    if not parser.parse_args().check:
        write(read(STORED))
        return 0
    old = stale(read(STORED))
    for file in old:
        print(f"{file.relative_to(ROOT)} is not what {STORED.name} shows", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
