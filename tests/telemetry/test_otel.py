"""Traces: which spans there are, how they hang together, and what they say."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from compaction_proxy.core.event import COMPACTED, FAILED, UNDONE, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.otel import OtelTracer, get_provider_name

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FIELDS = [
    (b"authorization", b"Bearer sk-of-somebody"),
    (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()),
    (b"tracestate", b"vendor=1"),
]
CONVERSATION = "c_0123456789abcdef01234567"
EXCHANGE = Exchange(
    at=1.0, model="gpt-5.4", status="reused", code=200, request="r1", strategy="anchored", round=2,
    tokens_before=900, tokens_after=400, prompt_tokens=410, completion_tokens=7, cached_tokens=384,
    overhead_s=0.25, first_byte_s=0.5,
)  # fmt: skip


class Traced:
    """A tracer, and the spans that have ended, by name."""

    def __init__(self, upstream: str = "https://api.openai.com/v1") -> None:
        self._memory = InMemorySpanExporter()
        self.tracer = OtelTracer(upstream, "1.0", SimpleSpanProcessor(self._memory))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._memory.get_finished_spans()}


def said(span: ReadableSpan) -> Mapping[str, Any]:
    return dict(span.attributes or {})


def test_a_request_goes_on_with_the_client_s_trace_and_the_upstream_with_ours() -> None:
    traced = Traced()
    trace = traced.tracer.start_request(FIELDS, "r1")
    sent = trace.start_upstream_call(FIELDS)
    trace.end_request(EXCHANGE, CONVERSATION)
    spans = traced.spans()
    request, question = spans["POST chat/completions"], spans["chat gpt-5.4"]
    assert (request.kind.name, question.kind.name) == ("SERVER", "CLIENT")
    assert request.context is not None
    assert question.context is not None
    assert request.parent is not None
    assert question.parent == request.context
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert sent == [
        FIELDS[0],
        (b"traceparent", f"00-{TRACE}-{question.context.span_id:016x}-01".encode()),
        FIELDS[2],
    ]
    assert said(question) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5.4",
        "gen_ai.conversation.id": CONVERSATION,
        "gen_ai.conversation.compacted": True,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 410,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 384,
        "server.address": "api.openai.com",
        "server.port": 443,
        "http.response.status_code": 200,
    }
    assert said(request) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.conversation.id": CONVERSATION,
        "compaction_proxy.request.id": "r1",
        "compaction_proxy.status": "reused",
        "compaction_proxy.strategy": "anchored",
        "compaction_proxy.round": 2,
        "compaction_proxy.tokens_before": 900,
        "compaction_proxy.tokens_after": 400,
        "compaction_proxy.overhead": 0.25,
    }


def test_a_request_that_was_not_changed_is_not_called_compacted() -> None:
    traced = Traced("http://127.0.0.1:8000/v1")
    trace = traced.tracer.start_request([], "r1")
    trace.start_upstream_call([])
    trace.end_request(Exchange(at=1.0, model="m", status="none", code=200), None)
    assert said(traced.spans()["chat m"]) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "127.0.0.1",
        "gen_ai.request.model": "m",
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "http.response.status_code": 200,
    }


def test_one_span_stands_for_an_answer_that_went_on_and_the_request_says_how_often() -> None:
    traced = Traced()
    trace = traced.tracer.start_request([], "r1")
    trace.start_upstream_call([])
    trace.end_request(EXCHANGE._replace(recalls=2), None)
    spans = traced.spans()
    assert set(spans) == {"POST chat/completions", "chat gpt-5.4"}
    assert said(spans["POST chat/completions"])["compaction_proxy.recalls"] == 2


@pytest.mark.parametrize(("code", "error"), [(429, "429"), (0, "no-answer")])
def test_what_went_wrong_is_an_error_of_both_spans(code: int, error: str) -> None:
    traced = Traced()
    trace = traced.tracer.start_request([], "r1")
    trace.start_upstream_call([])
    trace.start_upstream_call([])  # a shorter request, because the first one was refused
    trace.end_request(EXCHANGE._replace(code=code), None)
    found = {name: (span.status.is_ok, said(span).get("error.type")) for name, span in traced.spans().items()}
    assert found == {
        "chat": (False, "refused"),
        "chat gpt-5.4": (False, error),
        "POST chat/completions": (False, error),
    }


def test_a_round_is_a_span_that_is_linked_to_the_request_it_was_made_in() -> None:
    traced = Traced()
    trace = traced.tracer.start_request(FIELDS, "r1")
    about = {"strategy": "anchored", "round": 1, "conversation": CONVERSATION, "request": "r1"}
    made = Event(COMPACTED, 100.0, **about, seconds=2.5, reason="tokens", outcome="applied", prompt_tokens=9)  # type: ignore[arg-type]
    traced.tracer.on_event("t", made)
    traced.tracer.on_event("t", Event(FAILED, 101.0, strategy="full", reason="timeout"))
    traced.tracer.on_event("t", Event(UNDONE, 102.0))
    trace.end_request(EXCHANGE, None)
    spans = traced.spans()
    assert set(spans) == {"compact anchored", "compact full", "POST chat/completions"}
    span, request = spans["compact anchored"], spans["POST chat/completions"]
    assert ([link.context for link in span.links], span.parent) == ([request.context], None)
    assert (span.start_time, span.end_time) == (97_500_000_000, 100_000_000_000)
    assert said(span) == {
        "gen_ai.conversation.id": CONVERSATION,
        "gen_ai.usage.input_tokens": 9,
        "compaction_proxy.request.id": "r1",
        "compaction_proxy.strategy": "anchored",
        "compaction_proxy.round": 1,
        "compaction_proxy.reason": "tokens",
        "compaction_proxy.outcome": "applied",
    }
    assert (spans["compact full"].status.is_ok, said(spans["compact full"])["error.type"]) == (
        False,
        "timeout",
    )


@pytest.mark.parametrize(
    "field", [b"", b"00-0-0-01", b"00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff\xfe", b"x" * 10_000]
)
def test_a_field_that_names_no_trace_begins_a_new_one(field: bytes) -> None:
    traced = Traced()
    trace = traced.tracer.start_request([(b"traceparent", field)], "r1")
    [(name, text)] = trace.start_upstream_call([(b"traceparent", field)])
    trace.end_request(EXCHANGE, None)
    request = traced.spans()["POST chat/completions"]
    assert request.parent is None
    assert request.context is not None
    assert (name, text[3:35]) == (b"traceparent", f"{request.context.trace_id:032x}".encode())


ENDING = """
import asyncio, sys
from compaction_proxy.telemetry.otel import OtelTracer, create_span_processor

async def main():
    tracer = OtelTracer("https://api.openai.com/v1", "1.0", create_span_processor(sys.argv[1]))
    tracer.start_request([], "r1")._span.end()
    await tracer.close()

asyncio.run(main())
"""


def test_a_collector_that_never_answers_does_not_keep_the_process_from_ending() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run = [sys.executable, "-c", ENDING, endpoint]
        patient = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "110"}  # seconds for which the exporter tries
        subprocess.run(run, check=True, timeout=60, env=patient)
        silent.settimeout(1)
        connection, _ = silent.accept()
        with connection:
            asked = connection.recv(4)
    assert asked == b"POST"


def test_providers_are_called_as_the_conventions_call_them() -> None:
    hosts = ("api.openai.com", "some.openai.azure.com", "api.x.ai", "llm.internal")
    assert [get_provider_name(host) for host in hosts] == [
        "openai",
        "azure.ai.openai",
        "x_ai",
        "llm.internal",
    ]
