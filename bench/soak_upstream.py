"""The upstream of the soak: it streams at a pace, cuts off where it is told to, and judges what reaches it.

Each request names itself in its `user` member; what it asked for, and what must stand in it, is known here.
"""

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from upstream import paced_body, paced_events

from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider

MODEL = "soak-agent"
SUMMARY_MODEL = "soak-summary"
WINDOW_TOKENS = 8_000
# Of summary calls: how many fail, and how many take longer than the proxy waits.
FAILING_SHARE, LATE_SHARE = 0.04, 0.01
SUMMARY_S, LATE_S = 0.1, 3.0

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_CANARY = re.compile(rb"canary_\w+")
_SAID = "They looked at one service after the other, and found nothing wrong with {}."
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BROKEN = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as its client knows it.

    Attributes:
        name: Of the request.
        canary: A word of its conversation that stands in no other.
        rule: What its user said, to hold for good.
        size: Of its body, in bytes.
        events: How many it is to be answered with; 0: no stream.
        pause_s: Between them, in seconds.
        cut: After how many the upstream breaks off; None: it does not.
    """

    name: str
    canary: str
    rule: str
    size: int
    events: int
    pause_s: float
    cut: int | None = None

    def answer(self) -> bytes:
        """The body that its client gets."""
        if not self.events:
            return whole(self.name, 0)[0]
        if self.cut is not None:
            return b"".join(paced_events(self.name, self.cut))
        return paced_body(self.name, self.events)


def whole(name: str, tokens: int) -> tuple[bytes, bytes]:
    """An answer that is no stream, up to `usage`, and what stands there; bodies are compared without."""
    message = {"role": "assistant", "content": f"It is {name}."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    start = json.dumps({"id": name, "object": "chat.completion", "model": MODEL, "choices": [choice]})
    usage = {"prompt_tokens": tokens, "completion_tokens": 8, "total_tokens": tokens + 8}
    return start[:-1].encode(), f', "usage": {json.dumps(usage)}}}'.encode()


@dataclass
class Upstream:
    """What reached it, and what was wrong with that.

    Attributes:
        rng: Decides who waits how long.
        port: Where it listens.
        asked: Requests under way, by name.
        seen: How many requests of each kind came.
        wrong: What they should not have been.
    """

    rng: random.Random
    port: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        counter = TiktokenCounter(lambda _: None)
        counter.warm_up()
        self._meter = SimulatedProvider(counter)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                raw = await reader.readexactly(int(length[1]) if length else 0)
                await self._answer(raw, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, raw: bytes, writer: asyncio.StreamWriter) -> None:
        body = json.loads(raw) if raw else {}
        if not raw:  # what models there are
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif body["model"] == SUMMARY_MODEL:
            await self._summarise(raw, writer)
        else:
            asked = self.asked[body["user"]]
            tokens = self._judge(raw, body, asked)
            if asked.events:
                await self._stream(asked, writer)
            else:
                writer.write(_plain(b"".join(whole(asked.name, tokens))))

    async def _summarise(self, raw: bytes, writer: asyncio.StreamWriter) -> None:
        self.seen["summary calls"] += 1
        canaries = sorted({found.decode() for found in _CANARY.findall(raw)})
        if len(canaries) != 1:
            self.wrong.append(f"a summary call about {len(canaries)} conversations")
        fate = self.rng.random()
        late = FAILING_SHARE < fate < FAILING_SHARE + LATE_SHARE
        await asyncio.sleep(LATE_S if late else SUMMARY_S * self.rng.random())
        if fate < FAILING_SHARE:
            self.seen["summary calls that failed"] += 1
            writer.write(_BROKEN)
            return
        said = {"role": "assistant", "content": _SAID.format(" and ".join(canaries))}
        writer.write(_plain(json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()))

    def _judge(self, raw: bytes, body: dict[str, Any], asked: Asked) -> int:
        """Note what is wrong with a request that reached the upstream; its tokens."""
        self.seen["requests upstream"] += 1
        tokens = self._meter.count_prompt_tokens(ProviderPrompt.from_body(body))
        foreign = {found.decode() for found in _CANARY.findall(raw)} - {asked.canary}
        faults = {
            f"{tokens} tokens for a window of {WINDOW_TOKENS}": tokens > WINDOW_TOKENS,
            f"words of {len(foreign)} other conversations": bool(foreign),
            "without the rule": asked.rule.encode() not in raw,
            f"{len(raw)} bytes of {asked.size}": len(raw) > asked.size,
            "not its own system message": body["messages"][0] != {"role": "system", "content": asked.canary},
        }
        self.wrong += [f"{asked.name} upstream: {fault}" for fault, is_so in faults.items() if is_so]
        self.seen["requests upstream, compacted"] += len(raw) < asked.size
        return tokens

    async def _stream(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(_STREAM)
        events = [*paced_events(asked.name, asked.events), b"data: [DONE]\n\n"]
        for event in events[: asked.cut]:
            for piece in self._sliced(event):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(asked.pause_s)
        if asked.cut is not None:
            writer.close()
            raise ConnectionAbortedError
        writer.write(b"0\r\n\r\n")

    def _sliced(self, event: bytes) -> Iterator[bytes]:
        """An event in one or two pieces."""
        at = self.rng.randrange(2 * len(event))
        yield from (piece for piece in (event[:at], event[at:]) if piece)


def _plain(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body
