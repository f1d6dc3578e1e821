"""Endpoints that relay a request and its response unchanged.

One of them relays requests that ask for a token count. A provider's count is exact and costs nothing. So the
proxy also uses it to calibrate its own estimates, after the client has its response. The other endpoint
relays all requests that contain no messages of a conversation.
"""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

import httpx
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.message_reader import CountingOptions, MessageReader
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import OverloadedError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import (
    decode_request_body,
    read_body,
    stream_body,
    while_connected,
)
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.headers import build_header_map, get_content_length, get_header
from compaction_proxy.gateway.identity import IdentityResolver, format_origin
from compaction_proxy.gateway.upstream import (
    Upstream,
    build_request,
    find_wire_name,
    relay_response,
    send_request,
)
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.support.offload import WORK_OWNER, run_in_worker
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.wires.body import decode_small_json, parse_body
from compaction_proxy.wires.content_coding import Inflater
from compaction_proxy.wires.messages.wire import MESSAGES

# A body of at most this many bytes is read as a whole, so that it can be sent again on another connection. A
# larger body is streamed.
REPLAYABLE_BYTES = 262_144
COUNT_TOKENS_ENDING: Final = b"/v1/messages/count_tokens"
# If a request for a token count has a body of more bytes than this, or does not declare the size of its body,
# the proxy relays the request but does not learn from the response.
MAX_COUNTED_BYTES: Final = 4 * 1024 * 1024
# The most bytes of a response in which the proxy looks for a token count. A count is a short JSON object, so
# a longer response holds no count.
_MAX_ANSWER_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class PassthroughEndpoint:
    """An ASGI endpoint that relays any request, of any size, without parsing it.

    Attributes:
        upstreams: The upstreams by the names of their wires.
        admission: Limits the number of concurrent requests of all endpoints together.
        identity_resolver: Identifies the tenant, whose requests share limits.
    """

    upstreams: Mapping[str, Upstream]
    admission: ConcurrencyLimiter
    identity_resolver: IdentityResolver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relays one request.

        Raises:
            OverloadedError: If the proxy is serving too many requests, or holds too many bytes of bodies.
            UpstreamError: If the upstream gave no response.
            ClientDisconnect: If the client left. The connection to the upstream has then been closed.
        """
        WORK_OWNER.set(self.identity_resolver.identify_client(scope["headers"]).tenant)
        async with self.admission.admit_request() as hold:
            upstream = self.upstreams[find_wire_name(scope["raw_path"], build_header_map(scope["headers"]))]
            length = get_content_length(scope["headers"])
            if length is None and get_header(scope["headers"], b"transfer-encoding") is None:
                length = 0
            if length is not None and length <= REPLAYABLE_BYTES:
                body = await read_body(scope, receive, REPLAYABLE_BYTES, hold) if length else b""
                request = build_request(upstream, scope, body)
            else:
                request = build_request(upstream, scope, stream_body(receive), length)
            with while_connected(scope):
                await relay_response(await send_request(upstream, request), send)


class CountTokensEndpoint:
    """An ASGI endpoint that relays requests for token counts, and calibrates estimates with the counts.

    Args:
        config: The configuration.
        upstream: The upstream of the Messages wire.
        passthrough: Relays the requests from which the proxy does not learn.
        message_reader: Makes the proxy's own estimate, with which the provider's count is compared.
        model_limits: Calibrates estimates with the provider's count.
        get_secret: Returns the secret key of the digests that identify tenants.
        admission: Limits the number of concurrent requests.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        passthrough: PassthroughEndpoint,
        message_reader: MessageReader,
        model_limits: ModelLimits,
        get_secret: Callable[[], bytes],
        admission: ConcurrencyLimiter,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._passthrough = passthrough
        self._message_reader = message_reader
        self._model_limits = model_limits
        self._admission = admission
        self._origin = format_origin(upstream.base_url)
        self._identity_resolver = IdentityResolver(config, self._origin, get_secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relays one request.

        Raises:
            OverloadedError: If the proxy is serving too many requests, or holds too many bytes of bodies.
            UpstreamError: If the upstream gave no response.
            ClientDisconnect: If the client left. The connection to the upstream has then been closed.
        """
        length = get_content_length(scope["headers"])
        if length is None or length > min(MAX_COUNTED_BYTES, self._admission.body_budget.limit_bytes):
            await self._passthrough(scope, receive, send)
            return
        WORK_OWNER.set(self._identity_resolver.identify_client(scope["headers"]).tenant)
        async with self._admission.admit_request() as hold:
            raw = await read_body(scope, receive, MAX_COUNTED_BYTES, hold)
            provider_tokens = await self._relay_request(scope, send, raw)
            if provider_tokens is not None:
                with suppress_and_log(RESPONSE_NOT_OBSERVED):
                    await self._calibrate_estimate(scope, raw, provider_tokens, hold)

    async def _relay_request(self, scope: Scope, send: Send, raw: bytes) -> int | None:
        """Relays the request and its response. Returns the provider's token count.

        Returns None if the response has no count, is not complete, or has a status other than 200.
        """
        with while_connected(scope):
            opened = await send_request(self._upstream, build_request(self._upstream, scope, raw))
            async with aclosing(opened) as answer:
                beginning = await answer.peek(_MAX_ANSWER_BYTES)
                whole = await relay_response(answer, send)
        if not whole or answer.response.status != httpx.codes.OK:
            return None
        encoding = answer.get_field(b"content-encoding")
        payload = decode_small_json(Inflater(encoding, _MAX_ANSWER_BYTES).feed(beginning))
        tokens = payload.get("input_tokens") if isinstance(payload, dict) else None
        return tokens if type(tokens) is int else None

    async def _calibrate_estimate(
        self, scope: Scope, raw: bytes, provider_tokens: int, hold: BodyHold
    ) -> None:
        try:
            decoded = await decode_request_body(raw, scope["headers"], hold, MAX_COUNTED_BYTES)
            if decoded is None:
                return
            body = await run_in_worker(partial(parse_body, decoded, MESSAGES))
            options = CountingOptions(
                body.model, get_model_settings(self._config, body.model).compaction.counter, MESSAGES
            )
            messages = await self._message_reader.read_request(body, options)
        except (OverloadedError, RequestRefusedError, UnreadableBodyError):
            return
        if messages.has_guessed_tokens:  # images, whose tokens we can only guess
            return
        estimate = messages.tokens + await self._message_reader.count_overhead(body.prompt_members, options)
        tenant = self._identity_resolver.identify_client(scope["headers"]).tenant
        await self._model_limits.learn_token_count(
            tenant, self._origin, body.model, estimate, provider_tokens
        )
