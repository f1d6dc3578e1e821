"""An upstream that costs next to nothing: it answers every request, whatever it says, as a provider would.

It reads no further than it must to know whether a stream is wanted. A stream has `CHUNKS` events, each
written by itself as soon as the event loop comes round; any other request gets a JSON answer of about 0.9 KB.
The path says in the shape of which wire. `usage` follows from the length of the request, so that a proxy that
learns from it learns something likely.

A query `?stream=ID&chunks=N&pause_ms=M` asks for a stream of N events with M ms between them, each of which
says whose it is and which, so that a reader can tell every lost, moved or foreign byte: `paced_body`.

`PUT /decode/1` makes it decode the JSON of every request before it answers, which no provider gets around;
`PUT /decode/0` ends that.

    python bench/upstream.py        prints the URL it listens on, and serves until it is ended
"""

import asyncio
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import uvloop
import wire_answers

CHUNKS = 200
BYTES_PER_TOKEN = 4
# A longer body asks for a stream only by its `accept` header.
READ_BYTES = 16_384
MS = 1e3

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_STREAM = re.compile(rb"(?i)\r\naccept: *text/event-stream")
_WANTED = re.compile(rb'"stream": *true')
_PACED = re.compile(rb"\?stream=(\w+)&chunks=(\d+)&pause_ms=(\d+) ")
_DECODE = re.compile(rb"PUT /decode/([01]) ")
_DONE_SO = b"HTTP/1.1 204 No Content\r\n\r\n"
_TEXT = "The build passes again; the failing test compared two sets by their order. " * 7
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


def _usage(request_bytes: int) -> str:
    prompt = request_bytes // BYTES_PER_TOKEN
    return f'{{"prompt_tokens":{prompt},"completion_tokens":128,"total_tokens":{prompt + 128}}}'


@functools.lru_cache(maxsize=1024)
def whole_answer(request_bytes: int, wire: str = "chat") -> bytes:
    """An answer that is no stream, to a request of so many bytes; head and body."""
    other = wire != "chat"
    body = wire_answers.whole(wire, _TEXT, request_bytes) if other else _completion(request_bytes)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _completion(request_bytes: int) -> bytes:
    return (
        '{"id":"chatcmpl-bench","object":"chat.completion","created":1790000000,"model":"bench",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"'
        f'{_TEXT}"}},"logprobs":null,"finish_reason":"stop"}}],"usage":{_usage(request_bytes)},'
        '"system_fingerprint":"fp_bench"}'
    ).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(rest: str) -> bytes:
    start = '{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1790000000,"model":"bench",'
    return f"data: {start}{rest}}}\n\n".encode()


def _delta(text: str) -> bytes:
    return _event(f'"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}]')


_STOP = _event('"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]')
_DONE = b"data: [DONE]\n\n"


@functools.lru_cache(maxsize=1024)
def _stream(request_bytes: int, wire: str) -> tuple[bytes, ...]:
    """The writes that make up a stream: head, `CHUNKS` events, end."""
    if wire != "chat":
        made = wire_answers.events(wire, CHUNKS, request_bytes)
        return (_STREAM_HEAD, *map(_chunk, made), _LAST_CHUNK)
    usage = _event(f'"choices":[],"usage":{_usage(request_bytes)}')
    # No two alike: there are proxies that end a stream which repeats itself.
    events = [*(_delta(f" {number}") for number in range(CHUNKS - 2)), _STOP, usage]
    return (_STREAM_HEAD, *map(_chunk, events), _chunk(_DONE) + _LAST_CHUNK)


def paced_events(stream: str, chunks: int) -> Iterator[bytes]:
    """The events of a paced stream, as a client reads them."""
    for number in range(chunks):
        yield _delta(f" {stream} {number:06d}")


def paced_body(stream: str, chunks: int) -> bytes:
    """All that a client reads of a paced stream."""
    return b"".join(paced_events(stream, chunks)) + _DONE


@dataclass(slots=True)
class _Care:
    """With how much care requests are read.

    Attributes:
        decodes: Whether their JSON is decoded.
    """

    decodes: bool = False


class _Connection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, care: _Care) -> None:
        self._care = care
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._body: list[bytes] = []
        self._missing = 0
        self._length = 0
        self._streams = False
        self._wire = "chat"
        self._paced: re.Match[bytes] | None = None
        self._waiting = iter(tuple[bytes, ...]())
        self._pause_s = 0.0
        self._paused = False
        self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._read_body(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, rest, self._head = self._head[: end + 2], self._head[end + 4 :], b""
            self._read_head(head)
            self._read_body(rest)
        if not self._missing:
            self._reply()

    def _read_head(self, head: bytes) -> None:
        declared = _LENGTH.search(head)
        self._length = self._missing = int(declared[1]) if declared else 0
        self._streams = _STREAM.search(head) is not None
        self._wire = wire_answers.wire_of(head)
        self._paced = _PACED.search(head, 0, head.find(b"\r\n"))
        self._body = []
        if told := _DECODE.match(head):
            self._care.decodes = told[1] == b"1"
            self._told = True

    def _read_body(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._care.decodes or (self._length <= READ_BYTES and not self._streams):
            self._body.append(data)

    def _reply(self) -> None:
        body = b"".join(self._body)
        if self._told:
            self._told = False
            self._transport.write(_DONE_SO)
            return
        if self._care.decodes:
            json.loads(body)
        if self._paced:
            stream, chunks, pause_ms = self._paced[1].decode(), int(self._paced[2]), int(self._paced[3])
            self._pause_s = pause_ms / MS
            self._waiting = self._paced_writes(stream, chunks)
            self._write_next()
        elif self._streams or (self._length <= READ_BYTES and _WANTED.search(body)):
            self._pause_s = 0.0
            self._waiting = iter(_stream(self._length, self._wire))
            self._write_next()
        else:
            self._transport.write(whole_answer(self._length, self._wire))

    @staticmethod
    def _paced_writes(stream: str, chunks: int) -> Iterator[bytes]:
        head = _STREAM_HEAD
        for event in paced_events(stream, chunks):
            yield head + _chunk(event)
            head = b""
        yield _chunk(_DONE) + _LAST_CHUNK

    def _write_next(self) -> None:
        if self._paused or self._transport.is_closing():
            return
        chunk = next(self._waiting, None)
        if chunk is None:
            return
        self._transport.write(chunk)
        if self._pause_s:
            self._loop.call_later(self._pause_s, self._write_next)
        else:
            self._loop.call_soon(self._write_next)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write_next()


async def _serve() -> None:
    made = functools.partial(_Connection, _Care())
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
