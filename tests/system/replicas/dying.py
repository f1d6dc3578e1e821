"""Forks proxies that kill themselves at a point of a round: each line that is read names the point by number.

They print what `serve` prints, and this process says when one has died. To fork them is quicker than to start
each anew, and nothing runs yet in what is forked.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from compaction_proxy.app import create_app
from compaction_proxy.cli.main import app
from compaction_proxy.compaction import round_builder
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.gateway import endpoint
from compaction_proxy.gateway.server.cycle import RequestResponseCycle
from compaction_proxy.storage import leases
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.telemetry.event_history import EventHistory

# Where, and whether before it or with its outcome.
POINTS: list[tuple[tuple[Any, ...], str, bool]] = [
    ((leases,), "_acquire_or_give_back", False),
    ((leases,), "_acquire_or_give_back", True),
    ((Summarizer,), "write_summary", False),
    ((Summarizer,), "write_summary", True),
    ((round_builder,), "build_replacements", True),
    ((EventHistory,), "record_root", True),
    ((RedisStore, SqliteStore), "commit", False),
    ((RedisStore, SqliteStore), "commit", True),
    ((RecordStore,), "release_lease", False),
    ((RecordStore,), "release_lease", True),
    ((endpoint,), "send_request", False),
    ((RequestResponseCycle,), "_send_body", True),
]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The same, but whoever calls it dies; a commit at start-up is none of a round."""

    async def awaited(*arguments: Any, **named: Any) -> Any:
        if real.__name__ == "commit" and ":checkpoint:" not in str(arguments[1]):
            return await real(*arguments, **named)
        if not after:
            die()
        outcome = await real(*arguments, **named)
        die()
        return outcome

    def called(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        die()

    return awaited if asyncio.iscoroutinefunction(real) else called


def main() -> None:
    assert create_app is not None  # loaded before anything is forked
    for line in sys.stdin:
        owners, name, after = POINTS[int(line)]
        pid = os.fork()
        if pid == 0:
            for owner in owners:
                setattr(owner, name, deadly(getattr(owner, name), after=after))
            app(["serve", *sys.argv[1:]])
        _, status = os.waitpid(pid, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)  # noqa: T201 - it is how this process speaks


if __name__ == "__main__":
    main()
