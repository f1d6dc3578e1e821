"""Answers requests that ask only for a compaction.

Such a request goes to one of two endpoints (`POST /v1/compact` and `POST …/responses/compact`), or it is an
ordinary request that asks for a compaction item.

The proxy compacts the messages of such a request by the same code as those of a relayed request with the
header `x-compaction: force`, but it stores nothing. With every strategy, if no model writes a summary, an
extract takes its place.

A compaction item is an item of the Responses wire that holds the result of a compaction. To ask for one,
Codex sends an ordinary request whose input ends in an item of type `compaction_trigger`. Codex shows its user
an error unless the response holds one item of type `compaction`. The proxy forwards the first such request to
the upstream. If the response shows that the upstream does not know the type `compaction_trigger`, the proxy
answers this request itself and, for a day, all later requests of this kind for the same model.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

import httpx
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.stateless import ShortenResult, StatelessCompaction, shorten_messages
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.core.errors import ProxyError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import decode_or_refuse, read_body, while_connected
from compaction_proxy.gateway.compaction_items import CompactionItemCodec
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.control_headers import build_report_headers
from compaction_proxy.gateway.headers import EVENT_STREAM, Headers, build_header_map
from compaction_proxy.gateway.identity import Identity, IdentityResolver, format_origin
from compaction_proxy.gateway.overflow_probe import detect_overflow
from compaction_proxy.gateway.summary_routes import build_summary_routes
from compaction_proxy.gateway.upstream import (
    PEEK_BYTES,
    Upstream,
    UpstreamResponse,
    build_request,
    relay_response,
    send_request,
)
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.support.offload import WORK_OWNER, run_in_worker, run_in_worker_if_large
from compaction_proxy.wires.body import RequestBody, decode_small_json, parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.content_coding import Inflater
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.project_instructions import find_client_by_headers
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

# The path to which summary calls for `/v1/compact` are sent. Other summary calls use the path of the client's
# request, but `/v1/compact` does not exist at the provider.
_CHAT_TARGET = {"raw_path": b"/v1/chat/completions", "query_string": b""}
# If a request names a target size, the trigger T is this many times that size, because the strategy
# `anchored` shrinks a conversation to 40 % of T.
TRIGGERS_PER_TARGET = 2.5
# The largest number of tokens that `trigger_tokens` or `target_tokens` may have. A larger one is refused.
MAX_TOKENS = 999_999_999
# No valid value of a member in `_OPTION_NAMES` has more bytes than this. A longer value is not decoded.
MAX_VALUE_BYTES = 64
_OPTION_NAMES = ("strategy", "trigger_tokens", "target_tokens")
PATH_ENDING: Final = b"/responses/compact"
# The statuses that an upstream sends if it does not serve the path of a request.
_MISSING_ENDPOINT_STATUSES: Final = frozenset({404, 405, 501})
# The ending of error codes such as `model_not_found`. Such a code means that the upstream lacks something
# that the request names, such as the model. So the upstream does serve the path.
_NOT_FOUND_SUFFIX: Final = "_not_found"
# The proxy holds back at most this many bytes of a response, in order to see whether the response holds a
# compaction item. If an event stream has no such item in these bytes, the proxy assumes that it has none at
# all. A response of another type that has more bytes than this is relayed to the client without a search.
HOLD_BYTES: Final = 16 * 1024 * 1024
# The statuses with which most upstreams refuse an item of an unknown type. The body of such a response names
# the type.
_REFUSAL_STATUSES: Final = frozenset({400, 422, 501})
# The text with which llama.cpp refuses an item of an unknown type, without naming the type.
_UNKNOWN_ITEM: Final = b"Cannot determine type of 'item'"
_END_EVENTS: Final = frozenset({"response.completed", "response.incomplete"})
_FAILURE_EVENTS: Final = frozenset({"response.failed", "error"})
_ID_BYTES: Final = 16


class CompactRequest(NamedTuple):
    """A list of messages to compact, and how to compact it.

    Attributes:
        body: The parsed request with the list.
        strategy: The name of the strategy; None selects the configured one.
        trigger_tokens: The trigger, in tokens, which also decides how much text is kept. It has an effect
            only if it is lower than the configured one. None uses the configured one.
        target_tokens: The most tokens that the shortened list should have; None for no target.
    """

    body: RequestBody
    strategy: str | None = None
    trigger_tokens: int | None = None
    target_tokens: int | None = None


class InputCompactor:
    """Compacts the messages of requests, however few they are, and stores nothing.

    Args:
        config: The configuration.
        upstream: The upstream to which summary calls are sent.
        stateless: Compacts without storing anything.
        get_secret: Returns the secret key of the digests that identify tenants.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        stateless: StatelessCompaction,
        get_secret: Callable[[], bytes],
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = format_origin(upstream.base_url)
        self._stateless = stateless
        self._identity_resolver = IdentityResolver(config, self._origin, get_secret)

    def set_work_owner(self, scope: Scope) -> None:
        """Sets the tenant of a request as the owner of all further work of the current task."""
        WORK_OWNER.set(self._identity_resolver.identify_client(scope["headers"]).tenant)

    async def compact_input(self, request: CompactRequest, scope: Scope) -> ShortenResult:
        """Compacts the messages of a request.

        Args:
            request: The request.
            scope: The ASGI scope of the request, or a copy with the path that summary calls are to use.

        Raises:
            UnreadableBodyError: If a message is not valid.
            InternalError: If the compaction fails because of a fault in the proxy. The log names the cause.
        """
        headers, body = scope["headers"], request.body
        settings = _build_waiting_settings(
            get_model_settings(self._config, body.model), request.target_tokens
        )
        policy = resolve_policy(settings, request.strategy)
        build_routes = partial(build_summary_routes, self._config, settings, policy, self._upstream)
        ask = FitRequest(
            body=body,
            model=body.model,
            tenant=self._identity_resolver.identify_client(headers).tenant,
            conversation=None,
            origin=self._origin,
            settings=settings,
            mode=CompactionMode.FORCE,
            trigger_tokens=_compute_trigger(request),
            resolve_summary_routes=partial(build_routes, scope, body.model, body.wire),
            patience_s=None,
            strategy=request.strategy,
            client=find_client_by_headers(build_header_map(headers)),
        )
        return await shorten_messages(self._stateless, ask, request.target_tokens)


class CompactEndpoint:
    """An ASGI endpoint that compacts a list of messages and stores nothing.

    Args:
        config: The configuration.
        compactor: Compacts the list.
        admission: Limits the number of concurrent requests; relayed requests count, too.
    """

    def __init__(self, config: Config, compactor: InputCompactor, admission: ConcurrencyLimiter) -> None:
        self._max_body_bytes = config.server.max_body_bytes
        self._compactor = compactor
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: If the body is too large or cannot be compacted, or the method is not POST.
            OverloadedError: If the proxy is serving too many requests, or holds too many bytes of bodies.
            ClientDisconnect: If the client left. A pending summary call has then been cancelled.
        """
        if scope["method"] != "POST":
            raise RequestRefusedError(
                405, "Only POST is allowed.", "method_not_allowed", ((b"allow", b"POST"),)
            )
        self._compactor.set_work_owner(scope)
        async with self._admission.admit_request() as hold:
            raw = await read_body(scope, receive, self._max_body_bytes, hold)
            with while_connected(scope):
                raw = await decode_or_refuse(raw, scope["headers"], hold, self._max_body_bytes)
                answer = await self._build_answer(raw, scope)
            await _send_answer(send, answer)

    async def _build_answer(self, raw: bytes, scope: Scope) -> bytes:
        """Compacts the messages of a request body. Returns the body of the response."""
        started = time.monotonic()
        request = await run_in_worker(partial(parse_compact_request, raw))
        try:
            result = await self._compactor.compact_input(request, {**scope, **_CHAT_TARGET})
        except UnreadableBodyError as unreadable:
            raise _build_unusable_error("messages", unreadable.reason) from unreadable
        report = _build_report(result, request, time.monotonic() - started)
        return await run_in_worker(partial(_encode_answer, result.fit.raw, report))


def parse_compact_request(raw: bytes) -> CompactRequest:
    """Parses the body of a call of `/v1/compact`.

    Raises:
        RequestRefusedError: With status 400 if the body holds no list of messages, names no model or has an
            invalid option.
    """
    try:
        body = parse_body(raw, CHAT)
    except UnreadableBodyError as unreadable:
        raise _build_unusable_error("messages", unreadable.reason) from unreadable
    if not body.model:
        raise RequestRefusedError(400, "`model` must be the name of a model.", "model_required")
    members = find_members(raw)
    options = {
        name: _parse_value(raw[members[name].start : members[name].stop])
        for name in _OPTION_NAMES
        if name in members
    }
    strategy = options.get("strategy")
    if strategy is not None and not (isinstance(strategy, str) and strategy in STRATEGIES):
        names = ", ".join(sorted(STRATEGIES))
        raise RequestRefusedError(400, f"`strategy` must be one of {names}.", "unknown_strategy")
    return CompactRequest(
        body, strategy, _parse_tokens(options, "trigger_tokens"), _parse_tokens(options, "target_tokens")
    )


def _build_unusable_error(noun: str, reason: str) -> RequestRefusedError:
    message = f"The request body has no valid {noun}: {reason}."
    return RequestRefusedError(400, message, reason.replace("-", "_"))


def _parse_value(raw: bytes) -> Any:  # noqa: ANN401 - a JSON value
    """Decodes the value of a body member in `_OPTION_NAMES`.

    A value that is longer than any valid one is returned as bytes, without decoding. The caller then refuses
    it, because bytes are no valid option.
    """
    return json.loads(raw) if len(raw) <= MAX_VALUE_BYTES else raw


def _parse_tokens(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 < value <= MAX_TOKENS:
        raise RequestRefusedError(
            400, f"`{name}` must be a whole number of tokens above 0.", "invalid_tokens"
        )
    return value


@lru_cache(maxsize=256)
def _build_waiting_settings(settings: ModelSettings, target_tokens: int | None) -> ModelSettings:
    """Returns a copy of the settings that lets a compaction wait `summary.timeout_s` seconds for its summary.

    `target_tokens` is the number of tokens that the compacted list should have; None keeps the configured
    number.
    """
    changed: dict[str, Any] = {"max_block_s": settings.summary.timeout_s}
    if target_tokens is not None:
        changed["target_tokens"] = target_tokens
    return replace(settings, compaction=settings.compaction.model_copy(update=changed))


def _compute_trigger(request: CompactRequest) -> int | None:
    """Returns the trigger T in tokens, or None if the request names neither a trigger nor a target size.

    T is the lower of two sizes: the requested trigger, and `TRIGGERS_PER_TARGET` times the target size.
    """
    implied = int(request.target_tokens * TRIGGERS_PER_TARGET) if request.target_tokens else None
    return min(filter(None, (request.trigger_tokens, implied)), default=None)


def _build_report(result: ShortenResult, request: CompactRequest, seconds: float) -> dict[str, Any]:
    first, last = result.strategy_result.report, result.fit.report
    after, target = last.tokens_after or 0, request.target_tokens
    status = CompactionStatus.APPLIED if result.fit.raw is not request.body.raw else first.status
    if last.status is CompactionStatus.OVER_LIMIT or (target is not None and after > target):
        status = CompactionStatus.OVER_LIMIT
    return {
        "status": status,
        "strategy": first.strategy or last.strategy or request.strategy,
        "tokens_before": first.tokens_before,
        "tokens_after": last.tokens_after,
        "messages_before": first.messages_before,
        "messages_after": last.messages_after,
        "reason": first.reason,
        "summary_model": result.model,
        "seconds": round(seconds, 3),
    }


def _encode_answer(raw: bytes, report: Mapping[str, Any]) -> bytes:
    """Returns the body of the response: the report, and the messages of `raw`, byte for byte.

    `raw` is the compacted body of the request.
    """
    place = find_members(raw)["messages"]
    parts = b'{"object":"compaction","messages":', raw[place.start : place.stop], b',"report":'
    return b"".join((*parts, json.dumps(report).encode(), b"}"))


async def _send_answer(
    send: Send, body: bytes, content_type: bytes = b"application/json", report: Headers | None = None
) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        *(report or ()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class ResponsesCompactEndpoint:
    """An ASGI endpoint that compacts the input of a request on the Responses wire, and stores nothing.

    Depending on the configuration, it relays the request to the upstream instead.

    Args:
        config: The configuration; `upstream.responses_compact` decides whether the upstream or the proxy
            answers.
        upstream: The upstream of the Responses wire.
        compactor: Compacts the input.
        items: Decodes the proxy's own compaction items in the request.
        admission: Limits the number of concurrent requests.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        compactor: InputCompactor,
        items: CompactionItemCodec,
        admission: ConcurrencyLimiter,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._compactor = compactor
        self._items = items
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: If the body is too large or cannot be compacted, or one of the proxy's
                compaction items cannot be decrypted.
            OverloadedError: If the proxy is serving too many requests, or holds too many bytes of bodies.
            UpstreamError: If the upstream gave no response.
            ClientDisconnect: If the client left. The pending call to the upstream or to the summary model has
                then been cancelled.
        """
        self._compactor.set_work_owner(scope)
        async with self._admission.admit_request() as hold:
            raw = await read_body(scope, receive, self._config.server.max_body_bytes, hold)
            raw = await self._items.decrypt_items_in_body(raw, scope, for_compaction=True)
            with while_connected(scope):
                if self._config.upstream.responses_compact == "answer":
                    await _send_answer(send, await self._build_answer(raw, scope, hold))
                else:
                    await self._relay_or_compact(raw, scope, send, hold)

    async def _relay_or_compact(self, raw: bytes, scope: Scope, send: Send, hold: BodyHold) -> None:
        """Relays the upstream's response. If the upstream does not serve the path, the proxy answers instead.

        If the proxy's own compaction fails, the upstream's response is relayed although it is an error.
        """
        answer = await send_request(self._upstream, build_request(self._upstream, scope, raw))
        body = None
        try:
            if await _is_endpoint_missing(answer):
                with suppress(ProxyError):
                    body = await self._build_answer(raw, scope, hold)
            if body is None:
                await relay_response(answer, send)
        finally:
            await answer.aclose()
        if body is not None:
            await _send_answer(send, body)

    async def _build_answer(self, raw: bytes, scope: Scope, hold: BodyHold) -> bytes:
        """Compacts the input of a request body. Returns the body of the response.

        Raises:
            RequestRefusedError: With status 400 if the body holds no input that could be compacted. With
                status 413 or 415 if the body cannot be decoded (see `decode_or_refuse`).
            OverloadedError: If no room to decode the body became free in time.
        """
        decoded = await decode_or_refuse(raw, scope["headers"], hold, self._config.server.max_body_bytes)
        if decoded is not raw:
            decoded = await self._items.decrypt_items_in_body(decoded, scope, for_compaction=True)
        summary_scope = {**scope, "raw_path": scope["raw_path"].removesuffix(b"/compact")}
        try:
            body = await run_in_worker(partial(parse_body, decoded, RESPONSES))
            result = await self._compactor.compact_input(CompactRequest(body), summary_scope)
        except UnreadableBodyError as unreadable:
            raise _build_unusable_error("input", unreadable.reason) from unreadable
        return await run_in_worker(partial(_encode_compaction, result))


async def _is_endpoint_missing(answer: UpstreamResponse) -> bool:
    """Returns whether a response shows that the upstream does not serve the path of the request."""
    if answer.response.status not in _MISSING_ENDPOINT_STATUSES:
        return False
    payload = decode_small_json(await _peek_decompressed(answer, PEEK_BYTES))
    error = payload.get("error") if isinstance(payload, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return not (isinstance(code, str) and code.endswith(_NOT_FOUND_SUFFIX))


async def _peek_decompressed(answer: UpstreamResponse, limit_bytes: int) -> bytes:
    """Reads a response's body until at least `limit_bytes` bytes have come, and returns them decompressed.

    Returns fewer bytes if the body is shorter. Returns empty bytes if they cannot be decompressed, or if they
    have more than `limit_bytes` bytes after decompression.
    """
    encoding = answer.get_field(b"content-encoding")
    return Inflater(encoding, limit_bytes).feed(await answer.peek(limit_bytes))


def _encode_compaction(result: ShortenResult) -> bytes:
    """Returns the body of the response: the compacted items and a `usage` (`_build_usage`)."""
    head = {
        "id": f"resp_{token_hex(_ID_BYTES)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
    }
    output = b",".join(map(_expand_short_message, read_items(result.fit.raw)))
    return b'%b,"output":[%b],"usage":%b}' % (
        json.dumps(head)[:-1].encode(),
        output,
        json.dumps(_build_usage(result)).encode(),
    )


def _build_usage(result: ShortenResult) -> dict[str, Any]:
    """Returns the `usage` of a compaction.

    Its input tokens are the estimated tokens before the compaction, and its output tokens those after it.
    """
    before, after = result.strategy_result.report.tokens_before or 0, result.fit.report.tokens_after or 0
    return {
        "input_tokens": before,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": after,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": before + after,
    }


def _expand_short_message(raw: bytes) -> bytes:
    """Returns an item of a request in the form that a response must have.

    In a request, a message may have a short form, without a type or with a plain string as content. In a
    response, it may not, so the function expands it. Other items stay unchanged.
    """
    item: dict[str, Any] = json.loads(raw)
    if item.get("type", "message") != "message":
        return raw
    content = item.get("content")
    if "type" in item and not isinstance(content, str):
        return raw
    item = {"type": "message", "role": "user", **item}
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": content}]
    return json.dumps(item).encode()


class CompactionItemRequest(NamedTuple):
    """A request that asks for a compaction item.

    Attributes:
        body: The parsed request without the last item, which asks for the compaction.
        is_streamed: Whether the client asks for the response as a stream of events.
        identity: The identity of the client.
        scope: The ASGI scope of the request.
    """

    body: RequestBody
    is_streamed: bool
    identity: Identity
    scope: Scope


class CompactionItemResponder:
    """Answers requests for a compaction item.

    Args:
        config: The configuration; `upstream.responses_compact` decides whether the upstream or the proxy
            answers.
        upstream: The upstream of the Responses wire.
        compactor: Compacts the input.
        items: Encodes the compaction items that the proxy sends, and decodes them in later requests.
        model_limits: Remembers for which models the upstream makes no compaction items.

    Attributes:
        items: The same object as the argument.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        compactor: InputCompactor,
        items: CompactionItemCodec,
        model_limits: ModelLimits,
    ) -> None:
        self._mode = config.upstream.responses_compact
        self._origin = format_origin(upstream.base_url)
        self._compactor = compactor
        self.items = items
        self._model_limits = model_limits

    async def read_request(
        self, raw: bytes, identity: Identity, scope: Scope
    ) -> CompactionItemRequest | None:
        """Returns the request if it asks for a compaction item and the proxy may answer it, else None.

        Args:
            raw: The body as the client sent it. Its compaction items are still encrypted.
            identity: The identity of the client.
            scope: The ASGI scope of the request.

        Raises:
            RequestRefusedError: With status 400 if one of the proxy's compaction items cannot be decrypted.
        """
        if self._mode == "relay" or not await run_in_worker_if_large(len(raw), partial(has_trigger, raw)):
            return None
        raw = await self.items.decrypt_items_in_body(raw, scope, for_compaction=True)
        parsed = await run_in_worker_if_large(len(raw), partial(_parse_item_request, raw))
        return None if parsed is None else CompactionItemRequest(*parsed, identity, scope)

    async def is_answered_locally(self, request: CompactionItemRequest) -> bool:
        """Returns whether the proxy answers a request without asking the upstream."""
        return self._mode == "answer" or await self._model_limits.lacks_compaction(
            request.identity.tenant, self._origin, request.body.model
        )

    async def should_replace_answer(self, request: CompactionItemRequest, answer: UpstreamResponse) -> bool:
        """Returns whether the proxy must answer a request itself, because the upstream has not compacted it.

        The method reads the response, and relays nothing, until a compaction item appears, the response ends,
        or `HOLD_BYTES` bytes have arrived. If the response shows that the upstream makes no compaction items,
        the proxy remembers this for the model.

        If the upstream refuses the request as too long, the method also returns True. This response does not
        show whether the upstream makes compaction items. So the proxy remembers nothing, and asks the
        upstream again next time.
        """
        status = answer.response.status
        if status >= httpx.codes.BAD_REQUEST:
            if await detect_overflow(answer, RESPONSES) is not None:
                return True
            beginning = await _peek_decompressed(answer, PEEK_BYTES)
            names_type = status in _REFUSAL_STATUSES and TRIGGER_TYPE.encode() in beginning
            lacks = names_type or _UNKNOWN_ITEM in beginning
        elif answer.is_stream:
            lacks = await _lacks_compaction_item(answer)
        else:
            payload = decode_small_json(await _peek_decompressed(answer, HOLD_BYTES))
            output = payload.get("output") if isinstance(payload, dict) else None
            lacks = isinstance(output, list) and not any(map(_is_compaction_item, output))
        if lacks:
            await self._model_limits.learn_lacks_compaction(
                request.identity.tenant, self._origin, request.body.model
            )
        return lacks

    async def send_compaction_item(self, request: CompactionItemRequest, send: Send) -> bool:
        """Compacts the input, and sends the client a response with a compaction item. Then returns True.

        If the compaction fails, sends nothing and returns False.
        """
        try:
            result = await self._compactor.compact_input(CompactRequest(request.body), request.scope)
        except ProxyError:
            return False
        body = await run_in_worker(partial(self._build_body, request, result))
        report = result.fit.report._replace(
            status=CompactionStatus.APPLIED,
            conversation=request.identity.conversation,
            reason=result.strategy_result.report.reason,
        )
        content_type = EVENT_STREAM if request.is_streamed else b"application/json"
        await _send_answer(send, body, content_type, build_report_headers(report))
        return True

    def _build_body(self, request: CompactionItemRequest, result: ShortenResult) -> bytes:
        sent = frozenset(read_items(request.body.raw))
        items = [
            each if each in sent else demote_privileged_item(each) for each in read_items(result.fit.raw)
        ]
        token = self.items.encode_token(b"[%b]" % b",".join(items), request.scope)
        item = build_item(f"cmp_{token_hex(_ID_BYTES)}", token)
        response_id, now = f"resp_{token_hex(_ID_BYTES)}", int(time.time())
        response = build_response(response_id, request.body.model, now, item, _build_usage(result))
        return build_stream(response) if request.is_streamed else json.dumps(response).encode()


def _parse_item_request(raw: bytes) -> tuple[RequestBody, bool] | None:
    """Returns the body without its last item, which asks for the compaction, and whether to send a stream.

    Returns None if the body does not ask for a compaction item, or has no input that could be compacted.
    """
    triggered = parse_triggered_request(raw)
    if triggered is None:
        return None
    try:
        return parse_body(triggered.raw, RESPONSES), triggered.is_streamed
    except UnreadableBodyError:
        return None


async def _lacks_compaction_item(answer: UpstreamResponse) -> bool:
    """Returns whether a stream shows that the upstream makes no compaction items.

    This is so if the stream ends without such an item, has none in its first `HOLD_BYTES` bytes, or reports
    that the type `compaction_trigger` is unknown. Returns False if an item appears, if the stream reports
    another failure, or if the connection is lost. The stream can still be relayed from its start.
    """
    inflater, events = Inflater(answer.get_field(b"content-encoding"), HOLD_BYTES), EventSplitter()
    held_bytes = 0
    while chunk := await answer.peek_next():
        held_bytes += len(chunk)
        for event in events.feed(inflater.feed(chunk)):
            lacks = _shows_unknown_type(read_data(event))
            if lacks is not None:
                return lacks
        if held_bytes > HOLD_BYTES:
            return True
    return False


def _shows_unknown_type(data: bytes) -> bool | None:
    """Returns True if an event shows that the upstream makes no compaction items.

    Returns False if the event shows a compaction item, or a failure that has another cause. Returns None if
    further events have to be read.
    """
    payload = decode_small_json(data) if data.startswith(b"{") else None
    if not isinstance(payload, dict):
        return None
    kind = payload.get("type")
    if kind in _FAILURE_EVENTS:
        return TRIGGER_TYPE.encode() in data or _UNKNOWN_ITEM in data
    if kind in _END_EVENTS:
        response = payload.get("response")
        output = response.get("output") if isinstance(response, dict) else None
        return not (isinstance(output, list) and any(map(_is_compaction_item, output)))
    return False if _is_compaction_item(payload.get("item")) else None


def _is_compaction_item(item: Any) -> bool:  # noqa: ANN401 - a JSON value
    return isinstance(item, dict) and item.get("type") in COMPACTION_TYPES
