"""How fast the proxy is, and beside what: the upstream directly, nginx, a plain relay, and other proxies.

    uv run python bench/throughput.py [--quick | --smoke] [--rivals] [--soak [N]] [--json FILE] [--readme]

Every program runs in a process of its own: the one under test on one core, upstream and load generator on
another. Targets take turns within each round, and stand still until it is theirs; so what counts is their
ratio; figures change with the machine. `direct` shows what upstream and load can do at most.
`gate off` is the proxy with a header on each request that closes its gate: the request is parsed, digested,
counted and looked up, and goes on unchanged.
"""

import argparse
import contextlib
import dataclasses
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import growth
import report
import streams
import wrk
from load import LoadError
from loads import LOADS, QUICK, REFERENCE, SMALL_MANY, SMOKE, STRICT, USUAL, Generator, Plan, Reference, Wrk
from processes import allow_sockets, cores, pinned
from results import Results, Soaked, cell, stored
from rivals import cache
from targets import (
    DIRECT,
    GATED,
    NGINX,
    OPEN,
    OPEN_FAST,
    OURS,
    PLAIN,
    Bench,
    Target,
    running,
    without_fast,
)
from upstream import CHUNKS

LIBRARIES = (
    "fastapi", "httptools", "httpx", "msgspec", "starlette", "tiktoken", "toktok-rs", "uvicorn",
    "uvloop",
)  # fmt: skip
STREAMED = (DIRECT, NGINX, GATED, OPEN)
# Targets whose decision is measured, as `decision` calls them, and with which tokenizer.
GROWN = ((GATED, "gated", False), (OPEN, "open", False), (OPEN_FAST, "open", True))
SOAK_STEPS = 10
SOAKED = (GATED, OPEN)
# Where a target fails it is left out from then on; if one of these fails, so does the bench in the end.
MUST = (DIRECT, *OURS)
PARTS = (*(load.name for load in LOADS), "streams", "growth", "soak")


def _failed(target: str, part: str) -> str:
    """How the report names a part that a target is left out of."""
    return f"{target}, {part}"


class Run:
    """Measures one thing after the other, and notes what fails.

    Args:
        bench: What there is to measure.
        results: Where it is noted.
        plan: For how long.
        generators: What makes the loads.
    """

    def __init__(self, bench: Bench, results: Results, plan: Plan, generators: Sequence[Generator]) -> None:
        self._bench = bench
        self._results = results
        self._plan = plan
        self._generators = generators

    def _turns(self, number: int, part: str, names: Sequence[str] = ()) -> Iterator[Target]:
        """Those of these names, or all, that have not failed; who begins changes with the round."""
        chosen = [target for target in self._bench.targets if not names or target.name in names]
        first = number % len(chosen)
        for target in (*chosen[first:], *chosen[:first]):
            if _failed(target.name, part) not in self._results.skipped:
                with self._bench.alone(target):
                    yield target

    @contextlib.contextmanager
    def _noting(self, target: str, part: str) -> Iterator[None]:
        try:
            yield
        except LoadError as error:
            ended = any(each.name == target and each.program.has_ended() for each in self._bench.targets)
            why = f"{error}; the program has ended" if ended else str(error)
            self._results.skipped[_failed(target, part)] = why
            print(f"left out {_failed(target, part)}: {why}", file=sys.stderr, flush=True)

    def loads(self, number: int) -> None:
        """Every target under every load."""
        for load in LOADS:
            for target in self._turns(number, load.name):
                with self._noting(target.name, load.name):
                    for generator in self._generators:
                        found = generator.run(target, load)
                        self._results.cells.append(
                            cell(generator.name, number, target.name, load.name, found)
                        )

    def streams(self, number: int) -> None:
        """Many streams at once."""
        # The plain relay takes half a minute for them: once is enough.
        names = STREAMED if number else (*STREAMED, PLAIN)
        for target in self._turns(number, "streams", names):
            with self._noting(target.name, "streams"):
                found = streams.measured(number, target, streams=self._plan.streams, chunks=self._plan.chunks)
                self._results.streams.append(found)

    def growth(self, number: int) -> None:
        """A growing conversation."""
        hidden = without_fast(self._bench.folder)
        for name, mode, fast in GROWN:
            if name not in self._results.targets or _failed(name, "growth") in self._results.skipped:
                continue
            with self._noting(name, "growth"):
                self._results.growth += growth.measured(
                    number,
                    name,
                    mode=mode,
                    tokens=self._plan.growth_tokens,
                    turns=self._plan.growth_turns,
                    core=self._bench.tested,
                    settings={} if fast else hidden,
                    fast=fast,
                )

    def memory(self) -> None:
        """What every target holds now."""
        programs = {target.name: target.program for target in self._bench.targets if target.name != DIRECT}
        self._results.rss_bytes = {name: program.rss_bytes() for name, program in programs.items()}

    def soak(self) -> None:
        """Memory over many small requests."""
        most, step = self._plan.soak_requests, self._plan.soak_step
        load = next(load for load in LOADS if load.name == SMALL_MANY)
        for target in self._turns(0, "soak", SOAKED):
            with self._noting(target.name, "soak"):
                seen = noted = 0
                while noted < most:
                    seen += self._generators[-1].run(target, load).answers
                    while noted + step <= min(seen, most):
                        noted += step
                        self._results.soak.append(Soaked(target.name, noted, target.program.rss_bytes()))


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _nginx_version() -> str | None:
    with contextlib.suppress(OSError):
        said = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=False).stderr
        return said.strip().rpartition("/")[2] or None
    return None


def _environment() -> dict[str, object]:
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "chunks": CHUNKS,
        "libraries": {
            "nginx": _nginx_version(),
            **{library: _version(library) for library in LIBRARIES},
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the proxy beside other ways to the upstream.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="a few minutes, rougher figures")
    length.add_argument("--smoke", action="store_true", help="seconds: shows that the bench works, no more")
    parser.add_argument("--rivals", action="store_true", help="install other proxies and measure them too")
    parser.add_argument(
        "--soak", type=int, nargs="?", const=200_000, metavar="N", help="memory over N (200,000) requests too"
    )
    parser.add_argument("--load", choices=(REFERENCE, STRICT), help="only one of the two kinds of load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    parser.add_argument("--readme", action="store_true", help="show this run in README.md and docs")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    plan = SMOKE if options.smoke else QUICK if options.quick else USUAL
    if options.soak:
        step = max(1, options.soak // SOAK_STEPS)
        return dataclasses.replace(plan, soak_requests=step * SOAK_STEPS, soak_step=step)
    return plan


def _generators(options: argparse.Namespace, plan: Plan, bench: Bench) -> list[Generator]:
    """What makes the loads; wrk is the last where it is one of them."""
    made: list[Generator] = []
    if options.load != STRICT:
        made.append(Reference(plan, bench.upstream))
    if options.load == STRICT or (options.load is None and wrk.installed() and not options.smoke):
        requests = bench.folder / "requests"
        requests.mkdir()
        made.append(Wrk(plan, requests))
    return made


@contextlib.contextmanager
def _timed(name: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


def _measured(options: argparse.Namespace, tested: int | None, rest: int | None) -> Results:
    plan = _plan(options)
    environment = _environment()
    rivals = cache() if options.rivals else None
    with tempfile.TemporaryDirectory() as name, pinned(rest):
        folder = Path(name)
        with running(folder, tested, rest, rivals, few=options.smoke) as bench:
            generators = _generators(options, plan, bench)
            names = [generator.name for generator in generators]
            targets = [target.name for target in bench.targets]
            results = Results(environment, dataclasses.asdict(plan), names, targets, bench.skipped)
            run = Run(bench, results, plan, generators)
            for number in range(plan.rounds):
                for part in (run.loads, run.growth, run.streams):
                    with _timed(f"round {number}, {part.__name__}"):
                        part(number)
            run.memory()
            if options.soak or options.smoke:
                with _timed("soak"):
                    run.soak()
            return results


def main() -> int:
    options = _options()
    allow_sockets()
    pair = cores()
    if pair is None:
        print("No two cores to pin to: programs share what there is, and figures say less.", file=sys.stderr)
    began_s = time.monotonic()
    try:
        results = _measured(options, *(pair or (None, None)))
    except (LoadError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(stored(results), "utf-8")
    print(report.everything(results))
    print(f"{time.monotonic() - began_s:.0f} s.")
    if options.readme:
        report.STORED.write_text(stored(results), "utf-8")
        report.write(results)
    return int(any(_failed(target, part) in results.skipped for target in MUST for part in PARTS))


if __name__ == "__main__":
    sys.exit(main())
