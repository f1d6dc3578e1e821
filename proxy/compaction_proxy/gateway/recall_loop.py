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

from compaction_proxy.compaction.types import Ask, Fit, Status
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.client.types import HttpRequest
from compaction_proxy.gateway.upstream import PEEK_BYTES, Answer
from compaction_proxy.recall.offer import offered
from compaction_proxy.recall.tool import Asker, Memory
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import RECALL_FAILED
from compaction_proxy.wires.chat.continuation import is_begun, with_tool
from compaction_proxy.wires.context_errors import detect
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.wire import Dialect, SearchCall, SearchTool

# Searches for one answer that take longer together are given up, in seconds: nothing reaches the client then.
SEARCH_S: Final = 5.0
# Calls of one answer that are run; a model that makes more is told so.
MAX_CALLS: Final = 8

NOT_NOW: Final = "What was removed cannot be searched right now. Go on without it."
TOO_MANY: Final = f"Not run: {MAX_CALLS} searches at once are the most."
NO_ROOM: Final = "What was found has no room in the context window. Go on without it."

# A field that would have an answer packed.
_PACKING: Final = b"accept-encoding"

# Errors that no tool brings about, and what those speak of that one does.
_ABOUT_THE_CLIENT: Final = frozenset({401, 402, 403, 429})
_TOOLS: Final = re.compile(rb"tool|function", re.IGNORECASE)

# Requests that are to go on as they came.
_AS_IT_CAME: Final = frozenset({Status.BYPASSED, Status.SHADOW})

# Sends a body to the upstream as the client's next request.
Asking = Callable[[bytes], Awaitable[Answer]]

_T = TypeVar("_T")

_log = structlog.get_logger()


class Offer(NamedTuple):
    """A request that the tool was offered with.

    Attributes:
        raw: Its body, with the tool.
        bare: The same without it.
        has_tools: Whether it brings tools of its own.
        hops: How often its answer may go on.
        memory: What the tool searches.
        asker: Who searches.
        dialect: Its wire.
        tool: The tool on this wire.
    """

    raw: bytes
    bare: bytes
    has_tools: bool
    hops: int
    memory: Memory
    asker: Asker
    dialect: Dialect
    tool: SearchTool

    @property
    def tool_tokens(self) -> int:
        """What the tool takes of the prompt, about, in tokens."""
        return len(self.tool.json) // 4


def asked_with(made: Offer, request: HttpRequest) -> HttpRequest:
    """The request that the tool is offered with, or one by which it goes on; its answer can be read."""
    kept = [each for each in request.headers if each[0] != _PACKING]
    body = made.raw if request.body is made.bare else request.body
    return request._replace(headers=[*kept, (_PACKING, b"identity")], body=body)


async def beside(size: int, work: Callable[[], _T]) -> _T:
    """Work on so many bytes, beside the loop where they are many."""
    return work() if size <= LITTLE_BYTES else await asyncio.to_thread(work)


async def offer(memory: Memory, ask: Ask, fit: Fit) -> Offer | None:
    """The request with the tool, where it is offered; None: it goes on as it is.

    Args:
        memory: What the tool searches.
        ask: The request as it was read.
        fit: What is to be forwarded.
    """
    settings, report, tool = ask.settings, fit.report, ask.body.dialect.search_tool
    if tool is None:
        return None
    if settings.recall.tool == "none" or report.conversation is None or report.status in _AS_IT_CAME:
        return None
    last = (ask.body.late or ask.body.messages)[-1]
    try:
        found = await beside(len(fit.raw), lambda: tool.find_place(fit.raw, TOOL_NAME))
        begun = is_begun(last)
    except Unreadable:
        return None
    wanted = offered(settings, compacted=fit.compacted, has_tools=found.has_tools, model=ask.model)
    if not found.possible or begun or not wanted:
        return None
    known = frozenset(map(message_id, fit.footing.prefixes)) if fit.footing else frozenset[str]()
    asker = Asker(ask.tenant, report.conversation, known)
    raw, hops = with_tool(found, tool.json), settings.recall.max_hops
    return Offer(raw, fit.raw, found.has_tools, hops, memory, asker, ask.body.dialect, tool)


async def minds(answer: Answer) -> bool:
    """Whether an error speaks of tools, and so perhaps of ours: of a model, or a list, that takes no more."""
    status = answer.response.status
    if status < httpx.codes.BAD_REQUEST or status in _ABOUT_THE_CLIENT:
        return False
    seen = await answer.peek(PEEK_BYTES)
    minded = _TOOLS.search(seen) is not None and detect(status, seen) is None
    if minded:
        _log.warning(RECALL_FAILED, error="tool-refused", status=status)
    return minded


class Course:
    """How the answer to one request goes on.

    Args:
        made: The request.
        ask: Sends what it goes on by.
        kind: Content type of its first answer.

    Attributes:
        dialect: The wire.
        tool: The tool on this wire.
        hops: How often it went on.
        code: The status that the client got.
        tap: Watches what the client gets.
        first: Watches the upstream's first answer, whose count is of the request as it was sized.
    """

    def __init__(self, made: Offer, ask: Asking, kind: str) -> None:
        self._offer = made
        self._ask = ask
        self._said: list[dict[str, Any]] = []
        self.dialect = made.dialect
        self.tool = made.tool
        self.hops = 0
        self.code = httpx.codes.OK.value
        self.tap = made.dialect.tap(kind, "")
        self.first = made.dialect.tap(kind, "")

    def may_go_on(self, after: int = 0) -> bool:
        """Whether it may go on once more, after so many hops from now."""
        return self.hops + after < self._offer.hops

    async def next(self, message: dict[str, Any], calls: Sequence[SearchCall]) -> Answer:
        """Run these calls, and have the upstream go on from what they give; its next answer.

        Args:
            message: What the answer said that made them (`go_on` of a joiner).
            calls: Calls of the tool.

        Raises:
            Overloaded: See `open_answer`.
            UpstreamError: Likewise.
        """
        self.hops += 1
        turn = self.tool.build_turn(message, await self._results(calls))
        answer = await self._asked(turn)
        if await _is_too_long(answer):
            turn = self.tool.build_turn(message, [NO_ROOM] * len(calls))
            answer = await self._asked(turn)
        self._said += turn
        return answer

    async def _asked(self, turn: list[dict[str, Any]]) -> Answer:
        made, said = self._offer, [*self._said, *turn]
        # Where there are no tools at all, a server may refuse the calls that stand in the conversation.
        last = made.bare if made.has_tools else self.tool.forbid_calls(made.raw)
        if made.has_tools and self.tool.binds_tools(said):
            last = made.raw  # a further call is left out of the answer
        raw = made.raw if self.may_go_on() else last
        return await self._ask(await asyncio.to_thread(self.tool.continue_request, raw, said))

    async def _results(self, calls: Sequence[SearchCall]) -> list[str]:
        until = asyncio.get_running_loop().time() + SEARCH_S
        run = [await self._result(call.arguments, until) for call in calls[:MAX_CALLS]]
        return [*run, *[TOO_MANY for _ in calls[MAX_CALLS:]]]

    async def _result(self, arguments: str, until: float) -> str:
        text = NOT_NOW
        with contained(_failed):
            async with asyncio.timeout_at(until):
                text = await self._offer.memory.answer(self._offer.asker, arguments)
        return text


async def _is_too_long(answer: Answer) -> bool:
    """Whether the upstream refuses a request for its length, by status or inside a stream; closed then.

    So is one that nobody waits for any more.
    """
    kept = False
    try:
        status = answer.response.status
        seen = await answer.peek(1 if status == httpx.codes.OK else PEEK_BYTES)
        fine = status == httpx.codes.OK and b"error" not in seen[:PEEK_BYTES]
        kept = fine or detect(status, seen, answer.field(b"content-encoding")) is None
    finally:
        if not kept:
            await answer.aclose()
    return not kept


def _failed(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
