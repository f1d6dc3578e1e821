"""The model searches what was removed, in the middle of an answer: the tool is offered, its calls are run.

Where an answer ends in calls of the tool alone, the upstream is asked to go on from their results. How the
client sees one answer of it: `gateway.recall_relay`.
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
from compaction_proxy.wires.chat.continuation import add_tool, is_prefill
from compaction_proxy.wires.context_errors import parse_overflow
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.wire import SearchCall, SearchTool, Wire

# Searches for one answer that take longer together are given up, in seconds: nothing reaches the client then.
SEARCH_S: Final = 5.0
# Calls of one answer that are run; a model that makes more is told so.
MAX_CALLS: Final = 8

NOT_NOW: Final = "What was removed cannot be searched right now. Go on without it."
TOO_MANY: Final = f"Not run: {MAX_CALLS} searches at once are the most."
NO_ROOM: Final = "What was found has no room in the context window. Go on without it."

# A field that would have an answer packed.
_ACCEPT_ENCODING: Final = b"accept-encoding"

# Errors that no tool brings about, and what those speak of that one does.
_ABOUT_THE_CLIENT: Final = frozenset({401, 402, 403, 429})
_TOOLS: Final = re.compile(rb"tool|function", re.IGNORECASE)

# Requests that are to go on as they came.
_UNCHANGED_STATUSES: Final = frozenset({CompactionStatus.BYPASSED, CompactionStatus.SHADOW})

# Sends a body to the upstream as the client's next request.
SendBody = Callable[[bytes], Awaitable[UpstreamResponse]]

_T = TypeVar("_T")

_log = structlog.get_logger()


class ToolOffer(NamedTuple):
    """A request that the tool was offered with.

    Attributes:
        raw: Its body, with the tool.
        bare: The same without it.
        has_tools: Whether it brings tools of its own.
        hops: How often its answer may go on.
        memory: What the tool searches.
        asker: Who searches.
        wire: Its wire.
        tool: The tool on this wire.
    """

    raw: bytes
    bare: bytes
    has_tools: bool
    hops: int
    memory: RecallTool
    asker: RecallContext
    wire: Wire
    tool: SearchTool

    @property
    def tool_tokens(self) -> int:
        """What the tool takes of the prompt, about, in tokens."""
        return len(self.tool.json) // 4


def apply_offer(tool_offer: ToolOffer, request: HttpRequest) -> HttpRequest:
    """The request that the tool is offered with, or one by which it goes on; its answer can be read."""
    kept = [each for each in request.headers if each[0] != _ACCEPT_ENCODING]
    body = tool_offer.raw if request.body is tool_offer.bare else request.body
    return request._replace(headers=[*kept, (_ACCEPT_ENCODING, b"identity")], body=body)


async def run_in_worker_if_large(size: int, work: Callable[[], _T]) -> _T:
    """Work on so many bytes, beside the loop where they are many."""
    return work() if size <= LITTLE_BYTES else await asyncio.to_thread(work)


async def offer_tool(memory: RecallTool, ask: FitRequest, fit: FitResult) -> ToolOffer | None:
    """The request with the tool, where it is offered; None: it goes on as it is.

    Args:
        memory: What the tool searches.
        ask: The request as it was read.
        fit: What is to be forwarded.
    """
    settings, report, tool = ask.settings, fit.report, ask.body.wire.search_tool
    if tool is None:
        return None
    if settings.recall.tool == "none" or report.conversation is None or report.status in _UNCHANGED_STATUSES:
        return None
    last = (ask.body.new_pieces or ask.body.messages)[-1]
    try:
        found = await run_in_worker_if_large(len(fit.raw), lambda: tool.inspect_tools(fit.raw, TOOL_NAME))
        begun = is_prefill(last)
    except UnreadableBodyError:
        return None
    wanted = should_offer_tool(
        settings, compacted=fit.is_compacted, has_tools=found.has_tools, model=ask.model
    )
    if not found.can_add_tool or begun or not wanted:
        return None
    known = (
        frozenset(map(format_message_id, fit.usage_basis.prefixes)) if fit.usage_basis else frozenset[str]()
    )
    asker = RecallContext(ask.tenant, report.conversation, known)
    raw, hops = add_tool(found, tool.json), settings.recall.max_hops
    return ToolOffer(raw, fit.raw, found.has_tools, hops, memory, asker, ask.body.wire, tool)


async def is_tool_refusal(answer: UpstreamResponse) -> bool:
    """Whether an error speaks of tools, and so perhaps of ours: of a model, or a list, that takes no more."""
    status = answer.response.status
    if status < httpx.codes.BAD_REQUEST or status in _ABOUT_THE_CLIENT:
        return False
    seen = await answer.peek(PEEK_BYTES)
    minded = _TOOLS.search(seen) is not None and parse_overflow(status, seen) is None
    if minded:
        _log.warning(RECALL_FAILED, error="tool-refused", status=status)
    return minded


class RecallLoop:
    """How the answer to one request goes on.

    Args:
        tool_offer: The request.
        send_body: Sends what it goes on by.
        content_type: Content type of its first answer.

    Attributes:
        dialect: The wire.
        tool: The tool on this wire.
        hops: How often it went on.
        code: The status that the client got.
        tap: Watches what the client gets.
        first: Watches the upstream's first answer, whose count is of the request as it was sized.
    """

    def __init__(self, tool_offer: ToolOffer, send_body: SendBody, content_type: str) -> None:
        self._offer = tool_offer
        self._send_body = send_body
        self._said: list[dict[str, Any]] = []
        self.wire = tool_offer.wire
        self.tool = tool_offer.tool
        self.hops = 0
        self.code = httpx.codes.OK.value
        self.tap = tool_offer.wire.open_tap(content_type, "")
        self.first_tap = tool_offer.wire.open_tap(content_type, "")

    def can_continue(self, after: int = 0) -> bool:
        """Whether it may go on once more, after so many hops from now."""
        return self.hops + after < self._offer.hops

    async def continue_after_calls(
        self, message: dict[str, Any], calls: Sequence[SearchCall]
    ) -> UpstreamResponse:
        """Run these calls, and have the upstream go on from what they give; its next answer.

        Args:
            message: What the answer said that made them (`go_on` of a joiner).
            calls: Calls of the tool.

        Raises:
            Overloaded: See `open_answer`.
            UpstreamError: Likewise.
        """
        self.hops += 1
        turn = self.tool.build_turn(message, await self._run_calls(calls))
        answer = await self._send_turn(turn)
        if await _close_if_too_long(answer):
            turn = self.tool.build_turn(message, [NO_ROOM] * len(calls))
            answer = await self._send_turn(turn)
        self._said += turn
        return answer

    async def _send_turn(self, turn: list[dict[str, Any]]) -> UpstreamResponse:
        made, said = self._offer, [*self._said, *turn]
        # Where there are no tools at all, a server may refuse the calls that stand in the conversation.
        last = made.bare if made.has_tools else self.tool.forbid_calls(made.raw)
        if made.has_tools and self.tool.binds_tools(said):
            last = made.raw  # a further call is left out of the answer
        raw = made.raw if self.can_continue() else last
        return await self._send_body(await asyncio.to_thread(self.tool.continue_request, raw, said))

    async def _run_calls(self, calls: Sequence[SearchCall]) -> list[str]:
        until = asyncio.get_running_loop().time() + SEARCH_S
        run = [await self._run_call(call.arguments, until) for call in calls[:MAX_CALLS]]
        return [*run, *[TOO_MANY for _ in calls[MAX_CALLS:]]]

    async def _run_call(self, arguments: str, until: float) -> str:
        text = NOT_NOW
        with suppress_and_report(_log_recall_failed):
            async with asyncio.timeout_at(until):
                text = await self._offer.memory.answer_call(self._offer.asker, arguments)
        return text


async def _close_if_too_long(answer: UpstreamResponse) -> bool:
    """Whether the upstream refuses a request for its length, by status or inside a stream; closed then.

    So is one that nobody waits for any more.
    """
    kept = False
    try:
        status = answer.response.status
        seen = await answer.peek(1 if status == httpx.codes.OK else PEEK_BYTES)
        fine = status == httpx.codes.OK and b"error" not in seen[:PEEK_BYTES]
        kept = fine or parse_overflow(status, seen, answer.get_field(b"content-encoding")) is None
    finally:
        if not kept:
            await answer.aclose()
    return not kept


def _log_recall_failed(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
