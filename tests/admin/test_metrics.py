"""`/metrics` of a running proxy: open, about what has just happened, without anything that is somebody's."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter

KEY = "an-admin-key"
TEXT = "a text that nobody else should read"


def config(upstream: str, **server: Any) -> Config:
    given = {"upstream": {"base_url": f"{upstream}/v1"}, "store": {"url": "memory://"}, "server": server}
    return Config.model_validate(given)


@pytest.mark.parametrize("base_path", ["", "/compaction"])
async def test_it_tells_everybody_what_was_just_done_but_not_whose_it_was(base_path: str) -> None:
    asked = {"model": "demo-agent", "messages": [{"role": "user", "content": TEXT}]}
    shown = {"authorization": "Bearer sk-of-somebody", "x-session-id": "somebody-s-session"}
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter()))) as upstream,
        serve_embedded(create_app(config(upstream, base_path=base_path, admin_key=KEY))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=asked, headers=shown)
        metrics = await client.get(f"{base_path}/metrics")
        head = await client.head(f"{base_path}/metrics", headers={"accept": "application/openmetrics-text"})
        posted = await client.post(f"{base_path}/metrics")
    assert answer.status_code == 200
    assert [metrics.status_code, head.status_code, posted.status_code] == [200, 200, 405]
    assert head.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    told = {
        sample.name: sample
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
    }
    requests = told["compaction_requests_total"]
    assert (requests.labels["status"], requests.value) == ("none", 1)
    assert told["upstream_request_duration_seconds_count"].labels["code"] == "200"
    assert [hidden for hidden in (TEXT, "somebody", KEY, '="c_', '="t_') if hidden in metrics.text] == []


async def test_a_request_is_in_flight_until_it_is_answered() -> None:
    arrived, may_answer = asyncio.Event(), asyncio.Event()

    async def upstream(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for name in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{name}.complete"})
            return
        arrived.set()
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def count_requests(client: httpx.AsyncClient) -> float:
        metrics = (await client.get("/metrics")).text
        [family] = [it for it in text_string_to_metric_families(metrics) if it.name == "inflight_requests"]
        return family.samples[0].value

    async with (
        serve_embedded(upstream) as provider,
        serve_embedded(create_app(config(provider))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=100) as client,
    ):
        answer = asyncio.create_task(client.post("/v1/embeddings", json={"model": "m", "input": "text"}))
        async with asyncio.timeout(100):
            await arrived.wait()
        assert await count_requests(client) == 1
        may_answer.set()
        assert (await answer).status_code == 200
        async with asyncio.timeout(100):
            while await count_requests(client):  # noqa: ASYNC110 - the answer may arrive before its request ends
                await asyncio.sleep(0)
