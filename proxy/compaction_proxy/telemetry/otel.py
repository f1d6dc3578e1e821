"""Creates OpenTelemetry traces, with a trace span for each request, upstream call and compaction."""

import asyncio
import threading
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
from compaction_proxy.support.lru import BoundedDict

# Maps the host of a provider to the provider's name in the OpenTelemetry conventions. The name of any other
# provider is its host.
PROVIDERS = {
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


def get_provider_name(host: str) -> str:
    """Returns the provider's name in the OpenTelemetry conventions, or `host` for an unknown provider."""
    return "azure.ai.openai" if host.endswith(".openai.azure.com") else PROVIDERS.get(host, host)


SERVICE = "compaction-proxy"
# Time limit, in seconds, for sending the last OpenTelemetry spans when the process ends. Spans that are not
# sent by then are lost.
CLOSE_S = 1.5
# Maximum number of requests whose OpenTelemetry span contexts stay in memory, so that the trace span of a
# compaction can link to the trace span of its request. If there are more, the oldest context is dropped.
MAX_REQUESTS = 10_000
_FIELDS = (b"traceparent", b"tracestate")
_NS = 1_000_000_000
_w3c = TraceContextTextMapPropagator()

SpanAttributes = Mapping[str, str | int | float | bool | None]
Headers = list[tuple[bytes, bytes]]


def create_span_processor(endpoint: str) -> BatchSpanProcessor:
    """Creates a processor that sends OpenTelemetry spans to a collector (a server for traces).

    `endpoint` is the base URL of the collector. If it is empty, the environment variables `OTEL_EXPORTER_…`
    name the collector.
    """
    traces_url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url))


class OtelTracer:
    """Creates OpenTelemetry spans for client requests, upstream calls and compactions.

    No method blocks the event loop or raises an error. If the proxy has no tracer, it forwards the trace
    headers of clients unchanged.

    Args:
        upstream: Base URL of the upstream.
        version: Version of the proxy.
        processor: Gets each OpenTelemetry span when the span ends, and sends it to a collector.
    """

    def __init__(self, upstream: str, version: str, processor: SpanProcessor) -> None:
        # The environment variable OTEL_SERVICE_NAME may set a name in place of `SERVICE`.
        name = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, SERVICE)
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._spans = self._provider.get_tracer(SERVICE, version)
        self._about = _build_upstream_attributes(upstream)
        self._requests: BoundedDict[str, SpanContext] = BoundedDict(MAX_REQUESTS)

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> "OtelTrace":
        """Starts the trace span of a client request.

        The trace span belongs to the trace that the headers of the request name, or else to a new trace.
        """
        carrier = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in headers if name in _FIELDS
        }
        span = self._spans.start_span("POST chat/completions", _w3c.extract(carrier), SpanKind.SERVER)
        _set_attributes(span, {"http.request.method": "POST", "compaction_proxy.request.id": request_id})
        self._requests[request_id] = span.get_span_context()
        return OtelTrace(self._spans, span, self._about)

    def set_upstream(self, upstream: str) -> None:
        """Sets the base URL of the upstream that the OpenTelemetry spans of later requests describe."""
        self._about = _build_upstream_attributes(upstream)

    def on_event(self, _tenant: str, event: Event) -> None:
        """Records a trace span for a finished or failed compaction, linked to the span of its request.

        Ignores other events.
        """
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
        _set_attributes(
            span,
            {
                "gen_ai.conversation.id": event.conversation,
                "compaction_proxy.request.id": event.request,
                "compaction_proxy.strategy": event.strategy,
                "compaction_proxy.round": event.round,
                "compaction_proxy.reason": event.reason,
                "compaction_proxy.outcome": event.outcome,
                "compaction_proxy.tokens_before": event.tokens_before,
                "compaction_proxy.tokens_after": event.tokens_after,
                "compaction_proxy.messages": event.messages,
                "gen_ai.request.model": event.model,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
            },
        )
        if event.kind == FAILED:
            _mark_failed(span, event.reason)
        span.end(int(event.at * _NS))

    async def close(self) -> None:
        """Sends the remaining OpenTelemetry spans. Spans that are not sent within `CLOSE_S` seconds are lost.

        `shutdown` may take 10 s and cannot be interrupted. It therefore runs in a daemon thread, for which
        the process does not wait when it ends. The process would wait for a thread of the event loop's
        executor.
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
    """Creates and ends the trace spans of one client request.

    Args:
        spans: OpenTelemetry tracer that creates spans.
        span: OpenTelemetry span of the request.
        upstream_attributes: Attributes for the OpenTelemetry span of each upstream call.
    """

    __slots__ = ("_about", "_question", "_span", "_spans")

    def __init__(self, spans: Spans, span: Span, upstream_attributes: SpanAttributes) -> None:
        self._spans = spans
        self._span = span
        self._about = upstream_attributes
        self._question: Span | None = None

    def start_upstream_call(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Starts the trace span of an upstream call. Returns `headers` with the trace context of this span.

        Call this method for each upstream call. A second call for the same client request means that the
        upstream has refused the request, and that the proxy sends a shortened request.
        """
        if self._question is not None:  # a second call means that the upstream refused the first one
            _mark_failed(self._question, "refused")
            self._question.end()
        parent = set_span_in_context(self._span)
        self._question = self._spans.start_span("chat", parent, SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(self._question))
        ours = [(name.encode(), text.encode("latin-1")) for name, text in carrier.items()]
        return [*(field for field in headers if field[0].lower() not in _FIELDS), *ours]

    def end_request(self, exchange: Exchange, conversation: str | None) -> None:
        """Ends all trace spans of the request. Call it after the response, or if no response will come."""
        error = str(exchange.code or "no-answer") if exchange.has_failed or not exchange.code else ""
        _set_attributes(
            self._span,
            {
                "http.response.status_code": exchange.code or None,
                "gen_ai.conversation.id": conversation,
                "compaction_proxy.status": exchange.status,
                "compaction_proxy.strategy": exchange.strategy,
                "compaction_proxy.round": exchange.round,
                "compaction_proxy.reason": exchange.reason,
                "compaction_proxy.tokens_before": exchange.tokens_before,
                "compaction_proxy.tokens_after": exchange.tokens_after,
                "compaction_proxy.overhead": exchange.overhead_s,
                "compaction_proxy.recalls": exchange.recalls,
            },
        )
        spans = [self._span] if self._question is None else [self._question, self._span]
        if self._question is not None:
            self._question.update_name(f"chat {exchange.model}".strip())
            _set_attributes(
                self._question,
                {
                    **self._about,
                    "http.response.status_code": exchange.code or None,
                    "gen_ai.conversation.id": conversation,
                    "gen_ai.conversation.compacted": True if exchange.round is not None else None,
                    "gen_ai.request.model": exchange.model,
                    "gen_ai.response.time_to_first_chunk": exchange.first_byte_s,
                    "gen_ai.usage.input_tokens": exchange.prompt_tokens,
                    "gen_ai.usage.output_tokens": exchange.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": exchange.cached_tokens,
                },
            )
        for span in spans:
            if error:
                _mark_failed(span, error)
            span.end()


def _build_upstream_attributes(base_url: str) -> SpanAttributes:
    """Builds the attributes that are the same in the OpenTelemetry spans of all calls of one upstream."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": get_provider_name(host),
        "server.address": host,
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }


def _set_attributes(span: Span, attributes: SpanAttributes) -> None:
    """Sets the attributes whose value is known, which means neither None nor an empty text."""
    span.set_attributes({name: value for name, value in attributes.items() if value not in (None, "")})


def _mark_failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
