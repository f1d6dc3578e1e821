"""The compacted endpoints as routes of the FastAPI application, over sockets, without the dispatcher."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from compaction_proxy.app import Proxy, create_app
from compaction_proxy.cli.demo.provider import AGENT_MODEL, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.routes import RelayRoute
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.doubles.three_wire_provider import ThreeWireProvider

WINDOW_TOKENS = 8_192
KEY = "k-one"
HEADERS = {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}
TALK: list[Any] = [
    {"role": ("user", "assistant")[number % 2], "content": f"Step {number}: {'word ' * 300}"}
    for number in range(41)
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": AGENT_MODEL, "messages": TALK},
    "/v1/responses": {"model": AGENT_MODEL, "input": TALK},
    "/v1/messages": {"model": AGENT_MODEL, "messages": TALK, "max_tokens": 100},
}


@dataclass
class Running:
    """The FastAPI application on a socket, and the provider behind it."""

    proxy: Proxy
    provider: ThreeWireProvider
    url: str
    client: httpx.AsyncClient

    def forwarded(self) -> list[int]:
        """The number of messages in each request of the agent's model that has arrived."""
        bodies = [json.loads(seen.body) for seen in self.provider.log if seen.model == AGENT_MODEL]
        return [len(body["messages"] if "messages" in body else body["input"]) for body in bodies]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    provider = ThreeWireProvider(DemoProviderSettings(CharacterCounter(), window=WINDOW_TOKENS))
    async with serve_embedded(provider) as upstream:
        config = Config.model_validate(
            {
                "upstream": {"base_url": f"{upstream}/v1"},
                "server": {"client_keys": [KEY], "admin_key": "none"},
                "store": {"url": "memory://"},
                "compaction": {"trigger": [{"tokens": 4_000}]},
                "models": {"*": {"window": WINDOW_TOKENS}},
            }
        )
        proxy = create_app(config)
        async with (
            serve_embedded(proxy.api) as url,
            httpx.AsyncClient(base_url=url, headers=HEADERS, trust_env=False, timeout=100) as client,
        ):
            yield Running(proxy, provider, url, client)


@pytest.mark.parametrize("path", BODIES)
async def test_a_route_compacts_and_relays(running: Running, path: str) -> None:
    answer = await running.client.post(path, json=BODIES[path])

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-compaction-status"] == "applied"
    assert running.forwarded()[-1] < len(TALK)


@pytest.mark.parametrize("path", BODIES)
async def test_a_route_streams(running: Running, path: str) -> None:
    async with running.client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line async for line in answer.aiter_lines() if line.startswith("data: ")]

    assert len(events) > 2


@pytest.mark.parametrize("path", BODIES)
async def test_a_route_refuses_a_wrong_key(running: Running, path: str) -> None:
    answer = await running.client.post(path, json=BODIES[path], headers={"authorization": "Bearer other"})

    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert running.forwarded() == []


async def test_an_sdk_talks_to_a_route(running: Running) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{running.url}/v1", http_client=http) as client:
        answer = await client.chat.completions.create(
            model=AGENT_MODEL, messages=[{"role": "user", "content": "Hello"}]
        )

    assert answer.choices[0].message.content == 'You said "Hello". I was sent 1 messages.'


async def test_the_handlers_of_the_routes_are_those_that_the_dispatcher_calls(running: Running) -> None:
    dispatcher = running.proxy._dispatcher
    routes = {route.name: route.app for route in running.proxy.api.routes if isinstance(route, RelayRoute)}

    called = {**dispatcher.wire_endpoints, "compact": dispatcher.own_endpoints["/v1/compact"]}

    assert set(routes) == set(called)
    assert [name for name in called if called[name] is not routes[name]] == []


async def test_the_description_of_the_application_has_the_compacted_endpoints(running: Running) -> None:
    described = (await running.client.get("/admin/v1/openapi.json", headers={"host": "127.0.0.1"})).json()

    posts = {
        path: operations["post"] for path, operations in described["paths"].items() if "post" in operations
    }
    relay = {path: post for path, post in posts.items() if post.get("tags") == ["relay"]}
    assert set(relay) == {*BODIES, "/v1/compact"}
    assert all(each["summary"] and each["requestBody"]["required"] for each in relay.values())
    assert "text/event-stream" in relay["/v1/responses"]["responses"]["200"]["content"]
