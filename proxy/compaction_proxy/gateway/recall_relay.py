"""Joins one or several answers of the upstream into one answer for the client (`gateway.recall_loop`).

The client gets the status and the headers of the upstream's first answer. If a later answer fails and the
client has received nothing yet, it gets the failure as its answer. If the client has already received the
beginning of a stream, the proxy sends the failure as an event and then cuts the stream. So an incomplete
answer never looks complete.
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

from compaction_proxy.core.errors import OverloadedError, UpstreamError
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.client.types import HttpResponse
from compaction_proxy.gateway.headers import Headers, to_client_headers
from compaction_proxy.gateway.recall_loop import RecallLoop, run_in_worker_if_large
from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse, relay_response, send_error
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RELAY_TAP_FAILED
from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.json.values import encode_ascii_json
from compaction_proxy.wires.search_tool import AnswerJoiner, StreamJoiner

# An answer that is no stream is searched for calls only if it has at most this many bytes, both before and
# after decompression. A longer answer is relayed without a search.
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
# An upstream may compress a stream although the proxy asked for an uncompressed one. These are the most bytes
# to which such a stream is decompressed, and the number of compressed bytes decompressed in one step.
MAX_INFLATED_BYTES: Final = 256 * 1024 * 1024
INFLATE_STEP_BYTES: Final = 4_096
# Once an upstream has marked an answer as done, the proxy waits this many seconds for the end of the body. A
# connection can be used again only if the body was read to its end.
LINGER_S: Final = 1.0

_FRAMING: Final = frozenset({b"content-length", b"content-encoding"})
_BROKEN: Final = (502, "The upstream did not go on with its answer.", "upstream_protocol_error")

_log = structlog.get_logger()

ExtraHeaders = Sequence[tuple[bytes, bytes]]


async def relay_with_recall(
    recall_loop: RecallLoop, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
) -> bool:
    """Relays an answer with status 200. If it calls the search tool, relays its continuations as well.

    Returns whether the client got the complete answer. Closes every answer of the upstream. An answer whose
    compression the proxy does not support is relayed unchanged and is not continued.

    Args:
        recall_loop: Continues the answer.
        answer: The upstream's first answer.
        send: The client's ASGI send channel.
        extra_headers: The proxy's own header fields, appended to the upstream's.
    """
    if not _is_plain(answer) and Inflater(answer.get_field(b"content-encoding"), 0).has_failed:
        return await _relay_unchanged(recall_loop, answer, send, extra_headers)
    if _is_stream(answer):
        return await _relay_stream(recall_loop, answer, send, extra_headers)
    return await _relay_whole_answer(recall_loop, answer, send, extra_headers)


async def _relay_unchanged(
    recall_loop: RecallLoop, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
) -> bool:
    recall_loop.status = answer.response.status
    recall_loop.client_tap = recall_loop.wire.open_tap(
        answer.get_field(b"content-type"), answer.get_field(b"content-encoding")
    )
    return await relay_response(answer, send, extra_headers=extra_headers, tap=recall_loop.client_tap.feed)


def _is_stream(answer: UpstreamResponse) -> bool:
    return answer.get_field(b"content-type").strip().lower().startswith("text/event-stream")


def _is_plain(answer: UpstreamResponse) -> bool:
    return answer.get_field(b"content-encoding").strip().lower() in IDENTITY


def _build_headers(first: HttpResponse, extra_headers: ExtraHeaders) -> Headers:
    """Returns the header fields for the client: those of the first answer, and `extra_headers`.

    The length and the encoding of the body are left out, because the joined answer has other bytes.
    """
    fields = to_client_headers(first.status, first.headers)
    return [*[each for each in fields if each[0] not in _FRAMING], *extra_headers]


async def _relay_stream(
    recall_loop: RecallLoop, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
) -> bool:
    stream, client = recall_loop.tool.open_stream_joiner(TOOL_NAME), _ClientStream(recall_loop, send)
    headers = _build_headers(answer.response, extra_headers)
    try:
        await send({"type": "http.response.start", "status": answer.response.status, "headers": headers})
        await _forward_stream(stream, answer, client)
        while calls := stream.calls:
            await answer.aclose()
            start_next = partial(stream.start_next_answer, may_answer_calls=recall_loop.can_continue(1))
            message = await run_in_worker_if_large(stream.buffered_bytes, start_next)
            answer = await recall_loop.run_calls_and_continue(message, calls)
            if answer.response.status != httpx.codes.OK or not _is_stream(answer):
                await client.send_data(
                    stream.encode_error_event(await _build_stream_error(answer, recall_loop))
                )
                return False
            await _forward_stream(stream, answer, client)
    except httpx.TransportError:
        return False
    except (OverloadedError, UpstreamError) as error:
        await client.send_data(stream.encode_error_event(recall_loop.wire.encode_error(error)))
        return False
    finally:
        await answer.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return True


class _ClientStream:
    """Sends a stream to the client, and feeds the taps.

    Args:
        recall_loop: Holds the taps.
        send: The client's ASGI send channel.
    """

    __slots__ = ("_send", "recall_loop")

    def __init__(self, recall_loop: RecallLoop, send: Send) -> None:
        self.recall_loop = recall_loop
        self._send = send

    async def send_data(self, data: bytes) -> None:
        """Sends data to the client, and feeds it to the tap of the client's answer. Ignores empty data."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            with suppress_and_report(_log_tap_failed):
                self.recall_loop.client_tap.feed(data)

    def feed_first_tap(self, data: bytes) -> None:
        """Feeds data from the upstream to `first_tap`, unless the data belongs to a later answer."""
        if not self.recall_loop.hop_count:
            with suppress_and_report(_log_tap_failed):
                self.recall_loop.first_tap.feed(data)


async def _forward_stream(stream: StreamJoiner, answer: UpstreamResponse, client: _ClientStream) -> None:
    """Forwards one answer of the upstream, without the calls of the search tool.

    Raises:
        httpx.TransportError: The answer was cut or cannot be decompressed.
    """
    packed = (
        None if _is_plain(answer) else Inflater(answer.get_field(b"content-encoding"), MAX_INFLATED_BYTES)
    )
    clock, until = asyncio.get_running_loop().time, None
    while chunk := await _read_before_deadline(answer, until):
        for data in _inflate_chunks(chunk, packed):
            client.feed_first_tap(data)
            await client.send_data(stream.feed(data))
        if stream.is_done and stream.calls:
            until = until or clock() + LINGER_S
            if clock() > until:
                break
    await client.send_data(stream.flush_rest())


async def _read_before_deadline(answer: UpstreamResponse, deadline: float | None) -> bytes:
    """Returns the next bytes of an answer; empty at its end.

    `deadline` is a time on the event loop's clock; None sets no limit. Callers set it once the upstream has
    marked the answer as done and another answer will continue it. From then on nothing more is needed from
    this answer, so a missed deadline or a cut counts as its end.
    """
    if deadline is None:
        return await answer.read()
    with suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout_at(deadline):
            return await answer.read()
    return b""


def _inflate_chunks(chunk: bytes, inflater: Inflater | None) -> Iterator[bytes]:
    if inflater is None:
        yield chunk
        return
    for start in range(0, len(chunk), INFLATE_STEP_BYTES):
        yield inflater.feed(chunk[start : start + INFLATE_STEP_BYTES])
        if inflater.has_failed:
            raise httpx.RemoteProtocolError("the answer cannot be inflated")


async def _build_stream_error(answer: UpstreamResponse, recall_loop: RecallLoop) -> bytes:
    """Returns the body of the error that tells a client why its stream ends early.

    That is the body of `answer` if it is an error in JSON, else a general error of the proxy.
    """
    body = await _peek_whole_body(answer, PEEK_BYTES)
    try:
        payload = json.loads(body or b"")
    except (ValueError, RecursionError):
        payload = None
    if isinstance(payload, dict) and payload.get("error"):
        return encode_ascii_json(payload)
    return recall_loop.wire.encode_error(UpstreamError(*_BROKEN))


async def _relay_whole_answer(
    recall_loop: RecallLoop, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
) -> bool:
    joiner, first = recall_loop.tool.open_answer_joiner(TOOL_NAME), answer.response
    try:
        body = await _join_answer(joiner, answer, recall_loop)
        while body is None:
            await answer.aclose()
            answer = await recall_loop.run_calls_and_continue(joiner.message, joiner.calls)
            if answer.response.status != httpx.codes.OK:
                break
            body = await _join_answer(joiner, answer, recall_loop)
        if not body:  # an error, or an answer to relay unchanged
            return await _relay_unchanged(recall_loop, answer, send, extra_headers)
    except (OverloadedError, UpstreamError) as error:
        recall_loop.status = error.status
        await send_error(send, error, extra_headers, recall_loop.wire.encode_error)
        return False
    finally:
        await answer.aclose()
    headers = [*_build_headers(first, extra_headers), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": first.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
    recall_loop.client_tap.feed(body)
    return True


async def _join_answer(
    joiner: AnswerJoiner, answer: UpstreamResponse, recall_loop: RecallLoop
) -> bytes | None:
    """Returns the body for the client, or None if the answer has to be continued.

    The result is empty if the upstream's bytes must be relayed unchanged: a first answer that has no calls of
    the tool or cannot be searched.

    Raises:
        UpstreamError: A later answer was cut, is too large, or cannot be joined to the first one.
    """
    body = await _peek_whole_body(answer, MAX_ANSWER_BYTES)
    if not body and not recall_loop.hop_count:
        return b""
    if not body or (recall_loop.hop_count and _is_stream(answer)):
        raise UpstreamError(*_BROKEN)
    joined = await run_in_worker_if_large(
        len(body), lambda: joiner.join_answer(body, may_answer_calls=recall_loop.can_continue())
    )
    if recall_loop.hop_count and joined == b"":
        raise UpstreamError(*_BROKEN)
    if not recall_loop.hop_count:
        recall_loop.first_tap.feed(body)
    return b"" if joined is body and not recall_loop.hop_count else joined


async def _peek_whole_body(answer: UpstreamResponse, limit_bytes: int) -> bytes | None:
    """Returns the whole body, decompressed.

    Returns None if the body exceeds `limit_bytes` bytes, was cut or cannot be decompressed.
    """
    raw = await answer.peek(limit_bytes + 1)
    if len(raw) > limit_bytes or answer.is_cut:
        return None
    if _is_plain(answer):
        return raw
    inflater = Inflater(answer.get_field(b"content-encoding"), limit_bytes)
    body = inflater.feed(raw)
    return None if inflater.has_failed else body


def _log_tap_failed(error: BaseException) -> None:
    _log.warning(RELAY_TAP_FAILED, error=type(error).__name__)
