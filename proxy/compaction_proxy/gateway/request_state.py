"""One request on its way through the relay: what is known of it at each stage, and its figures at the end."""

import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from itertools import count
from secrets import token_hex

from starlette.types import Scope

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS, Exchange, UnreadExchange
from compaction_proxy.gateway.after_response import CompletedRequest
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.body_decoder import OriginalRequest
from compaction_proxy.gateway.client.types import HttpRequest
from compaction_proxy.gateway.compaction_trigger import TriggerRequest
from compaction_proxy.gateway.control_headers import UNREAD_HEADERS, ControlHeaders, build_report_headers
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.identity import Identity
from compaction_proxy.gateway.recall_loop import RecallLoop, ToolOffer
from compaction_proxy.gateway.side_requests import SideRequestKind
from compaction_proxy.telemetry.exchange_log import ExchangeRecorder
from compaction_proxy.telemetry.tracing import RequestTrace
from compaction_proxy.wires.wire import TokenUsage

# Ids of requests are told apart by the process and a number: they go into logs, and guess nothing.
_PROCESS = token_hex(5)
_NUMBERS = count(1)
_GIVEN = re.compile(rb"[!-~]{1,128}")
_NOTHING = CompactionReport(CompactionStatus.NONE)
IDEMPOTENCY = b"idempotency-key"


def choose_request_id(given: bytes | None) -> str:
    """The id that the client gave its request (`x-request-id`), if it is fit to be shown; else a new one."""
    if given is not None and _GIVEN.fullmatch(given):
        return given.decode("ascii")
    return f"r_{_PROCESS}{next(_NUMBERS):x}"


@dataclass(slots=True)
class RequestState:
    """One request on its way.

    Attributes:
        identity: Whose it is.
        raw: The client's body, decoded, until nobody needs it any more.
        scope: The request (ASGI), as if its body had come decoded.
        control: What the client asked of us.
        size: Bytes of the body, decoded.
        request_id: Its id.
        hold: Counts its body.
        side_kind: Which side call it is: nothing is learned of it, and no conversation notes it; None: it is
            none.
        original: The request as it came, as long as that may be forwarded; None: its body was not encoded.
        opaque: Whether its body is encoded in a way that cannot be undone, so that nothing is read of it.
        fit: What is forwarded; None where that is the body as it came, unread.
        ask: The request as it was read.
        model: The model asked for, as far as it matters.
        code: The upstream's status code; 0 while there is no answer.
        at: When it came, in seconds since the epoch.
        started: The same in monotonic seconds.
        waited_s: Seconds that the upstream was waited for, before its answers began.
        first_byte_s: Of these, those for the answer that is relayed.
        overhead_s: Seconds from its coming to its answer's being relayed that were not the upstream's.
        trace: Follows it; None: nobody does.
        recovered: Whether the upstream had refused it as too long, and took a shorter one.
        offer: How the model may search what was removed; None: it may not.
        trigger: The same request without the compaction trigger that it ends in; None: it ends in none.
        recall_loop: How its answer goes on; None: nothing is to be looked for in it.
        search: Looks for its conversation while the answer is relayed; None: nothing does.
    """

    identity: Identity
    raw: bytes
    scope: Scope
    control: ControlHeaders
    size: int
    request_id: str
    hold: BodyHold
    side_kind: SideRequestKind | None = None
    original: OriginalRequest | None = None
    opaque: bool = False
    fit: FitResult | None = None
    ask: FitRequest | None = None
    model: str = ""
    code: int = 0
    at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0
    first_byte_s: float | None = None
    overhead_s: float = 0.0
    trace: RequestTrace | None = None
    recovered: bool = False
    offer: ToolOffer | None = None
    trigger: TriggerRequest | None = None
    recall_loop: RecallLoop | None = None
    search: asyncio.Task[str | None] | None = None

    @property
    def conversation(self) -> str | None:
        """The conversation, as far as it is known."""
        return (self.fit.report.conversation if self.fit else None) or self.identity.conversation

    @property
    def _recorded_conversation(self) -> str | None:
        """The conversation that it is noted of."""
        return self.conversation if self.side_kind is None else None

    @property
    def should_learn(self) -> bool:
        """Whether anything is done with what its answer says."""
        return self.ask is not None or self.conversation is not None or self.search is not None

    @property
    def has_failed(self) -> bool:
        """Whether the upstream answered with an error."""
        return self.code >= FIRST_ERROR_STATUS

    @property
    def prefix_digests(self) -> tuple[bytes, ...]:
        """Prefix digests of the client's messages; none where they were not read."""
        return (
            self.fit.usage_basis.prefixes
            if self.fit and self.fit.usage_basis and self.side_kind is None
            else ()
        )

    @property
    def token_estimates(self) -> tuple[int, int]:
        """Our own counts of what the client sent and of what was forwarded; zeros where it was not read."""
        return (self.fit.client_tokens, self.fit.estimate) if self.fit else (0, 0)

    def drop_reused_idempotency_key(self, request: HttpRequest) -> HttpRequest:
        """A request of it; the client's idempotency key names the first only: others have other bodies."""
        if self.first_byte_s is None:
            return request
        return request._replace(headers=[each for each in request.headers if each[0] != IDEMPOTENCY])

    def record_wait(self, seconds: float) -> None:
        """The upstream has answered, or failed to, after so long."""
        if self.recall_loop is None:  # else it has answered long ago, and goes on
            self.waited_s += seconds
            self.first_byte_s = seconds

    def record_overhead(self) -> None:
        """From here on the client waits for nobody but the upstream."""
        self.overhead_s = time.perf_counter() - self.started - self.waited_s

    def build_headers(self) -> Headers:
        """Our response headers; a request that passed the gate carries its status only."""
        if self.fit is None:
            return UNREAD_HEADERS
        if self.ask is None:
            return build_report_headers(self.fit.report)
        told = build_report_headers(self.fit.report, self.overhead_s)
        told.append((b"x-compaction-request-id", self.request_id.encode()))
        return told

    def to_fit_result(self) -> FitResult:
        """What is forwarded, as a fit in any case."""
        return self.fit or FitResult(self.raw, 0, _NOTHING)

    def release_bodies(self) -> None:
        """Let go of what nobody needs while the answer streams: bodies as they came, and those not read."""
        self.original = None  # what may be sent from here on is changed
        if self.ask is None:
            self.raw = b""
            self.hold.release()
            self.fit = self.fit and replace(self.fit, raw=b"")

    def to_completed_request(self, usage: TokenUsage | None) -> CompletedRequest:
        """What is left to do, now that the client has its answer."""
        model = self.ask.model if self.ask else self.model
        whose = self.identity.tenant, self._recorded_conversation, model, self.request_id
        fit = self.fit
        if self.offer is not None and fit is not None and fit.estimate:
            fit = replace(fit, estimate=fit.estimate + self.offer.tool_tokens)
        if (
            self.recall_loop is not None and self.recall_loop.hops
        ):  # the others had more to read than was sized
            usage = self.recall_loop.first_tap.result()
        side = self.side_kind is not None
        return CompletedRequest(
            *whose, usage, self.scope, self.ask, fit, self.has_failed, self.recovered, side
        )

    def record_end(self, usage: TokenUsage | None, origin: str, notes: ExchangeRecorder) -> None:
        """Tell those who listen that it has ended; of what the upstream was never asked nothing is noted.

        Args:
            usage: What the upstream counted, if it said so.
            origin: Of the upstream.
            notes: Where it is noted.
        """
        first_s = self.first_byte_s
        if self.fit is None and first_s is not None:
            whose = self.identity.tenant, self._recorded_conversation, origin
            notes.record_unread(*whose, self.model, self.code, self._build_unread(usage, first_s))
        if self.fit is None and self.trace is None:
            return
        exchange = self.build_exchange(usage)
        if self.fit is not None and first_s is not None:
            notes.record_exchange(
                self.identity.tenant,
                self._recorded_conversation,
                origin,
                exchange,
                self.prefix_digests,
                self.token_estimates,
            )
        if self.trace is not None:
            self.trace.end_request(exchange, self.conversation)

    def _compute_upstream_s(self, first_s: float) -> float:
        """Seconds from asking the upstream to the end of its answer, which is now."""
        return time.perf_counter() - self.started - self.overhead_s - self.waited_s + first_s

    def _build_unread(self, usage: TokenUsage | None, first_s: float) -> UnreadExchange:
        prompt = completion = cached = None
        if usage is not None:
            prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        times = self.overhead_s, first_s, self._compute_upstream_s(first_s)
        return UnreadExchange(self.at, self.request_id, self.size, prompt, completion, cached, *times)

    def build_exchange(self, usage: TokenUsage | None) -> Exchange:
        """The request and its answer as figures."""
        first_s = self.first_byte_s
        upstream_s = None if first_s is None else self._compute_upstream_s(first_s)
        report = self.fit.report if self.fit else _NOTHING
        return Exchange(
            self.at,
            self.ask.model if self.ask else self.model,
            report.status.value,
            self.code,
            self.request_id,
            report.strategy or "",
            report.round,
            report.reason or "",
            self.size,
            report.messages_before,
            report.messages_after,
            report.tokens_before,
            report.tokens_after,
            report.window,
            report.trigger,
            usage.prompt_tokens if usage else None,
            usage.completion_tokens if usage else None,
            usage.cached_tokens if usage else None,
            self.overhead_s,
            first_s,
            upstream_s,
            *self._count_recalls(usage),
        )

    def _count_recalls(self, usage: TokenUsage | None) -> tuple[int | None, int | None, int | None]:
        """How often the answer went on, and what of `usage` that took; None: it did not, or nobody said."""
        if self.recall_loop is None or not self.recall_loop.hops:
            return None, None, None
        first = self.recall_loop.first_tap.result()
        if usage is None or first is None:
            return self.recall_loop.hops, None, None
        more = usage.prompt_tokens - first.prompt_tokens, usage.cached_tokens - first.cached_tokens
        return self.recall_loop.hops, max(0, more[0]), max(0, more[1])
