"""The endpoint of the compacted paths: the way of a request, from its bytes to the end of its answer."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from secrets import token_bytes

import httpx
from starlette.types import Receive, Scope, Send

from proxy.compaction.compactor import REPLAYS, Compactor
from proxy.compaction.fitting import Ask, Fit, Mode, Report, Status
from proxy.compaction.policies import policy_for
from proxy.config.model import Config, ModelSettings, for_model
from proxy.dialects.chat_reader import KEY_BYTES, Reader
from proxy.dialects.overflow import detect
from proxy.dialects.usage import UsageTap
from proxy.errors import Unreadable, UpstreamError
from proxy.relay.aftermath import Aftermath, Answered
from proxy.relay.control import Control, control, report_headers
from proxy.relay.exchange import Answer, Upstream, build_request, open_answer, relay_back, send_error
from proxy.relay.gate import Gate
from proxy.relay.headers import Headers, value
from proxy.relay.identity import conversation, tenant
from proxy.relay.inbound import read_body, while_connected
from proxy.relay.paths import deployment
from proxy.relay.summary_routes import summary_routes

# How much of an error's body is looked at, in bytes.
PEEK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Who:
    """Whose request it is.

    Attributes:
        tenant: Digest of the credential.
        conversation: Id of the conversation, if a header named one.
    """

    tenant: str
    conversation: str | None


@dataclass(slots=True)
class _Passage:
    """One request on its way."""

    who: Who
    raw: bytes
    scope: Scope
    control: Control
    fit: Fit
    ask: Ask | None = None
    overhead_s: float = 0.0

    def headers(self) -> Headers:
        """Our response headers; a request that passed the gate carries its status only."""
        return report_headers(self.fit.report, self.overhead_s if self.ask else None)


class Chat:
    """An ASGI endpoint that makes requests fit and relays them.

    Args:
        config: The configuration.
        upstream: Where requests go.
        origin: Of the upstream, as identities name it.
        compactor: Makes requests fit.
        aftermath: Learns from answers.
        gate: Lets small requests through.
        secret: Gives the key of the digests that tell tenants apart.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        origin: str,
        *,
        compactor: Compactor,
        aftermath: Aftermath,
        gate: Gate,
        secret: Callable[[], bytes],
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = origin
        self._compactor = compactor
        self._aftermath = aftermath
        self._gate = gate
        self._secret = secret
        self._reader = Reader(token_bytes(KEY_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RequestRefused: The body is too large, or a header of ours makes no sense.
            ClientDisconnect: The client left; the upstream has been hung up on.
        """
        wishes = control(scope["headers"])
        raw = await read_body(scope, receive, self._config.server.max_body_bytes)
        passage = _Passage(self._who(scope), raw, scope, wishes, Fit(raw, 0, Report(Status.NONE)))
        async with while_connected(receive):
            tap = await self._relay(passage, send)
        if tap is not None:
            named = passage.fit.report.conversation or passage.who.conversation
            await self._aftermath(
                Answered(
                    passage.who.tenant, named, passage.raw, scope, passage.ask, passage.fit, tap.result()
                )
            )

    async def _relay(self, passage: _Passage, send: Send) -> UsageTap | None:
        """Fit, forward, stream back; the tap that watched, or None if the answer was cut."""
        started = time.perf_counter()
        await self._fit(passage)
        passage.overhead_s += time.perf_counter() - started
        try:
            answer = await self._answer(passage)
        except UpstreamError as error:
            await send_error(send, error, passage.headers())
            return None
        tap = UsageTap(answer.field(b"content-type"), answer.field(b"content-encoding"))
        extra = passage.headers()
        whole = await relay_back(answer, send, extra=extra, tap=tap.feed)
        return tap if whole else None

    def _who(self, scope: Scope) -> Who:
        session = self._config.session
        whose = tenant(scope["headers"], self._secret(), self._origin, session.tenant)
        named = conversation(scope["headers"], session.headers, self._secret(), whose)
        return Who(whose, named)

    async def _fit(self, passage: _Passage) -> None:
        """Decide what to forward."""
        path_model = deployment(passage.scope["raw_path"])
        if not passage.control.in_force and self._gate.passes(
            passage.raw, path_model, passage.who.tenant, passage.who.conversation
        ):
            return
        try:
            passage.ask = self._ask(passage)
        except Unreadable as error:
            report = Report(Status.NONE, passage.who.conversation, reason=error.reason)
            passage.fit = replace(passage.fit, report=report)
            return
        passage.fit = await self._compactor.fit(passage.ask)
        if passage.fit.report.round is not None:
            self._gate.remember(passage.who.conversation)

    def _ask(self, passage: _Passage) -> Ask:
        """The request as the compactor takes it.

        Raises:
            Unreadable: It is no chat request, or an encoded one (`encoded`).
        """
        if value(passage.scope["headers"], b"content-encoding") not in {None, b"identity"}:
            raise Unreadable("encoded")
        body = self._reader.read(passage.raw, passage.who.tenant, passage.who.conversation)
        model = deployment(passage.scope["raw_path"]) or body.model
        settings = for_model(self._config, model)
        policy = policy_for(settings, passage.control.strategy)
        return Ask(
            body=body,
            model=model,
            tenant=passage.who.tenant,
            conversation=passage.who.conversation,
            origin=self._origin,
            settings=settings,
            mode=self._mode(passage, settings),
            trigger_tokens=passage.control.trigger_tokens,
            routes=summary_routes(self._config, settings, policy, self._upstream, passage.scope, model),
            patience_s=passage.control.patience_s,
            strategy=passage.control.strategy,
            lower_output=self._config.upstream.lower_max_tokens,
            pins=passage.control.pins,
            remembered=passage.who.conversation is not None or self._config.session.fallback == "content",
        )

    def _mode(self, passage: _Passage, settings: ModelSettings) -> Mode:
        """The stricter of what is configured and what the request asks for."""
        configured = Mode(settings.compaction.mode)
        asked = passage.control.mode
        if asked is None or configured is Mode.BYPASS:
            return configured
        return Mode.SHADOW if configured is Mode.SHADOW and asked is Mode.FORCE else asked

    async def _answer(self, passage: _Passage) -> Answer:
        """The upstream's answer; where it refuses the request as too long, that of a shorter one."""
        answer = await self._open(passage.scope, passage.fit.raw)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(answer.aclose)
            shorter = None
            if await _may_be_refusal(answer, gated=passage.ask is None):
                shorter = await self._recovered(passage, answer, passage.fit)
            if shorter is None:
                stack.pop_all()  # the refusal is what the client gets
        return shorter or answer

    async def _open(self, scope: Scope, raw: bytes) -> Answer:
        return await open_answer(self._upstream, build_request(self._upstream, scope, raw))

    async def _recovered(
        self, passage: _Passage, refused: Answer, fit: Fit, refusals: int = 1
    ) -> Answer | None:
        """The answer to a shorter request, if `fit` was refused for its length and a shorter one is taken."""
        status = refused.response.status
        seen = await refused.peek(1 if status == httpx.codes.OK else PEEK_BYTES)
        overflow = detect(status, seen, refused.field(b"content-encoding"))
        if overflow is None:
            return None
        started = time.perf_counter()
        try:
            ask = passage.ask or self._ask(passage)
            shorter = await self._compactor.refit(ask, fit, overflow, refusals)
            passage.overhead_s += time.perf_counter() - started
            answer = await self._open(passage.scope, shorter.raw) if shorter else None
        except (Unreadable, UpstreamError):
            return None
        if shorter is None or answer is None:
            return None
        if answer.response.status < httpx.codes.BAD_REQUEST:
            passage.ask, passage.fit = ask, shorter
            return answer
        async with aclosing(answer):
            again = refusals < REPLAYS
            return await self._recovered(passage, answer, shorter, refusals + 1) if again else None


async def _may_be_refusal(answer: Answer, *, gated: bool) -> bool:
    """Whether an answer may say that the request is too long: an error, or a 200 that begins with one.

    Some local servers refuse inside a stream that has already begun. For a request large enough to have been
    read the first chunk is awaited before the status is relayed; it is relayed with it.
    """
    if answer.response.status != httpx.codes.OK:
        return answer.response.status >= httpx.codes.BAD_REQUEST
    return not gated and b"error" in (await answer.peek(1))[:PEEK_BYTES]
