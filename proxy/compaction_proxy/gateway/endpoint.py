"""The endpoint of the compacted paths: the way of a request, from its bytes to the end of its answer."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from secrets import token_bytes

import httpx
from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.compactor import REPLAYS, Compactor
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.compaction.types import Ask, Fit, Mode, Report, Status
from compaction_proxy.config.config import Config, for_model
from compaction_proxy.core.errors import Overloaded, Unreadable, UpstreamError
from compaction_proxy.gateway.after_response import Aftermath, Answered
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.body_decoder import CONTENT_ENCODING, OriginalRequest
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.compaction_trigger import TriggerRequest, TriggerResponder
from compaction_proxy.gateway.concurrency_limit import Admission
from compaction_proxy.gateway.control_headers import ASKING, Control, control, stricter
from compaction_proxy.gateway.headers import drop_field, first_values, length_of
from compaction_proxy.gateway.identity import Whose, origin
from compaction_proxy.gateway.overflow_probe import too_long
from compaction_proxy.gateway.paths import deployment
from compaction_proxy.gateway.recall_loop import Course, Offer, asked_with, minds, offer
from compaction_proxy.gateway.recall_relay import relay_one
from compaction_proxy.gateway.request_state import Passage, request_id
from compaction_proxy.gateway.side_requests import Side
from compaction_proxy.gateway.size_gate import Gate
from compaction_proxy.gateway.summary_routes import summary_routes
from compaction_proxy.gateway.unread_conversations import TOOLS, UnreadConversations
from compaction_proxy.gateway.upstream import (
    PEEK_BYTES,
    Answer,
    Upstream,
    build_request,
    open_answer,
    relay_back,
    send_error,
)
from compaction_proxy.recall.tool import Memory
from compaction_proxy.telemetry.logs import REQUEST
from compaction_proxy.telemetry.tracing import Tracer
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.incremental_reader import KEY_BYTES, Reader
from compaction_proxy.wires.project_instructions import find_client
from compaction_proxy.wires.wire import Dialect, Tap

USUAL = Control()
# No model's window is so small that a smaller body is refused inside an answer of status 200.
LEAST_REFUSED_BYTES = 8_192


class Endpoint:
    """An ASGI endpoint that makes requests fit and relays them.

    Args:
        config: The configuration.
        upstream: Where requests go.
        dialect: Their wire.
        compactor: Makes requests fit.
        aftermath: Learns from answers.
        gate: Lets small requests through.
        secret: Gives the key of the digests that tell tenants apart.
        admission: Places for requests under way.
        tracer: Follows requests; None: nobody does.
        memory: What models may search; None: no model is offered that.
        triggers: Answers requests for compaction items, and opens those of ours. None: the wire has none.
        unread: Finds the conversations of small requests. None: those without an id have none.
    """

    def __init__(  # noqa: PLR0913 - all that a request needs, by name
        self,
        config: Config,
        upstream: Upstream,
        dialect: Dialect,
        *,
        compactor: Compactor,
        aftermath: Aftermath,
        gate: Gate,
        secret: Callable[[], bytes],
        admission: Admission,
        tracer: Tracer | None = None,
        memory: Memory | None = None,
        triggers: TriggerResponder | None = None,
        unread: UnreadConversations | None = None,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = origin(upstream.base_url)
        self._compactor = compactor
        self._aftermath = aftermath
        self._gate = gate
        self._dialect = dialect
        self._reader = Reader(token_bytes(KEY_BYTES), dialect)
        self._whose = Whose(config, self._origin, secret)
        self._admission = admission
        self._tracer = tracer
        self._memory = memory
        self._triggers = triggers
        self._unread = unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RequestRefused: The body is too large, a header of ours makes no sense, or a compaction item of
                ours does not open.
            Overloaded: There are too many requests, or too many bytes of them.
            ClientDisconnect: The client left; the upstream has been hung up on.
        """
        first = first_values(scope["headers"])
        wishes = USUAL if ASKING.isdisjoint(first) else control(scope["headers"])
        if not self._admission.entered():
            await self._admission.wait()
        hold = self._admission.bodies.open()
        try:
            try:
                who = self._whose.of(scope["headers"], first)
                name = request_id(first.get(b"x-request-id"))
                REQUEST.set(name)
                declared = length_of(first.get(b"content-length"))
                raw = await read_body(scope, receive, self._config.server.max_body_bytes, hold, declared)
                original, opaque = None, False
                if CONTENT_ENCODING in first:
                    scope, raw, original, opaque = await self._decode(scope, receive, raw, hold)
                trigger = None
                if self._triggers is not None:
                    trigger = await self._triggers.read_request(raw, who, scope)
                    expanded = await self._triggers.items.expand(raw, scope)
                    original = original if expanded is raw else None
                    raw = expanded
                    del expanded
                who, side = await self._whose.placed(who, raw, first)
                passage = Passage(
                    who, raw, scope, wishes, len(raw), name, hold, side, original, opaque, trigger=trigger
                )
                del raw, original  # so that they can be let go of
                if self._tracer is not None:
                    passage.trace = self._tracer.began(scope["headers"], name)
                answered = await self._attended(passage, receive, send)
            finally:
                self._admission.leave()
            if answered is not None:
                await self._aftermath(answered)
                if passage.ask is not None:
                    self._gate.reconsider()
        finally:
            hold.release()

    async def _decode(
        self, scope: Scope, receive: Receive, raw: bytes, hold: BodyHold
    ) -> tuple[Scope, bytes, OriginalRequest | None, bool]:
        """Decode a body. Returns the request as if it had come so, as it came, and whether that failed."""
        decoder, limit = self._admission.decoder, self._config.server.max_body_bytes
        async with while_connected(scope, receive):
            decoded = await decoder.decode(raw, scope["headers"], hold, limit)
        if decoded is None or decoded is raw:
            return scope, raw, None, decoded is None
        plain = {**scope, "headers": drop_field(scope["headers"], CONTENT_ENCODING)}
        return plain, decoded, OriginalRequest(scope, raw), False

    async def _attended(self, passage: Passage, receive: Receive, send: Send) -> Answered | None:
        """Relay while the client is there, and note how it went; what can be learned, if anything."""
        usage = None
        try:
            async with while_connected(passage.scope, receive):
                tap = await self._relay(passage, send)
            usage = tap.result() if tap is not None and not passage.failed else None
            if passage.search is not None:
                passage.who = replace(passage.who, conversation=await passage.search)
        finally:
            passage.ended(usage, self._origin, self._aftermath.notes)
        return None if tap is None else passage.answered(usage)

    async def _relay(self, passage: Passage, send: Send) -> Tap | None:
        """Fit, forward, stream back; the tap that watched, or None if nothing is to be learned."""
        trigger = passage.trigger
        if trigger is not None and await self._answer_known(trigger, send):
            return None
        await self._fit(passage)
        try:
            answer = await self._answer(passage)
        except UpstreamError as error:
            passage.settled()
            await send_error(send, error, passage.headers(), self._dialect.error)
            return None
        if trigger is not None and await self._replace_answer(trigger, answer, send):
            passage.code = httpx.codes.OK
            passage.settled()
            return None
        passage.code = answer.response.status
        self._search_conversation(passage)
        passage.release()
        passage.settled()
        if passage.offer is not None and answer.response.status == httpx.codes.OK:
            return await self._relay_one(passage, passage.offer, answer, send)
        if not passage.teaches:
            await relay_back(answer, send, extra=passage.headers())
            return None
        tap = self._dialect.tap(answer.field(b"content-type"), answer.field(b"content-encoding"))
        whole = await relay_back(answer, send, extra=passage.headers(), tap=tap.feed)
        return tap if whole else None

    def _search_conversation(self, passage: Passage) -> None:
        """Begin to look for the conversation of a request that went on unread, if its client named none."""
        known = passage.fit is not None or passage.conversation is not None or passage.side is not None
        if not known and self._unread is not None and passage.code == httpx.codes.OK:
            passage.search = self._unread.start_search(
                passage.who.tenant, passage.raw, find_client(first_values(passage.scope["headers"]))
            )

    async def _answer_known(self, trigger: TriggerRequest, send: Send) -> bool:
        """Answer a trigger if the upstream is known not to. Returns whether it was answered."""
        triggers = self._triggers
        return (
            triggers is not None and await triggers.is_ours(trigger) and await triggers.respond(trigger, send)
        )

    async def _replace_answer(self, trigger: TriggerRequest, answer: Answer, send: Send) -> bool:
        """Answer a trigger in place of an upstream that does not. Returns whether it was answered."""
        triggers, keep = self._triggers, False
        if triggers is None:
            return False
        try:
            keep = not (await triggers.lacks_item(trigger, answer) and await triggers.respond(trigger, send))
        finally:
            if not keep:
                await answer.aclose()
        return not keep

    async def _relay_one(self, passage: Passage, made: Offer, answer: Answer, send: Send) -> Tap | None:
        """Relay an answer that may call the tool it was offered; see `_relay`."""
        asking = partial(self._open, passage)
        course = passage.course = Course(made, asking, answer.field(b"content-type"))
        whole = await relay_one(course, answer, send, passage.headers())
        passage.code = course.code
        return course.tap if whole else None

    async def _fit(self, passage: Passage) -> None:
        """Decide what to forward."""
        if not passage.opaque and not passage.control.in_force and self._passes(passage):
            return
        try:
            passage.ask = await self._ask(passage)
        except Unreadable as error:
            report = Report(Status.NONE, passage.who.conversation, reason=error.reason)
            passage.fit = Fit(passage.raw, 0, report)
            return
        passage.fit = await self._compactor.fit(passage.ask)
        await self._remember(passage, passage.fit)
        if self._memory is not None:
            passage.offer = await offer(self._memory, passage.ask, passage.fit)

    async def _remember(self, passage: Passage, fit: Fit) -> None:
        """Have later requests of a compacted conversation read, on every replica."""
        if fit.compacted and passage.side is None:
            await self._gate.remember(passage.who.tenant, passage.who.conversation, passage.size)

    def _passes(self, passage: Passage) -> bool:
        """Whether a request is too small to be read."""
        who = passage.who
        models = self._gate.models(passage.raw, deployment(passage.scope["raw_path"]))
        passage.model = min(models, default="")
        return self._gate.passes(passage.raw, models, who.tenant, who.conversation)

    async def _ask(self, passage: Passage) -> Ask:
        """The request as the compactor takes it.

        Raises:
            Unreadable: It is no request that we could rewrite, or its body cannot be decoded (`encoded`).
        """
        if passage.opaque:
            raise Unreadable("encoded")
        body = await self._reader.read_beside(passage.raw, passage.who.tenant, passage.who.conversation)
        if passage.control is USUAL:
            passage.control = control(passage.scope["headers"])  # with what only matters here
        model = deployment(passage.scope["raw_path"]) or body.model
        settings = for_model(self._config, model)
        policy = policy_for(settings, passage.control.strategy)
        ask = Ask(
            body=body,
            model=model,
            tenant=passage.who.tenant,
            conversation=passage.who.conversation,
            origin=self._origin,
            settings=settings,
            mode=stricter(Mode(settings.compaction.mode), passage.control.mode),
            trigger_tokens=passage.control.trigger_tokens,
            whom=partial(
                summary_routes,
                self._config,
                settings,
                policy,
                self._upstream,
                passage.scope,
                model,
                self._dialect,
            ),
            patience_s=passage.control.patience_s,
            strategy=passage.control.strategy,
            lower_output=self._config.upstream.lower_max_tokens is not False,
            pins=passage.control.pins,
            client=find_client(first_values(passage.scope["headers"])),
            remembered=passage.who.conversation is not None or self._config.session.fallback == "content",
        )
        if passage.side is not None:
            return ask
        found = await self._compactor.find_conversation(ask, has_tools=TOOLS in passage.raw)
        passage.side = Side.ALONE if found is None else None
        return found or ask

    async def _answer(self, passage: Passage) -> Answer:
        """The upstream's answer; that of another request where it refuses what we can leave out."""
        answer = await self._open(passage, passage.fit.raw if passage.fit else passage.raw)
        if _cannot_be_refusal(passage, answer):
            return answer
        shorter, given = None, False
        try:
            overflow = await too_long(answer, self._dialect)
            if overflow is not None:
                shorter = await self._recovered(passage, overflow, passage.whole())
            elif passage.fit is None and answer.response.status == httpx.codes.OK:
                self._gate.note_accepted(passage.who.tenant, passage.model, passage.size)
            shorter = shorter or await self._mended(passage, answer)
            given = shorter is None  # a refusal, too, is what the client gets then
        finally:
            if not given:
                await answer.aclose()
        return shorter or answer

    async def _open(self, passage: Passage, raw: bytes) -> Answer:
        original, scope = passage.original, passage.scope
        if original is not None and raw is passage.raw and passage.offer is None:
            scope, raw = original  # nothing was changed: it goes on as it came
        request = passage.named(build_request(self._upstream, scope, raw))
        if passage.offer is not None:
            request = asked_with(passage.offer, request)
        if passage.trace is not None:
            request = request._replace(headers=passage.trace.asked(request.headers))
        started = time.perf_counter()
        try:
            return await open_answer(self._upstream, request)
        finally:
            passage.waited(time.perf_counter() - started)

    async def _mended(self, passage: Passage, refused: Answer) -> Answer | None:
        """The answer to a request without the tool that it was offered, or what else was refused of it."""
        raw: bytes | None = passage.whole().raw
        if passage.offer is not None and await minds(refused):
            passage.offer = None
        elif refused.response.status == httpx.codes.BAD_REQUEST and raw:
            raw = self._dialect.mended(raw, await refused.peek(PEEK_BYTES))
            if raw and passage.offer is not None and passage.ask and passage.fit and self._memory:
                passage.offer = await offer(self._memory, passage.ask, replace(passage.fit, raw=raw))
        else:
            return None
        try:
            return await self._open(passage, raw) if raw else None
        except (Overloaded, UpstreamError):
            return None

    async def _recovered(
        self, passage: Passage, overflow: Overflow, fit: Fit, refusals: int = 1
    ) -> Answer | None:
        """The answer to a shorter request, if `fit` was refused for its length and a shorter one is taken."""
        try:
            ask = passage.ask or await self._ask(passage)
            shorter = await self._compactor.refit(ask, fit, overflow, refusals)
            self._gate.reconsider()
            if shorter is None:
                return None
            await self._remember(passage, shorter)
            if self._memory is not None:
                passage.offer = await offer(self._memory, ask, shorter)
            answer = await self._open(passage, shorter.raw)
        except (Overloaded, Unreadable, UpstreamError):
            return None
        again, kept = None, False
        try:
            again = await too_long(answer, self._dialect)
            kept = again is None and answer.response.status < httpx.codes.BAD_REQUEST
        finally:
            if not kept:
                await answer.aclose()
        if kept:
            passage.ask, passage.fit, passage.recovered = ask, shorter, True
            return answer
        if again is None or refusals >= REPLAYS:
            return None
        return await self._recovered(passage, again, shorter, refusals + 1)


def _cannot_be_refusal(passage: Passage, answer: Answer) -> bool:
    """Whether an answer of status 200 is certainly no refusal of the request for its length.

    Of a body that cannot be read no shorter one is made, and a small one that passed the gate fits.
    """
    if passage.ask is not None or answer.response.status != httpx.codes.OK:
        return False
    return passage.fit is not None or passage.size < LEAST_REFUSED_BYTES
