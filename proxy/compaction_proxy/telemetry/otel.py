"""Traces by OpenTelemetry: spans of requests, of each time that the upstream is asked, and of rounds."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as Spans
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from compaction_proxy.core.event import COMPACTED, FAILED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry import otel_names as names

SERVICE = "compaction-proxy"
TRACES_PATH = "/v1/traces"
# How long the end of the process waits for spans to be sent, in seconds.
CLOSE_S = 1.5
# Requests whose spans the rounds that are made in them, or for them later, may be linked to.
MAX_REQUESTS = 10_000
_FIELDS = (b"traceparent", b"tracestate")
_NS = 1_000_000_000
_w3c = TraceContextTextMapPropagator()

Values = Mapping[str, str | int | float | bool | None]
Headers = list[tuple[bytes, bytes]]


def exporting(endpoint: str) -> BatchSpanProcessor:
    """What sends spans to a collector; empty: to the one that the environment names (`OTEL_EXPORTER_…`)."""
    whole = f"{endpoint.rstrip('/')}{TRACES_PATH}" if endpoint else None
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=whole))


class OtelTracer:
    """Follows requests as OpenTelemetry does (`tracing.Tracer`).

    Args:
        upstream: Base URL of the upstream.
        version: Our version.
        processor: What takes the spans that have ended.
    """

    def __init__(self, upstream: str, version: str, processor: SpanProcessor) -> None:
        named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, SERVICE)  # OTEL_SERVICE_NAME, …
        resource = Resource.create({SERVICE_NAME: named, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._spans = self._provider.get_tracer(SERVICE, version)
        self._about = _of_upstream(upstream)
        self._requests: OrderedDict[str, SpanContext] = OrderedDict()

    def began(self, headers: Sequence[tuple[bytes, bytes]], request: str) -> "OtelTrace":
        """A request has come; it goes on with the trace that its fields name."""
        carrier = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in headers if name in _FIELDS
        }
        span = self._spans.start_span("POST chat/completions", _w3c.extract(carrier), SpanKind.SERVER)
        _describe(span, {names.METHOD: "POST", names.REQUEST: request})
        self._requests[request] = span.get_span_context()
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return OtelTrace(self._spans, span, self._about)

    def towards(self, upstream: str) -> None:
        """Spans of requests that come from now on name the upstream with this base URL."""
        self._about = _of_upstream(upstream)

    def event(self, _tenant: str, event: Event) -> None:
        """A round was made, or was due and failed: a span of its own, linked to the request's."""
        if event.kind not in {COMPACTED, FAILED}:
            return
        context = self._requests.get(event.request)
        took_s = event.seconds or 0.0
        span = self._spans.start_span(
            f"compact {event.strategy}",
            Context(),  # of no trace: it may be made for requests to come
            links=[Link(context)] if context else [],
            start_time=int((event.at - took_s) * _NS),
        )
        _describe(span, _of_round(event))
        if event.kind == FAILED:
            _failed(span, event.reason)
        span.end(int(event.at * _NS))

    async def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most: a collector that does not answer loses it.

        The exporter tries for 10 s and cannot be told to give up. So the thread is one that the end of the
        process does not wait for, as it does for those of the event loop.
        """
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="last-spans", daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(sent.wait(), CLOSE_S)


class OtelTrace:
    """One request on its way (`tracing.Trace`).

    Args:
        spans: Makes spans.
        span: The request's.
        about: What is true of every question to the upstream.
    """

    __slots__ = ("_about", "_question", "_span", "_spans")

    def __init__(self, spans: Spans, span: Span, about: Values) -> None:
        self._spans = spans
        self._span = span
        self._about = about
        self._question: Span | None = None

    def asked(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """The fields that the upstream is asked with: those of the client, but our place in the trace."""
        if self._question is not None:  # what was asked before was not taken
            _failed(self._question, "refused")
            self._question.end()
        within = set_span_in_context(self._span)
        self._question = self._spans.start_span(names.CHAT, within, SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(self._question))
        ours = [(name.encode(), text.encode("latin-1")) for name, text in carrier.items()]
        return [*(field for field in headers if field[0].lower() not in _FIELDS), *ours]

    def ended(self, exchange: Exchange, conversation: str | None) -> None:
        """The client has its answer, or will never have one."""
        error = str(exchange.code or "no-answer") if exchange.failed or not exchange.code else ""
        _describe(self._span, _of_request(exchange, conversation))
        spans = [self._span] if self._question is None else [self._question, self._span]
        if self._question is not None:
            self._question.update_name(f"{names.CHAT} {exchange.model}".strip())
            _describe(self._question, {**self._about, **_of_answer(exchange, conversation)})
        for span in spans:
            if error:
                _failed(span, error)
            span.end()


def _of_upstream(base_url: str) -> Values:
    """What is true of every question to an upstream."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    return {
        names.OPERATION: names.CHAT,
        names.PROVIDER: names.provider_of(host),
        names.SERVER_ADDRESS: host,
        names.SERVER_PORT: parts.port or (443 if parts.scheme == "https" else 80),
    }


def _of_request(exchange: Exchange, conversation: str | None) -> Values:
    return {
        names.CODE: exchange.code or None,
        names.CONVERSATION: conversation,
        names.STATUS: exchange.status,
        names.STRATEGY: exchange.strategy,
        names.ROUND: exchange.round,
        names.REASON: exchange.reason,
        names.TOKENS_BEFORE: exchange.tokens_before,
        names.TOKENS_AFTER: exchange.tokens_after,
        names.OVERHEAD_S: exchange.overhead_s,
        names.RECALLS: exchange.recalls,
    }


def _of_answer(exchange: Exchange, conversation: str | None) -> Values:
    return {
        names.CODE: exchange.code or None,
        names.CONVERSATION: conversation,
        names.COMPACTED: True if exchange.round is not None else None,
        names.REQUEST_MODEL: exchange.model,
        names.FIRST_CHUNK_S: exchange.first_byte_s,
        names.INPUT_TOKENS: exchange.prompt_tokens,
        names.OUTPUT_TOKENS: exchange.completion_tokens,
        names.CACHED_TOKENS: exchange.cached_tokens,
    }


def _of_round(event: Event) -> Values:
    return {
        names.CONVERSATION: event.conversation,
        names.REQUEST: event.request,
        names.STRATEGY: event.strategy,
        names.ROUND: event.round,
        names.REASON: event.reason,
        names.OUTCOME: event.outcome,
        names.TOKENS_BEFORE: event.tokens_before,
        names.TOKENS_AFTER: event.tokens_after,
        names.MESSAGES: event.messages,
        names.REQUEST_MODEL: event.model,
        names.INPUT_TOKENS: event.prompt_tokens,
        names.OUTPUT_TOKENS: event.completion_tokens,
        names.CACHED_TOKENS: event.cached_tokens,
    }


def _describe(span: Span, about: Values) -> None:
    """Say what is known."""
    span.set_attributes({name: value for name, value in about.items() if value not in (None, "")})


def _failed(span: Span, kind: str) -> None:
    span.set_attribute(names.ERROR, kind)
    span.set_status(Status(StatusCode.ERROR))
