"""Answers compaction triggers of the Responses wire for upstreams that do not.

Codex ends the input of an ordinary request with an item of type `compaction_trigger`, and gives up unless the
answer holds one `compaction` item. The first such request goes to the upstream. If the answer shows that the
upstream does not know the trigger, the proxy answers that request itself, and later ones for a day.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

import httpx
from starlette.types import Scope, Send

from compaction_proxy.compaction.stateless import Shortened
from compaction_proxy.compaction.types import Status
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ProxyError, Unreadable
from compaction_proxy.gateway.compact_api import InputCompactor, read_plain, tell_usage
from compaction_proxy.gateway.compaction_items import CompactionItems
from compaction_proxy.gateway.control_headers import report_headers
from compaction_proxy.gateway.headers import EVENT_STREAM
from compaction_proxy.gateway.identity import Who, origin
from compaction_proxy.gateway.overflow_probe import too_long
from compaction_proxy.gateway.upstream import PEEK_BYTES, Answer, Upstream
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.body import Body, read, small
from compaction_proxy.wires.decompress import IDENTITY, Inflater
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.responses.compaction_item import (
    build_item,
    build_response,
    build_stream,
    has_trigger,
    read_items,
    read_trigger,
    strip_privilege,
)
from compaction_proxy.wires.responses.items import COMPACTED, TRIGGER
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.sse import Events, data_of

# The most of an answer that is held back until it shows whether it holds a compaction item.
HOLD_BYTES: Final = 16 * 1024 * 1024
# Statuses of a refusal that names the trigger.
_REFUSED: Final = frozenset({400, 422, 501})
# How llama.cpp refuses an item whose type it does not know, without naming it.
_UNKNOWN_ITEM: Final = b"Cannot determine type of 'item'"
_ENDS: Final = frozenset({"response.completed", "response.incomplete"})
_FAILURES: Final = frozenset({"response.failed", "error"})
_ID_BYTES: Final = 16


class TriggerRequest(NamedTuple):
    """A request that ends in a compaction trigger.

    Attributes:
        body: The request without the trigger.
        streamed: Whether the answer is to be a stream of events.
        who: Whose it is.
        scope: Its head (ASGI).
    """

    body: Body
    streamed: bool
    who: Who
    scope: Scope


class TriggerResponder:
    """Answers compaction triggers.

    Args:
        config: The configuration; `upstream.responses_compact` says who answers.
        upstream: Where requests of this wire go.
        compactor: Compacts the input.
        items: Seals what the answer holds.
        learning: Remembers that the upstream does not answer triggers.
        clock: Seconds since the epoch.

    Attributes:
        items: Opens what later requests hold of it.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        compactor: InputCompactor,
        items: CompactionItems,
        learning: Learning,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._mode = config.upstream.responses_compact
        self._origin = origin(upstream.base_url)
        self._compactor = compactor
        self.items = items
        self._learning = learning
        self._clock = clock

    async def read_request(self, raw: bytes, who: Who, scope: Scope) -> TriggerRequest | None:
        """Returns the request if its body ends in a trigger and the proxy may answer it, else None.

        Args:
            raw: The body as the client sent it, with its compaction items.
            who: Whose it is.
            scope: Its head (ASGI).

        Raises:
            RequestRefused: 400, a compaction item of ours does not open.
        """
        if self._mode == "relay" or not has_trigger(raw):
            return None
        raw = await self.items.expand(raw, scope, restored=True)
        work = partial(_read, raw)
        found = work() if len(raw) <= LITTLE_BYTES else await beside(work)
        return None if found is None else TriggerRequest(*found, who, scope)

    async def is_ours(self, request: TriggerRequest) -> bool:
        """Returns whether the proxy answers a trigger without asking the upstream."""
        return self._mode == "answer" or await self._learning.lacks_compaction(*self._place(request))

    async def lacks_item(self, request: TriggerRequest, answer: Answer) -> bool:
        """Returns whether the proxy has to answer in place of the upstream, and learns that it has to.

        An answer is held back until it shows a compaction item, or ends. A refusal of the length says nothing
        about the trigger: the proxy answers, and the next trigger goes to the upstream again.
        """
        status = answer.response.status
        if status >= httpx.codes.BAD_REQUEST:
            if await too_long(answer, RESPONSES) is not None:
                return True
            seen = read_plain(await answer.peek(PEEK_BYTES), answer.field(b"content-encoding"))
            lacks = (status in _REFUSED and TRIGGER.encode() in seen) or _UNKNOWN_ITEM in seen
        elif answer.field(b"content-type").lower().startswith(EVENT_STREAM.decode()):
            lacks = await _ends_without_item(answer)
        else:
            seen = read_plain(await answer.peek(HOLD_BYTES), answer.field(b"content-encoding"), HOLD_BYTES)
            told = small(seen)
            output = told.get("output") if isinstance(told, dict) else None
            lacks = isinstance(output, list) and not _has_item(output)
        if lacks:
            await self._learning.learn_lacks_compaction(*self._place(request))
        return lacks

    async def respond(self, request: TriggerRequest, send: Send) -> bool:
        """Answer a trigger with a compaction item. Returns False, and sends nothing, where that fails."""
        try:
            came = await self._compactor.compact(request.body, request.scope)
        except ProxyError:
            return False
        body = await beside(partial(self._build_body, request, came))
        kind = EVENT_STREAM if request.streamed else b"application/json"
        report = came.fit.report._replace(
            status=Status.APPLIED, conversation=request.who.conversation, reason=came.first.report.reason
        )
        headers = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
            *report_headers(report),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    def _place(self, request: TriggerRequest) -> tuple[str, str, str]:
        return request.who.tenant, self._origin, request.body.model

    def _build_body(self, request: TriggerRequest, came: Shortened) -> bytes:
        sent = frozenset(read_items(request.body.raw))
        items = [each if each in sent else strip_privilege(each) for each in read_items(came.fit.raw)]
        token = self.items.seal(b"[%b]" % b",".join(items), request.scope)
        item = build_item(f"cmp_{token_hex(_ID_BYTES)}", token)
        name, now = f"resp_{token_hex(_ID_BYTES)}", int(self._clock())
        response = build_response(name, request.body.model, now, item, tell_usage(came))
        return build_stream(response) if request.streamed else json.dumps(response).encode()


def _read(raw: bytes) -> tuple[Body, bool] | None:
    trigger = read_trigger(raw)
    if trigger is None:
        return None
    try:
        return read(trigger.raw, RESPONSES), trigger.streamed
    except Unreadable:
        return None


async def _ends_without_item(answer: Answer) -> bool:
    """Whether a stream ends without a compaction item. It is still relayed from its start."""
    encoding = answer.field(b"content-encoding")
    inflater = None if encoding.strip().lower() in IDENTITY else Inflater(encoding, HOLD_BYTES)
    events, held_bytes = Events(), 0
    while chunk := await answer.peek_next():
        held_bytes += len(chunk)
        for event in events.feed(chunk if inflater is None else inflater.feed(chunk)):
            verdict = _judge_event(data_of(event))
            if verdict is not None:
                return verdict
        if held_bytes > HOLD_BYTES:
            return True
    return False


def _judge_event(data: bytes) -> bool | None:
    """Whether an event ends a stream without a compaction item; None if it does not decide."""
    told = small(data) if data.startswith(b"{") else None
    if not isinstance(told, dict):
        return None
    kind = told.get("type")
    if kind in _FAILURES:
        return TRIGGER.encode() in data or _UNKNOWN_ITEM in data
    if kind in _ENDS:
        response = told.get("response")
        return not (isinstance(response, dict) and _has_item(response.get("output")))
    return False if _is_item(told.get("item")) else None


def _has_item(output: Any) -> bool:  # noqa: ANN401 - a JSON value
    return isinstance(output, list) and any(map(_is_item, output))


def _is_item(item: Any) -> bool:  # noqa: ANN401 - a JSON value
    return isinstance(item, dict) and item.get("type") in COMPACTED
