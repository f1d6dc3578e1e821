"""An upstream that costs next to nothing: it answers every request, whatever it says, as a provider would.

It reads no further than the head. A request that accepts an event stream gets one of `CHUNKS` events, each
written by itself as soon as the event loop comes round; every other gets a JSON answer of about 0.9 KB.
`usage` follows from the length of the request, so that a proxy that learns from it learns something likely.

    python bench/upstream.py        prints the URL it listens on, and serves until it is ended
"""

import asyncio
import functools
import re
from typing import cast

import uvloop

CHUNKS = 200
BYTES_PER_TOKEN = 4

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_STREAM = re.compile(rb"(?i)\r\naccept: *text/event-stream")
_TEXT = "The build passes again; the failing test compared two sets by their order. " * 7


def _usage(request_bytes: int) -> str:
    prompt = request_bytes // BYTES_PER_TOKEN
    return f'{{"prompt_tokens":{prompt},"completion_tokens":128,"total_tokens":{prompt + 128}}}'


@functools.lru_cache(maxsize=1024)
def _answer(request_bytes: int) -> bytes:
    """A whole answer that is no stream."""
    body = (
        '{"id":"chatcmpl-bench","object":"chat.completion","created":1790000000,"model":"bench",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"'
        f'{_TEXT}"}},"logprobs":null,"finish_reason":"stop"}}],"usage":{_usage(request_bytes)},'
        '"system_fingerprint":"fp_bench"}'
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _framed(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(rest: str) -> bytes:
    start = '{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1790000000,"model":"bench",'
    return _framed(start + rest + "}")


@functools.lru_cache(maxsize=1024)
def _stream(request_bytes: int) -> tuple[bytes, ...]:
    """The writes that make up a stream: head, `CHUNKS` events, end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    delta = _event('"choices":[{"index":0,"delta":{"content":" again"},"finish_reason":null}]')
    stop = _event('"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]')
    usage = _event(f'"choices":[],"usage":{_usage(request_bytes)}')
    return (head, *[delta] * (CHUNKS - 2), stop, usage, _framed("[DONE]") + b"0\r\n\r\n")


class _Connection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._missing = 0
        self._length = 0
        self._streams = False
        self._waiting = iter(tuple[bytes, ...]())
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(self._head[: end + 2], len(self._head) - end - 4)
            self._head = b""
        if not self._missing:
            self._reply()

    def _read_head(self, head: bytes, body_bytes: int) -> None:
        declared = _LENGTH.search(head)
        self._length = int(declared[1]) if declared else 0
        self._streams = _STREAM.search(head) is not None
        self._missing = self._length - body_bytes

    def _reply(self) -> None:
        if self._streams:
            self._waiting = iter(_stream(self._length))
            self._write_next()
        else:
            self._transport.write(_answer(self._length))

    def _write_next(self) -> None:
        if self._paused or self._transport.is_closing():
            return
        chunk = next(self._waiting, None)
        if chunk is not None:
            self._transport.write(chunk)
            self._loop.call_soon(self._write_next)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write_next()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0, backlog=2048)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
