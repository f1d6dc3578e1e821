"""Lets the model search removed messages in the middle of an answer: offers a tool and runs its calls.

If an answer ends with tool calls, and all of them call this tool, the proxy runs the calls, sends their
results to the upstream and asks it to go on. `gateway.recall_relay` joins the answers into one for the
client.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import structlog

from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.client.types import HttpRequest
from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse
from compaction_proxy.recall.offer import should_offer_tool
from compaction_proxy.recall.tool import RecallContext, RecallTool
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RECALL_FAILED
from compaction_proxy.wires.context_errors import parse_overflow
from compaction_proxy.wires.incremental_reader import MAX_INLINE_BYTES
from compaction_proxy.wires.search_tool import SearchTool, add_tool, is_prefill
from compaction_proxy.wires.wire import Wire

# The time limit for all searches of one answer together, in seconds. The client receives nothing meanwhile.
SEARCH_S: Final = 5.0
# The most calls of one answer that are run. Each further call gets the result `TOO_MANY`.
MAX_CALLS: Final = 8

NOT_NOW: Final = "What was removed cannot be searched right now. Go on without it."
TOO_MANY: Final = f"Not run: {MAX_CALLS} searches at once are the most."
NO_ROOM: Final = "What was found has no room in the context window. Go on without it."

# The request header field that says which compressions of the answer are allowed.
_ACCEPT_ENCODING: Final = b"accept-encoding"

# Status codes of errors that the search tool cannot cause, and words by which an error about tools is
# recognised.
_CLIENT_ERROR_STATUSES: Final = frozenset({401, 402, 403, 429})
_TOOLS: Final = re.compile(rb"tool|function", re.IGNORECASE)

# Compaction statuses of requests whose bodies must be forwarded unchanged.
_UNCHANGED_STATUSES: Final = frozenset({CompactionStatus.BYPASSED, CompactionStatus.SHADOW})

# Sends a body to the upstream with the path and the header fields of the client's request.
SendBody = Callable[[bytes], Awaitable[UpstreamResponse]]

_T = TypeVar("_T")

_log = structlog.get_logger()


class ToolOffer(NamedTuple):
    """A request that offers the search tool to the model.

    Attributes:
        raw_with_tool: The request body with the tool.
        raw_without_tool: The request body without the tool.
        has_tools: Whether the client's request carries tools of its own.
        max_hops: How often the answer may be continued after calls of the tool.
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
        """The approximate size of the tool in the prompt, in tokens."""
        return len(self.tool.definition_json) // 4


def apply_tool_offer(tool_offer: ToolOffer, request: HttpRequest) -> HttpRequest:
    """Returns a request to the upstream that offers the tool and asks for an uncompressed answer.

    If `request` has the body without the tool, that body is replaced. Any other body stays unchanged: it is
    that of a continuation, and `RecallLoop` has already decided whether it has the tool.
    """
    fields = [each for each in request.headers if each[0] != _ACCEPT_ENCODING]
    body = tool_offer.raw_with_tool if request.body is tool_offer.raw_without_tool else request.body
    return request._replace(headers=[*fields, (_ACCEPT_ENCODING, b"identity")], body=body)


async def run_in_worker_if_large(size_bytes: int, work: Callable[[], _T]) -> _T:
    """Runs `work` and returns its result.

    `work` processes `size_bytes` bytes. It runs on the event loop if these are at most `MAX_INLINE_BYTES`,
    else in a thread.
    """
    return work() if size_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


async def build_tool_offer(
    recall_tool: RecallTool, fit_request: FitRequest, fit_result: FitResult
) -> ToolOffer | None:
    """Returns the request with the search tool, or None if the tool must not or need not be offered.

    Args:
        recall_tool: Searches removed messages.
        fit_request: The parsed request.
        fit_result: The result of the fit, with the body to forward.
    """
    settings, report, tool = fit_request.settings, fit_result.report, fit_request.body.wire.search_tool
    if tool is None:
        return None
    if settings.recall.tool == "none" or report.conversation is None or report.status in _UNCHANGED_STATUSES:
        return None
    last = (fit_request.body.new_pieces or fit_request.body.messages)[-1]
    try:
        support = await run_in_worker_if_large(
            len(fit_result.raw), lambda: tool.inspect_tool_support(fit_result.raw, TOOL_NAME)
        )
        has_prefill = is_prefill(last)
    except UnreadableBodyError:
        return None
    is_wanted = should_offer_tool(
        settings, is_compacted=fit_result.is_compacted, has_tools=support.has_tools, model=fit_request.model
    )
    if not support.can_add_tool or has_prefill or not is_wanted:
        return None
    known_ids = (
        frozenset(map(format_message_id, fit_result.usage_basis.prefixes))
        if fit_result.usage_basis
        else frozenset[str]()
    )
    asker = RecallContext(fit_request.tenant, report.conversation, known_ids)
    raw, hops = add_tool(support, tool.definition_json), settings.recall.max_hops
    return ToolOffer(
        raw, fit_result.raw, support.has_tools, hops, recall_tool, asker, fit_request.body.wire, tool
    )


async def is_tool_refusal(answer: UpstreamResponse) -> bool:
    """Returns whether an answer is an error about tools, which the search tool may have caused.

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
    """Continues the answer to one request after calls of the search tool.

    Args:
        tool_offer: The request with the offered tool.
        send_body: Sends the body of a continuation to the upstream.
        content_type: The content type of the upstream's first answer.

    Attributes:
        wire: The wire of the request.
        tool: The search tool in the format of this wire.
        hop_count: How often the answer has been continued.
        status: The status code that the client got.
        client_tap: Watches the joined answer that the client gets.
        first_tap: Watches only the upstream's first answer. Its token count belongs to the request whose size
            the proxy estimated. The requests for continuations are longer.
    """

    def __init__(self, tool_offer: ToolOffer, send_body: SendBody, content_type: str) -> None:
        self._offer = tool_offer
        self._send_body = send_body
        self._said: list[dict[str, Any]] = []
        self.wire = tool_offer.wire
        self.tool = tool_offer.tool
        self.hop_count = 0
        self.status = httpx.codes.OK.value
        self.client_tap = tool_offer.wire.open_tap(content_type, "")
        self.first_tap = tool_offer.wire.open_tap(content_type, "")

    def can_continue(self, further_hops: int = 0) -> bool:
        """Returns whether the answer may be continued once more, after `further_hops` more continuations."""
        return self.hop_count + further_hops < self._offer.max_hops

    async def run_calls_and_continue(self, message: dict[str, Any], calls: Sequence[str]) -> UpstreamResponse:
        """Runs calls of the tool, sends their results to the upstream, and returns its next answer.

        If the upstream refuses the results as too long, they are replaced by `NO_ROOM` and sent again.

        Args:
            message: The assistant message that makes the calls (`StreamJoiner.start_next_answer` or
                `AnswerJoiner.message`).
            calls: The arguments of the calls in the message.

        Raises:
            OverloadedError: See `send_request`.
            UpstreamError: See `send_request`.
        """
        self.hop_count += 1
        turn = self.tool.build_turn(message, await self._run_calls(calls))
        answer = await self._send_continuation(turn)
        if await _close_if_too_long(answer):
            turn = self.tool.build_turn(message, [NO_ROOM] * len(calls))
            answer = await self._send_continuation(turn)
        self._said += turn
        return answer

    async def _send_continuation(self, turn: list[dict[str, Any]]) -> UpstreamResponse:
        offer, turns = self._offer, [*self._said, *turn]
        # The last continuation must not call the tool again. If the client has tools, the search tool is left
        # out. Else it stays and its calls are forbidden: a server may refuse a request that defines no tools
        # although its messages contain tool calls.
        last = offer.raw_without_tool if offer.has_tools else self.tool.forbid_calls(offer.raw_with_tool)
        if offer.has_tools and self.tool.requires_same_tools(turns):
            last = offer.raw_with_tool  # if the model calls the tool again, the client does not see that call
        raw = offer.raw_with_tool if self.can_continue() else last
        return await self._send_body(await asyncio.to_thread(self.tool.continue_request, raw, turns))

    async def _run_calls(self, calls: Sequence[str]) -> list[str]:
        until = asyncio.get_running_loop().time() + SEARCH_S
        run = [await self._run_call(arguments, until) for arguments in calls[:MAX_CALLS]]
        return [*run, *[TOO_MANY for _ in calls[MAX_CALLS:]]]

    async def _run_call(self, arguments: str, deadline: float) -> str:
        text = NOT_NOW
        with suppress_and_report(_log_recall_failed):
            async with asyncio.timeout_at(deadline):
                text = await self._offer.recall_tool.answer_call(self._offer.context, arguments)
        return text


async def _close_if_too_long(answer: UpstreamResponse) -> bool:
    """Closes an answer that refuses the request as too long, by its status or by an error inside a stream.

    Returns whether it closed the answer. Also closes the answer if the wait for its beginning is cancelled.
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


def _log_recall_failed(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
