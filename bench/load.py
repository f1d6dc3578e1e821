"""A load generator of our own: connections that each send the next request once the last one is answered.

It serves where wrk is not installed, and says when every answer has come, so that nothing is cut off.
"""

import asyncio
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

Requests = Iterator[list[bytes]]

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_OK = re.compile(rb"HTTP/1\.1 200 ")
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_POLL_S = 0.01
# How long the first answers, and afterwards the last ones, may take.
PATIENCE_S = 60.0


class LoadError(Exception):
    """A target did not answer as it should."""


@dataclass(slots=True)
class Answers:
    """What came back.

    Attributes:
        latencies_s: From the first byte written to the last byte read, in seconds, one per answer.
        running: Whether another request follows each answer.
        failure: What went wrong on a connection; empty if nothing did.
    """

    latencies_s: list[float] = field(default_factory=list)
    running: bool = True
    failure: str = ""


class _Connection(asyncio.Protocol):
    """One connection. Knows no more of HTTP than where an answer ends."""

    def __init__(self, requests: Requests, answers: Answers) -> None:
        self._requests = requests
        self._answers = answers
        self._head = b""
        self._missing: int | None = None  # bytes of the body; None in a chunked one
        self._last = b""
        self._in_body = False
        self.answered = 0
        self.idle = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.idle:
            self._answers.failure = self._answers.failure or "the connection ended before the answer did"

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = self._begin(end)
        if self._missing is None:
            self._last = (self._last + data)[-len(_LAST_CHUNK) :]
            ended = self._last == _LAST_CHUNK
        else:
            self._missing -= len(data)
            ended = self._missing <= 0
        if ended:
            self._finish()

    def _begin(self, end: int) -> bytes:
        """Take note of the head, which ends at `end`; what came of the body."""
        head, rest = self._head[: end + 2], self._head[end + 4 :]
        if not _OK.match(head):
            self._answers.failure = head.partition(b"\r\n")[0].decode("latin-1")
        declared = _LENGTH.search(head)
        self._missing = int(declared[1]) if declared else None
        self._in_body, self._head, self._last = True, b"", b""
        return rest

    def _finish(self) -> None:
        self._in_body = False
        self.answered += 1
        self._answers.latencies_s.append(time.perf_counter() - self._sent_s)
        if self._answers.running and not self._answers.failure:
            self._ask()
        else:
            self.idle = True

    def _ask(self) -> None:
        buffers = next(self._requests)
        self._sent_s = time.perf_counter()
        self._transport.writelines(buffers)

    def close(self) -> None:
        self.idle = True
        self._transport.abort()


async def _until(true: Callable[[], bool], answers: Answers) -> None:
    deadline_s = time.perf_counter() + PATIENCE_S
    while not true():
        if answers.failure or time.perf_counter() > deadline_s:
            raise LoadError(answers.failure or f"no answer within {PATIENCE_S:.0f} s")
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Measured:
    """One window of load on one target.

    Attributes:
        answers: Those that ended in the window; none if each takes longer.
        elapsed_s: Length of the window, in seconds.
        p50_s: Half of the answers took at most this long, in seconds.
        p99_s: 99 % of them did.
        cpu_s: CPU time that the target's processes took in it; 0 where there is none to ask.
    """

    answers: int
    elapsed_s: float
    p50_s: float
    p99_s: float
    cpu_s: float


def percentile(found: Sequence[float], share: float) -> float:
    """The smallest number that at least `share` (0..1) of them do not exceed; the list is not empty."""
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _summed(latencies_s: Sequence[float], elapsed_s: float, cpu_s: float) -> Measured:
    return Measured(
        answers=len(latencies_s),
        elapsed_s=elapsed_s,
        p50_s=percentile(latencies_s, 0.50),
        p99_s=percentile(latencies_s, 0.99),
        cpu_s=cpu_s,
    )


async def measure(
    address: tuple[str, int],
    requests: Sequence[Requests],
    *,
    warm_s: float,
    window_s: float,
    cpu_s: Callable[[], float],
) -> Measured:
    """Load a target, one connection for each of `requests`.

    The window opens after `warm_s`, and not before every connection has had an answer; it stays open until
    there is an answer in it. Connections end only when their last answer has come, so that nothing is left
    over for the next measurement.

    Raises:
        LoadError: A connection was cut, or an answer is late or has another status than 200.
    """
    loop = asyncio.get_running_loop()
    answers = Answers()
    connections: list[_Connection] = []
    try:
        for each in requests:
            made = functools.partial(_Connection, each, answers)
            connections.append((await loop.create_connection(made, *address))[1])
        await asyncio.sleep(warm_s)
        await _until(lambda: all(connection.answered for connection in connections), answers)
        before_s, opened_s = cpu_s(), time.perf_counter()
        answers.latencies_s.clear()
        await asyncio.sleep(window_s)
        await _until(lambda: bool(answers.latencies_s), answers)
        elapsed_s, spent_s = time.perf_counter() - opened_s, cpu_s() - before_s
        latencies_s = list(answers.latencies_s)
        answers.running = False
        await _until(lambda: all(connection.idle for connection in connections), answers)
    finally:
        for connection in connections:
            connection.close()
    return _summed(latencies_s, elapsed_s, spent_s)
