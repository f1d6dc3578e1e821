"""The endpoint that asks the provider to count a request: relayed byte for byte, and learned from.

What it answers is exact and costs nothing, so it calibrates our own counts, once the client has it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.message_reader import Gauge, Reading
from compaction_proxy.config.config import Config, for_model
from compaction_proxy.core.errors import Overloaded, RequestRefused, Unreadable
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.concurrency_limit import Admission
from compaction_proxy.gateway.headers import content_length, first_values
from compaction_proxy.gateway.identity import Whose, origin
from compaction_proxy.gateway.passthrough import Blind
from compaction_proxy.gateway.upstream import Upstream, build_request, open_answer, relay_back
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import NOT_OBSERVED
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.body import read, small
from compaction_proxy.wires.decompress import IDENTITY, Inflater
from compaction_proxy.wires.messages.wire import MESSAGES

ENDING: Final = b"/v1/messages/count_tokens"
# A larger request is relayed without being read, as is one that does not say how large it is.
MAX_READ_BYTES: Final = 4 * 1024 * 1024
# An answer is a number; a larger one is none.
_MAX_ANSWER_BYTES: Final = 65_536

_log = structlog.get_logger()


@dataclass(slots=True)
class _Seen:
    """The beginning of an answer, as far as it could be a count."""

    body: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> None:
        self.body += chunk[: _MAX_ANSWER_BYTES - len(self.body)]

    def tokens(self, encoding: str) -> int | None:
        """What it counts; None if it is no count."""
        plain = encoding.strip().lower() in IDENTITY
        body = bytes(self.body) if plain else Inflater(encoding, _MAX_ANSWER_BYTES).feed(bytes(self.body))
        told = small(body)
        counted = told.get("input_tokens") if isinstance(told, dict) else None
        return counted if type(counted) is int else None


class CountTokens:
    """An ASGI endpoint that relays requests to count tokens.

    Args:
        config: The configuration.
        upstream: Where requests of the Messages wire go.
        blind: Relays what is not read.
        reading: Counts as it does for requests of conversations.
        learning: Is told what the provider has counted.
        secret: Gives the key of the digests that tell tenants apart.
        admission: Places for requests under way.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        *,
        blind: Blind,
        reading: Reading,
        learning: Learning,
        secret: Callable[[], bytes],
        admission: Admission,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._blind = blind
        self._reading = reading
        self._learning = learning
        self._admission = admission
        self._origin = origin(upstream.base_url)
        self._whose = Whose(config, self._origin, secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request.

        Raises:
            Overloaded: There are too many requests.
            UpstreamError: There was no answer.
            ClientDisconnect: The client left; the upstream has been hung up on.
        """
        length = content_length(scope["headers"])
        if length is None or length > min(MAX_READ_BYTES, self._admission.bodies.most_bytes):
            await self._blind(scope, receive, send)
            return
        if not self._admission.entered():
            await self._admission.wait()
        hold = self._admission.bodies.open()
        try:
            try:
                raw = await read_body(scope, receive, MAX_READ_BYTES, hold, length)
                counted = await self._relay(scope, receive, send, raw)
            finally:
                self._admission.leave()
            if counted is not None:
                with contained(_not_observed):
                    await self._learn(scope, raw, counted, hold)
        finally:
            hold.release()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, raw: bytes) -> int | None:
        """Relay there and back; what was counted, if anything was."""
        seen = _Seen()
        async with while_connected(scope, receive):
            answer = await open_answer(self._upstream, build_request(self._upstream, scope, raw))
            succeeded = answer.response.status == httpx.codes.OK
            whole = await relay_back(answer, send, tap=seen.feed)
        return seen.tokens(answer.field(b"content-encoding")) if succeeded and whole else None

    async def _learn(self, scope: Scope, raw: bytes, counted: int, hold: BodyHold) -> None:
        try:
            decoded = await self._admission.decoder.decode(raw, scope["headers"], hold, MAX_READ_BYTES)
            if decoded is None:
                return
            body = await beside(partial(read, decoded, MESSAGES))
            gauge = Gauge(body.model, for_model(self._config, body.model).compaction.counter, MESSAGES)
            listed = await self._reading.listed(body, gauge)
        except (Overloaded, RequestRefused, Unreadable):
            return
        if listed.guessed:  # images, whose tokens are not ours to count
            return
        estimate = listed.tokens + await self._reading.overhead(body.prompt_members, gauge)
        who = self._whose.of(scope["headers"], first_values(scope["headers"]))
        await self._learning.observed(who.tenant, self._origin, body.model, estimate, counted)


def _not_observed(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
