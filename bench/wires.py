"""Whether every wire is relayed as fast as chat: CPU time of the proxy per request, wire beside wire.

    uv run python bench/wires.py [--rounds N] [--seconds S] [--json FILE]

One proxy on a core of its own gets the same conversations on each wire by turns, in bodies of the same size:
small ones that pass the gate, 40 KB of a session with the gate off, and small ones answered by a stream
of 200 events. Chat is asked twice in each round: how far its two figures are apart says what a ratio means.
Time on the processor is counted, and not on the wall: others may use the machine.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from conversations import GATE_OFF, MARK, WINDOW_TOKENS, Conversation, varied
from load import LoadError, Measured, Requests, measure
from processes import Program, allow_sockets, cores, pinned, started
from targets import ALLOCATOR, BENCH, without_fast

from compaction_proxy.wires.registry import WIRES

WARM_S = 0.1
CONNECTIONS = 4
FIRST_CHARACTERS = 300
MS = 1e3
# Chat once more, as a wire of its own: what differs between the two is noise.
AGAIN = "chat again"
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
ARRAYS = {"chat": "messages", "responses": "input", "messages": "messages"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to ask.

    Attributes:
        name: As it is reported.
        body_bytes: Of a request, on average.
        turns: In one, on average; a question each, and its answer.
        grows: By how many turns it does before it begins anew.
        headers: Lines beside the usual ones.
        stream: Whether answers are streamed.
    """

    name: str
    body_bytes: int
    turns: int
    grows: int
    headers: tuple[str, ...] = ()
    stream: bool = False


KINDS = (
    Kind("gated, 2.5 KB", 2_500, 3, 2),
    Kind("gate off, 40 KB", 40_000, 20, 16, GATE_OFF),
    Kind("gated, SSE of 200", 2_500, 3, 2, ("accept: text/event-stream",), stream=True),
)


def _said(wire: str, role: str, text: str) -> bytes:
    """A message as this wire's clients write it."""
    content: object = text
    if wire == "responses":
        content = [{"type": f"{'output' if role == 'assistant' else 'input'}_text", "text": text}]
    elif wire == "messages":
        content = [{"type": "text", "text": text}]
    typed = {"type": "message"} if wire == "responses" else {}
    return json.dumps({**typed, "role": role, "content": content}, separators=(",", ":")).encode()


def _turn(wire: str, session: str, number: int, room: int) -> bytes:
    """An answer and a question of so many bytes, with a comma before each; no other session has them."""
    roles = ("assistant", "user")
    frame = sum(len(_said(wire, role, "")) + 1 for role in roles)
    begun = f"{MARK.decode()} {number:02d} "
    texts = [begun + varied(f"{session} {number} {role}", (room - frame) // 2 - len(begun)) for role in roles]
    return b"".join(b"," + _said(wire, role, text) for role, text in zip(roles, texts, strict=True))


def _conversation(wire: str, kind: Kind, session: str) -> Conversation:
    """Requests of `kind`: each repeats the one before and adds a turn."""
    fields = [
        f"POST /v1/{PATHS[wire]} HTTP/1.1",
        "host: 127.0.0.1",
        "authorization: Bearer sk-bench",
        "content-type: application/json",
        "user-agent: OpenAI/Python 3.50.0",
        f"x-session-id: {session}",
        *kind.headers,
        "",
    ]
    opening = b'{"model":"bench-wires","%b":[' % ARRAYS[wire].encode()
    end = b'],"temperature":0.2,"stream":%s}' % (b"true" if kind.stream else b"false")
    first = _said(wire, "user", varied(session, FIRST_CHARACTERS))
    room = (kind.body_bytes - len(opening) - len(first) - len(end)) // kind.turns
    turns = [_turn(wire, session, number, room) for number in range(kind.turns + kind.grows // 2)]
    known, grown = turns[: kind.turns - kind.grows // 2], turns[kind.turns - kind.grows // 2 :]
    start = opening + first + b"".join(known).replace(MARK, b"0" * len(MARK))
    return Conversation("\r\n".join(fields).encode(), start, tuple(grown), end)


def _requests(name: str, kind: Kind) -> list[Requests]:
    """What each connection asks on a wire."""
    sessions = [f"{name} {kind.name} {number}" for number in range(CONNECTIONS)]
    return [_conversation(_wire(name), kind, each).requests() for each in sessions]


@contextlib.contextmanager
def _running(folder: Path, tested: int | None, rest: int | None) -> Iterator[Program]:
    """The proxy before an upstream, each on its core."""
    with started([sys.executable, str(BENCH / "upstream.py")], folder / "upstream", rest, {}) as upstream:
        settings = {
            **without_fast(folder),
            **ALLOCATOR,
            "COMPACTION_PROXY__MODELS": json.dumps({"bench-*": {"window": WINDOW_TOKENS}}),
            "COMPACTION_PROXY__UPSTREAM__BASE_URL": upstream.url + "/v1",
            "COMPACTION_PROXY__SERVER__PORT": "0",
            "COMPACTION_PROXY__STORE__URL": f"sqlite:///{folder}/state.db",
        }
        with started(
            [sys.executable, "-m", "compaction_proxy", "serve"], folder / "proxy", tested, settings
        ) as proxy:
            yield proxy


Found = dict[tuple[str, str], list[float]]  # by kind and name of the wire: seconds of CPU per answer


def _measured(proxy: Program, rounds: int, seconds: float) -> Found:
    names = (*WIRES, AGAIN)
    asked = {(kind, name): _requests(name, kind) for kind in KINDS for name in names}
    found: Found = {(kind.name, name): [] for kind in KINDS for name in names}
    for number, kind in itertools.product(range(rounds + 1), KINDS):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            window = _window(proxy, asked[kind, name], seconds)
            if number:  # the first round warms up
                found[kind.name, name].append(window.cpu_s / window.answers)
    return found


def _wire(name: str) -> str:
    return "chat" if name == AGAIN else name


def _window(proxy: Program, requests: Sequence[Requests], seconds: float) -> Measured:
    cpu_s: Callable[[], float] = proxy.cpu_s
    waiting = measure(
        proxy.address, requests, warm_s=WARM_S, window_s=seconds, most_s=seconds, enough=1, cpu_s=cpu_s
    )
    return uvloop.run(waiting)


def _table(found: Found) -> Iterator[str]:
    yield "| | wire | CPU per request, ms | of chat |"
    yield "| --- | --- | --- | --- |"
    for kind in KINDS:
        chat = found[kind.name, "chat"]
        for name in (*WIRES, AGAIN):
            ours = found[kind.name, name]
            ratio = statistics.median(own / other for own, other in zip(ours, chat, strict=True))
            yield f"| {kind.name} | {name} | {statistics.median(ours) * MS:.3f} | {ratio:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what the wires cost.")
    parser.add_argument("--rounds", type=int, default=7, help="how often each wire has its turn")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a turn is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    options = parser.parse_args()
    allow_sockets()
    rest, tested = cores() or (None, None)
    with tempfile.TemporaryDirectory() as name, pinned(rest):
        try:
            with _running(Path(name), tested, rest) as proxy:
                found = _measured(proxy, options.rounds, options.seconds)
        except (LoadError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
    if options.json:
        told = [{"kind": kind, "wire": wire, "cpu_s": cpu_s} for (kind, wire), cpu_s in found.items()]
        options.json.write_text(json.dumps(told, indent=1))
    print("\n".join(_table(found)))
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
