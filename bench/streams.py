"""Many event streams at once, each slow: what an agent farm or a chat site looks like from the wire.

Connections stand before the first request is sent, and all requests are sent at once: the worst case for the
first byte. Each stream is compared with what the upstream sent, by digest; each event says whose it is.
"""

import asyncio
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop
from conversations import small
from load import PATIENCE_S, LoadError, percentile
from targets import Target
from upstream import paced_body, paced_events

PAUSE_MS = 200
MS = 1e3
_POLL_S = 0.01
# Connections that are made at once: fewer than any backlog.
_BATCH = 100


@dataclass(frozen=True, slots=True)
class Streamed:
    """Many streams through one target.

    Attributes:
        round: Counted from 0.
        target: Its name.
        streams: How many there were at once.
        joined: Share of events (0..1) that came together with another in one read of the client.
        wrong: Of these, cut, answered with an error, or with other bytes than the upstream's.
        first_p50_s: From the request to the first byte of the body, in seconds.
        first_p99_s: The same.
        late_p99_s: By how much the gap between two events was over `PAUSE_MS`, in seconds.
        chunk_cpu_s: CPU time of the target per event, while all streams were open.
        held_bytes: Memory that it held more than before, while all streams were open.
    """

    round: int
    target: str
    streams: int
    joined: float
    wrong: int
    first_p50_s: float
    first_p99_s: float
    late_p99_s: float
    chunk_cpu_s: float
    held_bytes: int


class _Reader(asyncio.Protocol):
    """One stream, as a client reads it."""

    def __init__(self, event_bytes: int) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._event_bytes = event_bytes
        self._digest = hashlib.sha256()
        self._bytes = 0
        self.arrivals_s: list[float] = []
        self.joined = 0
        self.sent_s = 0.0
        self.ended = False
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: Sequence[bytes]) -> None:
        self.sent_s = time.perf_counter()
        self._transport.writelines(request)

    def data_received(self, data: bytes) -> None:
        before = len(self.arrivals_s)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = self.failure or repr(error)
        came = len(self.arrivals_s) - before
        self.joined += came if came > 1 else 0

    def on_body(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)
        complete = self._bytes // self._event_bytes
        self.arrivals_s.extend([time.perf_counter()] * (complete - len(self.arrivals_s)))

    def on_message_complete(self) -> None:
        self.ended = True
        if self._parser.get_status_code() != 200:
            self.failure = self.failure or f"status {self._parser.get_status_code()}"

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended:
            self.failure = self.failure or "cut"

    @property
    def is_over(self) -> bool:
        return self.ended or bool(self.failure)

    def is_exactly(self, body: bytes) -> bool:
        return not self.failure and self._digest.digest() == hashlib.sha256(body).digest()

    def close(self) -> None:
        self._transport.abort()


def _asked(number: int, target: Target, chunks: int) -> list[bytes]:
    query = f"?stream=s{number:05d}&chunks={chunks}&pause_ms={PAUSE_MS} HTTP/1.1".encode()
    extra = [*target.headers, "accept: text/event-stream"]
    head, *body = next(small(f"stream {number}", extra, stream=True).requests())
    return [head.replace(b" HTTP/1.1", query, 1), *body]


async def _open(target: Target, streams: int, event_bytes: int) -> list[_Reader]:
    loop, readers = asyncio.get_running_loop(), list[_Reader]()
    make = functools.partial(_Reader, event_bytes)
    for start in range(0, streams, _BATCH):
        wanted = range(start, min(start + _BATCH, streams))
        made = [loop.create_connection(make, *target.program.address) for _ in wanted]
        readers += [reader for _, reader in await asyncio.gather(*made)]
    return readers


async def _until(readers: Sequence[_Reader], *, begun: bool) -> None:
    deadline_s = time.perf_counter() + PATIENCE_S
    while not all(reader.is_over or (begun and reader.arrivals_s) for reader in readers):
        if time.perf_counter() > deadline_s:
            raise LoadError(f"streams did not end within {PATIENCE_S:.0f} s")
        await asyncio.sleep(_POLL_S)


def _events(readers: Sequence[_Reader]) -> int:
    return sum(len(reader.arrivals_s) for reader in readers)


def _late_s(reader: _Reader, chunks: int) -> list[float]:
    times = reader.arrivals_s[:chunks]
    pairs = itertools.pairwise(times)
    return [max(0.0, later - earlier - PAUSE_MS / MS) for earlier, later in pairs]


async def _measured(number: int, target: Target, streams: int, chunks: int) -> Streamed:
    program = target.program
    rss_before = program.rss_bytes()
    event_bytes = len(next(paced_events("s00000", 1)))
    readers = await _open(target, streams, event_bytes)
    try:
        for index, reader in enumerate(readers):
            reader.ask(_asked(index, target, chunks))
        await _until(readers, begun=True)
        held, cpu_s, seen = program.rss_bytes() - rss_before, program.cpu_s(), _events(readers)
        await asyncio.sleep(PAUSE_MS / MS * (chunks - 2) / 2)
        held = max(held, program.rss_bytes() - rss_before)
        cpu_s, seen = program.cpu_s() - cpu_s, _events(readers) - seen
        await _until(readers, begun=False)
    finally:
        for reader in readers:
            reader.close()
    firsts_s = [reader.arrivals_s[0] - reader.sent_s for reader in readers if reader.arrivals_s]
    late_s = [late for reader in readers for late in _late_s(reader, chunks)]
    expected = (paced_body(f"s{index:05d}", chunks) for index in range(streams))
    return Streamed(
        round=number,
        target=target.name,
        streams=streams,
        joined=sum(reader.joined for reader in readers) / max(1, _events(readers)),
        wrong=sum(not reader.is_exactly(body) for reader, body in zip(readers, expected, strict=True)),
        first_p50_s=percentile(firsts_s or [PATIENCE_S], 0.50),
        first_p99_s=percentile(firsts_s or [PATIENCE_S], 0.99),
        late_p99_s=percentile(late_s or [PATIENCE_S], 0.99),
        chunk_cpu_s=cpu_s / max(1, seen),
        held_bytes=held,
    )


def measured(number: int, target: Target, *, streams: int, chunks: int) -> Streamed:
    """Open so many streams of so many events through a target.

    Raises:
        LoadError: They did not end.
    """
    return uvloop.run(_measured(number, target, streams, chunks))
