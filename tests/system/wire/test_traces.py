"""Traces through the whole proxy: a client's trace goes on to the upstream, a collector gets the spans."""

import asyncio
import json
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.gateway.server import serve_embedded

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FIELDS = ("x-session-id: s", f"traceparent: 00-{TRACE}-{PARENT}-01")
ANSWER = b'{"usage":{"prompt_tokens":41,"completion_tokens":1}}'


async def answered(exchange: Any) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))


def asked(wire: Any, messages: int) -> bytes:
    said = [{"role": ("user", "assistant")[n % 2], "content": "alpha beta " * 60} for n in range(messages)]
    body = wire.chat_body(messages=[*said, {"role": "user", "content": "?"}])
    return bytes(wire.post("/v1/chat/completions", body, *FIELDS))


def parents(seen: Any) -> list[str]:
    fields = (line.partition(b": ") for line in seen.head.split(b"\r\n")[1:])
    return [value.decode() for name, _, value in fields if name.lower() == b"traceparent"]


async def test_the_collector_gets_the_request_and_what_was_decided_in_the_client_s_trace(wire: Any) -> None:
    async with wire.running_upstream(answered) as collector, wire.running_upstream(answered) as upstream:
        told = {
            "observability": {"otlp_endpoint": f"http://127.0.0.1:{collector.port}"},
            "models": {"m": {"window": 3_000}},
        }
        async with wire.running_proxy(upstream.port, **told) as port:
            reply = await wire.ask(port, asked(wire, 40))
    assert wire.status_of_ours(reply)["status"] == "applied"
    [sent] = [parents(seen) for seen in upstream.seen]
    [(_, trace, ours, _)] = [each.split("-") for each in sent]
    assert (trace, ours != PARENT) == (TRACE, True)
    spans = {}
    for seen in collector.seen:
        request = ExportTraceServiceRequest.FromString(seen.body)
        for span in request.resource_spans[0].scope_spans[0].spans:
            spans[span.name] = span
    question = spans["chat m"]
    said = {each.key: each.value for each in question.attributes}
    assert question.trace_id.hex() == TRACE
    assert question.span_id.hex() == ours
    assert said["gen_ai.conversation.id"].string_value.startswith("c_")
    assert said["gen_ai.conversation.compacted"].bool_value is True
    assert said["gen_ai.usage.input_tokens"].int_value == json.loads(ANSWER)["usage"]["prompt_tokens"]
    assert spans["POST chat/completions"].parent_span_id.hex() == PARENT
    assert all(b"alpha beta" not in seen.body for seen in collector.seen)


async def test_without_a_collector_a_client_s_trace_passes_untouched(wire: Any) -> None:
    async with wire.running_upstream(answered) as upstream, wire.running_proxy(upstream.port) as port:
        await wire.ask(port, asked(wire, 4))
    assert [parents(seen) for seen in upstream.seen] == [[f"00-{TRACE}-{PARENT}-01"]]


async def test_spans_name_the_upstream_that_was_asked_after_another_configuration_too(wire: Any) -> None:
    def loaded(collector: int, upstream: int) -> LoadedConfig:
        sections = {
            "store": {"url": "memory://"},
            "upstream": {"base_url": f"http://127.0.0.1:{upstream}/v1"},
            "observability": {"otlp_endpoint": f"http://127.0.0.1:{collector}"},
        }
        return LoadedConfig(Config.model_validate(sections), {}, None, ())

    async with (
        wire.running_upstream(answered) as collector,
        wire.running_upstream(answered) as first,
        wire.running_upstream(answered) as second,
    ):
        app = create_app(loaded(collector.port, first.port).config)
        async with serve_embedded(app) as url:
            port = int(url.rpartition(":")[2])
            await wire.ask(port, asked(wire, 4))
            app.reload(loaded(collector.port, second.port))
            await wire.ask(port, asked(wire, 4))
    told = [
        attribute.value.int_value
        for seen in collector.seen
        for span in ExportTraceServiceRequest.FromString(seen.body).resource_spans[0].scope_spans[0].spans
        for attribute in span.attributes
        if attribute.key == "server.port"
    ]
    assert told == [first.port, second.port]


async def test_a_client_that_leaves_ends_its_span(wire: Any) -> None:
    left = asyncio.Event()

    async def silent(exchange: Any) -> None:
        await exchange.reader.read(-1)
        left.set()

    async with wire.running_upstream(answered) as collector, wire.running_upstream(silent) as upstream:
        told = {"observability": {"otlp_endpoint": f"http://127.0.0.1:{collector.port}"}}
        async with wire.running_proxy(upstream.port, **told) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked(wire, 4))
            async with asyncio.timeout(100):
                while not upstream.seen:  # noqa: ASYNC110 - a socket sets no event
                    await asyncio.sleep(0.01)
            writer.close()
            async with asyncio.timeout(100):
                await left.wait()
    names = [
        span.name
        for seen in collector.seen
        for span in ExportTraceServiceRequest.FromString(seen.body).resource_spans[0].scope_spans[0].spans
    ]
    assert sorted(names) == ["POST chat/completions", "chat m"]
