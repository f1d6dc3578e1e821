"""The endpoint for requests that ask the provider to count the tokens of a conversation.

The endpoint relays request and answer unchanged. The provider's count is exact and costs nothing, so the
proxy also uses it to calibrate its own estimates. It does so after the client has its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.message_reader import CountingOptions, MessageReader
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import OverloadedError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.headers import build_header_map, get_content_length
from compaction_proxy.gateway.identity import IdentityResolver, format_origin
from compaction_proxy.gateway.passthrough import PassthroughEndpoint
from compaction_proxy.gateway.upstream import Upstream, build_request, relay_response, send_request
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.body import decode_small_json, parse_body
from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.messages.wire import MESSAGES

PATH_ENDING: Final = b"/v1/messages/count_tokens"
# A request whose body has more bytes is relayed unread. So is a request that does not declare its size.
MAX_READ_BYTES: Final = 4 * 1024 * 1024
# The most bytes of an answer that are read. A count is a short JSON object, so a longer answer holds no
# count.
_MAX_ANSWER_BYTES: Final = 65_536

_log = structlog.get_logger()


@dataclass(slots=True)
class _CountAnswerReader:
    """Collects the first `_MAX_ANSWER_BYTES` of an answer, and parses the count in them."""

    body: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> None:
        self.body += chunk[: _MAX_ANSWER_BYTES - len(self.body)]

    def parse_input_tokens(self, encoding: str) -> int | None:
        """Returns the number of tokens that the answer states, or None if it states none."""
        plain = encoding.strip().lower() in IDENTITY
        body = bytes(self.body) if plain else Inflater(encoding, _MAX_ANSWER_BYTES).feed(bytes(self.body))
        payload = decode_small_json(body)
        token_count = payload.get("input_tokens") if isinstance(payload, dict) else None
        return token_count if type(token_count) is int else None


class CountTokensEndpoint:
    """An ASGI endpoint that relays requests to count tokens.

    Args:
        config: The configuration.
        upstream: The upstream of the Messages wire.
        passthrough: Relays requests that are not read.
        message_reader: Counts the tokens of messages for our own estimate, as it does for other requests.
        model_limits: Learns from the provider's count.
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
            OverloadedError: The proxy is serving too many requests, or too many bytes of them, at once.
            UpstreamError: The upstream gave no answer.
            ClientDisconnect: The client left, and the connection to the upstream was closed.
        """
        length = get_content_length(scope["headers"])
        if length is None or length > min(MAX_READ_BYTES, self._admission.body_budget.limit_bytes):
            await self._passthrough(scope, receive, send)
            return
        if not self._admission.try_acquire_slot():
            await self._admission.wait_for_slot()
        hold = self._admission.body_budget.open_hold()
        try:
            try:
                raw = await read_body(scope, receive, MAX_READ_BYTES, hold, length)
                provider_tokens = await self._relay_request(scope, send, raw)
            finally:
                self._admission.release_slot()
            if provider_tokens is not None:
                with suppress_and_report(_log_not_observed):
                    await self._calibrate_estimate(scope, raw, provider_tokens, hold)
        finally:
            hold.release()

    async def _relay_request(self, scope: Scope, send: Send, raw: bytes) -> int | None:
        """Relays the request and its answer. Returns the provider's count, or None if the answer has none."""
        reader = _CountAnswerReader()
        with while_connected(scope):
            answer = await send_request(self._upstream, build_request(self._upstream, scope, raw))
            succeeded = answer.response.status == httpx.codes.OK
            whole = await relay_response(answer, send, tap=reader.feed)
        return (
            reader.parse_input_tokens(answer.get_field(b"content-encoding")) if succeeded and whole else None
        )

    async def _calibrate_estimate(
        self, scope: Scope, raw: bytes, provider_tokens: int, hold: BodyHold
    ) -> None:
        try:
            decoded = await self._admission.decoder.decode(raw, scope["headers"], hold, MAX_READ_BYTES)
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
        identity = self._identity_resolver.identify_client(
            scope["headers"], build_header_map(scope["headers"])
        )
        await self._model_limits.learn_token_count(
            identity.tenant, self._origin, body.model, estimate, provider_tokens
        )


def _log_not_observed(error: BaseException) -> None:
    _log.warning(RESPONSE_NOT_OBSERVED, error=type(error).__name__)
