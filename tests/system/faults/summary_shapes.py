"""Twenty-five ways for a summary model to fail, as it does them on a socket, and the upstream beside it.

Whoever asks names the way in the credential, which summary calls carry on: `Bearer WAY.anything`.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.summaries import put_as_asked

# A word that stands in every text of a summary model here, and nowhere else.
WORD = "quokkasummary"
# What a client's own request carries; summary calls have none of its other fields.
CLIENTS_FIELD = b"x-from-the-client"
DRIP_S = 0.05
_LINES = (
    f"- {WORD}: the parts of the service were read one after the other",
    "- all of them start as expected",
)
TEXT = "\n".join(_LINES)

ANSWER = b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"Yes."}}]}'
EVENTS = b'data: {"choices":[{"delta":{"content":"Yes."}}]}\n\ndata: [DONE]\n\n'

Way = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def said(text: str | None = TEXT, *, finish: str = "stop", **message: Any) -> bytes:
    """A chat completion that says this."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish,
    }
    return http(json.dumps({"choices": [choice]}).encode())


def failing(status: str, more: str = "") -> bytes:
    return http(json.dumps({"error": {"message": WORD}}).encode(), status=status, more=more)


def sent(data: bytes) -> Way:
    async def way(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.close()

    return way


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in said():
        if reader.at_eof():
            return
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(DRIP_S)


async def stops_halfway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(said()[:-20])
    await reader.read()


async def resets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


_CALL = {"id": "call_x", "type": "function", "function": {"name": WORD, "arguments": "{}"}}
WAYS: dict[str, Way] = {
    # S1: it cannot be had.
    "too-many": sent(failing("429 Too Many Requests")),
    "come-back-later": sent(failing("429 Too Many Requests", "retry-after: 60\r\n")),
    "broken": sent(failing("500 Internal Server Error")),
    "busy": sent(failing("503 Service Unavailable")),
    "refused-key": sent(failing("401 Unauthorized")),
    "unknown-model": sent(failing("404 Not Found")),
    # S2: it takes too long.
    "silent": silent,
    "dripping": drips,
    "stops-halfway": stops_halfway,
    # S3: it says nothing that could be read.
    "gateway-page": sent(http(f"<html>{WORD}</html>".encode(), kind="text/html")),
    "no-json": sent(http(TEXT.encode())),
    "empty-body": sent(http(b"")),
    "white-space": sent(said(" \n\t ")),
    "null": sent(said(None)),
    "no-choices": sent(http(b'{"choices":[]}')),
    "cut": sent(said()[:-20]),
    "reset": resets,
    "no-http": sent(b"SSH-2.0-OpenSSH_9\r\n\r\n"),
    "too-deep": sent(http(b"[" * 200_000)),
    "two-megabytes": sent(http(b" " * 2_000_000)),
    # S4: it says too much, or does not come to its end.
    "longer": sent(said("\n".join(_LINES * 3_000))),
    "unfinished": sent(
        said(f"{WORD} and then the parts of the service were read one after the o", finish="length")
    ),
    # S5 and S6: it does something else.
    "refusal": sent(said(None, refusal=f"I will not. {WORD}")),
    "filtered": sent(said(finish="content_filter")),
    "tool-calls": sent(said(tool_calls=[_CALL], finish="tool_calls")),
}
SLOW = frozenset({"silent", "dripping", "stops-halfway"})
# Why there is no summary, as the proxy says it.
REASONS = {
    "too-many": "http-429",
    "come-back-later": "http-429",
    "broken": "http-500",
    "busy": "http-503",
    "refused-key": "http-401",
    "unknown-model": "unknown-model",
    **dict.fromkeys(SLOW, "timeout"),
    **dict.fromkeys(
        ("gateway-page", "no-json", "empty-body", "no-choices", "too-deep", "two-megabytes"), "garbage"
    ),
    **dict.fromkeys(("white-space", "null"), "empty"),
    **dict.fromkeys(("cut", "reset", "no-http"), "unreachable"),
    "longer": "longer",
    "unfinished": "truncated",
    "refusal": "refused",
    "filtered": "content-filter",
    "tool-calls": "tool-calls",
}
WELL = "well"


@dataclass
class Upstream:
    """An upstream and its summary model, on one socket.

    Attributes:
        url: Where it listens.
        bodies: What clients' requests have become, by credential; the last of each.
        asked: Summary calls by credential.
    """

    url: str = ""
    bodies: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = (line.partition(b": ") for line in head.split(b"\r\n")[1:-2])
            fields = {name.lower(): value for name, _, value in lines}
            body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
            who = fields.get(b"authorization", b"").decode().removeprefix("Bearer ")
            if CLIENTS_FIELD in fields:
                self.bodies[who] = body
                streams = json.loads(body).get("stream")
                writer.write(http(EVENTS, kind="text/event-stream") if streams else http(ANSWER))
            elif head.startswith(b"POST"):
                self.asked[who] += 1
                well = sent(said(put_as_asked(TEXT, body.decode())))
                await WAYS.get(who.partition(".")[0], well)(reader, writer)
            else:
                writer.write(failing("404 Not Found"))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """It, listening. Every connection serves one request."""
    made = Upstream()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(100):
                await server.wait_closed()
