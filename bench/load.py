"""The reference load: clients and a provider that do with what they get what real ones cannot avoid.

Connections each send the next request once the last one is answered. A client parses the answer and decodes
its JSON, event by event where it streams; the upstream is told to decode the JSON of each request, too. Both
share one core, as they do not in life: a proxy that is much faster than them is shown slower than it is.
`wrk` is the strict one.
"""

import asyncio
import functools
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

Requests = Iterator[list[bytes]]

OK = 200
_DATA = b"data: {"
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
    """One client."""

    def __init__(self, requests: Requests, answers: Answers) -> None:
        self._requests = requests
        self._answers = answers
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._rest = b""
        self._streams = False
        self.answered = 0
        self.idle = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.idle:
            self._fail("the connection ended before the answer did")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"an answer cannot be read: {error.__context__ or error!r}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        if not self._streams:
            self._body.append(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                json.loads(line[len(_DATA) - 1 :])

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != OK:
            self._fail(f"status {status}")
        elif not self._streams:
            json.loads(b"".join(self._body))
        self._body.clear()
        self._rest, self._streams = b"", False
        self._finish()

    def _fail(self, failure: str) -> None:
        self._answers.failure = self._answers.failure or failure

    def _finish(self) -> None:
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


def tell_upstream(address: tuple[str, int], *, decodes: bool) -> None:
    """Whether the upstream shall decode the JSON of requests.

    Raises:
        LoadError: It does not say that it will.
    """
    asking = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    try:
        asking.request("PUT", f"/decode/{decodes:d}")
        if asking.getresponse().status != http.client.NO_CONTENT:
            raise LoadError("the upstream cannot be told what to do")
    except OSError as error:
        raise LoadError(f"the upstream is not there: {error}") from error
    finally:
        asking.close()


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
    most_s: float,
    enough: int,
    cpu_s: Callable[[], float],
) -> Measured:
    """Load a target, one connection for each of `requests`.

    The window opens after `warm_s`, and not before every connection has had an answer. After `window_s` it
    stays open until there are `enough` answers in it, at most `most_s`, and until there is one in any case.
    Connections end only when their last answer has come, so that nothing is left over for the next
    measurement.

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
        # An event would be work for each answer, and part of the load.
        while len(answers.latencies_s) < enough and time.perf_counter() < opened_s + most_s:  # noqa: ASYNC110 - above
            await asyncio.sleep(_POLL_S)
        await _until(lambda: bool(answers.latencies_s), answers)
        elapsed_s, spent_s = time.perf_counter() - opened_s, cpu_s() - before_s
        latencies_s = list(answers.latencies_s)
        answers.running = False
        await _until(lambda: all(connection.idle for connection in connections), answers)
    finally:
        for connection in connections:
            connection.close()
    return _summed(latencies_s, elapsed_s, spent_s)
