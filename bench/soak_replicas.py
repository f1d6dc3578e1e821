"""The replicas of the soak, of which one stays and is measured and one is replaced all the time."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from processes import Program
from soak_clients import Addresses
from soak_upstream import SUMMARY_MODEL, WINDOW_TOKENS
from targets import ALLOCATOR

from tests.helpers.redis_servers import RedisServer

ROOT = Path(__file__).resolve().parent.parent
START_S, END_S = 60.0, 40.0
# How long a balancer goes on sending to a replica that has been told to end; how long that accepts requests.
NOTICED_S, ACCEPT_GRACE_S = 0.3, 1
# How seldom a process is asked what it holds, in seconds, and how long an answer may take.
SAMPLE_S, SAMPLED_S = 0.5, 30.0
# Every timer that can be set, shortened.
SHORT = {
    "COMPACTION_PROXY__STORE__TTL": "20s",
    "COMPACTION_PROXY__SUMMARY__TIMEOUT_S": "2",
    "COMPACTION_PROXY__SUMMARY__CALLS_PER_HOUR": "0",
    "COMPACTION_PROXY__SERVER__ACCEPT_GRACE_S": str(ACCEPT_GRACE_S),
    "COMPACTION_PROXY__SERVER__DRAIN_S": "30",
    "COMPACTION_PROXY__SERVER__BODY_TIMEOUT_S": "5",
    "COMPACTION_PROXY__SERVER__SEND_TIMEOUT_S": "5",
}
# Runs in each replica before it: SIGUSR1 makes it write down how many tasks there are.
_COUNTING = """
import asyncio, os, signal

def counted(*_):
    with open(f"tasks-{os.getpid()}.new", "w") as file:
        file.write(str(len(asyncio.all_tasks())))
    os.rename(f"tasks-{os.getpid()}.new", f"tasks-{os.getpid()}")

signal.signal(signal.SIGUSR1, counted)
"""


def list_open_files(pid: int, store: int, store_sockets: set[str]) -> list[str]:
    """Lists the descriptors that a process has open, except connections to the store, which a pool bounds.

    The kernel names no peer of a connection that was reset. A pool notices that only at the next use, so the
    sockets that have once been seen as connections to the store are added to `store_sockets` and remembered.
    A connection is listed with its two ports.
    """
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = {f"socket:[{row[9]}]": [int(end.partition(":")[2], 16) for end in row[1:3]] for row in rows}
    store_sockets |= {name for name, (_, remote) in ports.items() if remote == store}
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(each.readlink())
            if name not in store_sockets:
                found.append(f"{name} {ports[name]}" if name in ports else name)
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at one moment.

    Attributes:
        at_s: When, by the loop's clock.
        rss_bytes: Memory.
        open_files: Open descriptors, without the pool of connections to the store.
        tasks: Of its event loop.
    """

    at_s: float
    rss_bytes: int
    open_files: tuple[str, ...]
    tasks: int


@dataclass(frozen=True, slots=True)
class Replica:
    """A proxy that accepts requests.

    Attributes:
        process: It.
        address: Where it listens.
        folder: Where it works.
        log: What it says.
        store: Port of its store.
        store_sockets: The sockets that were seen connected to the store.
    """

    process: asyncio.subprocess.Process
    address: tuple[str, int]
    folder: Path
    log: Path
    store: int
    store_sockets: set[str] = field(default_factory=set)

    async def held(self) -> Held:
        """What it holds now."""
        said = self.folder / f"tasks-{self.process.pid}"
        said.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(SAMPLED_S):
            while not said.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        files = tuple(list_open_files(self.process.pid, self.store, self.store_sockets))
        program = Program(self.process.pid, self.address)
        now_s = asyncio.get_running_loop().time()
        return Held(now_s, program.rss_bytes(), files, int(said.read_text()))

    async def end(self) -> str:
        """Tell it to end; what was wrong with how it did, or nothing."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(self.process.wait(), END_S)
        except TimeoutError:
            return f"a replica did not end within {END_S:.0f} s"
        return f"a replica ended with {code}" if code else ""

    def failures(self) -> list[str]:
        """What its log should not hold: crashes, and anything that is no event."""
        lines = self.log.read_text(errors="replace").splitlines()
        plain = [line for line in lines if not line.startswith("{")]
        events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
        crashes = [event for event in events if event in {"request.crashed", "relay.tap_failed"}]
        return [f"a replica said: {line[:200]}" for line in plain + crashes]


@dataclass
class Replicas:
    """Starts replicas on one Redis server, and replaces them.

    Attributes:
        folder: Where they work.
        upstream: Port of their upstream.
        redis: Their store.
        addresses: What clients know of them.
        rng: Decides what happens when.
        counted: What has happened to them.
        wrong: What should not have.
    """

    folder: Path
    upstream: int
    redis: RedisServer
    addresses: Addresses
    rng: random.Random
    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Held] = field(default_factory=list)
    started: list[Replica] = field(default_factory=list)

    async def start(self) -> Replica:
        """A replica that clients know of."""
        (self.folder / "sitecustomize.py").write_text(_COUNTING)
        log = self.folder / f"replica-{len(self.started)}.log"
        settings = {
            "HOME": str(self.folder),
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT / 'proxy'}",
            "COMPACTION_PROXY__STORE__URL": self.redis.url,
            "COMPACTION_PROXY__SUMMARY__MODEL": SUMMARY_MODEL,
            "COMPACTION_PROXY__MODELS": json.dumps({"soak-*": {"window": WINDOW_TOKENS}}),
        }
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "compaction_proxy", "serve", "--port", "0",
                "--upstream", f"http://127.0.0.1:{self.upstream}/v1",
                cwd=self.folder, env={**settings, **SHORT, **ALLOCATOR},
                stdout=asyncio.subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        try:
            address = await asyncio.wait_for(_listening(process), START_S)
        except BaseException:  # also where it is cancelled: the next replica writes to a log of this name
            process.kill()
            await process.communicate()
            raise
        replica = Replica(process, address, self.folder, log, self.redis.port)
        self.started.append(replica)
        self.addresses.live.append(address)
        return replica

    async def roll(self, replica: Replica, every_s: float) -> None:
        """Have a replica serve for a while, end it, start another, and so on until cancelled."""
        while True:
            await asyncio.sleep(every_s * (0.5 + self.rng.random()))
            ending, begun_s = asyncio.create_task(replica.end()), time.monotonic()
            try:
                await asyncio.sleep(NOTICED_S)
            finally:
                self.addresses.live.remove(replica.address)
            if wrong := await ending:
                self.wrong.append(wrong)
            self.counted["replicas replaced"] += 1
            took_ms = int((time.monotonic() - begun_s) * 1000)
            self.counted["slowest end of a replica, ms"] = max(
                took_ms, self.counted["slowest end of a replica, ms"]
            )
            replica = await self.start()

    async def break_redis(self, every_s: float) -> None:
        """Restart the store, empty, or hold it up, until cancelled."""
        while True:
            await asyncio.sleep(every_s * (0.5 + self.rng.random()))
            restarts = self.rng.random() < 0.7
            (self.redis.kill if restarts else self.redis.pause)()
            try:
                await asyncio.sleep(0.1 + self.rng.random() * 0.5)
            finally:
                (self.redis.start if restarts else self.redis.resume)()
            self.counted["Redis restarts" if restarts else "Redis hangs"] += 1

    async def sample(self, replica: Replica) -> None:
        """Note what a replica holds, until cancelled."""
        while True:
            self.samples.append(await replica.held())
            await asyncio.sleep(SAMPLE_S)

    async def close(self) -> None:
        """End them all at once; nothing is left."""
        for replica in self.started:
            with contextlib.suppress(ProcessLookupError):
                replica.process.kill()
            await replica.process.communicate()


async def _listening(process: asyncio.subprocess.Process) -> tuple[str, int]:
    assert process.stdout is not None
    address: tuple[str, int] | None = None
    async for line in process.stdout:
        found = re.search(rb"listens on http://([\d.]+):(\d+)", line)
        address = (found[1].decode(), int(found[2])) if found else address
        if address and b"OPENAI_BASE_URL" in line:
            return address
    raise RuntimeError("a replica did not start")
