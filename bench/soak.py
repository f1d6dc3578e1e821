"""Hours of trouble in minutes: real replicas on a real Redis, both of which come and go, under mixed load.

    python bench/soak.py [--seconds 90] [--clients 24] [--seed 0]

Clients ask in conversations that grow, are compacted and begin anew, all under one session id, each with a
credential of its own. One answer in ten is left by its client, some are cut by the upstream, some summary
calls fail or are late. Meanwhile the Redis server is restarted empty or hangs, one of two replicas is
replaced by SIGTERM, and all timers are short. Checked: every byte of every answer; no error of ours but 503
with `retry-after`; the user's rule, the system message and nobody else's words in every request upstream,
none over the window or larger than it came; exit codes and logs of the replicas; what the one that stays
holds.

Prints a report; exit code 1 if there was a violation.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for helpers of the tests

from soak_clients import Addresses, Clients
from soak_replicas import Held, Replica, Replicas
from soak_upstream import Upstream

from tests.helpers.redis_servers import RedisServer

MB = 1024 * 1024
# Growth of memory that is none: a share, or so many bytes, whichever is more.
GROWTH_SHARE, GROWTH_BYTES = 0.05, 10 * MB
# What the load has left behind must be gone within this, in seconds: the proxy keeps an idle connection for
# 75 s if the client, cancelled while it connected, has not closed it.
SETTLED_S = 90.0
# Before the first tenth, what is remembered fills: for this share of the time, and so many seconds at most.
WARM_UP_SHARE, WARM_UP_S, LEAST_S = 2 / 3, 60.0, 1.0
# The least time between two troubles of the store, in seconds.
REDIS_S = 1.0
# How many violations are printed.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown.

    Attributes:
        counted: How many of each kind of event there were.
        idle: What the replica that stays held before the load.
        samples: The same, all along; of a second run as long where memory had grown in the first.
        after: The same, once it had nothing to do any more.
        took_s: How long it was under load.
        wrong: Violations.
    """

    counted: Counter[str]
    idle: Held
    samples: Sequence[Held]
    after: Held
    took_s: float
    wrong: Sequence[str]

    def violations(self) -> list[str]:
        """All that should not have been."""
        grown = grown_bytes(self.samples)
        left = {
            "descriptors": len(self.after.open_files) - len(self.idle.open_files),
            "tasks": self.after.tasks - self.idle.tasks,
        }
        found = [f"{more} {name} more than before the load" for name, more in left.items() if more > 0]
        if left["descriptors"] > 0:
            found += [f"open after the load: {name}" for name in sorted(self.after.open_files)]
        if grown:
            found.append(f"memory grew by {grown / MB:.1f} MiB")
        return [*self.wrong, *found]


def tenths_bytes(samples: Sequence[Held]) -> list[int]:
    """Memory in each tenth of the run that has samples: their median."""
    begin_s = samples[0].at_s
    tenth_s = (samples[-1].at_s - begin_s) / 10 or 1.0
    tenths: dict[int, list[int]] = {}
    for each in samples:
        tenths.setdefault(min(9, int((each.at_s - begin_s) / tenth_s)), []).append(each.rss_bytes)
    return [int(statistics.median(held)) for held in tenths.values()]


def grown_bytes(samples: Sequence[Held]) -> int:
    """By how much memory grew from the first tenth to the last; 0 where that is no growth."""
    tenths = tenths_bytes(samples)
    grown = tenths[-1] - tenths[0]
    return grown if grown > max(GROWTH_BYTES, GROWTH_SHARE * tenths[0]) else 0


async def settled(replica: Replica, idle: Held) -> Held:
    """What a replica holds once that is no more than before, or has had the time to get there."""
    deadline_s = time.monotonic() + SETTLED_S
    held = await replica.held()
    while (
        len(held.open_files) > len(idle.open_files) or held.tasks > idle.tasks
    ) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.2)
        held = await replica.held()
    return held


async def under_load(
    clients: Clients, replicas: Replicas, stays: Replica, number: int, seconds: float
) -> None:
    """Ask, while everything else happens."""
    goes = await replicas.start()
    happening = [
        asyncio.create_task(replicas.sample(stays)),
        asyncio.create_task(replicas.roll(goes, seconds / 20 + 1)),
        asyncio.create_task(replicas.break_redis(max(REDIS_S, seconds / 60))),
    ]
    asking = asyncio.create_task(clients.run(number, seconds))
    try:
        done, _ = await asyncio.wait([asking, *happening], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it: nothing but the clients ends by itself
    finally:
        for task in (asking, *happening):
            task.cancel()
        await asyncio.gather(asking, *happening, return_exceptions=True)


async def soak(folder: Path, redis: RedisServer, number: int, seconds: float, seed: int) -> Outcome:
    """A run of so many seconds with so many clients."""
    rng, addresses = random.Random(seed), Addresses()
    upstream = Upstream(rng)
    clients = Clients(upstream, addresses, rng)
    async with upstream.listening(), contextlib.AsyncExitStack() as stack:
        replicas = Replicas(folder, upstream.port, redis, addresses, rng)
        stack.push_async_callback(replicas.close)
        stays = await replicas.start()
        await clients.run(1, LEAST_S)
        idle = await stays.held()
        await clients.run(number, max(LEAST_S, min(WARM_UP_S, seconds * WARM_UP_SHARE)))
        begun_s = time.monotonic()
        await under_load(clients, replicas, stays, number, seconds)
        if grown_bytes(replicas.samples):  # what is remembered may still have filled; a leak goes on
            replicas.samples.clear()
            await under_load(clients, replicas, stays, number, seconds)
        took_s = time.monotonic() - begun_s
        after = await settled(stays, idle)
        ended = await stays.end()
        said = [line for replica in replicas.started for line in replica.failures()]
    counted = clients.counted + upstream.seen + replicas.counted
    wrong = [*clients.wrong, *upstream.wrong, *replicas.wrong, *filter(None, [ended]), *said]
    return Outcome(counted, idle, replicas.samples, after, took_s, wrong)


def report(outcome: Outcome) -> Iterable[str]:
    """The outcome in Markdown, line by line."""
    yield f"Soak of {outcome.took_s:.0f} s\n"
    yield "| what | how often |"
    yield "| --- | ---: |"
    yield from (f"| {name} | {times:,} |" for name, times in outcome.counted.items())
    yield ""
    memory = [outcome.idle.rss_bytes, *tenths_bytes(outcome.samples), outcome.after.rss_bytes]
    shown = ", ".join(f"{each / MB:.1f}" for each in memory)
    yield "Held by the replica that stays"
    yield f"- memory before, in each tenth, and after, MiB: {shown}"
    yield f"- descriptors before and after: {len(outcome.idle.open_files)}, {len(outcome.after.open_files)}"
    yield f"- tasks before and after: {outcome.idle.tasks}, {outcome.after.tasks}"
    found = outcome.violations()
    yield f"\n{len(found)} violations"
    yield from (f"- {each}" for each in found[:SHOWN])


def main() -> int:
    """Exit code 1 if there was a violation."""
    parser = argparse.ArgumentParser(
        description="Load, faults and rollovers at once; see the top of this file."
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="how long, under load")
    parser.add_argument("--clients", type=int, default=24, help="how many ask at once")
    parser.add_argument("--seed", type=int, default=0, help="of what is left to chance")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name)) as redis:
        outcome = asyncio.run(soak(Path(name), redis, given.clients, given.seconds, given.seed))
    print("\n".join(report(outcome)))
    return 1 if outcome.violations() else 0


if __name__ == "__main__":
    sys.exit(main())
