"""Serves `POST /v1/compact` and `…/responses/compact`: shortens a list of messages and stores nothing.

The list is compacted by the same code as a relayed request with the header `x-compaction: force`, but nothing
is stored. If no model writes a summary, an extract takes its place, whatever the strategy.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.stateless import ShortenResult, StatelessCompaction, shorten_messages
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.core.errors import ProxyError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.compaction_items import CompactionItemCodec
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.decoder_pool import UNDECODABLE
from compaction_proxy.gateway.headers import build_header_map, parse_content_length
from compaction_proxy.gateway.identity import IdentityResolver, format_origin
from compaction_proxy.gateway.summary_routes import build_summary_routes
from compaction_proxy.gateway.upstream import (
    PEEK_BYTES,
    Upstream,
    UpstreamResponse,
    build_request,
    relay_response,
    send_request,
)
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.body import RequestBody, decode_small_json, parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.project_instructions import find_client_by_headers
from compaction_proxy.wires.responses.compaction_item import read_items
from compaction_proxy.wires.responses.wire import RESPONSES

# The path of summary calls for `/v1/compact`. Other summary calls use the path of the client's request, but
# `/v1/compact` does not exist at the provider.
_CHAT_TARGET = {"raw_path": b"/v1/chat/completions", "query_string": b""}
# If a call names a target size, the trigger T is this many times that size, because the strategy `anchored`
# shrinks a conversation to 40 % of T.
TRIGGERS_PER_TARGET = 2.5
# The largest value that a call may give for `trigger_tokens` or `target_tokens`.
MAX_TOKENS = 999_999_999
# No valid value of one of our own body members (`_OPTION_NAMES`) has more bytes than this.
MAX_VALUE_BYTES = 64
_OPTION_NAMES = ("strategy", "trigger_tokens", "target_tokens")


class CompactRequest(NamedTuple):
    """A call of `/v1/compact`: its messages and its options.

    Attributes:
        body: The parsed request.
        strategy: The name of the strategy; None selects the configured one.
        trigger_tokens: The trigger, in tokens, which also decides how much text is kept. It has an effect
            only if it is lower than the configured one. None uses the configured one.
        target_tokens: The most tokens that the shortened list should have; None for no target.
    """

    body: RequestBody
    strategy: str | None
    trigger_tokens: int | None
    target_tokens: int | None


class CompactEndpoint:
    """An ASGI endpoint that compacts a list of messages and stores nothing.

    Args:
        config: The configuration.
        upstream: The upstream that is asked for summaries.
        origin: The origin of the upstream, which is part of the identity of a tenant (`format_origin`).
        stateless: Compacts without storing anything.
        get_secret: Returns the secret key of the digests that identify tenants.
        admission: Limits the number of concurrent requests; relayed requests count, too.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        origin: str,
        *,
        stateless: StatelessCompaction,
        get_secret: Callable[[], bytes],
        admission: ConcurrencyLimiter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = origin
        self._stateless = stateless
        self._admission = admission
        self._clock = clock
        self._identity_resolver = IdentityResolver(config, origin, get_secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: The body is too large or cannot be compacted, or the method is not POST.
            OverloadedError: The proxy is serving too many requests, or too many bytes of them, at once.
            ClientDisconnect: The client left, and a pending summary call was cancelled.
        """
        if scope["method"] != "POST":
            raise RequestRefusedError(405, "Only POST is answered here.", "method_not_allowed")
        if not self._admission.try_acquire_slot():
            await self._admission.wait_for_slot()
        hold = self._admission.body_budget.open_hold()
        try:
            raw = await self._read_body(scope, receive, hold)
            with while_connected(scope):
                raw = await self._decode_body(raw, scope, hold)
                answer = await self._build_compaction_answer(raw, scope)
            await _send_json(send, answer)
        finally:
            hold.release()
            self._admission.release_slot()

    async def _read_body(self, scope: Scope, receive: Receive, hold: BodyHold) -> bytes:
        declared = parse_content_length(build_header_map(scope["headers"]).get(b"content-length"))
        return await read_body(scope, receive, self._config.server.max_body_bytes, hold, declared)

    async def _decode_body(self, raw: bytes, scope: Scope, hold: BodyHold) -> bytes:
        limit = self._config.server.max_body_bytes
        decoded = await self._admission.decoder.decode(raw, scope["headers"], hold, limit)
        if decoded is None:
            raise RequestRefusedError(415, UNDECODABLE, "encoded")
        return decoded

    async def _build_compaction_answer(self, raw: bytes, scope: Scope) -> bytes:
        """Compacts the messages of a request body. Returns the body of the answer."""
        started = self._clock()
        request = await run_in_worker(partial(parse_compact_request, raw))
        ask = self._build_fit_request(request, scope)
        try:
            result = await shorten_messages(self._stateless, ask, request.target_tokens)
        except UnreadableBodyError as unreadable:
            raise _build_unusable_error(unreadable.reason) from unreadable
        report = _build_report(result, request, self._clock() - started)
        return await run_in_worker(partial(_encode_answer, result.fit.raw, report))

    def _build_fit_request(self, request: CompactRequest, scope: Scope) -> FitRequest:
        headers = scope["headers"]
        identity = self._identity_resolver.identify_client(headers, build_header_map(headers))
        model = request.body.model
        settings = build_waiting_settings(get_model_settings(self._config, model), request.target_tokens)
        policy = resolve_policy(settings, request.strategy)
        summary_scope: Scope = {**scope, **_CHAT_TARGET}
        return FitRequest(
            body=request.body,
            model=model,
            tenant=identity.tenant,
            conversation=None,
            origin=self._origin,
            settings=settings,
            mode=CompactionMode.FORCE,
            trigger_tokens=_compute_trigger(request),
            resolve_summary_routes=partial(
                build_summary_routes, self._config, settings, policy, self._upstream, summary_scope, model
            ),
            patience_s=None,
            strategy=request.strategy,
            client=find_client_by_headers(build_header_map(headers)),
        )


def parse_compact_request(raw: bytes) -> CompactRequest:
    """Parses the body of a call of `/v1/compact`.

    Raises:
        RequestRefusedError: 400, the body holds no list of messages, names no model or has an invalid option.
    """
    try:
        body = parse_body(raw, CHAT)
    except UnreadableBodyError as unreadable:
        raise _build_unusable_error(unreadable.reason) from unreadable
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


def _build_unusable_error(reason: str) -> RequestRefusedError:
    code = reason.replace("-", "_")
    return RequestRefusedError(400, f"The body holds no messages that could be compacted: {reason}.", code)


def _parse_value(raw: bytes) -> Any:  # noqa: ANN401 - a JSON value
    """Decodes the value of one of our own body members (`_OPTION_NAMES`).

    A value that is longer than any valid one is returned as undecoded bytes, which the caller refuses as
    invalid.
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
def build_waiting_settings(settings: ModelSettings, target_tokens: int | None) -> ModelSettings:
    """Returns settings with which a call waits for its summary as long as `summary.timeout_s` allows.

    `target_tokens` is the size in tokens that the compacted list should have; None keeps the configured one.
    """
    changed: dict[str, Any] = {"max_block_s": settings.summary.timeout_s}
    if target_tokens is not None:
        changed["target_tokens"] = target_tokens
    return replace(settings, compaction=settings.compaction.model_copy(update=changed))


def _compute_trigger(request: CompactRequest) -> int | None:
    """Returns the trigger T in tokens, or None if the call names neither a trigger nor a target size.

    T is the lower of two sizes: the requested trigger, and the trigger that follows from the target size.
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
    """Returns the body of the answer. Copies the messages from `raw`, the compacted body, byte for byte."""
    place = find_members(raw)["messages"]
    parts = b'{"object":"compaction","messages":', raw[place.start : place.stop], b',"report":'
    return b"".join((*parts, json.dumps(report).encode(), b"}"))


async def _send_json(send: Send, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


PATH_ENDING: Final = b"/responses/compact"
# Statuses with which an upstream answers if it does not serve the path of a request.
_MISSING_ENDPOINT_STATUSES: Final = frozenset({404, 405, 501})
# The ending of error codes such as `model_not_found`. They say that the upstream does not have a thing that
# the request names. So the upstream does serve the path.
_NOT_FOUND_SUFFIX: Final = "_not_found"
_ID_BYTES: Final = 16


class InputCompactor:
    """Compacts the input of requests on the Responses wire and stores nothing.

    Args:
        config: The configuration.
        upstream: The upstream of this wire, which is also asked for summaries.
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

    async def compact_input(self, body: RequestBody, scope: Scope) -> ShortenResult:
        """Compacts the input of a body with the configured strategy, even if the input is short.

        Args:
            body: The parsed request.
            scope: The ASGI scope of the request. Its path may end in `/compact`; summary calls use the path
                without this ending.

        Raises:
            UnreadableBodyError: An item of the input is not valid.
            InternalError: The proxy has a fault; the log names the cause.
        """
        return await shorten_messages(self._stateless, self._build_fit_request(body, scope), None)

    def _build_fit_request(self, body: RequestBody, scope: Scope) -> FitRequest:
        headers = scope["headers"]
        identity = self._identity_resolver.identify_client(headers, build_header_map(headers))
        settings = build_waiting_settings(get_model_settings(self._config, body.model), None)
        policy = resolve_policy(settings, None)
        summary_scope: Scope = {**scope, "raw_path": scope["raw_path"].removesuffix(b"/compact")}
        build_routes = partial(
            build_summary_routes, self._config, settings, policy, self._upstream, summary_scope
        )
        return FitRequest(
            body=body,
            model=body.model,
            tenant=identity.tenant,
            conversation=None,
            origin=self._origin,
            settings=settings,
            mode=CompactionMode.FORCE,
            trigger_tokens=None,
            resolve_summary_routes=partial(build_routes, body.model, RESPONSES),
            patience_s=None,
            client=find_client_by_headers(build_header_map(headers)),
        )


class ResponsesCompactEndpoint:
    """An ASGI endpoint that compacts the input of a request on the Responses wire and stores nothing.

    Args:
        config: The configuration; `upstream.responses_compact` decides whether the upstream or the proxy
            answers.
        upstream: The upstream of this wire.
        compactor: Compacts the input.
        items: Decodes our compaction items in the request.
        admission: Limits the number of concurrent requests.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        compactor: InputCompactor,
        items: CompactionItemCodec,
        admission: ConcurrencyLimiter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._compactor = compactor
        self._items = items
        self._admission = admission
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: The body is too large or cannot be compacted, or one of the proxy's
                compaction items cannot be decrypted.
            OverloadedError: The proxy is serving too many requests, or too many bytes of them, at once.
            UpstreamError: The upstream gave no answer.
            ClientDisconnect: The client left, and the pending call to the upstream or the summary model was
                cancelled.
        """
        if not self._admission.try_acquire_slot():
            await self._admission.wait_for_slot()
        hold = self._admission.body_budget.open_hold()
        try:
            declared = parse_content_length(build_header_map(scope["headers"]).get(b"content-length"))
            raw = await read_body(scope, receive, self._config.server.max_body_bytes, hold, declared)
            raw = await self._items.decrypt_items_in_body(raw, scope, for_compaction=True)
            with while_connected(scope):
                if self._config.upstream.responses_compact == "answer":
                    await _send_json(send, await self._build_compaction_answer(raw, scope, hold))
                else:
                    await self._relay_or_compact(raw, scope, send, hold)
        finally:
            hold.release()
            self._admission.release_slot()

    async def _relay_or_compact(self, raw: bytes, scope: Scope, send: Send, hold: BodyHold) -> None:
        """Relays the upstream's answer, or sends our own answer if the upstream does not serve the path.

        If our own compaction fails, the upstream's answer is relayed although it is an error.
        """
        answer = await send_request(self._upstream, build_request(self._upstream, scope, raw))
        try:
            body = await self._compact_if_unsupported(answer, raw, scope, hold)
            if body is None:
                await relay_response(answer, send)
                return
        finally:
            await answer.aclose()
        await _send_json(send, body)

    async def _compact_if_unsupported(
        self, answer: UpstreamResponse, raw: bytes, scope: Scope, hold: BodyHold
    ) -> bytes | None:
        if not await _is_endpoint_missing(answer):
            return None
        try:
            return await self._build_compaction_answer(raw, scope, hold)
        except ProxyError:
            return None

    async def _build_compaction_answer(self, raw: bytes, scope: Scope, hold: BodyHold) -> bytes:
        """Compacts the input of a request body. Returns the body of the answer.

        Raises:
            RequestRefusedError: 400, the body holds no input that could be compacted; 413 or 415, the body
                cannot be decoded (see `BodyDecoder`).
            OverloadedError: No room to decode the body became free in time.
        """
        limit = self._config.server.max_body_bytes
        decoded = await self._admission.decoder.decode(raw, scope["headers"], hold, limit)
        if decoded is None:
            raise RequestRefusedError(415, UNDECODABLE, "encoded")
        try:
            if decoded is not raw:
                decoded = await self._items.decrypt_items_in_body(decoded, scope, for_compaction=True)
            body = await run_in_worker(partial(parse_body, decoded, RESPONSES))
            result = await self._compactor.compact_input(body, scope)
        except UnreadableBodyError as unreadable:
            code = unreadable.reason.replace("-", "_")
            message = f"The body holds no input that could be compacted: {unreadable.reason}."
            raise RequestRefusedError(400, message, code) from unreadable
        return await run_in_worker(partial(_encode_compaction, result, int(self._clock())))


async def _is_endpoint_missing(answer: UpstreamResponse) -> bool:
    """Returns whether an answer shows that the upstream does not serve the path of the request."""
    if answer.response.status not in _MISSING_ENDPOINT_STATUSES:
        return False
    payload = decode_small_json(
        decompress_body(await answer.peek(PEEK_BYTES), answer.get_field(b"content-encoding"))
    )
    error = payload.get("error") if isinstance(payload, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return not (isinstance(code, str) and code.endswith(_NOT_FOUND_SUFFIX))


def decompress_body(body: bytes, encoding: str, limit_bytes: int = PEEK_BYTES) -> bytes:
    """Returns a body as it was before it was compressed.

    Args:
        body: The body as received.
        encoding: The value of its `content-encoding`.
        limit_bytes: The most bytes after decompression. The result is empty if the body is larger or cannot
            be decompressed.
    """
    return body if encoding.strip().lower() in IDENTITY else Inflater(encoding, limit_bytes).feed(body)


def _encode_compaction(result: ShortenResult, created_at: int) -> bytes:
    """Returns the body of the answer. Its `usage` gives the estimated tokens before and after compaction."""
    head = {"id": f"resp_{token_hex(_ID_BYTES)}", "object": "response.compaction", "created_at": created_at}
    output = b",".join(map(_expand_short_message, read_items(result.fit.raw)))
    return b'%b,"output":[%b],"usage":%b}' % (
        json.dumps(head)[:-1].encode(),
        output,
        json.dumps(build_compaction_usage(result)).encode(),
    )


def build_compaction_usage(result: ShortenResult) -> dict[str, Any]:
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
    """Returns an item in the form that answers require.

    Requests may hold messages in a short form, without a type or with a plain string as content. Such a
    message is expanded. Other items stay unchanged.
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
