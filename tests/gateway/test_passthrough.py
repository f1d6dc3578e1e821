"""Requests to count tokens over real sockets: every byte passes, and the counts are learned from."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from compaction_proxy.cli.demo.run import build_demo_config
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.gateway import passthrough
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.identity import IdentityResolver
from compaction_proxy.gateway.passthrough import CountTokensEndpoint, PassthroughEndpoint
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.gateway.upstream import build_upstreams
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

PATH = "/v1/messages/count_tokens?beta=true"
MODEL = "some-model"
WORDS = "word " * 400
ANSWER = b'{ "input_tokens": 1000 }'


@dataclass
class Provider:
    """Notes what comes, and answers with one thing."""

    answer: Response = field(default_factory=lambda: Response(ANSWER))
    got: list[tuple[str, bytes]] = field(default_factory=list)

    async def count(self, request: Request) -> Response:
        self.got.append((str(request.url).partition("/v1")[2], await request.body()))
        return self.answer


def ignored(_: StoreUnavailableError) -> None:
    """A memory store does not fail."""


def body(**more: object) -> bytes:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}], "n": 1.0, **more}
    return json.dumps(fields, indent=1).encode()


@dataclass
class Told:
    """What was learned."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, _: str, __: str, model: str, estimate: int, actual: int) -> None:
        self.calls.append((model, estimate, actual))
        self.came.set()


@asynccontextmanager
async def running(provider: Provider, told: Told) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route("/{path:path}", provider.count, methods=["POST"])])
    async with serve_embedded(app) as url:
        config = build_demo_config(url)
        engine, admission = NativeEngine(), ConcurrencyLimiter(4)
        reading = MessageReader(
            {name: TokenScheduler(CharacterCounter()) for name in ("tiktoken", "characters")}
        )
        learning = ModelLimits(RecordStore(MemoryStore(), ignored))
        learning.learn_token_count = told  # type: ignore[method-assign, assignment]
        targets = build_upstreams(config, engine, "0" * 16, UpstreamMonitor())
        endpoint = CountTokensEndpoint(
            config,
            targets["messages"],
            passthrough=PassthroughEndpoint(targets, admission, IdentityResolver(config, url, lambda: b"s")),
            message_reader=reading,
            model_limits=learning,
            get_secret=lambda: b"s",
            admission=admission,
        )
        try:
            async with (
                serve_embedded(Starlette(routes=[Mount("/", endpoint)])) as front,
                httpx.AsyncClient(base_url=front, trust_env=False) as client,
            ):
                yield client
            assert admission.active_request_count == 0
        finally:
            reading.close()
            await engine.aclose()


async def test_a_count_passes_untouched_and_is_learned_from() -> None:
    provider, told = Provider(), Told()
    raw = body(system="s", tools=[])
    async with running(provider, told) as client:
        answer = await client.post(PATH, content=raw)
        await asyncio.wait_for(told.came.wait(), 30)

    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert provider.got == [("/messages/count_tokens?beta=true", raw)]
    [(model, estimate, actual)] = told.calls
    assert (model, actual) == (MODEL, 1000)
    assert 400 <= estimate <= 800


async def test_a_packed_count_is_learned_from_too() -> None:
    packed, told = gzip.compress(ANSWER), Told()
    provider = Provider(Response(packed, headers={"content-encoding": "gzip"}))
    async with running(provider, told) as client:
        await client.post(PATH, content=body())
        await asyncio.wait_for(told.came.wait(), 30)

    assert [call[2] for call in told.calls] == [1000]


async def test_nothing_is_learned_where_there_is_nothing_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    seen = body(messages=[{"role": "user", "content": [image]}])
    odd = [b"no json", seen, body(thread={"type": "create"})]
    monkeypatch.setattr(passthrough, "MAX_COUNTED_BYTES", 10_000)
    odd.append(body(messages=[{"role": "user", "content": WORDS * 10}]))
    provider, told = Provider(), Told()
    async with running(provider, told) as client:
        for raw in odd:
            assert (await client.post(PATH, content=raw)).content == ANSWER
        provider.answer = Response(b'{"type":"error"}', 400)
        assert (await client.post(PATH, content=body())).status_code == 400
        provider.answer = Response(b'{"input_tokens":"x"}')
        await client.post(PATH, content=body())

    assert [raw for _, raw in provider.got] == [*odd, body(), body()]
    assert told.calls == []
