"""Replicas forward the same bytes, whatever their processes' hash seeds are."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = ("0", "1", "4711")
SCRIPT = """
import asyncio
import hashlib

from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.core.errors import SummaryError
from tests.helpers.compaction_bench import Summaries, bench, called, says, user

WORDS = "parser ledger budget timeout header socket cache index token branch".split()


def session():
    messages = [user("Fix the parser. Never touch prod.env. The port is 8080, the host is db.internal.")]
    for turn in range(40):
        one, two, three = (WORDS[(turn * k + k) % 10] for k in (1, 3, 7))
        messages += called(turn, f"{one}: ValueError: bad {two} in src/{three}_{turn}.py:{turn}; " * 8)
        messages.append(says(f"The {one} of the {two} was slow; I moved the {three} to src/{one}/{turn}.py."))
        messages.append(user(f"Now the port is {8000 + turn}. Please check the {two} and the {three}, too."))
    return messages


async def main():
    for strategy in STRATEGIES:
        for model in (Summaries(), Summaries([SummaryError("http-500")])):
            async with bench(model, strategy=strategy, window=9_000) as made:
                for stop in (81, 121, 161):
                    fit = await made.fit(session()[:stop], trigger_tokens=3_000)
                    asked = "".join(call.prompt for call in model.calls)
                    said = fit.raw + asked.encode()
                    print("forwarded", strategy, fit.report.status, hashlib.sha256(said).hexdigest())


asyncio.run(main())
"""


def test_no_hash_seed_changes_what_is_forwarded() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env=environment | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    said = [process.communicate(timeout=100)[0].splitlines() for process in running]
    told = [[line for line in lines if line.startswith("forwarded ")] for lines in said]
    assert [process.returncode for process in running] == [0] * len(SEEDS)
    assert sum("applied" in line for line in told[0]) >= 20
    assert told[1:] == [told[0]] * (len(SEEDS) - 1)
