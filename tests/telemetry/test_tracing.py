"""Traces are sent where they should be, and nowhere else."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from compaction_proxy import runtime
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.runtime import COLLECTOR_VARIABLES, create_tracer

NAMED = {"observability": {"otlp_endpoint": "http://127.0.0.1:9/"}}


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COLLECTOR_VARIABLES, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


class Collector:
    """Takes whatever is posted, and remembers path and kind."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        kind = dict(scope["headers"])[b"content-type"].decode()
        self.got.append((scope["method"], scope["path"], kind))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("named_by", ["configuration", "environment"])
async def test_spans_that_wait_are_sent_to_the_collector_in_the_end(
    named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    async with serve_embedded(collector) as url:
        if named_by == "environment":
            monkeypatch.setenv(COLLECTOR_VARIABLES[0], url)
        given = {} if named_by == "environment" else {"observability": {"otlp_endpoint": url}}
        tracer = await asyncio.to_thread(create_tracer, Config.model_validate(given))
        assert tracer is not None
        trace = tracer.start_request([], "r1")
        trace.start_upstream_call([])
        trace.end_request(Exchange(at=1.0, model="m", status="none", code=200), None)
        await tracer.close()
    assert collector.got == [("POST", "/v1/traces", "application/x-protobuf")]


def test_without_a_collector_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_tracer(Config()) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracer(Config.model_validate(NAMED)) is None


def test_a_collector_that_nothing_can_be_sent_to_for_lack_of_a_library_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(runtime, "import_module", missing)
    with pytest.raises(ConfigError) as refused:
        create_tracer(Config.model_validate(NAMED))
    assert str(refused.value) == "observability.otlp_endpoint: needs `pip install compaction-proxy[otel]`"
    monkeypatch.setenv(
        COLLECTOR_VARIABLES[0], "http://127.0.0.1:9"
    )  # set for all that runs there, not for us
    assert create_tracer(Config()) is None
