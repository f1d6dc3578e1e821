"""What is measured: programs that stand between load and upstream, started and shown to answer.

Every program runs in a process of its own on the core under test. One that cannot be had is left out, and the
report says why; `direct` and the proxy itself must be there.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import nginx
from conversations import GATE_OFF, WINDOW_TOKENS
from load import LoadError
from processes import Program, free_port, started
from rivals import RIVALS, Rival, installed_in

BENCH = Path(__file__).parent
DIRECT = "direct"
NGINX = "nginx"
GATED = "proxy, gated"
OPEN = "proxy, gate off"
OPEN_FAST = "proxy, gate off [fast]"
PLAIN = "FastAPI + httpx"
OURS = (GATED, OPEN, OPEN_FAST)
# How long a target may take to make up for what it missed while it stood still.
SETTLE_S = 5.0
# The native library of the extra `fast`, as a path of a loaded file has it.
FAST_LIBRARY = "toktok"
_SETTINGS = {"COMPACTION_PROXY__MODELS": json.dumps({"bench-*": {"window": WINDOW_TOKENS}})}


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured.

    Attributes:
        name: As the tables say it.
        program: What answers.
        headers: Lines that are added to each request.
        verbatim: Whether it must give the very bytes of the upstream; otherwise the same text.
    """

    name: str
    program: Program
    headers: tuple[str, ...] = ()
    verbatim: bool = True


@dataclass(slots=True)
class Bench:
    """The programs of a run.

    Attributes:
        folder: Where they work.
        tested: The core of what is measured; None leaves it to the system.
        upstream: What they all lead to.
        targets: Those that answer as they should.
        skipped: Names of the others, and why.
    """

    folder: Path
    tested: int | None
    upstream: Program
    stack: contextlib.ExitStack
    targets: list[Target] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def require(self, name: str, start: Callable[["Bench", str], Iterator[Target]]) -> None:
        """Add a target; RuntimeError or LoadError if it cannot be had."""
        with contextlib.ExitStack() as own:
            target = own.enter_context(contextlib.contextmanager(start)(self, name))
            try:
                _check(target, self.upstream)
            except LoadError as error:
                raise LoadError(f"{name} {error}") from error
            if name != DIRECT:
                target.program.pause()
            self.targets.append(target)
            self.stack.push(own.pop_all())

    @contextlib.contextmanager
    def alone(self, target: Target) -> Iterator[None]:
        """Let one target run for the length of the block; all others stand still."""
        if target.name == DIRECT:
            yield
            return
        target.program.resume()
        target.program.settle(SETTLE_S)
        try:
            yield
        finally:
            target.program.pause()

    def offer(self, name: str, start: Callable[["Bench", str], Iterator[Target]]) -> None:
        """Add a target if it can be had."""
        try:
            self.require(name, start)
        except (LoadError, RuntimeError, OSError) as error:
            self.skipped[name] = str(error)
            print(f"left out {name}: {error}", file=sys.stderr, flush=True)


# What the image and the systemd unit tell glibc.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


def _ours(
    bench: Bench, name: str, settings: Mapping[str, str], headers: tuple[str, ...] = ()
) -> Iterator[Target]:
    folder = bench.folder / name
    given = {
        **_SETTINGS,
        **ALLOCATOR,
        "COMPACTION_PROXY__UPSTREAM__BASE_URL": bench.upstream.url + "/v1",
        "COMPACTION_PROXY__SERVER__PORT": "0",
        "COMPACTION_PROXY__STORE__URL": f"sqlite:///{folder}/state.db",
        **settings,
    }
    with started([sys.executable, "-m", "compaction_proxy", "serve"], folder, bench.tested, given) as program:
        yield Target(name, program, headers)


def without_fast(folder: Path) -> dict[str, str]:
    """Settings under which a Python finds no library of the extra `fast`, installed or not."""
    hidden = folder / "without" / FAST_LIBRARY
    hidden.mkdir(parents=True, exist_ok=True)
    (hidden / "__init__.py").write_text("raise ImportError('left out by the bench')\n")
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(hidden.parent), inherited)))}


def _gated(bench: Bench, name: str) -> Iterator[Target]:
    yield from _ours(bench, name, without_fast(bench.folder))


def _open(bench: Bench, name: str) -> Iterator[Target]:
    yield from _ours(bench, name, without_fast(bench.folder), GATE_OFF)


def _open_fast(bench: Bench, name: str) -> Iterator[Target]:
    for target in _ours(bench, name, {}, GATE_OFF):
        _answer(target.program, target.headers, stream=False)
        if not target.program.has_loaded(FAST_LIBRARY):
            raise RuntimeError(f"{FAST_LIBRARY} is not installed, or the proxy does not use it")
        yield target


def _nginx(bench: Bench, name: str) -> Iterator[Target]:
    command = shutil.which("nginx")
    if command is None:
        raise RuntimeError("not installed")
    folder, port = bench.folder / name, free_port()
    folder.mkdir()
    run = nginx.command(command, folder, bench.upstream.address, port)
    with started(run, folder, bench.tested, {}, port=port) as program:
        yield Target(name, program)


def _plain(bench: Bench, name: str) -> Iterator[Target]:
    command = [sys.executable, str(BENCH / "plain_relay.py"), bench.upstream.url]
    with started(command, bench.folder / name, bench.tested, {}) as program:
        yield Target(name, program)


def _direct(bench: Bench, name: str) -> Iterator[Target]:
    yield Target(name, bench.upstream)


def _rival(rival: Rival, cache: Path) -> Callable[[Bench, str], Iterator[Target]]:
    def start(bench: Bench, name: str) -> Iterator[Target]:
        programs = installed_in(cache, rival)
        folder, port = bench.folder / name, free_port()
        folder.mkdir()
        command, settings = rival.configured(folder, bench.upstream.url, port)
        run = [str(programs / command[0]), *command[1:]]
        with started(run, folder, bench.tested, settings, port=port) as program:
            yield Target(name, program, verbatim=False)

    return start


@contextlib.contextmanager
def running(
    folder: Path, tested: int | None, rest: int | None, rivals: Path | None, *, few: bool
) -> Iterator[Bench]:
    """All targets that can be had, each standing still until it is its turn.

    Args:
        folder: An empty folder to work in.
        tested: The core for what is measured.
        rest: The core for the upstream.
        rivals: Where environments of rivals are kept; None leaves rivals out.
        few: Only what must be there.

    Raises:
        RuntimeError: The upstream or the proxy does not start.
        LoadError: The proxy does not answer as the upstream does.
    """
    with contextlib.ExitStack() as stack:
        serving = started([sys.executable, str(BENCH / "upstream.py")], folder / "upstream", rest, {})
        bench = Bench(folder, tested, stack.enter_context(serving), stack)
        bench.require(DIRECT, _direct)
        if not few:
            bench.offer(NGINX, _nginx)
        bench.require(GATED, _gated)
        bench.require(OPEN, _open)
        if few:
            yield bench
            return
        bench.offer(OPEN_FAST, _open_fast)
        bench.offer(PLAIN, _plain)
        for rival in RIVALS if rivals else ():
            bench.offer(rival.name, _rival(rival, rivals or folder))
        yield bench


def _answer(program: Program, headers: tuple[str, ...], *, stream: bool) -> httpx.Response:
    lines = dict(line.split(": ", 1) for line in headers)
    accept = "text/event-stream" if stream else "application/json"
    asked = {
        "model": "bench-check",
        "messages": [{"role": "user", "content": "Is it you?"}],
        "stream": stream,
    }
    sent = {**lines, "accept": accept, "authorization": "Bearer sk-bench"}
    url = program.url + "/v1/chat/completions"
    return httpx.post(url, json=asked, headers=sent, trust_env=False, timeout=60)


def _said(answer: httpx.Response) -> str:
    """The text of an answer, streamed or not; not the bytes."""
    if answer.headers.get("content-type", "").startswith("application/json"):
        return str(answer.json()["choices"][0]["message"]["content"])
    events = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    deltas = (choice["delta"] for event in events for choice in json.loads(event).get("choices", ()))
    return "".join(delta.get("content") or "" for delta in deltas)


def _check(target: Target, upstream: Program) -> None:
    """Raise LoadError unless a target gives the upstream's answers, in the way its name says."""
    for stream in (False, True):
        try:
            expected = _answer(upstream, (), stream=stream)
            found = _answer(target.program, target.headers, stream=stream)
        except httpx.HTTPError as error:
            raise LoadError(f"does not answer: {error!r}") from error
        if found.status_code != 200:
            raise LoadError(f"does not answer: {found.status_code} {found.text[:200]}")
        same = found.content == expected.content if target.verbatim else _said(found) == _said(expected)
        if not same:
            raise LoadError("does not answer as the upstream does")
        if ("x-compaction-tokens-before" in found.headers) != bool(target.headers):
            raise LoadError("has not the gate that it should have")
