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

from proxy.body_budget import BodyHold
from proxy.compaction.beside import beside
from proxy.config.model import Config, for_model
from proxy.dialects.body import read, small
from proxy.dialects.inflate import IDENTITY, Inflater
from proxy.dialects.messages.wire import MESSAGES
from proxy.errors import Overloaded, RequestRefused, Unreadable
from proxy.guard import contained
from proxy.learning import Learning
from proxy.log_events import NOT_OBSERVED
from proxy.reading import Gauge, Reading
from proxy.relay.admission import Admission
from proxy.relay.blind import Blind
from proxy.relay.exchange import Upstream, build_request, open_answer, relay_back
from proxy.relay.headers import content_length, first_values
from proxy.relay.identity import origin
from proxy.relay.inbound import read_body, while_connected
from proxy.relay.whose import Whose

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
