"""What is done once the client has its answer: learning from it, and work ahead of need."""

from contextlib import aclosing
from typing import NamedTuple

import httpx
import structlog
from starlette.types import Scope

from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.feedback import UsageFeedback
from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.errors import UpstreamError
from compaction_proxy.gateway.incidents import IncidentReporter
from compaction_proxy.gateway.summary_routes import build_credentials
from compaction_proxy.gateway.upstream import Upstream, build_request, send_request
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.types import WindowDiscovery
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import NOT_OBSERVED
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.exchange_log import ExchangeRecorder
from compaction_proxy.wires.body import build_probe_body
from compaction_proxy.wires.wire import TokenUsage, Wire

# An answer of 16 tokens is small.
MAX_PROBE_BYTES = 262_144

_log = structlog.get_logger()


class CompletedRequest(NamedTuple):
    """A request that the client has its answer to.

    Attributes:
        tenant: Whose it was.
        conversation: Of which conversation, if that is known.
        model: The model that was asked; empty if that is not known.
        request_id: The request's id.
        usage: What the upstream counted, if it said so; None where the answer is an error.
        scope: The request (ASGI).
        ask: The request as it was read; None where it passed unread.
        fit: What was forwarded; None where it passed unread.
        failed: Whether the answer is an error: nothing it says is learned, and nothing is prepared or asked.
        recovered: Whether the upstream had refused it as too long, and took a shorter one.
        is_side_request: Whether it was a side call (`side_calls`): it says nothing of what its conversation
            is now.
    """

    tenant: str
    conversation: str | None
    model: str
    request_id: str
    usage: TokenUsage | None
    scope: Scope
    ask: FitRequest | None = None
    fit: FitResult | None = None
    failed: bool = False
    recovered: bool = False
    is_side_request: bool = False


class AfterResponseHandler:
    """Learns from answers and prepares for the next request.

    Args:
        upstream: Where requests go.
        compactor: Works ahead of need.
        feedback: Learns from answers.
        notes: Are given each request's figures once it has ended.
        incidents: Tells of requests that did not go as they should.
        registry: Remembers whose a conversation is.
        model_limits: Knows which windows are unknown.
        discovery: Asks the upstream for them.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        compactor: Compactor,
        feedback: UsageFeedback,
        notes: ExchangeRecorder,
        incidents: IncidentReporter,
        registry: ConversationRegistry,
        model_limits: ModelLimits,
        discovery: WindowDiscovery,
    ) -> None:
        self._upstream = upstream
        self._compactor = compactor
        self._feedback = feedback
        self.notes = notes
        self._incidents = incidents
        self._registry = registry
        self._model_limits = model_limits
        self._discovery = discovery

    async def __call__(self, completed: CompletedRequest) -> None:
        """Take note of one request; nothing that goes wrong here touches anybody."""
        with suppress_and_report(_log_not_observed):
            if completed.conversation is not None:
                await self._registry.record_activity(completed.tenant, completed.conversation)
            if completed.ask is not None and completed.fit is not None:
                await self._learn_from_response(completed, completed.ask, completed.fit)

    async def _learn_from_response(
        self, completed: CompletedRequest, ask: FitRequest, fit: FitResult
    ) -> None:
        """What only a request that was read allows."""
        told = completed.request_id, ask.model
        await self._incidents(ask.tenant, fit.report, *told, recovered=completed.recovered)
        if completed.is_side_request or completed.failed:
            return
        usage = completed.usage
        if fit.report.status is CompactionStatus.APPLIED and ask.settings.compaction.recount == "probe":
            usage = await self._probe_usage(completed.scope, ask.body.wire, fit) or usage
        await self._feedback.learn_from_answer(ask, fit, usage)
        self._discover_window(completed, ask)
        if fit.should_prepare:
            await self._compactor.prepare_round(ask)

    def _discover_window(self, completed: CompletedRequest, ask: FitRequest) -> None:
        if ask.settings.window is not None:
            return

        async def fetch_window() -> int | None:
            headers = build_credentials(self._upstream, completed.scope["headers"])
            return await self._discovery.discover_window(self._upstream.base_url, headers, ask.model)

        self._model_limits.start_discovery(ask.tenant, ask.origin, ask.model, fetch_window)

    async def _probe_usage(self, scope: Scope, wire: Wire, fit: FitResult) -> TokenUsage | None:
        """What the upstream counts of the forwarded request when it is asked once more, for 16 tokens.

        Seeds/000 recounts in this way after each compaction. The client has its answer already.
        """
        body = build_probe_body(fit.raw, wire)
        if body is None:
            return None
        request = build_request(self._upstream, scope, body)
        try:
            opened = await send_request(self._upstream, request)
        except UpstreamError:  # the client's own answer still says something
            return None
        async with aclosing(opened) as answer:
            tap = wire.open_tap(answer.get_field(b"content-type"), answer.get_field(b"content-encoding"))
            tap.feed(await answer.peek(MAX_PROBE_BYTES))
            return tap.result() if answer.response.status == httpx.codes.OK else None


def _log_not_observed(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
