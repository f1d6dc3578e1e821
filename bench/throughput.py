"""How fast the proxy is, and beside what: the upstream reached directly, and the plain FastAPI + httpx relay.

    uv run python bench/throughput.py [--quick] [--json FILE]

Every program runs in a process of its own: the one under test on one core, upstream and load generator on
another. Targets take turns within each round, so what counts is their ratio; figures change with the machine.
`direct` shows what upstream and load generator can do at most: far more than anything between them.
`gate off` is the proxy with a header on each request that closes its gate: the request is parsed, digested,
counted and looked up, and goes on unchanged.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import uvloop
from conversations import large, small, streamed
from load import LoadError, Requests, measure
from processes import Program, cores, pinned, started
from results import Cell, Results, percentile, table
from upstream import CHUNKS

BENCH = Path(__file__).parent
DIRECT = "direct"
USUAL_WAY = "FastAPI + httpx"
# Never reached, and below the trigger of the window in PROXY_SETTINGS: it closes the gate and does no more.
GATE_OFF = ("x-compaction-trigger-tokens: 1000000",)
PROXY_SETTINGS = {"COMPACTION_PROXY__MODELS": json.dumps({"bench-*": {"window": 2_000_000}})}
LIBRARIES = (
    "aiohttp", "anyio", "fastapi", "httptools", "httpx", "msgspec", "sniffio", "starlette", "tiktoken",
    "uvicorn", "uvloop",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured.

    Attributes:
        name: As the table says it.
        program: What answers.
        headers: Lines that are added to each request.
    """

    name: str
    program: Program
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How it is measured.

    Attributes:
        name: As `results` knows it.
        connections: How many ask at once.
        requests: What they ask, for a session's id and further header lines.
    """

    name: str
    connections: int
    requests: Callable[[str, Sequence[str]], Requests]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long it is measured; seconds are for one target under one load in one round."""

    rounds: int
    warm_s: float
    window_s: float


LOADS = (
    Load("small c=1", 1, small),
    Load("small c=32", 32, small),
    Load("SSE c=32", 32, streamed),
    Load("853 KB c=4", 4, large),
)
USUAL = Plan(rounds=5, warm_s=0.3, window_s=1.5)
QUICK = Plan(rounds=3, warm_s=0.05, window_s=0.25)


@contextlib.contextmanager
def _targets(folder: Path, tested: int | None, rest: int | None) -> Iterator[list[Target]]:
    python = sys.executable
    with contextlib.ExitStack() as stack:
        serving = started([python, str(BENCH / "upstream.py")], folder / "upstream", rest, {})
        upstream = stack.enter_context(serving)

        def proxy(name: str) -> Program:
            settings = {
                **PROXY_SETTINGS,
                "COMPACTION_PROXY__UPSTREAM__BASE_URL": upstream.url + "/v1",
                "COMPACTION_PROXY__SERVER__PORT": "0",
                "COMPACTION_PROXY__STORE__URL": f"sqlite:///{folder / name}.db",
            }
            return stack.enter_context(
                started([python, "-m", "proxy", "serve"], folder / name, tested, settings)
            )

        plain = [python, str(BENCH / "plain_relay.py"), upstream.url]
        yield [
            Target(DIRECT, upstream),
            Target("proxy, gated", proxy("gated")),
            Target("proxy, gate off", proxy("open"), GATE_OFF),
            Target(USUAL_WAY, stack.enter_context(started(plain, folder / "plain", tested, {}))),
        ]


def _answer(target: Target, accept: str) -> httpx.Response:
    headers = dict(line.split(": ", 1) for line in target.headers)
    asked = {"model": "bench-check", "messages": [{"role": "user", "content": "Is it you?"}]}
    url = target.program.url + "/v1/chat/completions"
    return httpx.post(url, json=asked, headers={**headers, "accept": accept}, trust_env=False)


def _check(targets: Sequence[Target]) -> None:
    """Raise LoadError unless all targets give the same bytes, in the way their names say."""
    for accept in ("application/json", "text/event-stream"):
        expected = _answer(targets[0], accept).content
        for target in targets:
            found = _answer(target, accept)
            if found.status_code != 200 or found.content != expected:
                raise LoadError(f"{target.name} does not answer as the upstream does")
            if ("x-compaction-tokens-before" in found.headers) != bool(target.headers):
                raise LoadError(f"{target.name} has not the gate that it should have")


async def _cell(number: int, target: Target, load: Load, asked: Sequence[Requests], plan: Plan) -> Cell:
    program = target.program
    try:
        found = await measure(
            program.address, asked, warm_s=plan.warm_s, window_s=plan.window_s, cpu_s=program.cpu_s
        )
    except LoadError as error:
        raise LoadError(f"{target.name}, {load.name}: {error}") from error
    if not found.latencies_s:
        raise LoadError(f"{target.name}, {load.name}: no answer within {plan.window_s} s")
    return Cell(
        round=number,
        target=target.name,
        load=load.name,
        answers=len(found.latencies_s),
        elapsed_s=found.elapsed_s,
        p50_s=percentile(found.latencies_s, 0.50),
        p99_s=percentile(found.latencies_s, 0.99),
        cpu_s=found.cpu_s,
    )


async def _cells(targets: Sequence[Target], plan: Plan) -> list[Cell]:
    """Every target under every load, round by round; who begins changes with the round."""
    asked = {
        (target.name, load.name): [
            load.requests(f"{load.name} {index}", target.headers) for index in range(load.connections)
        ]
        for target in targets
        for load in LOADS
    }
    return [
        await _cell(number, target, load, asked[target.name, load.name], plan)
        for number in range(plan.rounds)
        for load in LOADS
        for target in (*targets[number % len(targets) :], *targets[: number % len(targets)])
    ]


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


def _environment() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "libraries": {library: _version(library) for library in LIBRARIES},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the proxy beside other ways to the upstream.")
    parser.add_argument("--quick", action="store_true", help="half a minute, rougher figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    return parser.parse_args()


def main() -> int:
    options = _options()
    plan = QUICK if options.quick else USUAL
    pair = cores()
    tested, rest = pair or (None, None)
    if pair is None:
        print("No two cores to pin to: programs share what there is, and figures say less.", file=sys.stderr)
    environment = _environment()
    began_s = time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            pinned(rest),
            _targets(Path(folder), tested, rest) as targets,
        ):
            _check(targets)
            cells = uvloop.run(_cells(targets, plan))
            rss_bytes = {target.name: target.program.rss_bytes() for target in targets[1:]}
    except (LoadError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    names = [target.name for target in targets]
    print(table(Results(cells, direct=DIRECT, usual=USUAL_WAY), names, rss_bytes, CHUNKS))
    print(
        f"\nMedians of {plan.rounds} rounds of {plan.window_s} s; ± is half the way from the lowest round to "
        f"the highest; in parentheses the multiple of {USUAL_WAY} in the same round. "
        f"{environment['processor']}, Python {environment['python']}, {time.monotonic() - began_s:.0f} s."
    )
    if options.json:
        raw = {
            "environment": environment,
            "plan": dataclasses.asdict(plan),
            "rss_bytes": rss_bytes,
            "cells": [dataclasses.asdict(cell) for cell in cells],
        }
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
