"""The endpoint for requests with the messages of a conversation: compacts them if needed, and relays them."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from secrets import token_bytes
from typing import TYPE_CHECKING

import httpx
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.compactor import MAX_REFITS, Compactor
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.types import (
    CompactionMode,
    CompactionReport,
    CompactionStatus,
    FitRequest,
    FitResult,
)
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import OverloadedError, UnreadableBodyError, UpstreamError
from compaction_proxy.core.upstream_failure import INVALID_ANSWER
from compaction_proxy.gateway.after_response import AfterResponseHandler
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import (
    OriginalRequest,
    decode_request_body,
    read_body,
    while_connected,
)
from compaction_proxy.gateway.compact_api import CompactionItemRequest, CompactionItemResponder
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.control_headers import (
    CONTROL_FIELDS,
    ControlHeaders,
    choose_stricter_mode,
    parse_control_headers,
)
from compaction_proxy.gateway.headers import BODY_FIELDS, build_header_map, drop_fields
from compaction_proxy.gateway.identity import IdentityResolver, format_origin
from compaction_proxy.gateway.overflow_probe import detect_overflow
from compaction_proxy.gateway.paths import find_deployment, join_upstream_url
from compaction_proxy.gateway.recall_loop import (
    RecallLoop,
    ToolOffer,
    apply_tool_offer,
    build_tool_offer,
    is_tool_refusal,
)
from compaction_proxy.gateway.request_state import REQUEST_ID_HEADER, RequestState, choose_request_id
from compaction_proxy.gateway.side_requests import SideRequestKind
from compaction_proxy.gateway.size_gate import SizeGate
from compaction_proxy.gateway.summary_routes import build_summary_routes
from compaction_proxy.gateway.unread_conversations import TOOLS, UnreadConversationFinder
from compaction_proxy.gateway.upstream import (
    PEEK_BYTES,
    Upstream,
    UpstreamResponse,
    build_request,
    relay_response,
    send_error,
    send_request,
)
from compaction_proxy.gateway.upstream_monitor import find_cause
from compaction_proxy.recall.tool import RecallTool
from compaction_proxy.support.offload import WORK_OWNER, run_in_worker_if_large
from compaction_proxy.telemetry.logs import REQUEST_ID
from compaction_proxy.telemetry.usage import NO_CAPTION, Caption
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.project_instructions import find_client_by_headers
from compaction_proxy.wires.titles import find_title
from compaction_proxy.wires.usage import UsageTap
from compaction_proxy.wires.wire import Wire

if TYPE_CHECKING:
    from compaction_proxy.telemetry.otel import OtelTracer

NO_OVERRIDES = ControlHeaders()
# The most seconds that a response which is ready waits for the search for its conversation
# (`unread_conversations`). Normally the search ends before the upstream responds. It takes longer only if the
# store or this process is very slow, and then the response does not name the conversation.
MAX_SEARCH_WAIT_S = 0.25
# A request with fewer bytes than this fits every context window. So if the response has status 200, the proxy
# does not search it for an error that refuses the request as too long.
LEAST_REFUSED_BYTES = 8_192


class RelayEndpoint:
    """An ASGI endpoint that makes requests fit the context window and relays them.

    Args:
        config: The configuration.
        upstream: The upstream to which requests are forwarded.
        wire: The wire of these requests.
        compactor: Makes requests fit.
        after_response: Does the work that follows a response, such as learning its token counts.
        gate: Lets small requests pass unparsed.
        get_secret: Returns the secret key of the digests that identify tenants.
        admission: Limits the number of concurrent requests.
        tracer: Records an OpenTelemetry span for each request. None disables tracing.
        recall_tool: Searches removed messages for models. None offers the search tool to no model.
        item_responder: Answers requests for compaction items, and decodes the proxy's own items. None if the
            wire has no such items.
        conversation_finder: Finds the conversations of small requests that name no conversation. If it is
            None, such requests belong to no conversation.
    """

    def __init__(  # noqa: PLR0913 - a request needs all of these, passed by name
        self,
        config: Config,
        upstream: Upstream,
        wire: Wire,
        *,
        compactor: Compactor,
        after_response: AfterResponseHandler,
        gate: SizeGate,
        get_secret: Callable[[], bytes],
        admission: ConcurrencyLimiter,
        tracer: "OtelTracer | None" = None,
        recall_tool: RecallTool | None = None,
        item_responder: CompactionItemResponder | None = None,
        conversation_finder: UnreadConversationFinder | None = None,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = format_origin(upstream.base_url)
        self._compactor = compactor
        self._after_response = after_response
        self._gate = gate
        self._wire = wire
        self._reader = IncrementalReader(token_bytes(KEY_BYTES), wire)
        self._identity_resolver = IdentityResolver(config, self._origin, get_secret)
        self._admission = admission
        self._tracer = tracer
        self._recall_tool = recall_tool
        self._item_responder = item_responder
        self._conversation_finder = conversation_finder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: If the path leads out of the base URL, the body is too large, a control
                header (`x-compaction…`) is invalid, or one of the proxy's compaction items cannot be
                decrypted.
            OverloadedError: If the proxy is serving too many requests, or holds too many bytes of bodies.
            ClientDisconnect: If the client left. The connection to the upstream has then been closed.
        """
        # Refuses a path outside the base URL before any work for the request begins.
        join_upstream_url(self._upstream.base_url, scope["raw_path"], scope["query_string"])
        header_map = build_header_map(scope["headers"])
        control = (
            NO_OVERRIDES if CONTROL_FIELDS.isdisjoint(header_map) else parse_control_headers(scope["headers"])
        )
        identity = self._identity_resolver.identify_client(scope["headers"])
        WORK_OWNER.set(identity.tenant)
        client_request_id = header_map.get(REQUEST_ID_HEADER)
        request_id = choose_request_id(client_request_id)
        if client_request_id is not None and client_request_id != request_id.encode():
            # The provider gets the id that the client and the log get.
            fields = drop_fields(scope["headers"], frozenset({REQUEST_ID_HEADER}))
            scope = {**scope, "headers": [*fields, (REQUEST_ID_HEADER, request_id.encode())]}
        REQUEST_ID.set(request_id)
        await self._admission.acquire_slot()
        hold = self._admission.body_budget.open_hold()
        try:
            try:
                raw = await read_body(scope, receive, self._config.server.max_body_bytes, hold)
                original, opaque = None, False
                if not BODY_FIELDS.isdisjoint(header_map):
                    scope, raw, original, opaque = await self._decode_body(scope, raw, hold)
                item_request = None
                if self._item_responder is not None:
                    item_request = await self._item_responder.read_request(raw, identity, scope)
                    expanded = await self._item_responder.items.decrypt_items_in_body(raw, scope)
                    original = original if expanded is raw else None
                    raw = expanded
                    del expanded
                identity, side_kind = await self._identity_resolver.complete_identity_and_classify(
                    identity, raw, header_map
                )
                state = RequestState(
                    identity,
                    raw,
                    scope,
                    control,
                    len(raw),
                    request_id,
                    hold,
                    side_kind,
                    original,
                    opaque,
                    item_request=item_request,
                )
                del raw, original  # so that their memory can be freed
                if self._tracer is not None:
                    state.trace = self._tracer.start_request(scope["headers"], request_id)
                is_complete = await self._relay_while_connected(state, send)
            finally:
                self._admission.release_slot()
            if is_complete:
                await self._after_response(state)
                if state.fit_request is not None:
                    self._gate.clear_cache()
            elif state.error and state.should_learn:
                await self._after_response.record_activity(state)  # people look for conversations that fail
        finally:
            hold.release()

    async def _decode_body(
        self, scope: Scope, raw: bytes, hold: BodyHold
    ) -> tuple[Scope, bytes, OriginalRequest | None, bool]:
        """Decodes the body of a request.

        Returns four values: the scope and the body as if the client had sent the body unencoded and without
        digests; the original request, or None if decoding failed; and whether decoding failed.
        """
        limit = self._config.server.max_body_bytes
        with while_connected(scope):
            decoded = await decode_request_body(raw, scope["headers"], hold, limit)
        if decoded is None:
            return scope, raw, None, True
        plain = {**scope, "headers": drop_fields(scope["headers"], BODY_FIELDS)}
        return plain, decoded, OriginalRequest(scope, raw), False

    async def _relay_while_connected(self, state: RequestState, send: Send) -> bool:
        """Relays the request while the client is connected, and then records the figures of the exchange.

        Returns whether the proxy can learn from the token counts of the response.
        """
        try:
            with while_connected(state.scope):
                tap = await self._relay_request(state, send)
            if tap is not None and not state.has_failed:
                state.usage = tap.result()
            if state.conversation_search is not None:
                await state.conversation_search
        finally:
            state.record_end(self._origin, self._after_response.exchange_log)
        return tap is not None

    async def _relay_request(self, state: RequestState, send: Send) -> UsageTap | None:
        """Makes the request fit the context window, forwards it, and streams the response to the client.

        Returns an object that has read the token counts of the response. Returns None if the client did not
        get the complete response, if nobody needs its token counts, or if the proxy itself made the response.
        """
        item_request = state.item_request
        if item_request is not None and await self._answer_item_request(item_request, send):
            return None
        await self._fit_request(state)
        self._start_conversation_search(state)
        try:
            answer = await self._send_with_recovery(state)
        except UpstreamError as error:
            cause = error.__cause__
            state.error = find_cause(cause) if isinstance(cause, httpx.TransportError) else INVALID_ANSWER
            await _wait_for_search(state)
            state.record_overhead()
            await send_error(send, error, state.build_headers(), self._wire.encode_error)
            return None
        if item_request is not None and await self._replace_upstream_answer(item_request, answer, send):
            state.status = httpx.codes.OK
            state.record_overhead()
            return None
        state.status = answer.response.status
        if state.has_failed:
            state.error = answer.find_error_code()  # `_send_with_recovery` has read its body
        async with AsyncExitStack() as stack:
            stack.push_async_callback(answer.aclose)  # if the client leaves now, nobody relays the response
            await _wait_for_search(state)
            state.caption = self._build_caption(state)
            stack.pop_all()
        state.release_bodies()
        state.record_overhead()
        if state.tool_offer is not None and answer.response.status == httpx.codes.OK:
            return await self._relay_with_recall(state, state.tool_offer, answer, send)
        if not state.should_learn:
            await relay_response(answer, send, extra_headers=state.build_headers())
            return None
        tap = self._wire.open_tap(answer.get_field(b"content-type"), answer.get_field(b"content-encoding"))
        whole = await relay_response(answer, send, extra_headers=state.build_headers(), tap=tap.feed)
        return tap if whole else None

    def _build_caption(self, state: RequestState) -> Caption:
        """Returns by what people recognise the conversation, as far as it may be stored."""
        session = self._config.session
        if not (session.store_names or session.store_titles) or state.recorded_conversation is None:
            return NO_CAPTION
        title = ""
        if session.store_titles and state.fit_request is not None:
            title = find_title(state.fit_request.body)
        elif session.store_titles and state.fit_result is None:
            with suppress(UnreadableBodyError):
                title = find_title(parse_body(state.raw, self._wire))
        return Caption(state.identity.name if session.store_names else "", title)

    def _start_conversation_search(self, state: RequestState) -> None:
        """Starts to search for the conversation of a request that is forwarded unparsed and has no id.

        The search runs while the upstream works on the request, so that the response can name the
        conversation. Starts no search if the request is a side call, such as a request for a title.
        """
        needs_no_search = (
            state.fit_result is not None or state.conversation is not None or state.side_kind is not None
        )
        if not needs_no_search and self._conversation_finder is not None:
            state.conversation_search = self._conversation_finder.start_search(
                state.identity.tenant,
                state.raw,
                find_client_by_headers(build_header_map(state.scope["headers"])),
            )

    async def _answer_item_request(self, item_request: CompactionItemRequest, send: Send) -> bool:
        """Answers a request for a compaction item, if the proxy is to do so without asking the upstream.

        Returns False, and sends nothing, if the upstream is to be asked or if compaction fails.
        """
        responder = self._item_responder
        return (
            responder is not None
            and await responder.is_answered_locally(item_request)
            and await responder.send_compaction_item(item_request, send)
        )

    async def _replace_upstream_answer(
        self, item_request: CompactionItemRequest, answer: UpstreamResponse, send: Send
    ) -> bool:
        """Answers a request for a compaction item if the upstream's response shows that it has made none.

        Returns whether the client got the proxy's response. If not, the caller relays the upstream's
        response.
        """
        responder, keep = self._item_responder, False
        if responder is None:
            return False
        try:
            keep = not (
                await responder.should_replace_answer(item_request, answer)
                and await responder.send_compaction_item(item_request, send)
            )
        finally:
            if not keep:
                await answer.aclose()
        return not keep

    async def _relay_with_recall(
        self, state: RequestState, tool_offer: ToolOffer, answer: UpstreamResponse, send: Send
    ) -> UsageTap | None:
        """Relays a response in which the model may call the offered search tool.

        Returns an object that has read the token counts of the response, or None if the client did not get
        the complete response.
        """
        send_body = partial(self._send_upstream, state)
        recall_loop = state.recall_loop = RecallLoop(tool_offer, send_body, answer.get_field(b"content-type"))
        whole = await recall_loop.relay_answer(answer, send, state.build_headers())
        state.status = recall_loop.status
        return recall_loop.client_tap if whole else None

    async def _fit_request(self, state: RequestState) -> None:
        """Decides which body to forward, and stores it in `state.fit_result`.

        A request that passes the gate is not parsed and is forwarded unchanged. Its `fit_result` stays None.
        """
        if not state.is_undecodable and not state.control_headers.has_overrides:
            models = self._gate.find_candidate_models(state.raw, find_deployment(state.scope["raw_path"]))
            state.model = min(models, default="")
            if self._gate.can_pass(state.raw, models, state.identity.tenant, state.identity.conversation):
                return
        try:
            state.fit_request = await self._build_fit_request(state)
        except UnreadableBodyError as error:
            report = CompactionReport(CompactionStatus.NONE, state.identity.conversation, reason=error.reason)
            state.fit_result = FitResult(state.raw, 0, report)
            return
        state.fit_result = await self._compactor.fit_request(state.fit_request)
        await self._mark_conversation_compacted(state, state.fit_result)
        if self._recall_tool is not None:
            state.tool_offer = await build_tool_offer(self._recall_tool, state.fit_request, state.fit_result)

    async def _mark_conversation_compacted(self, state: RequestState, fit_result: FitResult) -> None:
        """Makes the proxy parse all later requests of a conversation, if this request was compacted.

        Without this, small requests of the conversation would pass the gate, and the proxy would forward them
        uncompacted. If this request is a side call, such as a request for a title, the method does nothing.
        """
        if fit_result.is_compacted and state.side_kind is None:
            await self._gate.remember_compacted(
                state.identity.tenant, state.identity.conversation, state.size_bytes
            )

    async def _build_fit_request(self, state: RequestState) -> FitRequest:
        """Parses the request and returns it in the form that the compactor takes.

        Also finds the conversation of the request. If the request belongs to no conversation, sets
        `state.side_kind`, so that the proxy treats it as a side call.

        Raises:
            UnreadableBodyError: If the body is not a request that the proxy can change. The reason `encoded`
                means that the body cannot be decoded.
        """
        if state.is_undecodable:
            raise UnreadableBodyError("encoded")
        body = await self._reader.read_without_blocking(
            state.raw, state.identity.tenant, state.identity.conversation
        )
        if state.control_headers is NO_OVERRIDES:
            state.control_headers = parse_control_headers(state.scope["headers"])  # adds the client's timeout
        model = find_deployment(state.scope["raw_path"]) or body.model
        settings = get_model_settings(self._config, model)
        policy = resolve_policy(settings, state.control_headers.strategy)
        ask = FitRequest(
            body=body,
            model=model,
            tenant=state.identity.tenant,
            conversation=state.identity.conversation,
            origin=self._origin,
            settings=settings,
            mode=choose_stricter_mode(CompactionMode(settings.compaction.mode), state.control_headers.mode),
            trigger_tokens=state.control_headers.trigger_tokens,
            resolve_summary_routes=partial(
                build_summary_routes,
                self._config,
                settings,
                policy,
                self._upstream,
                state.scope,
                model,
                self._wire,
            ),
            patience_s=state.control_headers.patience_s,
            strategy=state.control_headers.strategy,
            can_lower_output=self._config.upstream.lower_max_tokens is not False,
            pins=state.control_headers.pins,
            client=find_client_by_headers(build_header_map(state.scope["headers"])),
            uses_checkpoints=state.identity.conversation is not None
            or self._config.session.fallback == "content",
        )
        if state.side_kind is not None:
            return ask
        # Only the members before and after the messages are searched, because the messages may be megabytes.
        start, stop = body.messages_slice
        has_tools = state.raw.find(TOOLS, 0, start) >= 0 or state.raw.find(TOOLS, stop) >= 0
        continued_ask = await self._compactor.find_conversation(ask, has_tools=has_tools)
        state.side_kind = SideRequestKind.ALONE if continued_ask is None else None
        return continued_ask or ask

    async def _send_with_recovery(self, state: RequestState) -> UpstreamResponse:
        """Forwards the request and returns the upstream's response.

        If the upstream refuses the request as too long, the method sends shorter requests until the upstream
        accepts one. If the upstream refuses a part of the request that can be left out, the method sends the
        request again without this part. If neither gives a new response, the method returns the refusal.

        Raises:
            OverloadedError: Under the conditions that `send_request` documents.
            UpstreamError: Under the conditions that `send_request` documents.
        """
        answer = await self._send_upstream(state, state.fit_result.raw if state.fit_result else state.raw)
        if _cannot_be_length_refusal(state, answer):
            return answer
        retried, is_relayed = None, False
        try:
            overflow = await detect_overflow(answer, self._wire)
            if overflow is not None:
                retried = await self._retry_shorter(state, overflow, state.to_fit_result())
            elif state.fit_result is None and answer.response.status == httpx.codes.OK:
                self._gate.record_accepted_size(state.identity.tenant, state.model, state.size_bytes)
            retried = retried or await self._retry_without_refused_part(state, answer)
            is_relayed = retried is None  # the client gets this response, even if it is a refusal
        finally:
            if not is_relayed:
                await answer.aclose()
        return retried or answer

    async def _send_upstream(self, state: RequestState, raw: bytes) -> UpstreamResponse:
        original, scope = state.original, state.scope
        if original is not None and raw is state.raw and state.tool_offer is None:
            scope, raw = original  # nothing was changed, so the original request is forwarded
        request = state.drop_reused_idempotency_key(build_request(self._upstream, scope, raw))
        if state.tool_offer is not None:
            request = apply_tool_offer(state.tool_offer, request)
        if state.trace is not None:
            request = request._replace(headers=state.trace.start_upstream_call(request.headers))
        started = time.perf_counter()
        try:
            return await send_request(self._upstream, request)
        finally:
            state.record_upstream_wait(time.perf_counter() - started)

    async def _retry_without_refused_part(
        self, state: RequestState, refused: UpstreamResponse
    ) -> UpstreamResponse | None:
        """Sends a refused request again without the search tool, or without a part that the upstream refused.

        Returns the new response. Returns None if neither the tool nor such a part seems to be the cause of
        the refusal, or if the new request gets no response.
        """
        raw: bytes | None = state.to_fit_result().raw
        if state.tool_offer is not None and await is_tool_refusal(refused):
            state.tool_offer = None
        elif refused.response.status == httpx.codes.BAD_REQUEST and raw:
            drop_content = partial(self._wire.drop_refused_content, raw, await refused.peek(PEEK_BYTES))
            raw = await run_in_worker_if_large(len(raw), drop_content)
            if (
                raw
                and state.tool_offer is not None
                and state.fit_request
                and state.fit_result
                and self._recall_tool
            ):
                state.tool_offer = await build_tool_offer(
                    self._recall_tool, state.fit_request, replace(state.fit_result, raw=raw)
                )
        else:
            return None
        try:
            return await self._send_upstream(state, raw) if raw else None
        except (OverloadedError, UpstreamError):
            return None

    async def _retry_shorter(
        self, state: RequestState, overflow: Overflow, fit_result: FitResult, refusal_count: int = 1
    ) -> UpstreamResponse | None:
        """Shortens a request that the upstream refused as too long, and sends it again.

        If the upstream also refuses the shorter request as too long, tries even shorter ones. Returns the
        response to the first request that the upstream accepts. Returns None if the request cannot be made
        shorter, if a call fails for another reason, or if the upstream has refused `MAX_REFITS` shorter
        requests.

        Args:
            state: The state of the request. The method stores the accepted request in it.
            overflow: What the refusal says about the request's length.
            fit_result: The body that was refused, with its report.
            refusal_count: The number of refusals so far.
        """
        await _wait_for_search(state)  # the search and the next line look for the same conversation
        try:
            ask = state.fit_request or await self._build_fit_request(state)
            shorter = await self._compactor.refit_after_refusal(ask, fit_result, overflow, refusal_count)
            self._gate.clear_cache()
            if shorter is None:
                return None
            await self._mark_conversation_compacted(state, shorter)
            if self._recall_tool is not None:
                state.tool_offer = await build_tool_offer(self._recall_tool, ask, shorter)
            answer = await self._send_upstream(state, shorter.raw)
        except (OverloadedError, UnreadableBodyError, UpstreamError):
            return None
        next_overflow, is_accepted = None, False
        try:
            next_overflow = await detect_overflow(answer, self._wire)
            is_accepted = next_overflow is None and answer.response.status < httpx.codes.BAD_REQUEST
        finally:
            if not is_accepted:
                await answer.aclose()
        if is_accepted:
            state.fit_request, state.fit_result, state.was_recovered = ask, shorter, True
            return answer
        if next_overflow is None or refusal_count >= MAX_REFITS:
            return None
        return await self._retry_shorter(state, next_overflow, shorter, refusal_count + 1)


async def _wait_for_search(state: RequestState) -> None:
    """Waits until the search for the conversation has ended, but at most `MAX_SEARCH_WAIT_S` seconds."""
    search = state.conversation_search
    if search is not None and not search.done():
        await asyncio.wait((search,), timeout=MAX_SEARCH_WAIT_S)


def _cannot_be_length_refusal(state: RequestState, answer: UpstreamResponse) -> bool:
    """Returns whether the proxy need not search a response for an error that refuses the request as too long.

    This is so for responses with status 200 to two kinds of requests. The body of the first kind cannot be
    parsed, so the proxy could not shorten it anyway. The body of the second kind has passed the gate and has
    fewer than `LEAST_REFUSED_BYTES` bytes, so it certainly fits.
    """
    if state.fit_request is not None or answer.response.status != httpx.codes.OK:
        return False
    return state.fit_result is not None or state.size_bytes < LEAST_REFUSED_BYTES
