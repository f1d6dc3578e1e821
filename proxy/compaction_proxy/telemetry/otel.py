"""OpenTelemetry traces: spans of client requests, upstream calls and compactions."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final
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

OPERATION: Final = "gen_ai.operation.name"
CHAT: Final = "chat"
PROVIDER: Final = "gen_ai.provider.name"
CONVERSATION: Final = "gen_ai.conversation.id"
COMPACTED_ATTRIBUTE: Final = "gen_ai.conversation.compacted"
REQUEST_MODEL: Final = "gen_ai.request.model"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
METHOD: Final = "http.request.method"
CODE: Final = "http.response.status_code"
ERROR: Final = "error.type"

REQUEST: Final = "compaction_proxy.request.id"
STATUS: Final = "compaction_proxy.status"
STRATEGY: Final = "compaction_proxy.strategy"
ROUND: Final = "compaction_proxy.round"
REASON: Final = "compaction_proxy.reason"
OUTCOME: Final = "compaction_proxy.outcome"
TOKENS_BEFORE: Final = "compaction_proxy.tokens_before"
TOKENS_AFTER: Final = "compaction_proxy.tokens_after"
MESSAGES: Final = "compaction_proxy.messages"
OVERHEAD_S: Final = "compaction_proxy.overhead"
RECALLS: Final = "compaction_proxy.recalls"

# Names of providers in the OpenTelemetry conventions, by host. Other providers are named by their host.
PROVIDERS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.mistral.ai": "mistral_ai",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.x.ai": "x_ai",
    "api.perplexity.ai": "perplexity",
    "api.cohere.com": "cohere",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
AZURE: Final = ("azure.ai.openai", ".openai.azure.com")


def get_provider_name(host: str) -> str:
    """Returns the name of the provider at a host, as in the OpenTelemetry conventions."""
    name, ending = AZURE
    return name if host.endswith(ending) else PROVIDERS.get(host, host)


SERVICE = "compaction-proxy"
TRACES_PATH = "/v1/traces"
# Time limit for sending the last spans when the process ends, in seconds.
CLOSE_S = 1.5
# Number of requests whose span contexts are kept, so that the span of a compaction can link to the span of
# its request.
MAX_REQUESTS = 10_000
_FIELDS = (b"traceparent", b"tracestate")
_NS = 1_000_000_000
_w3c = TraceContextTextMapPropagator()

SpanAttributes = Mapping[str, str | int | float | bool | None]
Headers = list[tuple[bytes, bytes]]


def create_span_processor(endpoint: str) -> BatchSpanProcessor:
    """Creates a processor that sends spans to a collector.

    `endpoint` is the base URL of the collector. If it is empty, the environment variables `OTEL_EXPORTER_…`
    configure the collector.
    """
    whole = f"{endpoint.rstrip('/')}{TRACES_PATH}" if endpoint else None
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=whole))


class OtelTracer:
    """Traces requests with OpenTelemetry (implements `tracing.Tracer`).

    Args:
        upstream: Base URL of the upstream.
        version: Version of the proxy.
        processor: Receiver of ended spans.
    """

    def __init__(self, upstream: str, version: str, processor: SpanProcessor) -> None:
        name = (
            OTELResourceDetector().detect().attributes.get(SERVICE_NAME, SERVICE)
        )  # OTEL_SERVICE_NAME overrides `SERVICE`
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._spans = self._provider.get_tracer(SERVICE, version)
        self._about = _build_upstream_attributes(upstream)
        self._requests: OrderedDict[str, SpanContext] = OrderedDict()

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> "OtelTrace":
        """Starts the span of a client request, in the trace that its headers name, or in a new one."""
        carrier = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in headers if name in _FIELDS
        }
        span = self._spans.start_span("POST chat/completions", _w3c.extract(carrier), SpanKind.SERVER)
        _set_attributes(span, {METHOD: "POST", REQUEST: request_id})
        self._requests[request_id] = span.get_span_context()
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return OtelTrace(self._spans, span, self._about)

    def set_upstream(self, upstream: str) -> None:
        """Uses the upstream with this base URL in the spans of later requests."""
        self._about = _build_upstream_attributes(upstream)

    def on_event(self, _tenant: str, event: Event) -> None:
        """Records a span for a finished or failed compaction, linked to the span of its request."""
        if event.kind not in {COMPACTED, FAILED}:
            return
        context = self._requests.get(event.request)
        took_s = event.seconds or 0.0
        span = self._spans.start_span(
            f"compact {event.strategy}",
            Context(),  # no parent: the compaction may serve later requests
            links=[Link(context)] if context else [],
            start_time=int((event.at - took_s) * _NS),
        )
        _set_attributes(span, _build_round_attributes(event))
        if event.kind == FAILED:
            _mark_failed(span, event.reason)
        span.end(int(event.at * _NS))

    async def close(self) -> None:
        """Sends the remaining spans within `CLOSE_S`. Spans that take longer are lost.

        The exporter tries for 10 s and cannot be interrupted. It therefore runs in a daemon thread, because
        the process does not wait for such a thread when it ends. It would wait for a thread of the event
        loop's executor.
        """
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed, so `close` no longer waits for `sent`
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="last-spans", daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(sent.wait(), CLOSE_S)


class OtelTrace:
    """Trace of one request (implements `tracing.RequestTrace`).

    Args:
        spans: OpenTelemetry tracer that creates spans.
        span: Span of the request.
        upstream_attributes: Attributes that the span of each upstream call gets.
    """

    __slots__ = ("_about", "_question", "_span", "_spans")

    def __init__(self, spans: Spans, span: Span, upstream_attributes: SpanAttributes) -> None:
        self._spans = spans
        self._span = span
        self._about = upstream_attributes
        self._question: Span | None = None

    def start_upstream_call(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Starts the span of an upstream call. Returns `headers` with the trace context of this span."""
        if self._question is not None:  # a second call means that the upstream refused the first one
            _mark_failed(self._question, "refused")
            self._question.end()
        parent = set_span_in_context(self._span)
        self._question = self._spans.start_span(CHAT, parent, SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(self._question))
        ours = [(name.encode(), text.encode("latin-1")) for name, text in carrier.items()]
        return [*(field for field in headers if field[0].lower() not in _FIELDS), *ours]

    def end_request(self, exchange: Exchange, conversation: str | None) -> None:
        """Ends all spans of the request. Call it after the answer, or when no answer will come."""
        error = str(exchange.code or "no-answer") if exchange.has_failed or not exchange.code else ""
        _set_attributes(self._span, _build_request_attributes(exchange, conversation))
        spans = [self._span] if self._question is None else [self._question, self._span]
        if self._question is not None:
            self._question.update_name(f"{CHAT} {exchange.model}".strip())
            _set_attributes(
                self._question, {**self._about, **_build_response_attributes(exchange, conversation)}
            )
        for span in spans:
            if error:
                _mark_failed(span, error)
            span.end()


def _build_upstream_attributes(base_url: str) -> SpanAttributes:
    """Builds the attributes that the spans of all calls to one upstream share."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    return {
        OPERATION: CHAT,
        PROVIDER: get_provider_name(host),
        SERVER_ADDRESS: host,
        SERVER_PORT: parts.port or (443 if parts.scheme == "https" else 80),
    }


def _build_request_attributes(exchange: Exchange, conversation: str | None) -> SpanAttributes:
    return {
        CODE: exchange.code or None,
        CONVERSATION: conversation,
        STATUS: exchange.status,
        STRATEGY: exchange.strategy,
        ROUND: exchange.round,
        REASON: exchange.reason,
        TOKENS_BEFORE: exchange.tokens_before,
        TOKENS_AFTER: exchange.tokens_after,
        OVERHEAD_S: exchange.overhead_s,
        RECALLS: exchange.recalls,
    }


def _build_response_attributes(exchange: Exchange, conversation: str | None) -> SpanAttributes:
    return {
        CODE: exchange.code or None,
        CONVERSATION: conversation,
        COMPACTED_ATTRIBUTE: True if exchange.round is not None else None,
        REQUEST_MODEL: exchange.model,
        FIRST_CHUNK_S: exchange.first_byte_s,
        INPUT_TOKENS: exchange.prompt_tokens,
        OUTPUT_TOKENS: exchange.completion_tokens,
        CACHED_TOKENS: exchange.cached_tokens,
    }


def _build_round_attributes(event: Event) -> SpanAttributes:
    return {
        CONVERSATION: event.conversation,
        REQUEST: event.request,
        STRATEGY: event.strategy,
        ROUND: event.round,
        REASON: event.reason,
        OUTCOME: event.outcome,
        TOKENS_BEFORE: event.tokens_before,
        TOKENS_AFTER: event.tokens_after,
        MESSAGES: event.messages,
        REQUEST_MODEL: event.model,
        INPUT_TOKENS: event.prompt_tokens,
        OUTPUT_TOKENS: event.completion_tokens,
        CACHED_TOKENS: event.cached_tokens,
    }


def _set_attributes(span: Span, attributes: SpanAttributes) -> None:
    """Sets the attributes whose value is known."""
    span.set_attributes({name: value for name, value in attributes.items() if value not in (None, "")})


def _mark_failed(span: Span, kind: str) -> None:
    span.set_attribute(ERROR, kind)
    span.set_status(Status(StatusCode.ERROR))
