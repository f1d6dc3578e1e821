"""Fifty tenants under the same session ids: none ever meets a word that belongs to another.

A tenant's words stand in its messages, in what the provider answers it, and in what the summary model writes
for it. Half of the conversations are the same for all tenants, to the byte: there nothing but the credential
tells them apart.
"""

import asyncio
import json
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.storage.envelope import extract_json
from tests.helpers.redis_servers import RedisServer
from tests.system.isolation.crowd import CANARY, SUMMARY_MODEL, Crowd, Provider, owners

ADMIN_KEY = "an-admin-key"
# How often the crowd asks at most, until tenants that share are seen to: that takes a coincidence.
ROUNDS = 5
SHOWN = f"authorization: Bearer {ADMIN_KEY}"


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[tuple[str, RedisServer | None]]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'state.db'}", None
        return
    with RedisServer(folder) as server:
        yield server.url, server


@asynccontextmanager
async def running(isolation: Any, provider: Provider, **settings: str) -> AsyncIterator[list[Any]]:
    """Two replicas before a provider."""
    models = {
        "plain": {"window": 2_000, "compaction": {"strategy": "chained", "keep": {"messages": 4}}},
        "anchored": {"window": 2_000},
    }
    async with (
        isolation.upstream(provider) as upstream,
        isolation.proxies(
            2,
            upstream__base_url=f"{upstream.url}/v1",
            summary__model=SUMMARY_MODEL,
            summary__calls_per_hour="0",
            server__admin_key=ADMIN_KEY,
            models=json.dumps(models),
            **settings,
        ) as proxies,
    ):
        yield proxies


async def admin_answers(isolation: Any, port: int, name: str) -> bytes:
    """Everything that the admin API tells of a conversation and of what rounds took out of it."""
    start = f"/admin/v1/conversations/{name}"
    found = b""
    for path in ("", "/events", "/pins", "/search?q=kestrel", "/search?q=ledger&limit=100"):
        reply = await isolation.ask(port, isolation.request("GET", start + path, SHOWN))
        assert reply is not None
        if reply.status == 404:
            return found  # what was stored before Redis was started again is gone
        assert reply.status == 200, (path, reply.body)
        found += reply.body
    for message in sorted(set(re.findall(rb'"message_id": "(m_\w+)"', found)))[:5]:
        path = f"{start}/messages/{message.decode()}"
        reply = await isolation.ask(port, isolation.request("GET", path, SHOWN))
        assert reply is not None
        found += reply.body
    return found


async def foreign_in_admin(isolation: Any, port: int, names: dict[str, int]) -> tuple[list[str], int]:
    """Conversations whose answers hold canaries of others, and how many hold one of their own."""
    foreign, own = [], 0
    for name, tenant in names.items():
        met = owners(await admin_answers(isolation, port, name))
        own += tenant in met
        if met - {tenant}:
            foreign.append(f"{name} of {tenant}: {sorted(met)}")
    return foreign, own


def foreign_in_store(url: str, isolation: Any) -> list[str]:
    """Records that hold canaries of several tenants, or keys that hold any."""
    found = []
    for key, values in isolation.stored(url).items():
        held = b"\n".join(extract_json(value) or value for value in values)
        if len(owners(held)) > 1 or CANARY.search(key) or b"session-" in key or b"sk-" in key:
            found.append(key.decode())
    return found


@pytest.mark.timeout(600)  # with --runslow
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_fifty_tenants_under_the_same_session_ids_never_meet_each_other(
    isolation: Any, kind: str, pytestconfig: pytest.Config
) -> None:
    slow = pytestconfig.getoption("--runslow")
    requests, restarts = (5_000, 6) if slow else (500, 2)
    rng = random.Random(f"{kind} 6")
    provider, crowd = Provider(isolation, rng), Crowd(isolation, rng)
    with store_of(kind, isolation.folder) as (url, server):
        async with running(isolation, provider, store__url=url) as proxies:
            ports = [each.port for each in proxies]
            share = requests // (restarts + 1)
            for number in range(restarts):
                asking = asyncio.create_task(crowd.asks(ports, share))
                await asyncio.sleep(0.5 + rng.random() / 2)
                ended = proxies[number % 2]
                await ended.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
                if server is not None and number % 2:
                    server.kill()
                    server.start()
                await ended.start()
                await asking
            await crowd.asks(ports, requests - restarts * share)
            names = dict(list(crowd.told.conversations.items())[-400 if slow else -25 :])
            foreign, own = await foreign_in_admin(isolation, ports[0], names)
            pages = [
                await isolation.ask(ports[0], isolation.request("GET", path))
                for path in ("/metrics", "/ui", "/readyz", "/admin/v1/openapi.json")
            ]
            mixed = foreign_in_store(url, isolation)
        output = b"".join(each.output.read_bytes() for each in proxies)

    assert (provider.foreign, crowd.told.wrong, foreign, mixed) == ([], [], [], [])
    assert CANARY.findall(output) == []
    assert not [page for page in pages if page is None or CANARY.search(page.body)]
    # All of this happened to conversations that were compacted, and found again.
    statuses = crowd.told.statuses
    assert provider.summaries > requests / 10, provider.summaries
    assert statuses["applied"] + statuses["reused"] > requests / 3, statuses
    assert own > len(names) / 10, own  # which conversations are the last is chance
    assert crowd.left > requests / 10
    assert crowd.lost < requests / 2, crowd.lost  # to replicas that had just been killed
    assert sum(statuses.values()) + crowd.left + crowd.lost == requests


async def test_clients_that_are_made_one_tenant_are_seen_to_share_a_summary(isolation: Any) -> None:
    """What the test above looks for is there to be seen, where the configuration lets tenants share."""
    rng = random.Random(6)
    provider, crowd = Provider(isolation, rng), Crowd(isolation, rng)
    settings = {"store__url": f"sqlite:///{isolation.folder / 'state.db'}", "session__tenant": "none"}
    async with running(isolation, provider, **settings) as proxies:
        for _ in range(ROUNDS):
            await crowd.asks([each.port for each in proxies], 80)
            if provider.foreign and crowd.told.wrong:
                break
    assert provider.foreign
    assert crowd.told.wrong
