"""Clocks that are wrong, run fast or jump: nothing that is shared goes by them."""

import asyncio
import os
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import compaction_proxy
from compaction_proxy.support.log_events import STORE_FAILED

CLIENTS = 30
# On a machine that is busy with something else one scene may say nothing about clocks.
SCENES = 3
ROOT = Path(compaction_proxy.__file__).parents[1]
WALL_CLOCK = Path(__file__).parents[2] / "helpers/wall_clock"
DAY_S, HOUR_S = 86_400, 3_600
MAX_TTL_S = 30 * DAY_S
OFFSETS_S = (0, 2 * DAY_S, -HOUR_S, 0)
MOST_APART_S = 600


async def until_dated(replica: Any, by_s: float) -> None:
    """Wait until a replica dates its answers so many seconds from now: it dates them anew once a second."""
    async with asyncio.timeout(60):
        while True:
            dated = parsedate_to_datetime((await replica.client.get("/livez")).headers["date"])
            if abs(dated.timestamp() - time.time() - by_s) < MOST_APART_S:
                return
            await asyncio.sleep(0.05)


def wrong(**clock: object) -> dict[str, str]:
    """Returns the environment of a replica whose wall clock is wrong; see `sitecustomize` in `WALL_CLOCK`."""
    return {
        "PYTHONPATH": os.pathsep.join((str(WALL_CLOCK), str(ROOT))),
        **{f"WALL_CLOCK_{name.upper()}": str(value) for name, value in clock.items()},
    }


async def test_replicas_whose_clocks_differ_by_days_make_one_summary_and_keep_what_is_kept(
    replicated: Any,
) -> None:
    clocks: tuple[dict[str, str], ...] = (
        {},
        wrong(offset_s=2 * DAY_S),
        wrong(offset_s=-HOUR_S, speed=60),
    )
    for left in reversed(range(SCENES)):
        async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
            three = await asyncio.gather(*(replicas.start(url, server.url, **clock) for clock in clocks))
            upstream.held_s = [0.5]
            content = replicated.body(replicated.conversation("c"))
            answers = await asyncio.gather(*(three[n % 3].ask(content) for n in range(CLIENTS)))
            grown = replicated.body(replicated.conversation("c", 63))
            later = [await replica.ask(grown) for replica in three]
            dates = {answer.headers["date"][:16] for answer in later}
            ttls = [server.admin.ttl(key) for key in server.admin.scan_iter(count=1_000)]
        # A replica that the store answers too late goes on without it, whatever its clock says.
        if not left or not any(replica.events(STORE_FAILED) for replica in three):
            break
    assert [answer.status_code for answer in answers] == [200] * CLIENTS
    assert len(dates) >= 2  # the clocks are wrong indeed
    assert upstream.summaries == 1
    assert len({body for body in upstream.forwarded("c") if len(body) == len(upstream.log[0].body)}) == 1
    assert [answer.headers["x-compaction-status"] for answer in later] == ["reused"] * 3
    assert max(ttls) <= MAX_TTL_S


async def test_a_clock_that_jumps_forth_and_back_costs_no_request_and_no_summary(
    replicated: Any, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    path = tmp_path / "state.db"
    seen = []
    async with replicated.scene(numbered=True) as (upstream, url, replicas, _):
        replica = await replicas.start(url, f"sqlite:///{path}", **wrong(file=clock))
        for number, by_s in enumerate(OFFSETS_S):
            clock.write_text(str(by_s))
            await until_dated(replica, by_s)
            body = replicated.body(replicated.conversation("c", 61 + 2 * number), stream=True)
            answer = await replica.ask(body)
            ended = answer.content.endswith(b"data: [DONE]\n\n")
            seen.append(
                (
                    answer.headers["date"][:16],
                    answer.status_code,
                    ended,
                    answer.headers["x-compaction-status"],
                )
            )
    assert len({day for day, *_ in seen}) >= 2
    assert [outcome for _, *outcome in seen] == [
        [200, True, "applied"],
        *[[200, True, "reused"]] * 3,
    ]
    assert upstream.summaries == 1
