"""Answers compaction triggers on the Responses wire if the upstream cannot answer them.

To ask for a compaction, Codex sends an ordinary request whose input ends in an item of type
`compaction_trigger`. It reports a failure unless the answer holds one `compaction` item. The first
such request goes to the upstream. If the answer shows that the upstream does not know the trigger, the proxy
answers this request and, for a day, all later requests with a trigger for the same model.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

import httpx
from starlette.types import Scope, Send

from compaction_proxy.compaction.stateless import ShortenResult
from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ProxyError, UnreadableBodyError
from compaction_proxy.gateway.compact_api import InputCompactor, build_compaction_usage, decompress_body
from compaction_proxy.gateway.compaction_items import CompactionItemCodec
from compaction_proxy.gateway.control_headers import build_report_headers
from compaction_proxy.gateway.headers import EVENT_STREAM
from compaction_proxy.gateway.identity import Identity, format_origin
from compaction_proxy.gateway.overflow_probe import detect_overflow
from compaction_proxy.gateway.upstream import PEEK_BYTES, Upstream, UpstreamResponse
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.body import RequestBody, decode_small_json, parse_body
from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.incremental_reader import MAX_INLINE_BYTES
from compaction_proxy.wires.responses.compaction_item import (
    build_item,
    build_response,
    build_stream,
    demote_privileged_item,
    has_trigger,
    parse_triggered_request,
    read_items,
)
from compaction_proxy.wires.responses.messages import COMPACTION_TYPES, TRIGGER_TYPE
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.sse import EventSplitter, read_data

# The most bytes of an answer that are held back from the client until it is clear whether the answer holds a
# compaction item.
HOLD_BYTES: Final = 16 * 1024 * 1024
# Statuses with which upstreams refuse an unknown trigger. The body of the refusal then names the trigger.
_REFUSAL_STATUSES: Final = frozenset({400, 422, 501})
# The text with which llama.cpp refuses an item of an unknown type, without naming the type.
_UNKNOWN_ITEM: Final = b"Cannot determine type of 'item'"
_END_EVENTS: Final = frozenset({"response.completed", "response.incomplete"})
_FAILURE_EVENTS: Final = frozenset({"response.failed", "error"})
_ID_BYTES: Final = 16


class CompactionTriggerRequest(NamedTuple):
    """A request that ends in a compaction trigger.

    Attributes:
        body: The parsed request without the trigger.
        is_streamed: Whether the client asks for the answer as a stream of events.
        identity: The identity of the client.
        scope: The ASGI scope of the request.
    """

    body: RequestBody
    is_streamed: bool
    identity: Identity
    scope: Scope


class CompactionTriggerResponder:
    """Answers compaction triggers.

    Args:
        config: The configuration; `upstream.responses_compact` decides whether the upstream or the proxy
            answers.
        upstream: The upstream of this wire.
        compactor: Compacts the input.
        items: Encrypts the content of the answer's compaction item.
        model_limits: Remembers for which models the upstream does not answer triggers.
        clock: Returns seconds since the epoch.

    Attributes:
        items: Encodes compaction items, and decodes them in later requests.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        compactor: InputCompactor,
        items: CompactionItemCodec,
        model_limits: ModelLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._mode = config.upstream.responses_compact
        self._origin = format_origin(upstream.base_url)
        self._compactor = compactor
        self.items = items
        self._model_limits = model_limits
        self._clock = clock

    async def read_request(
        self, raw: bytes, identity: Identity, scope: Scope
    ) -> CompactionTriggerRequest | None:
        """Returns the request if its body ends in a trigger and the proxy may answer it, else None.

        Args:
            raw: The body as the client sent it. Its compaction items are still encrypted.
            identity: The identity of the client.
            scope: The ASGI scope of the request.

        Raises:
            RequestRefusedError: 400, one of the proxy's compaction items cannot be decrypted.
        """
        if self._mode == "relay" or not has_trigger(raw):
            return None
        raw = await self.items.decrypt_items_in_body(raw, scope, for_compaction=True)
        work = partial(_parse_trigger_request, raw)
        parsed = work() if len(raw) <= MAX_INLINE_BYTES else await run_in_worker(work)
        return None if parsed is None else CompactionTriggerRequest(*parsed, identity, scope)

    async def is_answered_locally(self, request: CompactionTriggerRequest) -> bool:
        """Returns whether the proxy answers a trigger without asking the upstream."""
        return self._mode == "answer" or await self._model_limits.lacks_compaction(
            *self._build_model_key(request)
        )

    async def should_replace_answer(
        self, request: CompactionTriggerRequest, answer: UpstreamResponse
    ) -> bool:
        """Returns whether the proxy has to answer a trigger, because the upstream did not compact the input.

        If the answer shows that the upstream does not know the trigger, the proxy remembers that for the
        model. To find out, it holds the answer back until a compaction item appears or the answer ends.

        If the upstream refuses the request as too long, the answer says nothing about the trigger. Then the
        proxy also has to answer, but it remembers nothing, so the next trigger goes to the upstream again.
        """
        status = answer.response.status
        if status >= httpx.codes.BAD_REQUEST:
            if await detect_overflow(answer, RESPONSES) is not None:
                return True
            beginning = decompress_body(await answer.peek(PEEK_BYTES), answer.get_field(b"content-encoding"))
            lacks = (
                status in _REFUSAL_STATUSES and TRIGGER_TYPE.encode() in beginning
            ) or _UNKNOWN_ITEM in beginning
        elif answer.get_field(b"content-type").lower().startswith(EVENT_STREAM.decode()):
            lacks = await _lacks_compaction_item(answer)
        else:
            beginning = decompress_body(
                await answer.peek(HOLD_BYTES), answer.get_field(b"content-encoding"), HOLD_BYTES
            )
            payload = decode_small_json(beginning)
            output = payload.get("output") if isinstance(payload, dict) else None
            lacks = isinstance(output, list) and not _has_compaction_item(output)
        if lacks:
            await self._model_limits.learn_lacks_compaction(*self._build_model_key(request))
        return lacks

    async def send_compaction_item(self, request: CompactionTriggerRequest, send: Send) -> bool:
        """Answers a trigger with a compaction item. Returns False, and sends nothing, if compaction fails."""
        try:
            result = await self._compactor.compact_input(request.body, request.scope)
        except ProxyError:
            return False
        body = await run_in_worker(partial(self._build_body, request, result))
        kind = EVENT_STREAM if request.is_streamed else b"application/json"
        report = result.fit.report._replace(
            status=CompactionStatus.APPLIED,
            conversation=request.identity.conversation,
            reason=result.strategy_result.report.reason,
        )
        headers = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
            *build_report_headers(report),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    def _build_model_key(self, request: CompactionTriggerRequest) -> tuple[str, str, str]:
        return request.identity.tenant, self._origin, request.body.model

    def _build_body(self, request: CompactionTriggerRequest, result: ShortenResult) -> bytes:
        sent = frozenset(read_items(request.body.raw))
        items = [
            each if each in sent else demote_privileged_item(each) for each in read_items(result.fit.raw)
        ]
        token = self.items.encode_token(b"[%b]" % b",".join(items), request.scope)
        item = build_item(f"cmp_{token_hex(_ID_BYTES)}", token)
        name, now = f"resp_{token_hex(_ID_BYTES)}", int(self._clock())
        response = build_response(name, request.body.model, now, item, build_compaction_usage(result))
        return build_stream(response) if request.is_streamed else json.dumps(response).encode()


def _parse_trigger_request(raw: bytes) -> tuple[RequestBody, bool] | None:
    trigger = parse_triggered_request(raw)
    if trigger is None:
        return None
    try:
        return parse_body(trigger.raw, RESPONSES), trigger.is_streamed
    except UnreadableBodyError:
        return None


async def _lacks_compaction_item(answer: UpstreamResponse) -> bool:
    """Returns whether a stream is complete without a compaction item, or has none in its first `HOLD_BYTES`.

    Returns False if a compaction item appears, if the stream reports a failure that does not concern the
    trigger, or if the stream is cut. The bytes that were read are kept, so the stream can still be relayed
    from its start.
    """
    encoding = answer.get_field(b"content-encoding")
    inflater = None if encoding.strip().lower() in IDENTITY else Inflater(encoding, HOLD_BYTES)
    events, held_bytes = EventSplitter(), 0
    while chunk := await answer.peek_next():
        held_bytes += len(chunk)
        for event in events.feed(chunk if inflater is None else inflater.feed(chunk)):
            verdict = _shows_unknown_trigger(read_data(event))
            if verdict is not None:
                return verdict
        if held_bytes > HOLD_BYTES:
            return True
    return False


def _shows_unknown_trigger(data: bytes) -> bool | None:
    """Returns True if an event shows that the upstream does not know the trigger.

    Returns False if the event shows a compaction item, or a failure that does not concern the trigger.
    Returns None if further events have to be read.
    """
    payload = decode_small_json(data) if data.startswith(b"{") else None
    if not isinstance(payload, dict):
        return None
    kind = payload.get("type")
    if kind in _FAILURE_EVENTS:
        return TRIGGER_TYPE.encode() in data or _UNKNOWN_ITEM in data
    if kind in _END_EVENTS:
        response = payload.get("response")
        return not (isinstance(response, dict) and _has_compaction_item(response.get("output")))
    return False if _is_compaction_item(payload.get("item")) else None


def _has_compaction_item(output: Any) -> bool:  # noqa: ANN401 - a JSON value
    return isinstance(output, list) and any(map(_is_compaction_item, output))


def _is_compaction_item(item: Any) -> bool:  # noqa: ANN401 - a JSON value
    return isinstance(item, dict) and item.get("type") in COMPACTION_TYPES
