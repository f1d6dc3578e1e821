"""Offers the model a tool that searches removed messages, and runs the model's calls of this search tool.

If a response ends with tool calls, and all of them call the search tool, the proxy runs the calls, sends
their results to the upstream and asks it to continue the response. The proxy joins the upstream's responses
into one response for the client.

The client gets the status and the headers of the upstream's first response. If a later response is an error
and the client has received nothing yet, the client gets the error as its response. If the client has already
received the beginning of a stream, the proxy sends the error as an event and then cuts the stream. So an
incomplete response never looks complete.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import httpx
import structlog
from starlette.types import Send

from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import OverloadedError, UnreadableBodyError, UpstreamError
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.client.types import HttpRequest, HttpResponse
from compaction_proxy.gateway.headers import Headers, to_client_headers
from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse, relay_response, send_error
from compaction_proxy.recall.offer import should_offer_tool
from compaction_proxy.recall.tool import RecallContext, RecallTool
from compaction_proxy.support.log_events import RECALL_FAILED, RELAY_TAP_FAILED
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.wires.body import RequestBody, decode_small_json
from compaction_proxy.wires.content_coding import Inflater
from compaction_proxy.wires.context_errors import parse_overflow
from compaction_proxy.wires.json.values import encode_ascii_json
from compaction_proxy.wires.search_tool import (
    AnswerJoiner,
    SearchTool,
    StreamJoiner,
    ToolSupport,
    add_tool,
    is_prefill,
)
from compaction_proxy.wires.wire import Wire

# The most seconds that the calls of the search tool in one upstream response may take together. A call that
# does not end in time gets the result `NOT_NOW`. The client receives nothing while the proxy runs the calls.
SEARCH_S: Final = 5.0
# The most calls of the search tool that the proxy runs for one upstream response. Each further call gets the
# result `TOO_MANY`.
MAX_CALLS: Final = 8

NOT_NOW: Final = "Removed messages cannot be searched right now. Continue without them."
TOO_MANY: Final = f"Not run: at most {MAX_CALLS} searches can run at the same time."
NO_ROOM: Final = "The results do not fit into the context window. Continue without them."

# A response that is no stream is searched for calls of the tool only if it has at most this many bytes, both
# before and after decompression. If the upstream's first response is longer, the proxy relays it as it is. If
# a response that continues the first one is longer, the client gets an error.
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
# An upstream may compress a stream although the proxy asked for an uncompressed one. If such a stream has
# more bytes than this after decompression, the proxy cuts it.
MAX_INFLATED_BYTES: Final = 256 * 1024 * 1024
# The number of compressed bytes that the proxy decompresses in one step.
INFLATE_STEP_BYTES: Final = 4_096
# The most seconds that the proxy waits for the end of a body after the last event of the stream. The
# connection can be used again only if the body was read to its end.
LINGER_S: Final = 1.0

# The request header field that names the compressions that the response may use.
_ACCEPT_ENCODING: Final = b"accept-encoding"

# The status codes of errors that the search tool cannot cause.
_CLIENT_ERROR_STATUSES: Final = frozenset({401, 402, 403, 429})
# Matches words by which an error about tools is recognised.
_TOOLS: Final = re.compile(rb"tool|function", re.IGNORECASE)

# Compaction statuses of requests whose bodies must be forwarded unchanged.
_UNCHANGED_STATUSES: Final = frozenset({CompactionStatus.BYPASSED, CompactionStatus.SHADOW})

_FRAMING: Final = frozenset({b"content-length", b"content-encoding"})
_BROKEN: Final = (502, "The upstream did not continue its answer.", "upstream_protocol_error")

# Sends a body to the upstream with the path and the header fields of the client's request.
SendBody = Callable[[bytes], Awaitable[UpstreamResponse]]
ExtraHeaders = Sequence[tuple[bytes, bytes]]

_log = structlog.get_logger()


class ToolOffer(NamedTuple):
    """A request that offers the search tool to the model.

    Attributes:
        raw_with_tool: The request body with the tool.
        raw_without_tool: The request body without the tool.
        has_tools: Whether the client's request itself has tools.
        max_hops: The most times that the proxy may continue the response after calls of the tool.
        recall_tool: Runs the calls of the tool.
        context: The tenant and the conversation for which the tool searches.
        wire: The wire of the request.
        tool: The search tool in the format of this wire.
    """

    raw_with_tool: bytes
    raw_without_tool: bytes
    has_tools: bool
    max_hops: int
    recall_tool: RecallTool
    context: RecallContext
    wire: Wire
    tool: SearchTool

    @property
    def tool_tokens(self) -> int:
        """The approximate number of tokens by which the tool's definition makes the request longer."""
        return len(self.tool.definition_json) // 4


def apply_tool_offer(tool_offer: ToolOffer, request: HttpRequest) -> HttpRequest:
    """Returns a request to the upstream that offers the tool and asks for an uncompressed response.

    If the body of `request` is the one without the tool, the function replaces it with the one with the tool.
    Any other body belongs to a request that continues the response. It stays unchanged, because `RecallLoop`
    has already decided whether to offer the tool in it.
    """
    fields = [each for each in request.headers if each[0] != _ACCEPT_ENCODING]
    body = tool_offer.raw_with_tool if request.body is tool_offer.raw_without_tool else request.body
    return request._replace(headers=[*fields, (_ACCEPT_ENCODING, b"identity")], body=body)


async def build_tool_offer(
    recall_tool: RecallTool, fit_request: FitRequest, fit_result: FitResult
) -> ToolOffer | None:
    """Returns the request with the search tool, or None if the proxy must not or need not offer the tool.

    Args:
        recall_tool: Searches removed messages.
        fit_request: The parsed request.
        fit_result: The body to forward, with the report about its compaction.
    """
    settings, report, wire = fit_request.settings, fit_result.report, fit_request.body.wire
    tool = wire.search_tool
    if tool is None or report.conversation is None or report.status in _UNCHANGED_STATUSES:
        return None
    if settings.recall.tool == "none":
        return None
    raw = fit_result.raw
    try:
        inspect = partial(_inspect_request, tool, raw, fit_request.body)
        support, has_prefill = await run_in_worker_if_large(len(raw), inspect)
    except UnreadableBodyError:
        return None
    is_wanted = should_offer_tool(
        settings, is_compacted=fit_result.is_compacted, has_tools=support.has_tools, model=fit_request.model
    )
    if not support.can_add_tool or has_prefill or not is_wanted:
        return None
    usage_basis = fit_result.usage_basis
    prefixes = usage_basis.prefixes if usage_basis else ()
    known_ids = await run_in_worker_if_large(
        0, lambda: frozenset(map(format_message_id, prefixes)), message_count=len(prefixes)
    )
    root = usage_basis.root if usage_basis else None
    context = RecallContext(fit_request.tenant, report.conversation, known_ids, root=root)
    add = partial(add_tool, support, tool.definition_json)
    raw_with_tool, max_hops = await run_in_worker_if_large(len(raw), add), settings.recall.max_hops
    return ToolOffer(raw_with_tool, raw, support.has_tools, max_hops, recall_tool, context, wire, tool)


def _inspect_request(tool: SearchTool, raw: bytes, body: RequestBody) -> tuple[ToolSupport, bool]:
    """Returns whether the tool can be added to the body `raw`, and whether the request has a prefill."""
    support = tool.inspect_tool_support(raw, TOOL_NAME)
    return support, is_prefill((body.new_pieces or body.messages)[-1])


async def is_tool_refusal(answer: UpstreamResponse) -> bool:
    """Returns whether a response is an error that concerns tools, so that the search tool may be its cause.

    For example, the model may support no tools, or the request may have reached the maximum number of tools.
    """
    status = answer.response.status
    if status < httpx.codes.BAD_REQUEST or status in _CLIENT_ERROR_STATUSES:
        return False
    beginning = await answer.peek(PEEK_BYTES)
    is_refusal = _TOOLS.search(beginning) is not None and parse_overflow(status, beginning) is None
    if is_refusal:
        _log.warning(RECALL_FAILED, error="tool-refused", status=status)
    return is_refusal


class RecallLoop:
    """Relays the response to one request, and has the upstream continue it after calls of the search tool.

    Args:
        tool_offer: The request with the offered tool.
        send_body: Sends the upstream a body that asks it to continue the response.
        content_type: The content type of the upstream's first response.

    Attributes:
        hop_count: How often the proxy has asked the upstream to continue the response.
        status: The status code that the client got.
        client_tap: Finds the token counts in the joined response that the client gets.
        first_tap: Finds the token counts in the upstream's first response only. They belong to the request
            whose size the proxy estimated. The requests that continue the response are longer.
    """

    def __init__(self, tool_offer: ToolOffer, send_body: SendBody, content_type: str) -> None:
        self._offer = tool_offer
        self._wire, self._tool = tool_offer.wire, tool_offer.tool
        self._send_body = send_body
        self._turns: list[dict[str, Any]] = []  # the calls so far, and their results
        self.hop_count = 0
        self.status = httpx.codes.OK.value
        self.client_tap = tool_offer.wire.open_tap(content_type, "")
        self.first_tap = tool_offer.wire.open_tap(content_type, "")

    async def relay_answer(self, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders) -> bool:
        """Relays a response with status 200 to the client.

        If the response calls the search tool, the method runs the calls and has the upstream continue the
        response. If the proxy does not support the compression of the response, the method relays it
        unchanged. Returns whether the client got the complete response. Closes every response of the
        upstream.

        Args:
            answer: The upstream's first response.
            send: The client's ASGI send channel.
            extra_headers: The proxy's own header fields, appended to the upstream's.
        """
        if Inflater(answer.get_field(b"content-encoding"), 0).has_failed:
            return await self._relay_unchanged(answer, send, extra_headers)
        relay = self._relay_stream if answer.is_stream else self._relay_whole_answer
        return await relay(answer, send, extra_headers)

    async def _relay_unchanged(
        self, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
    ) -> bool:
        self.status = answer.response.status
        self.client_tap = self._wire.open_tap(
            answer.get_field(b"content-type"), answer.get_field(b"content-encoding")
        )
        return await relay_response(answer, send, extra_headers=extra_headers, tap=self.client_tap.feed)

    async def _relay_stream(self, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders) -> bool:
        joiner = self._tool.open_stream_joiner(TOOL_NAME)
        headers = _build_headers(answer.response, extra_headers)
        try:
            await send({"type": "http.response.start", "status": answer.response.status, "headers": headers})
            await self._forward_stream(joiner, answer, send)
            while calls := joiner.calls:
                await answer.aclose()
                start_next = partial(joiner.start_next_answer, may_answer_calls=self.can_continue(1))
                message = await run_in_worker_if_large(joiner.buffered_bytes, start_next)
                answer = await self.run_calls_and_continue(message, calls)
                if answer.response.status != httpx.codes.OK or not answer.is_stream:
                    error_body = await self._build_stream_error(answer)
                    await self._send_data(send, joiner.encode_error_event(error_body))
                    return False
                await self._forward_stream(joiner, answer, send)
        except httpx.TransportError:
            return False
        except (OverloadedError, UpstreamError) as error:
            await self._send_data(send, joiner.encode_error_event(self._wire.encode_error(error)))
            return False
        finally:
            await answer.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send_data(self, send: Send, data: bytes) -> None:
        """Sends data to the client, and then passes it to `client_tap`. Does nothing if the data is empty."""
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            with suppress_and_log(RELAY_TAP_FAILED):
                self.client_tap.feed(data)

    async def _forward_stream(self, joiner: StreamJoiner, answer: UpstreamResponse, send: Send) -> None:
        """Relays one response of the upstream to the client, without its calls of the search tool.

        Raises:
            httpx.TransportError: If the response was cut or cannot be decompressed.
        """
        inflater = Inflater(answer.get_field(b"content-encoding"), MAX_INFLATED_BYTES)
        while chunk := await answer.read():
            for data in _inflate_chunk(chunk, inflater):
                if not self.hop_count:
                    with suppress_and_log(RELAY_TAP_FAILED):
                        self.first_tap.feed(data)
                await self._send_data(send, joiner.feed(data))
            if joiner.is_done and joiner.calls:  # the rest of this response is not needed
                with suppress(TimeoutError, httpx.TransportError):
                    async with asyncio.timeout(LINGER_S):
                        while await answer.read():
                            pass
                break
        await self._send_data(send, joiner.flush_rest())

    async def _build_stream_error(self, answer: UpstreamResponse) -> bytes:
        """Returns the error that tells the client why its stream ends early, as JSON.

        If the body of `answer` is an error in JSON, the method returns this error. Otherwise it returns an
        error of the proxy.
        """
        payload = decode_small_json(await _peek_whole_body(answer, PEEK_BYTES))
        if isinstance(payload, dict) and payload.get("error"):
            return encode_ascii_json(payload)
        return self._wire.encode_error(UpstreamError(*_BROKEN))

    async def _relay_whole_answer(
        self, answer: UpstreamResponse, send: Send, extra_headers: ExtraHeaders
    ) -> bool:
        joiner, first = self._tool.open_answer_joiner(TOOL_NAME), answer.response
        try:
            body = await self._join_answer(joiner, answer)
            while body is None:
                await answer.aclose()
                answer = await self.run_calls_and_continue(joiner.message, joiner.calls)
                if answer.response.status != httpx.codes.OK:
                    break
                body = await self._join_answer(joiner, answer)
            if not body:  # an error, or a response to relay unchanged
                return await self._relay_unchanged(answer, send, extra_headers)
        except (OverloadedError, UpstreamError) as error:
            self.status = error.status
            await send_error(send, error, extra_headers, self._wire.encode_error)
            return False
        finally:
            await answer.aclose()
        headers = [*_build_headers(first, extra_headers), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": first.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        self.client_tap.feed(body)
        return True

    async def _join_answer(self, joiner: AnswerJoiner, answer: UpstreamResponse) -> bytes | None:
        """Returns the body for the client, or None if the upstream must continue the response.

        Returns empty bytes if the caller must relay the upstream's bytes unchanged. This is the case for a
        first response that has no calls of the search tool, or that cannot be searched for calls.

        Raises:
            UpstreamError: If a later response was cut, is too large, or cannot be joined to the first one.
        """
        is_first = not self.hop_count
        body = await _peek_whole_body(answer, MAX_ANSWER_BYTES)
        if not is_first and (not body or answer.is_stream):
            raise UpstreamError(*_BROKEN)
        if not body:
            return b""
        join = partial(joiner.join_answer, body, may_answer_calls=self.can_continue())
        joined = await run_in_worker_if_large(len(body), join)
        if is_first:
            self.first_tap.feed(body)
            return b"" if joined is body else joined
        if joined == b"":
            raise UpstreamError(*_BROKEN)
        return joined

    def can_continue(self, further_hops: int = 0) -> bool:
        """Returns whether the proxy may ask the upstream once more to continue the response.

        The method counts `further_hops` such requests in addition to those that were already made
        (`hop_count`).
        """
        return self.hop_count + further_hops < self._offer.max_hops

    async def run_calls_and_continue(self, message: dict[str, Any], calls: Sequence[str]) -> UpstreamResponse:
        """Runs calls of the search tool, sends the results to the upstream, and returns its next response.

        If the upstream refuses the results as too long, the method sends `NO_ROOM` in place of each result.

        Args:
            message: The assistant message that makes the calls (`StreamJoiner.start_next_answer` or
                `AnswerJoiner.message`).
            calls: The arguments of the calls in the message.

        Raises:
            OverloadedError: Under the conditions that `send_request` documents.
            UpstreamError: Under the conditions that `send_request` documents.
        """
        self.hop_count += 1
        turn = self._tool.build_turn(message, await self._run_calls(calls))
        answer = await self._send_continuation(turn)
        if await _close_if_too_long(answer):
            turn = self._tool.build_turn(message, [NO_ROOM] * len(calls))
            answer = await self._send_continuation(turn)
        self._turns += turn
        return answer

    async def _send_continuation(self, turn: list[dict[str, Any]]) -> UpstreamResponse:
        offer, turns = self._offer, [*self._turns, *turn]
        # `last` is the body that is sent if the upstream may be asked only this once more. The response to it
        # must not call the search tool again. If the client's request has tools, the search tool is left out.
        # Otherwise it stays, but the request forbids calls of it. A server may refuse a request that defines
        # no tools although its messages contain tool calls.
        last = offer.raw_without_tool if offer.has_tools else self._tool.forbid_calls(offer.raw_with_tool)
        if offer.has_tools and self._tool.requires_same_tools(turns):
            last = offer.raw_with_tool  # if the model calls the tool again, the client does not see that call
        raw = offer.raw_with_tool if self.can_continue() else last
        return await self._send_body(await asyncio.to_thread(self._tool.continue_request, raw, turns))

    async def _run_calls(self, calls: Sequence[str]) -> list[str]:
        deadline = asyncio.get_running_loop().time() + SEARCH_S
        results = [await self._run_call(arguments, deadline) for arguments in calls[:MAX_CALLS]]
        return results + [TOO_MANY] * len(calls[MAX_CALLS:])

    async def _run_call(self, arguments: str, deadline: float) -> str:
        with suppress_and_log(RECALL_FAILED):
            async with asyncio.timeout_at(deadline):
                return await self._offer.recall_tool.answer_call(self._offer.context, arguments)
        return NOT_NOW


def _build_headers(first: HttpResponse, extra_headers: ExtraHeaders) -> Headers:
    """Returns the header fields for the client: those of the first response, and `extra_headers`.

    `content-length` and `content-encoding` are left out, because the body of the joined response differs from
    that of the first one.
    """
    fields = to_client_headers(first.status, first.headers)
    return [*[each for each in fields if each[0] not in _FRAMING], *extra_headers]


def _inflate_chunk(chunk: bytes, inflater: Inflater) -> Iterator[bytes]:
    step_bytes = len(chunk) if inflater.is_identity else INFLATE_STEP_BYTES
    for start in range(0, len(chunk), step_bytes):
        yield inflater.feed(chunk[start : start + step_bytes])
        if inflater.has_failed:
            raise httpx.RemoteProtocolError("the response cannot be decompressed")


async def _peek_whole_body(answer: UpstreamResponse, limit_bytes: int) -> bytes:
    """Returns the whole body, decompressed.

    The result is empty if the body has more than `limit_bytes` bytes before or after decompression, was cut,
    or cannot be decompressed.
    """
    raw = await answer.peek(limit_bytes + 1)
    if len(raw) > limit_bytes or answer.is_cut:
        return b""
    return Inflater(answer.get_field(b"content-encoding"), limit_bytes).feed(raw)


async def _close_if_too_long(answer: UpstreamResponse) -> bool:
    """Closes a response if it refuses the request as too long, by its status or by an error inside a stream.

    Returns whether the function has closed the response. Also closes it if the wait for its first bytes is
    cancelled.
    """
    is_kept = False
    try:
        status = answer.response.status
        beginning = await answer.peek(1 if status == httpx.codes.OK else PEEK_BYTES)
        is_fine = status == httpx.codes.OK and b"error" not in beginning[:PEEK_BYTES]
        is_kept = is_fine or parse_overflow(status, beginning, answer.get_field(b"content-encoding")) is None
    finally:
        if not is_kept:
            await answer.aclose()
    return not is_kept
