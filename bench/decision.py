"""What our part in a turn costs, measured inside the process: no socket, no server, no client.

The real application is called as a server calls it, over an engine that answers at once. So CPU time can be
read where the body is complete and where the request is handed on, and nothing has to be taken off: what lies
between is the decision. Threads count too: what is counted beside the loop is not free.

How long the loop is held is measured in a second pass, by a callback that comes round with every iteration
of the loop: the longest stretch between two of them, in CPU time of the loop's thread. What other threads and
other programs take meanwhile is not in it.

    python bench/decision.py gated|open TURNS TOKENS…       prints a line of JSON for each length
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from conversations import GATE_OFF, WINDOW_TOKENS, growing
from starlette.types import ASGIApp, Message, Scope
from upstream import whole_answer

from compaction_proxy import app
from compaction_proxy import runtime as parts
from compaction_proxy.cli.serve import tune_interpreter
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.client.types import HttpEngine, HttpRequest
from compaction_proxy.gateway.client_stream import DEPARTURE, NOTICE
from compaction_proxy.telemetry import logs

# What a server hands over at a time.
PIECE_BYTES = 65_536
# First sights of each length; the median counts.
COLDS = 3
# Between two turns, so that what follows an answer is over.
BREATH_S = 0.005
# Everything is used once before it is measured.
WARM_TOKENS, WARM_TURNS = 2_000, 5
MODES: dict[str, tuple[str, ...]] = {"gated": (), "open": GATE_OFF}
OK = 200


class _Answer:
    """A provider's answer; `HttpResponse`."""

    status, reason = 200, b"OK"

    def __init__(self, request_bytes: int) -> None:
        self._body = whole_answer(request_bytes).partition(b"\r\n\r\n")[2]
        self.headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self._body)),
        ]

    async def read(self) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body

    async def aclose(self) -> None:
        """Nothing is open."""


class Engine:
    """Takes requests, notes when, and answers at once; `HttpEngine`."""

    def __init__(self) -> None:
        self.sent_s = 0.0

    def opened(self, **_: object) -> HttpEngine:
        """This one, whatever is asked for."""
        return self

    async def send(self, request: HttpRequest) -> _Answer:
        """See `HttpEngine`."""
        self.sent_s = time.process_time()
        return _Answer(len(request.body) if isinstance(request.body, bytes) else 0)

    async def aclose(self) -> None:
        """Nothing is open."""


class Ticks:
    """Watches how long an iteration of the loop takes its thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._seen_s = time.thread_time()
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._seen_s)
        self._seen_s = time.thread_time()
        self._next = self._loop.call_soon(self._tick)

    def taken(self) -> float:
        """The longest stretch since the last call, in seconds."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s

    def stop(self) -> None:
        """Watch no more."""
        self._next.cancel()


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as a server hands it over.

    Attributes:
        scope: Its head (ASGI).
        pieces: Its body, in messages of the ASGI channel.
        length: Bytes of the body.
    """

    scope: Scope
    pieces: tuple[Message, ...]
    length: int


class Caller:
    """Calls the application as a server does.

    Args:
        called: The application.
        engine: What it sends requests with.
    """

    def __init__(self, called: ASGIApp, engine: Engine) -> None:
        self._called = called
        self._engine = engine
        self._received_s = 0.0

    async def turn(self, turn: Turn) -> tuple[float, float]:
        """CPU time from the whole body to the request handed on, and of the whole call, in seconds."""
        pieces = iter(turn.pieces)
        answered: list[Message] = []

        async def receive() -> Message:
            piece = next(pieces)
            self._received_s = time.process_time()
            return piece

        async def send(message: Message) -> None:
            answered.append(message)

        began_s = time.process_time()
        await self._called(turn.scope, receive, send)
        ended_s = time.process_time()
        if answered[0]["status"] != OK:
            raise RuntimeError(f"answered {answered[0]['status']}")
        return self._engine.sent_s - self._received_s, ended_s - began_s


def _turn(head: bytes, *parts: bytes) -> Turn:
    body = b"".join(parts)
    starts = range(0, len(body), PIECE_BYTES)
    pieces = (
        {"type": "http.request", "body": body[start : start + PIECE_BYTES], "more_body": start < starts[-1]}
        for start in starts
    )
    return Turn(_scope(head), tuple(pieces), len(body))


def _turns(name: str, tokens: int, turns: int, mode: str) -> list[Turn]:
    """A conversation that shows at such a length, and then so many turns of it."""
    conversation = growing(name, MODES[mode], tokens=tokens, turns=turns + 1)
    return [_turn(*request) for request in itertools.islice(conversation.requests(), turns + 1)]


def _unnoticed(_: object) -> None:
    """Nobody leaves."""


def _scope(head: bytes) -> Scope:
    lines = head.rstrip().split(b"\r\n")
    _, path, _ = lines[0].split()
    pairs = (line.split(b": ", 1) for line in lines[1:])
    return {
        "type": "http",
        "method": "POST",
        "path": path.decode(),
        "raw_path": path,
        "query_string": b"",
        "headers": [(name, held) for name, held in pairs],
        "extensions": {DEPARTURE: {NOTICE: _unnoticed}},
    }


@asynccontextmanager
async def _living(called: ASGIApp) -> AsyncIterator[None]:
    """Run the application's lifespan."""
    inbox, outbox = asyncio.Queue[Message](), asyncio.Queue[Message]()
    running = asyncio.create_task(_lifespan(called, inbox, outbox))
    inbox.put_nowait({"type": "lifespan.startup"})
    await outbox.get()
    yield
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await running


async def _lifespan(called: ASGIApp, inbox: asyncio.Queue[Message], outbox: asyncio.Queue[Message]) -> None:
    await called({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put)


async def _costs(caller: Caller, tokens: int, turns: int, mode: str) -> dict[str, Any]:
    """What the turns of conversations of one length cost."""
    colds: list[tuple[float, float]] = []
    warms: list[tuple[float, float]] = []
    request_bytes = 0
    for number in range(COLDS):
        first, *others = _turns(f"cpu {number} {tokens}", tokens, turns, mode)
        request_bytes = first.length
        colds.append(await caller.turn(first))
        for turn in others:
            await asyncio.sleep(BREATH_S)
            warms.append(await caller.turn(turn))
    return {
        "tokens": tokens,
        "request_bytes": request_bytes,
        "cold_s": median(decided for decided, _ in colds),
        "cold_call_s": median(call for _, call in colds),
        "warm_s": median(decided for decided, _ in warms),
        "warm_call_s": median(call for _, call in warms),
    }


async def _held(caller: Caller, tokens: int, turns: int, mode: str) -> dict[str, float]:
    """For how long they hold the loop."""
    found: list[float] = []
    asked = _turns(f"held {tokens}", tokens, turns, mode)
    ticks = Ticks()
    for turn in asked:
        await asyncio.sleep(BREATH_S)
        ticks.taken()
        await caller.turn(turn)
        await asyncio.sleep(BREATH_S)
        found.append(ticks.taken())
    ticks.stop()
    return {"cold_held_s": found[0], "warm_held_s": max(found[1:])}


async def _measured(mode: str, turns: int, lengths: Sequence[int], folder: Path) -> None:
    engine = Engine()
    setattr(parts, "NativeEngine", engine.opened)  # noqa: B010 - a class is replaced by a function
    called = app.create_app(
        Config.model_validate(
            {
                "upstream": {"base_url": "http://127.0.0.1:9/v1"},
                "store": {"url": f"sqlite:///{folder}/state.db"},
                "models": {"bench-*": {"window": WINDOW_TOKENS}},
            }
        )
    )
    caller = Caller(called, engine)
    async with _living(called):
        tune_interpreter()
        for turn in _turns("warming", WARM_TOKENS, WARM_TURNS, mode):
            await caller.turn(turn)
        fast = "toktok" in sys.modules
        for tokens in lengths:
            costs = await _costs(caller, tokens, turns, mode)
            print(json.dumps({**costs, **await _held(caller, tokens, turns, mode), "fast": fast}), flush=True)


def main() -> None:
    logs.configure_logging("json")
    mode, turns, *lengths = sys.argv[1:]
    with TemporaryDirectory() as name:
        uvloop.run(_measured(mode, int(turns), [int(tokens) for tokens in lengths], Path(name)))


if __name__ == "__main__":
    main()
