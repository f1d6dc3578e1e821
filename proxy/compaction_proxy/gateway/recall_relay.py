"""One answer for the client, however many answers of the upstream it is made of (`gateway.recall_loop`).

Its head is that of the upstream's first answer. Where a later one fails, a client that has got nothing yet
gets that failure. One that has got the beginning of a stream is told of it in an event, and then cut: no
answer of ours looks whole that is not.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import httpx
import structlog
from starlette.types import Send

from compaction_proxy.core.errors import Overloaded, UpstreamError
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.client.types import HttpResponse
from compaction_proxy.gateway.headers import Headers, to_client
from compaction_proxy.gateway.recall_loop import Course, beside
from compaction_proxy.gateway.upstream import PEEK_BYTES, Answer, relay_back, send_error
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import TAP_FAILED
from compaction_proxy.wires.chat.continuation import dumped
from compaction_proxy.wires.decompress import IDENTITY, Inflater
from compaction_proxy.wires.wire import AnswerJoiner, StreamJoiner

# An answer that is no stream is looked into up to so many bytes, packed or not, and is passed on beyond.
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
# As much is inflated of a stream that came packed although it was not to be, and so much at once.
MAX_INFLATED_BYTES: Final = 256 * 1024 * 1024
INFLATE_STEP_BYTES: Final = 4_096
# An upstream that has said it is done is given so long to end its answer, in seconds, so that the connection
# may serve again.
LINGER_S: Final = 1.0

_FRAMING: Final = frozenset({b"content-length", b"content-encoding"})
_BROKEN: Final = (502, "The upstream did not go on with its answer.", "upstream_protocol_error")

_log = structlog.get_logger()

Extra = Sequence[tuple[bytes, bytes]]


async def relay_one(course: Course, answer: Answer, send: Send, extra: Extra) -> bool:
    """Relay an answer of status 200, going on where it calls the tool; whether the client got all of it.

    Every answer is closed. One that nobody can read but the client goes on as it is.

    Args:
        course: How it goes on.
        answer: The upstream's first one.
        send: The client's ASGI channel.
        extra: Header fields of ours.
    """
    if not _is_plain(answer) and Inflater(answer.field(b"content-encoding"), 0).failed:
        return await _relay_as_it_is(course, answer, send, extra)
    if _is_stream(answer):
        return await _relay_stream(course, answer, send, extra)
    return await _relay_whole(course, answer, send, extra)


async def _relay_as_it_is(course: Course, answer: Answer, send: Send, extra: Extra) -> bool:
    course.code = answer.response.status
    course.tap = course.dialect.tap(answer.field(b"content-type"), answer.field(b"content-encoding"))
    return await relay_back(answer, send, extra=extra, tap=course.tap.feed)


def _is_stream(answer: Answer) -> bool:
    return answer.field(b"content-type").strip().lower().startswith("text/event-stream")


def _is_plain(answer: Answer) -> bool:
    return answer.field(b"content-encoding").strip().lower() in IDENTITY


def _head(first: HttpResponse, extra: Extra) -> Headers:
    """The fields of the first answer, without what speaks of its bytes."""
    kept = to_client(first.status, first.headers)
    return [*[each for each in kept if each[0].lower() not in _FRAMING], *extra]


async def _relay_stream(course: Course, answer: Answer, send: Send, extra: Extra) -> bool:
    stream, client = course.tool.open_stream(TOOL_NAME), _Client(course, send)
    headers = _head(answer.response, extra)
    try:
        await send({"type": "http.response.start", "status": answer.response.status, "headers": headers})
        await _pass(stream, answer, client)
        while calls := stream.calls:
            await answer.aclose()
            going_on = partial(stream.go_on, hidden=course.may_go_on(1))
            message = await beside(stream.size, going_on)
            answer = await course.next(message, calls)
            if answer.response.status != httpx.codes.OK or not _is_stream(answer):
                await client.tell(stream.write_error(await _failure(answer, course)))
                return False
            await _pass(stream, answer, client)
    except httpx.TransportError:
        return False
    except (Overloaded, UpstreamError) as error:
        await client.tell(stream.write_error(course.dialect.error(error)))
        return False
    finally:
        await answer.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return True


class _Client:
    """The client's side of a stream.

    Args:
        course: Whose taps watch.
        send: The client's ASGI channel.
    """

    __slots__ = ("_send", "course")

    def __init__(self, course: Course, send: Send) -> None:
        self.course = course
        self._send = send

    async def tell(self, data: bytes) -> None:
        """Send what there is."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            with contained(_tap_failed):
                self.course.tap.feed(data)

    def heard(self, data: bytes) -> None:
        """The upstream has said this."""
        if not self.course.hops:
            with contained(_tap_failed):
                self.course.first.feed(data)


async def _pass(stream: StreamJoiner, answer: Answer, client: _Client) -> None:
    """Pass one answer of the upstream on, but for what is hidden.

    Raises:
        httpx.TransportError: It was cut, or cannot be read.
    """
    packed = None if _is_plain(answer) else Inflater(answer.field(b"content-encoding"), MAX_INFLATED_BYTES)
    clock, until = asyncio.get_running_loop().time, None
    while chunk := await _read(answer, until):
        for data in _inflated(chunk, packed):
            client.heard(data)
            await client.tell(stream.feed(data))
        if stream.done and stream.calls:
            until = until or clock() + LINGER_S
            if clock() > until:
                break
    await client.tell(stream.ended())


async def _read(answer: Answer, until: float | None) -> bytes:
    """The next bytes; of an answer that is done and goes on in another one, what comes until then."""
    if until is None:
        return await answer.read()
    with suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout_at(until):
            return await answer.read()
    return b""


def _inflated(chunk: bytes, packed: Inflater | None) -> Iterator[bytes]:
    if packed is None:
        yield chunk
        return
    for start in range(0, len(chunk), INFLATE_STEP_BYTES):
        yield packed.feed(chunk[start : start + INFLATE_STEP_BYTES])
        if packed.failed:
            raise httpx.RemoteProtocolError("the answer cannot be inflated")


async def _failure(answer: Answer, course: Course) -> bytes:
    """The error that tells a client why a stream does not go on; in the upstream's words, if it has any."""
    body = await _body(answer, PEEK_BYTES)
    try:
        told = json.loads(body or b"")
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict) and told.get("error"):
        return dumped(told)
    return course.dialect.error(UpstreamError(*_BROKEN))


async def _relay_whole(course: Course, answer: Answer, send: Send, extra: Extra) -> bool:
    hidden, first = course.tool.open_answer(TOOL_NAME), answer.response
    try:
        told = await _told(hidden, answer, course)
        while told is None:
            await answer.aclose()
            answer = await course.next(hidden.go_on(), hidden.calls)
            if answer.response.status != httpx.codes.OK:
                break
            told = await _told(hidden, answer, course)
        if not told:  # an error, or what was never looked into
            return await _relay_as_it_is(course, answer, send, extra)
    except (Overloaded, UpstreamError) as error:
        course.code = error.status
        await send_error(send, error, extra, course.dialect.error)
        return False
    finally:
        await answer.aclose()
    headers = [*_head(first, extra), (b"content-length", b"%d" % len(told))]
    await send({"type": "http.response.start", "status": first.status, "headers": headers})
    await send({"type": "http.response.body", "body": told, "more_body": False})
    course.tap.feed(told)
    return True


async def _told(hidden: AnswerJoiner, answer: Answer, course: Course) -> bytes | None:
    """What the client gets; None: the answer goes on; empty: the upstream's own bytes.

    Raises:
        UpstreamError: A later answer is none.
    """
    body = await _body(answer, MAX_ANSWER_BYTES)
    if not body and not course.hops:
        return b""
    if not body or (course.hops and _is_stream(answer)):
        raise UpstreamError(*_BROKEN)
    told = await beside(len(body), lambda: hidden.take(body, hidden=course.may_go_on()))
    if course.hops and told == b"":
        raise UpstreamError(*_BROKEN)
    if not course.hops:
        course.first.feed(body)
    return b"" if told is body and not course.hops else told


async def _body(answer: Answer, limit: int) -> bytes | None:
    """The whole body, inflated; None if it is longer than `limit` bytes, was cut, or cannot be inflated."""
    seen = await answer.peek(limit + 1)
    if len(seen) > limit or answer.cut:
        return None
    if _is_plain(answer):
        return seen
    inflater = Inflater(answer.field(b"content-encoding"), limit)
    body = inflater.feed(seen)
    return None if inflater.failed else body


def _tap_failed(error: BaseException) -> None:
    _log.warning(TAP_FAILED, error=type(error).__name__)
