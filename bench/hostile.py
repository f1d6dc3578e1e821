"""Hostile requests and random faults at once, against a real proxy process: make test-hostile

    python bench/hostile.py [--requests 200000] [--seed N] [--first N] [--corpus FOLDER] [--data FOLDER]
    python bench/hostile.py --replay FILE

Valid conversations on three wires are mutated, by structure and by bytes, and sent badly by tenants that each
have a marker of their own. Meanwhile the store is killed, hangs and is emptied; the upstream and the summary
model fail in any way; the clock jumps; descriptors and memory run out. Checked for each request: no 5xx of
ours but those that docs/reliability.md names, an error in the shape of the wire, the bytes of the upstream's
answer, the bytes of the request where nothing was compacted, no more tokens forwarded than received, and no
marker of anybody else. Checked for each round of requests: the log, the exit code, memory and descriptors.

Everything follows from the seed, the number of a request and the corpus; only the moments of faults do not.
The corpus is a folder of requests with which something new has happened; it grows with each run. A request
with which something went wrong is written there, too, as a file for --replay. Exit code 1 if there was one.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for helpers of the tests

import httptools
from hostile_requests import WIRES, Case, CaseMaker, deliver, load_chats
from hostile_upstream import MARKER, SUMMARY_MODEL, Provider, Visits
from processes import Program, allow_sockets
from soak_clients import Answer, read_answer
from soak_replicas import list_open_files

from compaction_proxy.gateway.body_budget import COST_FACTOR, PROCESS_BYTES
from tests.helpers.proxy_processes import ProxyProcess, proxy_process
from tests.helpers.redis_servers import RedisServer
from tests.helpers.scripted_upstream import upstream

ROOT = Path(__file__).resolve().parent.parent
SEEDS = Path(__file__).with_name("hostile_seeds")
WALL_CLOCK = ROOT / "tests" / "helpers" / "wall_clock" / "sitecustomize.py"
MIB = 1024 * 1024
# So many requests go to one process, and so many at once.
ROUND_REQUESTS, CLIENTS = 500, 48
# How many requests come between two faults of the machine or the store, and how long one lasts at the most.
FAULT_REQUESTS, FAULT_S = 25, 0.5
# Only a hang takes as long.
PATIENCE_S = 60.0
SETTLED_S = 20.0
DAY_S = 86_400
MAX_BODY_BYTES, MAX_INFLIGHT_BYTES = 8 * MIB, 32 * MIB
MAX_RSS_BYTES = PROCESS_BYTES + COST_FACTOR * MAX_INFLIGHT_BYTES
# A request of the corpus is not larger, and a run adds no more of them.
SEED_BYTES, NEW_SEEDS = 65_536, 200
SIZES = ("tokens-before", "tokens-after", "messages-before", "messages-after")
SHOWN, SHOWN_CHARACTERS = 20, 1_500

# What may be wrong, as the last line of the report calls it.
KINDS = {
    "5xx": "unnamed 5xx of ours",
    "answer": "missing answers",
    "shape": "errors of another shape",
    "foreign": "foreign markers",
    "altered": "altered bodies",
    "longer": "requests made longer",
    "log": "faults in the log",
    "held": "leaks",
    "ended": "dead proxies",
}
SETTINGS = {
    "STORE__TTL": "60s",
    "SUMMARY__MODEL": SUMMARY_MODEL,
    "SUMMARY__TIMEOUT_S": "1",
    "SUMMARY__CALLS_PER_HOUR": "0",
    "UPSTREAM__TIMEOUT_S": "10",
    "SERVER__ACCEPT_GRACE_S": "0",
    "SERVER__BODY_TIMEOUT_S": "2",
    "SERVER__MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "SERVER__MAX_INFLIGHT_BYTES": str(MAX_INFLIGHT_BYTES),
    "MODELS": json.dumps({"gpt-x": {"window": 4_000}}),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """What a round is played under.

    Attributes:
        store: `sqlite` or `redis`.
        faults: What happens meanwhile.
        settings: More settings.
        free_bytes: Address space that the process may use beyond what an idle one has; 0: any.
    """

    store: str
    faults: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()
    free_bytes: int = 0


_RECALLED = (("RECALL__TOOL", "inject"), ("RECALL__AUTO", "inject"))
_SEALED = (("STORE__ENCRYPTION_KEYS", '["' + "A" * 43 + '="]'),)
SCENES = (
    Scene("sqlite", ("clock", "descriptors")),
    Scene("redis", ("clock", "store", "store", "descriptors"), _RECALLED),
    Scene("sqlite", ("clock",), free_bytes=512 * MIB),
    Scene("sqlite", ("clock", "memory"), _SEALED),
)


@dataclass
class Run:
    """A run: what was asked, and what went wrong.

    Attributes:
        seed: Of what is left to chance.
        corpus: The folder of requests with which something new happens.
        folder: Where processes work.
        counted: What has become of requests.
        wrong: What should not have, by kind.
    """

    seed: int
    corpus: Path
    folder: Path
    provider: Provider
    maker: CaseMaker
    known: set[tuple[str, ...]] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    saved: int = 0
    squeezes: int = 0
    idle_bytes: int = 0

    async def play(self, first: int, stop: int) -> None:
        """All rounds."""
        async with upstream(self.provider) as server:
            for begin in range(first, stop, ROUND_REQUESTS):
                scene = SCENES[begin // ROUND_REQUESTS % len(SCENES)]
                numbers = range(begin, min(begin + ROUND_REQUESTS, stop))
                await self._play_round(scene, numbers, server.port)
                server.seen.clear()
                print(f"{numbers.stop:,} of {stop:,}, {len(self.wrong)} wrong", file=sys.stderr, flush=True)

    async def replay(self, raw: bytes) -> None:
        """Send one request as it was, and print the answer and the log."""
        async with upstream(self.provider) as server, self._start(SCENES[0], server.port, None) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(raw)
            print(repr(await reader.read()))
            print(proxy.errors.read_text())

    async def _play_round(self, scene: Scene, numbers: range, upstream_port: int) -> None:
        """The requests of one process."""
        with contextlib.ExitStack() as stack:
            redis = stack.enter_context(RedisServer(self.folder)) if scene.store == "redis" else None
            async with self._start(scene, upstream_port, redis) as proxy:
                self.idle_bytes = self.idle_bytes or _read_status_bytes(proxy, "VmSize")
                await self._ask_well(proxy)
                sockets: set[str] = set()
                store_port = redis.port if redis else 0
                idle = list_open_files(proxy.process.pid, store_port, sockets)
                waiting = iter(numbers)
                faults = set[asyncio.Task[None]]()
                async with asyncio.TaskGroup() as group:
                    for _ in range(CLIENTS):
                        group.create_task(self._ask_next(waiting, proxy, scene, redis, faults))
                await asyncio.gather(*faults)
                if proxy.process.returncode is None:
                    await self._ask_well(proxy)
                    self.counted["processor time of proxies, s"] += int(proxy.cpu_s)
                    await self._check_held(proxy, idle, store_port, sockets)
                    await self._end(proxy)
                else:
                    self._note("ended", f"the proxy ended with {proxy.process.returncode} in {scene}")
                self._check_log(proxy.errors, scene)

    @contextlib.asynccontextmanager
    async def _start(
        self, scene: Scene, upstream_port: int, redis: RedisServer | None
    ) -> AsyncIterator[ProxyProcess]:
        (self.folder / "clock").write_text("0")
        store = redis.url if redis else f"sqlite:///{self.folder}/{SCENES.index(scene)}.db"
        settings = {**SETTINGS, "STORE__URL": store, **dict(scene.settings)}
        if scene.free_bytes:
            del settings["SERVER__MAX_INFLIGHT_BYTES"]
        environ = {
            **{f"COMPACTION_PROXY__{name}": value for name, value in settings.items()},
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT / 'proxy'}",
            "WALL_CLOCK_FILE": str(self.folder / "clock"),
        }
        limit = self.idle_bytes + scene.free_bytes

        def prepare() -> None:
            if scene.free_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

        async with proxy_process(
            self.folder,
            upstream_port,
            environ=environ,
            prepare=prepare,
        ) as proxy:
            yield proxy

    async def _ask_next(
        self,
        waiting: Iterator[int],
        proxy: ProxyProcess,
        scene: Scene,
        redis: RedisServer | None,
        faults: set[asyncio.Task[None]],
    ) -> None:
        """Ask, and let something fail now and then, until no request is left."""
        for number in waiting:
            if proxy.process.returncode is not None:
                return
            if number % FAULT_REQUESTS == 0 and not any(not each.done() for each in faults):
                faults.add(asyncio.create_task(self._fail(number, proxy, scene, redis)))
            await self.ask(self.maker.make(number), proxy.port)

    async def _fail(self, number: int, proxy: ProxyProcess, scene: Scene, redis: RedisServer | None) -> None:
        """Something fails, for a moment."""
        rng = random.Random(f"{self.seed} fault {number}")
        fault = rng.choice(scene.faults)
        self.counted[f"faults: {fault}"] += 1
        lasts_s = FAULT_S * rng.random()
        if fault == "clock":
            (self.folder / "clock").write_text(str(rng.choice((0, 2 * DAY_S, -DAY_S, 3_600, -60))))
        elif fault == "store" and redis is not None:
            before, after = rng.choice(
                ((redis.kill, redis.start), (redis.pause, redis.resume), (redis.admin.flushall, time.time))
            )
            await asyncio.to_thread(before)
            await asyncio.sleep(lasts_s)
            await asyncio.to_thread(after)
        else:
            await self._squeeze(proxy, fault, rng, lasts_s)

    async def _squeeze(self, proxy: ProxyProcess, what: str, rng: random.Random, lasts_s: float) -> None:
        """Leave the process few descriptors or little memory, for a moment."""
        if what == "descriptors":
            kind, limit = resource.RLIMIT_NOFILE, proxy.open_files + rng.randrange(8)
        else:
            kind, limit = (
                resource.RLIMIT_AS,
                _read_status_bytes(proxy, "VmSize") + rng.choice((64, 128, 256)) * MIB,
            )
        self.squeezes += 1
        try:
            before, most = resource.prlimit(proxy.process.pid, kind)
            resource.prlimit(proxy.process.pid, kind, (limit, most))
            await asyncio.sleep(lasts_s)
            resource.prlimit(proxy.process.pid, kind, (before, most))
        except ProcessLookupError:
            return
        finally:
            self.squeezes += 1

    async def ask(self, case: Case, port: int) -> None:
        """Send a request, and judge what comes of it."""
        number, squeezes, begun_s = b"%d" % case.number, self.squeezes, time.monotonic()
        visits = self.provider.waiting[number] = Visits()
        answer, lost = Answer(), ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _exchange(port, case, answer)
        except TimeoutError:
            lost = f"no end within {PATIENCE_S:.0f} s"
        except (OSError, httptools.HttpParserError) as error:
            lost = repr(error)
        del self.provider.waiting[number]
        self.counted["requests"] += 1
        took_ms = int((time.monotonic() - begun_s) * 1000)
        self.counted["slowest answer, ms"] = max(self.counted["slowest answer, ms"], took_ms)
        self.counted[f"status {answer.status}"] += 1
        self.counted["compacted"] += _is_compacted(answer)
        is_squeezed = squeezes % 2 == 1 or self.squeezes > squeezes
        for kind, text in self._judge(case, answer, visits, lost, is_squeezed=is_squeezed):
            self._note(kind, text, case)
        self._keep(case, answer)

    def _judge(
        self, case: Case, answer: Answer, visits: Visits, lost: str, *, is_squeezed: bool
    ) -> Iterator[tuple[str, str]]:
        """What is wrong with an answer, and with what was forwarded."""
        own = set(MARKER.findall(case.head))
        if others := set(MARKER.findall(bytes(answer.body) + repr(answer.headers).encode())) - own:
            yield "foreign", f"the answer holds {others}"
        if case.way == "leaves":
            return
        badly_framed = case.way == "framed badly"
        if not answer.status:
            if lost or not (badly_framed or is_squeezed):
                yield "answer", f"no answer: {lost}"
            return
        if "x-fate" not in answer.headers:
            yield from _judge_own(case, answer)
        elif not badly_framed:
            yield from _judge_relayed(case, answer, visits)
        if visits.bodies and not badly_framed:
            yield from _judge_forwarded(case, answer, visits)

    def _note(self, kind: str, text: str, case: Case | None = None) -> None:
        """Note what is wrong; the request is written down, to be sent again."""
        if case is not None:
            path = self.corpus / f"wrong-{self.seed}-{case.number}.http"
            path.write_bytes(b"".join(each for each in deliver(case) if isinstance(each, bytes)))
            text = f"request {case.number} ({case.fate}, {case.way}, {case.target[:60]!r}): {text} [{path}]"
        self.wrong.append((kind, text))
        if sum(each == kind for each, _ in self.wrong) <= SHOWN:
            print(f"{kind}: {text}", file=sys.stderr, flush=True)

    def _keep(self, case: Case, answer: Answer) -> None:
        """Keep a request in the corpus if something new has happened with it."""
        named = [answer.headers.get(f"x-compaction-{name}", "") for name in ("status", "reason", "strategy")]
        code = _find_code(bytes(answer.body)) if "x-fate" not in answer.headers else case.fate
        signature = (case.target.decode("latin-1")[:40], str(answer.status), code, *named)
        if signature in self.known or len(case.body) > SEED_BYTES:
            return
        self.known.add(signature)
        if self.saved < NEW_SEEDS:
            seed = case.to_seed()
            path = self.corpus / f"{hashlib.blake2b(seed, digest_size=8).hexdigest()}.http"
            self.saved += not path.exists()
            path.write_bytes(seed)

    async def _ask_well(self, proxy: ProxyProcess) -> None:
        """A plain request on each wire is answered, now or soon."""
        for target in WIRES:
            case = Case(
                -1, 0, "whole", "whole", target, (), b'{"model":"m","max_tokens":1,"messages":[],"input":[]}'
            )
            for _ in range(20):
                answer = Answer()
                with contextlib.suppress(OSError):
                    await _exchange(proxy.port, case, answer)
                if answer.status == 200:
                    break
                await asyncio.sleep(0.5)
            else:
                self._note("answer", f"a good request was answered {answer.status} {bytes(answer.body)!r}")

    async def _check_held(
        self, proxy: ProxyProcess, idle: list[str], store_port: int, sockets: set[str]
    ) -> None:
        """Memory, and descriptors once nothing is under way."""
        deadline_s = time.monotonic() + SETTLED_S
        while True:
            held = list_open_files(proxy.process.pid, store_port, sockets)
            if len(held) <= len(idle) or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.2)
        if len(held) > len(idle):
            self._note(
                "held",
                f"{len(held) - len(idle)} descriptors more than before: {sorted(set(held) - set(idle))}",
            )
        peak, now = _read_status_bytes(proxy, "VmHWM"), Program(proxy.process.pid, ("", 0)).rss_bytes()
        self.counted["largest peak of memory, MiB"] = max(
            self.counted["largest peak of memory, MiB"], peak // MIB
        )
        self.counted["most memory after a round, MiB"] = max(
            self.counted["most memory after a round, MiB"], now // MIB
        )
        if peak > MAX_RSS_BYTES or now > PROCESS_BYTES:
            self._note("held", f"{peak // MIB} MiB at the peak, {now // MIB} MiB at the end")

    async def _end(self, proxy: ProxyProcess) -> None:
        try:
            await proxy.end()
        except (AssertionError, TimeoutError) as error:
            self._note("ended", f"{type(error).__name__} at the end: {str(error)[-2_000:]}")

    def _check_log(self, log: Path, scene: Scene) -> None:
        """Each line is an event, and none tells of a fault of ours."""
        for line in log.read_text(errors="replace").splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if (
                "lifespan" in line and "CancelledError" in line
            ):  # the end of a process on a busy machine is cut
                continue
            told = event.get("exception") or line
            if not event or "exception" in event or event["level"] in {"error", "critical"}:
                self._note(
                    "log", f"{scene.store}, {scene.faults}: {event.get('event')}: {told[-SHOWN_CHARACTERS:]}"
                )


async def _exchange(port: int, case: Case, answer: Answer) -> None:
    """Send a request as its way says, and read its answer meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(read_answer(reader, answer))
    try:
        for each in deliver(case):
            if isinstance(each, float):
                await asyncio.wait([reading], timeout=each)
            else:
                writer.write(each)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        if case.way != "leaves":
            with contextlib.suppress(ConnectionError):
                await reading
    finally:
        reading.cancel()
        writer.transport.abort()
        await asyncio.gather(reading, return_exceptions=True)


def _judge_own(case: Case, answer: Answer) -> Iterator[tuple[str, str]]:
    """What is wrong with an answer that the proxy itself has written."""
    body, status = bytes(answer.body), answer.status
    is_named = (
        (status == 503 and "retry-after" in answer.headers)
        or (status == 502 and case.fate in {"garbage", "reset"})
        or (status == 504 and case.fate == "hang")
        or (status == 501 and _find_code(body) == "unsupported_transfer_coding")
    )
    if status >= 500 and not is_named:
        yield "5xx", f"{status} {body[:500]!r}"
    if not answer.ended and case.way != "framed badly":
        yield "answer", f"the answer {status} has no end"
    if status >= 400 and not _has_shape(case, body):
        yield "shape", f"{status} {body[:500]!r}"


def _has_shape(case: Case, body: bytes) -> bool:
    """Whether an error is one that clients of its wire read."""
    try:
        told = json.loads(body)
    except ValueError:
        return False
    if case.target == b"/mcp" and isinstance(told, dict) and "jsonrpc" in told:
        return True
    error = told.get("error") if isinstance(told, dict) else None
    is_messages = b"/v1/messages" in case.target
    return (
        isinstance(error, dict)
        and all(isinstance(error.get(name), str) for name in ("message", "type"))
        and (not is_messages or told.get("type") == "error")
    )


def _judge_relayed(case: Case, answer: Answer, visits: Visits) -> Iterator[tuple[str, str]]:
    """What is wrong with an answer that is the upstream's."""
    body = bytes(answer.body)
    has_searched = (
        case.fate == "search" and len(visits.bodies) > 1
    )  # the proxy writes what such answers become
    if answer.ended and body not in visits.answers and not has_searched:
        yield "altered", f"the answer {answer.status} {body[:300]!r} is none of {str(visits.answers)[:600]}"
    elif not answer.ended and not (
        case.fate == "cut" and any(each.startswith(body) for each in visits.answers)
    ):
        yield "answer", f"the answer {answer.status} has no end: {body[:300]!r}"


def _judge_forwarded(case: Case, answer: Answer, visits: Visits) -> Iterator[tuple[str, str]]:
    """What is wrong with what went on to the upstream."""
    sizes = _read_sizes(answer)
    if sizes["tokens-after"] > sizes["tokens-before"]:
        yield "longer", f"{len(case.body)} bytes became {len(visits.bodies[-1])}, {answer.headers}"
    if not _is_compacted(answer) and visits.bodies[0] != case.body:
        yield "altered", f"{len(case.body)} bytes became {visits.bodies[0][:500]!r}, {answer.headers}"


def _read_sizes(answer: Answer) -> dict[str, int]:
    """Returns the sizes of a request, as the proxy tells them; 0 where it tells none."""
    return {name: int(answer.headers.get(f"x-compaction-{name}", "0")) for name in SIZES}


def _is_compacted(answer: Answer) -> bool:
    """Whether the proxy says that fewer tokens or messages went on than came."""
    told = _read_sizes(answer)
    is_smaller = any(told[f"{unit}-after"] < told[f"{unit}-before"] for unit in ("tokens", "messages"))
    return is_smaller or answer.headers.get("x-compaction-status") == "applied"


def _find_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError, IndexError):
        return ""


def _read_status_bytes(proxy: ProxyProcess, name: str) -> int:
    text = Path(f"/proc/{proxy.process.pid}/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def report(run: Run, took_s: float, seen: Counter[str]) -> Iterator[str]:
    """What has happened, line by line; the last one says how much was wrong."""
    for name, times in sorted((run.counted + seen).items()):
        yield f"{name}: {times:,}"
    found = Counter(kind for kind, _ in run.wrong)
    yield from (f"- {kind}: {text}" for kind, text in run.wrong[:SHOWN])
    yield (
        f"{run.counted['requests']:,} requests in {took_s:.0f} s, seed {run.seed}: "
        + ", ".join(f"{found[kind]} {name}" for kind, name in KINDS.items())
    )


def main() -> int:
    """Exit code 1 if anything was wrong."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compaction-proxy-hostile"
    parser = argparse.ArgumentParser(
        description="Hostile requests and faults at once; see the top of this file."
    )
    parser.add_argument("--requests", type=int, default=200_000, help="how many")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of what is left to chance")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with, to go on with a run")
    parser.add_argument(
        "--corpus", type=Path, default=cache, help="folder of requests to begin with; it grows"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of conversations of others"
    )
    parser.add_argument("--replay", type=Path, help="send this one request, and print the answer")
    given = parser.parse_args()
    allow_sockets()
    given.corpus.mkdir(parents=True, exist_ok=True)
    kept = [
        *SEEDS.glob("*.http"),
        *(path for path in given.corpus.glob("*.http") if not path.name.startswith("wrong-")),
    ]
    corpus = [path.read_bytes() for path in sorted(kept, key=lambda path: path.name)]
    print(f"seed {given.seed}, corpus {given.corpus} ({len(corpus)} requests)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(WALL_CLOCK, folder)
        provider, begun_s = Provider(given.seed), time.monotonic()
        run = Run(
            given.seed, given.corpus, folder, provider, CaseMaker(given.seed, corpus, load_chats(given.data))
        )
        if given.replay:
            asyncio.run(run.replay(given.replay.read_bytes()))
            return 0
        asyncio.run(run.play(given.first, given.first + given.requests))
        run.wrong += [("foreign", each) for each in provider.foreign]
    print("\n".join(report(run, time.monotonic() - begun_s, provider.seen)))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
