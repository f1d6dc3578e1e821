"""The state of one request while the proxy relays it, and the figures that the proxy records at its end."""

import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING

from starlette.types import Scope

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.event import SMALL
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS, Exchange
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client.types import HttpRequest
from compaction_proxy.gateway.client_stream import OriginalRequest
from compaction_proxy.gateway.compact_api import CompactionItemRequest
from compaction_proxy.gateway.control_headers import (
    ControlHeaders,
    build_report_headers,
    build_unread_headers,
)
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.identity import Identity
from compaction_proxy.gateway.recall_loop import RecallLoop, ToolOffer
from compaction_proxy.gateway.side_requests import SideRequestKind
from compaction_proxy.telemetry.exchange_log import ExchangeLog
from compaction_proxy.telemetry.usage import NO_CAPTION, Caption
from compaction_proxy.wires.usage import TokenUsage

if TYPE_CHECKING:
    from compaction_proxy.telemetry.otel import OtelTrace

# The proxy's own request ids consist of an id of the process and a number. They are only written to logs and
# shown to clients. They give access to nothing, so they need not be hard to guess.
_PROCESS = token_hex(5)
_NUMBERS = count(1)
_SHOWABLE_ID = re.compile(rb"[!-~]{1,128}")
_EMPTY_REPORT = CompactionReport(CompactionStatus.NONE)
# The report about a request that was forwarded without being parsed.
_UNREAD_REPORT = CompactionReport(CompactionStatus.NONE, reason=SMALL)
IDEMPOTENCY_HEADER = b"idempotency-key"
REQUEST_ID_HEADER = b"x-request-id"


def choose_request_id(client_request_id: bytes | None) -> str:
    """Returns the client's request id (`x-request-id`), or a new one.

    The client's id is used if it consists of 1 to 128 visible ASCII characters.
    """
    if client_request_id is not None and _SHOWABLE_ID.fullmatch(client_request_id):
        return client_request_id.decode("ascii")
    return f"r_{_PROCESS}{next(_NUMBERS):x}"


@dataclass(slots=True)
class RequestState:
    """The state of one request from its arrival until its response has ended.

    Attributes:
        identity: The tenant, and the conversation that the headers or the body name.
        raw: The client's body, decoded; empty once it is no longer needed.
        scope: The ASGI scope of the request, as if the client had sent the body without an encoding and
            digests.
        control_headers: The settings that the client requests in its `x-compaction…` headers.
        size_bytes: Size of the decoded body in bytes.
        request_id: The id of the request.
        body_hold: Counts the bytes of the body in the body budget (`gateway.body_budget`).
        side_kind: The kind of side call, or None if the request is no side call. A side call is not part of
            the conversation, such as a request for a title. The proxy learns nothing from it, and records its
            figures without a conversation.
        original: The request as the client sent it, if its body was encoded or had digests. None if not, or
            if the request can no longer be forwarded in this form.
        is_undecodable: Whether the body cannot be decoded, so that nothing in it is read.
        fit_result: The body to forward, with a report about its compaction. None if the body is forwarded
            without being parsed.
        fit_request: The parsed request, or None if the body was not parsed.
        model: The model that an unparsed request names; empty if it is unknown. The model of a parsed request
            is in `fit_request`.
        status: The upstream's status code; 0 while there is no response.
        received_at: The time when the request came, in seconds since the epoch.
        started: The time when the request came, in monotonic seconds.
        waited_s: Seconds that the proxy waited for responses of the upstream to begin, retries included.
        first_byte_s: The part of `waited_s` that belongs to the last call, whose response is relayed. None
            before the first call.
        overhead_s: Seconds from the arrival of the request until the relay of its response begins, without
            `waited_s`.
        usage: The token counts that the upstream reported; None before the response has ended, or if the
            upstream reported no counts.
        trace: Records the spans of the request. None disables tracing.
        was_recovered: Whether the upstream refused the request as too long and then accepted a shorter one.
        tool_offer: The request with the search tool; None if the tool is not offered.
        item_request: The request for a compaction item, if the client makes one; else None.
        recall_loop: Continues the response after calls of the search tool; None if the response is relayed
            directly.
        error: What the upstream calls its error, or why no response came (`Exchange.error`).
        caption: By what people recognise the conversation, as far as it may be stored.
        conversation_search: The task that looks for the conversation while the upstream works; None if no
            search was started.
    """

    identity: Identity
    raw: bytes
    scope: Scope
    control_headers: ControlHeaders
    size_bytes: int
    request_id: str
    body_hold: BodyHold
    side_kind: SideRequestKind | None = None
    original: OriginalRequest | None = None
    is_undecodable: bool = False
    fit_result: FitResult | None = None
    fit_request: FitRequest | None = None
    model: str = ""
    status: int = 0
    received_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0
    first_byte_s: float | None = None
    overhead_s: float = 0.0
    usage: TokenUsage | None = None
    trace: "OtelTrace | None" = None
    was_recovered: bool = False
    tool_offer: ToolOffer | None = None
    item_request: CompactionItemRequest | None = None
    recall_loop: RecallLoop | None = None
    error: str = ""
    caption: Caption = NO_CAPTION
    conversation_search: asyncio.Task[str | None] | None = None

    @property
    def conversation(self) -> str | None:
        """The id of the conversation; None if it is not known (yet)."""
        reported = self.fit_result.report.conversation if self.fit_result else None
        return reported or self.identity.conversation or self._found_conversation

    @property
    def _found_conversation(self) -> str | None:
        """The result of the search for the conversation; None if there is none (yet)."""
        search = self.conversation_search
        return None if search is None or not search.done() or search.cancelled() else search.result()

    @property
    def recorded_conversation(self) -> str | None:
        """The id of the conversation under which the request is recorded.

        It is None if the conversation is unknown, or if the request is a side call, such as one for a title.
        """
        return self.conversation if self.side_kind is None else None

    @property
    def should_learn(self) -> bool:
        """Whether the proxy needs the token counts in the response, so that the response must be watched.

        A small request of no known conversation is not watched, unless it is a side call, because there may
        be very many such requests.
        """
        return (
            self.fit_request is not None
            or self.conversation is not None
            or self.conversation_search is not None
            or self.side_kind is not None
        )

    @property
    def has_failed(self) -> bool:
        """Whether the upstream answered with an error."""
        return self.status >= FIRST_ERROR_STATUS

    @property
    def prefix_digests(self) -> tuple[bytes, ...]:
        """The prefix digests of the client's messages.

        The tuple is empty if the messages were not parsed, or if the request is a side call, such as one for
        a title.
        """
        return (
            self.fit_result.usage_basis.prefixes
            if self.fit_result and self.fit_result.usage_basis and self.side_kind is None
            else ()
        )

    @property
    def token_estimates(self) -> tuple[int, int]:
        """The estimated tokens of the client's and of the forwarded request; zeros if nothing was parsed."""
        return (self.fit_result.client_tokens, self.fit_result.estimate) if self.fit_result else (0, 0)

    def drop_reused_idempotency_key(self, request: HttpRequest) -> HttpRequest:
        """Returns the first request to the upstream unchanged, and later ones without the idempotency key.

        Later requests have other bodies. With the same key, the upstream could take them for repetitions of
        the first one.
        """
        if self.first_byte_s is None:
            return request
        return request._replace(headers=[each for each in request.headers if each[0] != IDEMPOTENCY_HEADER])

    def record_upstream_wait(self, seconds: float) -> None:
        """Records that an upstream's response began, or that the call failed, after this many seconds.

        Does nothing for a call that continues a response.
        """
        if self.recall_loop is None:  # otherwise the call continues a response that has begun
            self.waited_s += seconds
            self.first_byte_s = seconds

    def record_overhead(self) -> None:
        """Records how many seconds the proxy itself has taken so far (`overhead_s`).

        After this call, the client waits only for the upstream.
        """
        self.overhead_s = time.perf_counter() - self.started - self.waited_s

    def build_headers(self) -> Headers:
        """Builds the proxy's own response headers.

        If the request passed the gate, the headers are the status, the reason `small` and, if known, the
        id of the conversation.
        """
        if self.fit_result is None:
            return build_unread_headers(self.conversation)
        if self.fit_request is None:
            return build_report_headers(self.fit_result.report)
        headers = build_report_headers(self.fit_result.report, self.overhead_s)
        headers.append((b"x-compaction-request-id", self.request_id.encode()))
        return headers

    def to_fit_result(self) -> FitResult:
        """Returns `fit_result`. If it is None, returns a result with the client's unchanged body."""
        return self.fit_result or FitResult(self.raw, 0, _EMPTY_REPORT)

    def release_bodies(self) -> None:
        """Frees the bodies that the proxy does not need while it relays the response.

        These are the encoded body, and the decoded body if the request was not parsed.
        """
        self.original = None  # only a continuation can be sent from here on, and it has another body
        if self.fit_request is None:
            self.raw = b""
            self.body_hold.release()
            self.fit_result = self.fit_result and replace(self.fit_result, raw=b"")

    @property
    def first_usage(self) -> TokenUsage | None:
        """The token counts of the upstream's first response, without those of responses that continue it."""
        if self.recall_loop is not None and self.recall_loop.hop_count:
            return self.recall_loop.first_tap.result()
        return self.usage

    def include_tool_tokens(self, fit_result: FitResult) -> FitResult:
        """Returns `fit_result` with the tokens of the offered search tool added to its estimate."""
        if self.tool_offer is None or not fit_result.estimate:
            return fit_result
        return replace(fit_result, estimate=fit_result.estimate + self.tool_offer.tool_tokens)

    def record_end(self, origin: str, exchange_log: ExchangeLog) -> None:
        """Records the figures of the request and its response, and ends the trace.

        If the proxy sent nothing to the upstream, it records no figures.

        Args:
            origin: The origin of the upstream.
            exchange_log: Records the figures.
        """
        if self.first_byte_s is None and self.trace is None:
            return
        exchange = self.build_exchange()
        if self.first_byte_s is not None:
            exchange_log.record_exchange(
                self.identity.tenant,
                self.recorded_conversation,
                origin,
                exchange,
                self.prefix_digests,
                self.token_estimates,
                self.caption,
            )
        if self.trace is not None:
            self.trace.end_request(exchange, self.conversation)

    def build_exchange(self) -> Exchange:
        """Returns the figures of the request and its response."""
        usage = self.usage
        first_s = self.first_byte_s
        # The duration of the last upstream call: from its start to the end of its response, which is now.
        passed_s = time.perf_counter() - self.started
        upstream_s = None if first_s is None else passed_s - self.overhead_s - self.waited_s + first_s
        unread_report = _EMPTY_REPORT if first_s is None else _UNREAD_REPORT  # None: nothing was forwarded
        report = self.fit_result.report if self.fit_result else unread_report
        return Exchange(
            self.received_at,
            self.fit_request.model if self.fit_request else self.model,
            report.status.value,
            self.status,
            self.request_id,
            report.strategy or "",
            report.round,
            report.reason or "",
            self.size_bytes,
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
            *self._count_continuations_and_tokens(),
            self.control_headers.label,
            self.error,
        )

    def _count_continuations_and_tokens(self) -> tuple[int | None, int | None, int | None]:
        """Returns the number of requests that continued the response, and their prompt and cached tokens.

        All three values are None if the response was not continued. The tokens are None if the upstream did
        not report them.
        """
        if self.recall_loop is None or not self.recall_loop.hop_count:
            return None, None, None
        first, usage = self.first_usage, self.usage
        if usage is None or first is None:
            return self.recall_loop.hop_count, None, None
        extra = usage.prompt_tokens - first.prompt_tokens, usage.cached_tokens - first.cached_tokens
        return self.recall_loop.hop_count, max(0, extra[0]), max(0, extra[1])
