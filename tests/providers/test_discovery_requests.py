"""Asking an upstream for a window, on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.discovery import MAX_BODY_BYTES, HttpWindowDiscovery

MODEL = "org/model"
KEY = {"authorization": "Bearer sk-client"}
TOLD = {"data": [{"id": MODEL, "max_model_len": 32_768}]}
# Only a hang takes as long.
LIMIT_S = 100.0


@dataclass
class Upstream:
    """Answers with pages by path, and remembers who asked."""

    pages: dict[str, Response]
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        self.asked.append((request.url.path, request.headers.get("authorization")))
        return self.pages.get(request.url.path) or Response(status_code=404)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@asynccontextmanager
async def discovery(upstream: Upstream, deadline_s: float) -> AsyncIterator[tuple[HttpWindowDiscovery, str]]:
    transport = EngineTransport(NativeEngine())
    try:
        async with serve_embedded(Starlette(routes=[Route("/{path:path}", upstream.answer)])) as url:
            yield HttpWindowDiscovery(transport, deadline_s), f"{url}/v1"
    finally:
        await transport.aclose()


async def found(upstream: Upstream, deadline_s: float = LIMIT_S) -> int | None:
    async with discovery(upstream, deadline_s) as (asking, url):
        return await asking.discover_window(url, KEY, MODEL)


async def test_the_list_of_models_tells_the_window_and_is_asked_with_the_client_s_credential() -> None:
    upstream = Upstream({"/v1/models": JSONResponse(TOLD)})
    assert await found(upstream) == 32_768
    assert upstream.asked[0] == ("/v1/models", KEY["authorization"])


async def test_a_model_that_the_list_leaves_out_is_asked_for_alone() -> None:
    page = JSONResponse({"id": MODEL, "context_window": 131_072})
    upstream = Upstream({"/v1/models": JSONResponse({"data": []}), "/v1/models/org/model": page})
    assert await found(upstream) == 131_072


async def test_a_local_server_s_own_page_is_asked_for_and_the_smaller_window_wins() -> None:
    slots = JSONResponse({"default_generation_settings": {"n_ctx": 8_192}})
    upstream = Upstream({"/v1/models": JSONResponse(TOLD), "/props": slots})
    assert await found(upstream) == 8_192
    assert upstream.paths == ["/v1/models", "/props"]


async def test_what_ollama_has_loaded_is_found_at_last() -> None:
    running = JSONResponse({"models": [{"name": MODEL, "context_length": 4_096}]})
    upstream = Upstream({"/v1/models": JSONResponse({"data": [{"id": MODEL}]}), "/api/ps": running})
    assert await found(upstream) == 4_096


@pytest.mark.parametrize(
    "page",
    [
        Response("<html>"),
        Response(status_code=500),
        JSONResponse(TOLD, status_code=401),
        Response(b" " * MAX_BODY_BYTES + b"{}"),
    ],
)
async def test_a_page_that_is_of_no_use_tells_nothing(page: Response) -> None:
    assert await found(Upstream({"/v1/models": page})) is None


async def test_a_credential_is_not_carried_elsewhere() -> None:
    elsewhere = Upstream({"/v1/models": JSONResponse(TOLD)})
    async with serve_embedded(Starlette(routes=[Route("/{path:path}", elsewhere.answer)])) as other:
        moved = Response(status_code=307, headers={"location": f"{other}/v1/models"})
        assert await found(Upstream({"/v1/models": moved})) is None
    assert elsewhere.asked == []


async def test_an_upstream_that_does_not_end_is_waited_for_no_longer_than_the_deadline() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async with asyncio.timeout(LIMIT_S):
        assert await found(Upstream({"/v1/models": StreamingResponse(endless())}), deadline_s=0.3) is None


async def test_an_upstream_that_is_away_tells_nothing() -> None:
    transport = EngineTransport(NativeEngine())
    assert await HttpWindowDiscovery(transport).discover_window("http://127.0.0.1:9/v1", KEY, MODEL) is None
    await transport.aclose()


async def test_a_provider_that_tells_nothing_is_not_asked() -> None:
    transport = EngineTransport(NativeEngine())
    assert (
        await HttpWindowDiscovery(transport).discover_window("https://api.openai.com/v1", KEY, "gpt-4o")
        is None
    )
    await transport.aclose()
