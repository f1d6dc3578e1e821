"""Does the work that follows a response.

Reports incidents such as failed compactions, learns the upstream's token counts, and prepares compactions
ahead of need.
"""

import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import httpx
from starlette.types import Scope

from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.feedback import UsageFeedback
from compaction_proxy.compaction.types import CompactionReport, CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.errors import UpstreamError
from compaction_proxy.core.event import FAILED_OPEN, OVER_LIMIT, RECOVERED, Event
from compaction_proxy.gateway.request_state import RequestState
from compaction_proxy.gateway.upstream import Upstream, build_request, send_request
from compaction_proxy.gateway.window_finder import WindowFinder
from compaction_proxy.storage.resilient import ReportThrottle
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_history import EventBus, EventHistory, generate_event_id
from compaction_proxy.telemetry.exchange_log import ExchangeLog
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.wires.body import build_probe_body
from compaction_proxy.wires.usage import TokenUsage
from compaction_proxy.wires.wire import Wire

# The proxy stops reading the response to a probe after this many bytes. A probe asks for only 16 tokens of
# output, so its response is normally shorter.
MAX_PROBE_BYTES = 262_144
# `IncidentReporter` remembers at most this many incidents, in order to report each at most once a minute. If
# there are more, it forgets the incident that occurred longest ago.
MAX_INCIDENTS = 2_000


_INCIDENT_KINDS = {CompactionStatus.FAILED_OPEN: FAILED_OPEN, CompactionStatus.OVER_LIMIT: OVER_LIMIT}


class IncidentReporter:
    """Publishes incidents as events, and adds the events to the history of the conversation.

    An incident is a request whose compaction failed, that the proxy could not make short enough, or that the
    upstream accepted only in a shorter form. Incidents with the same tenant, conversation, kind and reason
    are reported at most once a minute.

    Args:
        event_bus: Publishes events.
        history: Stores events.
        clock: Returns monotonic seconds.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self,
        event_bus: EventBus,
        history: EventHistory,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._announce = event_bus
        self._history = history
        self._now = now
        # The key of an incident consists of its tenant, conversation, kind and reason.
        self._throttle = ReportThrottle[tuple[str, str | None, str, str | None]](
            max_keys=MAX_INCIDENTS, clock=clock
        )

    async def __call__(
        self,
        tenant: str,
        report: CompactionReport,
        request_id: str,
        model: str,
        *,
        was_recovered: bool = False,
    ) -> None:
        """Reports an incident of a request, if there was one. Call this after the client has its response.

        An incident occurred if the compaction of the request failed, if the proxy could not make the request
        short enough, or if the upstream accepted the request only in a shorter form (`was_recovered`).
        """
        kind = RECOVERED if was_recovered else _INCIDENT_KINDS.get(report.status, "")
        incident = tenant, report.conversation, kind, report.reason
        if not kind or self._throttle.admit_report(incident) is None:
            return
        event = Event(
            kind,
            self._now(),
            report.conversation or "",
            id=generate_event_id(),
            request=request_id,
            strategy=report.strategy or "",
            round=report.round,
            place=report.checkpoint_id,
            reason=report.reason or "",
            outcome=report.status.value,
            asked=model,
            tokens_before=report.tokens_before,
            tokens_after=report.tokens_after,
            trigger=report.trigger,
            window=report.window,
            listed=report.messages_before,
        )
        self._announce(tenant, event)
        if event.conversation:
            await self._history.record_event(tenant, event)


class AfterResponseHandler:
    """Learns token counts from responses, and prepares compactions for the next requests.

    Args:
        upstream: The upstream to which requests are forwarded.
        compactor: Prepares compactions ahead of need.
        feedback: Learns from the token counts (`usage`) that responses report.
        exchange_log: Records the figures of each request when it ends.
        incidents: Reports incidents, such as a request whose compaction failed.
        registry: Records when each conversation was last used.
        window_finder: Asks the upstream for unknown context windows.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        compactor: Compactor,
        feedback: UsageFeedback,
        exchange_log: ExchangeLog,
        incidents: IncidentReporter,
        registry: ConversationRegistry,
        window_finder: WindowFinder,
    ) -> None:
        self._upstream = upstream
        self._compactor = compactor
        self._feedback = feedback
        self.exchange_log = exchange_log
        self._incidents = incidents
        self._registry = registry
        self._window_finder = window_finder

    async def __call__(self, state: RequestState) -> None:
        """Records that the conversation was used, and learns from the response if the request was parsed.

        Call this after the client has its response. An error in this work is only logged.
        """
        await self.record_activity(state)
        with suppress_and_log(RESPONSE_NOT_OBSERVED):
            if state.fit_request is not None and state.fit_result is not None:
                await self._learn_from_response(state, state.fit_request, state.fit_result)
            elif self._window_finder.is_upstream_local and state.model and not state.has_failed:
                self._window_finder.start_discovery(state.scope, state.identity.tenant, state.model)

    async def record_activity(self, state: RequestState) -> None:
        """Records that the conversation was used, so that people find it. An error is only logged."""
        with suppress_and_log(RESPONSE_NOT_OBSERVED):
            if state.recorded_conversation is not None:
                await self._registry.record_activity(state.identity.tenant, state.recorded_conversation)

    async def _learn_from_response(
        self, state: RequestState, fit_request: FitRequest, fit_result: FitResult
    ) -> None:
        """Reports an incident, learns from the response's token counts, and prepares a compaction if needed.

        If the request failed, or is a side call such as a request for a title (`side_requests`), the method
        only reports an incident.
        """
        await self._incidents(
            fit_request.tenant,
            fit_result.report,
            state.request_id,
            fit_request.model,
            was_recovered=state.was_recovered,
        )
        if state.side_kind is not None or state.has_failed:
            return
        usage = state.first_usage
        if (
            fit_result.report.status is CompactionStatus.APPLIED
            and fit_request.settings.compaction.recount == "probe"
        ):
            usage = await self._probe_usage(state.scope, fit_request.body.wire, fit_result) or usage
        fit_result = state.include_tool_tokens(fit_result)
        await self._feedback.learn_from_answer(fit_request, fit_result, usage)
        self._window_finder.start_discovery(state.scope, fit_request.tenant, fit_request.model)
        if fit_result.should_prepare:
            await self._compactor.prepare_round(fit_request)

    async def _probe_usage(self, scope: Scope, wire: Wire, fit_result: FitResult) -> TokenUsage | None:
        """Sends a probe and returns the usage that the upstream reports.

        Returns None if no probe can be made from the request, or if the probe fails.

        The client already has its response, so it does not wait for the probe. The caller uses this method
        only after a new compaction, and only if `compaction.recount` is `probe`.
        """
        raw = fit_result.raw
        body = await run_in_worker_if_large(len(raw), partial(build_probe_body, raw, wire))
        if body is None:
            return None
        request = build_request(self._upstream, scope, body)
        try:
            opened = await send_request(self._upstream, request)
        except UpstreamError:  # the caller then uses the token counts in the client's response
            return None
        async with aclosing(opened) as answer:
            tap = wire.open_tap(answer.get_field(b"content-type"), answer.get_field(b"content-encoding"))
            tap.feed(await answer.peek(MAX_PROBE_BYTES))
            return tap.result() if answer.response.status == httpx.codes.OK else None
