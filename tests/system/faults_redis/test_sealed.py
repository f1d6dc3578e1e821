"""Sealed records, end to end: the proxy before a real Redis whose every byte is read."""

import base64
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.storage.envelope import extract_json
from tests.helpers.redis_servers import RedisServer

OLD, NEW = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
CONVERSATIONS, WORDS = 20, 50


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as made:
        yield made


@pytest.fixture
async def upstream() -> AsyncIterator[str]:
    """One provider for all proxies of a test: tenants differ with its address."""
    async with serve_embedded(
        DemoProvider(DemoProviderSettings(TiktokenCounter(print), window=4_096))
    ) as url:
        yield url


@asynccontextmanager
async def proxy(upstream: str, server: RedisServer, *keys: str) -> AsyncIterator[httpx.AsyncClient]:
    config = Config.model_validate(
        {
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": server.url, "encryption_keys": keys},
            "summary": {"model": "demo-summary"},
            "models": {"*": {"window": 4_096}},
        }
    )
    async with serve_embedded(create_app(config)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


def conversation(planted: list[str]) -> list[dict[str, Any]]:
    """One whose task, later messages and answers all hold planted words, well over the trigger."""
    filler = "and then we looked at the ledger once more, line by line. " * 4
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {planted[0]}: find {planted[1]}."}]
    for word in planted[2:]:
        messages.append({"role": "assistant", "content": f"I found /srv/{word}/ledger.py. {filler}"})
        messages.append({"role": "user", "content": f"Always keep {word} in mind."})
    return messages


async def status(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> str:
    body = {"model": "demo-agent", "messages": messages, "max_tokens": 16}
    answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-compaction-status"]


def everything(server: RedisServer) -> dict[bytes, list[bytes]]:
    """Every value in Redis, by key."""
    found: dict[bytes, list[bytes]] = {}
    with redis.Redis.from_url(server.url) as client:
        for key in client.scan_iter():
            kind = client.type(key)
            if kind == b"string":
                found[key] = [client.get(key) or b""]
            elif kind == b"list":
                found[key] = list(client.lrange(key, 0, -1))
            else:
                found[key] = [client.dump(key) or b""]
    return found


def planted_in(server: RedisServer, words: list[str]) -> list[str]:
    """The words that whoever has the store can read, inflating what was deflated."""
    raw = [each for key, values in everything(server).items() for each in (key, *values)]
    dump = b"\n".join([*raw, *(extract_json(value) or b"" for value in raw)])
    return [word for word in words if word.encode() in dump]


async def test_of_a_thousand_planted_words_none_is_in_a_sealed_store(
    upstream: str, server: RedisServer
) -> None:
    planted = [[secrets.token_hex(6) for _ in range(WORDS)] for _ in range(CONVERSATIONS)]
    words = [word for each in planted for word in each]
    async with proxy(upstream, server, OLD) as client:
        assert {await status(client, conversation(each)) for each in planted} == {"applied"}
        assert {await status(client, conversation(each)) for each in planted} == {"reused"}
    assert len(everything(server)) > CONVERSATIONS
    assert planted_in(server, words) == []

    async with proxy(upstream, server, OLD) as client:
        assert await status(client, conversation(planted[0])) == "reused"
    async with proxy(upstream, server, NEW, OLD) as client:  # rotated: the old key still opens
        assert await status(client, conversation(planted[0])) == "reused"
    async with proxy(upstream, server, NEW) as client:  # dropped: a miss, not an error
        assert await status(client, conversation(planted[0])) == "applied"


async def test_in_a_store_that_is_not_sealed_they_are_there(upstream: str, server: RedisServer) -> None:
    planted = [secrets.token_hex(6) for _ in range(WORDS)]
    async with proxy(upstream, server) as client:
        assert await status(client, conversation(planted)) == "applied"
    assert planted_in(server, planted) != []  # what was taken out is kept word for word


async def test_what_was_changed_in_the_store_is_a_miss(upstream: str, server: RedisServer) -> None:
    messages = conversation([secrets.token_hex(6) for _ in range(WORDS)])
    async with proxy(upstream, server, OLD) as client:
        assert await status(client, messages) == "applied"
    with redis.Redis.from_url(server.url) as raw:
        for key, values in everything(server).items():
            if b":checkpoint:" in key and len(values) == 1:
                raw.set(key, values[0][:-1] + bytes([values[0][-1] ^ 1]), keepttl=True)
    async with proxy(upstream, server, OLD) as client:
        assert await status(client, messages) == "applied"
