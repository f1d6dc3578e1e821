"""The proxy where the secret that replicas share has been damaged in their Redis."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.runtime import SECRET_RETRY_S
from compaction_proxy.storage.factory import NO_SECRET, SECRET_KEY
from compaction_proxy.storage.redis.url import parse_redis_url
from tests.helpers.redis_servers import RedisServer

LIMIT_S = 60.0
FILLER = "and then we looked at the ledger once more, line by line. " * 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as made:
        yield made


async def two_replicas(stack: AsyncExitStack, server: RedisServer) -> list[httpx.AsyncClient]:
    """Clients of two proxies on one server."""
    provider = await stack.enter_async_context(
        serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter())))
    )
    values = {
        "upstream": {"base_url": f"{provider}/v1"},
        "store": {"url": server.url},
        "summary": {"model": "demo-summary"},
        "models": {"*": {"window": 4_096}},
        "compaction": {"counter": "characters"},
    }
    urls = [
        await stack.enter_async_context(serve_embedded(create_app(Config.model_validate(values))))
        for _ in range(2)
    ]
    return [await stack.enter_async_context(httpx.AsyncClient(base_url=url)) for url in urls]


async def conversations(clients: list[httpx.AsyncClient]) -> list[str]:
    """What each replica takes the same conversation of the same client for."""
    named = {"authorization": "Bearer k", "x-session-id": "s"}
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n}: {FILLER}"} for n in range(61)]
    body = {"model": "demo-agent", "messages": messages, "max_tokens": 16}
    answers = [await each.post("/v1/chat/completions", json=body, headers=named) for each in clients]
    assert [answer.status_code for answer in answers] == [200, 200]
    return [answer.headers["x-compaction-session"] for answer in answers]


async def agreed(clients: list[httpx.AsyncClient]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(set(await conversations(clients))) > 1:  # noqa: ASYNC110 - another replica's asking is no event of ours
            await asyncio.sleep(0.1)


def told(logged: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was said of the secret; on a busy machine a call of the store may time out besides."""
    reasons = [event["reason"] for event in logged if event["event"] == "store.failed"]
    return [reason for reason in reasons if reason == NO_SECRET]


async def test_a_damaged_shared_secret_is_told_once_by_each_replica_until_it_is_mended(
    server: RedisServer,
) -> None:
    key = parse_redis_url(server.url).prefix + SECRET_KEY
    server.admin.set(key, "short")
    with capture_logs() as logged:
        async with AsyncExitStack() as stack:
            clients = await two_replicas(stack, server)
            apart = await conversations(clients)
            await asyncio.sleep(2 * SECRET_RETRY_S + 0.5)  # both ask again meanwhile
            damaged = told(logged), server.admin.get(key)
            server.admin.delete(key)
            await agreed(clients)

    assert len(set(apart)) == 2
    assert damaged == ([NO_SECRET] * 2, b"short")
    assert told(logged) == [NO_SECRET] * 2
    assert len(server.admin.get(key)) == 32


async def test_a_key_of_another_type_in_the_shared_secrets_place_is_taken_over(server: RedisServer) -> None:
    key = parse_redis_url(server.url).prefix + SECRET_KEY
    server.admin.rpush(key, "theirs")
    with capture_logs() as logged:
        async with AsyncExitStack() as stack:
            clients = await two_replicas(stack, server)
            together = await conversations(clients)

    assert len(set(together)) == 1
    assert told(logged) == []
    assert len(server.admin.get(key)) == 32
