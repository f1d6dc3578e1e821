"""The clients of the soak: conversations that grow and begin anew, streams read whole, left and cut."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httptools
from soak_upstream import MODEL, Asked, Upstream

TURNS = 30
TURN_WORDS = 110
PATIENCE_S = 60.0
# Of all requests: streams, streams that the upstream cuts, and requests whose client leaves.
STREAM_SHARE, CUT_SHARE, LEAVING_SHARE = 0.7, 0.03, 0.1
_WORDS = ("service", "deploy", "probe", "queue", "worker", "latency", "replica", "index", "shard", "cache")


@dataclass
class Addresses:
    """Replicas that a balancer would give requests to.

    Attributes:
        live: Host and port of each.
    """

    live: list[tuple[str, int]] = field(default_factory=list)


class Answer:
    """One answer, as it comes.

    Attributes:
        status: 0 before its head.
        headers: With names in lower case.
        body: What has come of it.
        ended: Whether it is whole.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended = self.status >= 200  # an interim response comes before it

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


async def read_answer(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Read an answer to its end, or to that of the connection."""
    while not answer.ended and (data := await reader.read(65_536)):
        answer.feed(data)


@dataclass
class Clients:
    """Clients, each with conversations of its own.

    Attributes:
        upstream: Knows what they ask for.
        addresses: Where they ask.
        rng: Decides who asks for what, and leaves when.
        ends_s: When to stop, by the loop's clock.
        counted: What became of requests.
        wrong: What should not have.
    """

    upstream: Upstream
    addresses: Addresses
    rng: random.Random
    ends_s: float = 0.0
    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        """Ask for so long."""
        self.ends_s = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._converse(number))

    async def _converse(self, client: int) -> None:
        # The same again and again, so that what is remembered of it does not grow without end.
        canary = f"canary_{client}_"
        turn = self.rng.randrange(TURNS)  # so that not all are as long at the same time
        while asyncio.get_running_loop().time() < self.ends_s:
            await self._ask(client, canary, turn)
            turn = (turn + 1) % TURNS

    async def _ask(self, client: int, canary: str, turn: int) -> None:
        name = f"s{self.counted['asked']:07d}x{client}"
        self.counted["asked"] += 1
        asked, content = self._made(name, canary, turn)
        self.upstream.asked[name] = asked
        leaves_s = self.rng.random() * 0.2 if self.rng.random() < LEAVING_SHARE else None
        address = self.rng.choice(self.addresses.live)
        answer, begun_s = Answer(), time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S if leaves_s is None else leaves_s):
                await self._exchange(address, canary, content, answer)
            self._judge(asked, answer)
        except TimeoutError:
            self._judge_left(asked, answer, leaves_s)
        except OSError as error:
            self.wrong.append(f"{name} from {address}: {error!r}")
        took_ms = int((time.monotonic() - begun_s) * 1000)
        self.counted["slowest answer, ms"] = max(took_ms, self.counted["slowest answer, ms"])
        # An upstream call may begin while its client leaves.
        asyncio.get_running_loop().call_later(PATIENCE_S, self.upstream.asked.pop, name)

    async def _exchange(self, address: tuple[str, int], canary: str, content: bytes, into: Answer) -> None:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\nauthorization: Bearer sk-{canary}\r\n"
            f"content-type: application/json\r\nx-session-id: same-for-all\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(head.encode() + content)
            with contextlib.suppress(ConnectionResetError):  # a cut, which `into` shows
                await read_answer(reader, into)
        finally:
            writer.transport.abort()

    def _made(self, name: str, canary: str, turn: int) -> tuple[Asked, bytes]:
        """A request of a conversation, at a turn."""
        events = self.rng.randrange(5, 40) if self.rng.random() < STREAM_SHARE else 0
        cut = self.rng.randrange(1, events) if events and self.rng.random() < CUT_SHARE else None
        rule = f"never delete the table audit_{canary} without asking me"
        messages = conversation(canary, rule, turn)
        body = {"model": MODEL, "messages": messages, "stream": events > 0, "user": name}
        content = json.dumps(body).encode()
        return Asked(name, canary, rule, len(content), events, self.rng.random() * 0.02, cut), content

    def _judge(self, asked: Asked, answer: Answer) -> None:
        """Note what is wrong with an answer whose client stayed."""
        if answer.status == 503 and "retry-after" in answer.headers:
            self.counted["turned away with retry-after"] += 1
            return
        expected, body = asked.answer(), bytes(answer.body)
        self.counted["bytes compared"] += len(body)
        same = body == expected if asked.events else body.startswith(expected)
        self.counted["cut by the upstream" if asked.cut else "whole"] += 1
        if answer.status != 200:
            self.wrong.append(f"{asked.name}: status {answer.status}")
        elif not same:
            self.wrong.append(
                f"{asked.name}: {len(body)} bytes, other than the {len(expected)} of the upstream"
            )
        elif answer.ended != (asked.cut is None):
            self.wrong.append(f"{asked.name}: {'ended' if answer.ended else 'cut'}, unlike the upstream's")

    def _judge_left(self, asked: Asked, answer: Answer, left_s: float | None) -> None:
        """Note what is wrong with what came until a client left."""
        if left_s is None:
            self.wrong.append(f"{asked.name}: no end within {PATIENCE_S:.0f} s")
            return
        self.counted["left by the client"] += 1
        if asked.events and answer.status == 200 and not asked.answer().startswith(answer.body):
            self.wrong.append(f"{asked.name}: other bytes than the upstream's before its client left")


def conversation(canary: str, rule: str, turn: int) -> list[dict[str, str]]:
    """The messages of a conversation at a turn."""
    messages = [
        {"role": "system", "content": canary},
        {"role": "user", "content": f"Look at all services of {canary}. Rule: {rule}."},
    ]
    for number in range(turn):
        messages += [
            {"role": "assistant", "content": _text(f"I looked at part {number} of {canary}.", number)},
            {"role": "user", "content": _text(f"And part {number + 1}?", number + 7)},
        ]
    return messages


def _text(start: str, seed: int) -> str:
    words = [_WORDS[(seed * 7 + place * place) % len(_WORDS)] for place in range(TURN_WORDS)]
    return f"{start} {' '.join(words)}."
