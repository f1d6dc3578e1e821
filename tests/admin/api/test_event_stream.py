"""The stream of what happens: it comes, goes on where it was left, and keeps no server from ending."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from compaction_proxy.admin.api.overview import HEARTBEAT, STREAM_OPENING, stream_events
from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.health import Readiness
from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry.live_feed import FeedItem
from tests.helpers.proxy_processes import proxy_process
from tests.helpers.watched import Watched

STREAM = "/admin/v1/events/stream"


@asynccontextmanager
async def followed() -> AsyncIterator[tuple[Watched, httpx.AsyncClient]]:
    here = Watched(MemoryStore(), 60.0, time.time)
    ready = Readiness(ready=True, store="ok", version="1")
    app = create_admin_app(
        lambda: ready,
        "",
        AdminApi(here.steering, here.watching, here.replaying, AccessPolicy("127.0.0.1", "none")),
    )
    async with (
        serve_embedded(app) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client,
    ):
        yield here, client
    await here.feed.close()
    await here.records.close()


async def told(lines: AsyncIterator[str]) -> dict[str, str]:
    """The next event, comments passed over."""
    found: dict[str, str] = {}
    async for line in lines:
        if line.startswith(":"):
            continue
        if not line:
            if found:
                return found
            continue
        name, _, value = line.partition(": ")
        found[name] = value
    raise AssertionError("the stream has ended")


async def test_what_happens_comes_and_a_reader_goes_on_where_it_was() -> None:
    async with followed() as (here, client):
        async with client.stream("GET", STREAM) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == STREAM_OPENING.decode().strip()
            here.feed.on_event("t_1", Event(COMPACTED, 1.0, "c_1", id="e_1", summary="a secret"))
            await here.feed.flush()
            first = await told(lines)
        here.feed.on_event("t_1", Event(COMPACTED, 2.0, "c_1", id="e_2"))
        await here.feed.flush()
        async with client.stream("GET", STREAM, headers={"last-event-id": first["id"]}) as answer:
            second = await told(answer.aiter_lines())
        async with asyncio.timeout(100):
            while here.feed.has_followers and here.feed._followers:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (first["event"], json.loads(first["data"])["id"]) == ("compaction", "e_1")
    assert (json.loads(second["data"])["id"], "secret" in first["data"]) == ("e_2", False)


async def test_silence_is_broken_by_a_comment_and_ends_with_the_server() -> None:
    ended = asyncio.Event()

    async def nothing() -> AsyncGenerator[FeedItem]:
        try:
            await asyncio.sleep(60)
            yield FeedItem("1", "never", {})
        finally:
            ended.set()

    came: list[bytes] = []
    async for piece in stream_events(nothing(), lambda: len(came) == 3, heartbeat_s=0.02, notice_s=0.01):
        came.append(piece)  # noqa: PERF401 - it is looked at meanwhile
    assert (came, ended.is_set()) == ([STREAM_OPENING, HEARTBEAT, HEARTBEAT], True)


async def test_a_stream_ends_with_its_items() -> None:
    async def one() -> AsyncGenerator[FeedItem]:
        yield FeedItem("7", "exchange", {"model": "\u2028 m"})

    came = [piece async for piece in stream_events(one(), bool)]
    assert came == [STREAM_OPENING, b'id: 7\nevent: exchange\ndata: {"model": "\\u2028 m"}\n\n']


async def test_who_was_admitted_with_a_key_that_has_changed_watches_no_longer() -> None:
    def loaded(key: str, window: int) -> LoadedConfig:
        sections = {"store": {"url": "memory://"}, "server": {"admin_key": key}}
        return LoadedConfig(
            Config.model_validate({**sections, "models": {"a": {"window": window}}}), {}, None, ()
        )

    first, second = "k" * 32, "n" * 32
    app = create_app(loaded(first, 5_000).config)
    async with (
        serve_embedded(app) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client,
        client.stream("GET", STREAM, headers={"authorization": f"Bearer {first}"}) as answer,
    ):
        rest = answer.aiter_raw()
        assert await anext(rest) == STREAM_OPENING
        app.reload(loaded(first, 6_000))  # of no concern to whoever watches
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending := asyncio.ensure_future(anext(rest, None))), 0.8)
        app.reload(loaded(second, 6_000))
        assert await asyncio.wait_for(ending, 30) is None
        again = await client.get(STREAM, headers={"authorization": f"Bearer {first}"})
    assert again.status_code == 401


async def test_what_comes_once_a_stream_is_to_end_is_not_told() -> None:
    ended = False

    async def one() -> AsyncGenerator[FeedItem]:
        nonlocal ended
        await asyncio.sleep(0.01)
        ended = True
        yield FeedItem("7", "exchange", {})

    assert [piece async for piece in stream_events(one(), lambda: ended)] == [STREAM_OPENING]


async def test_who_watches_does_not_hold_the_end_up(tmp_path: Path) -> None:
    async with (
        proxy_process(tmp_path, 9, admin_key="none") as proxy,
        httpx.AsyncClient(base_url=proxy.url, timeout=100, trust_env=False) as client,
        client.stream("GET", STREAM) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        proxy.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):  # the drain would be 120 s
            rest = [line async for line in lines]
            code = await proxy.process.wait()
    assert all(not line or line.startswith(":") for line in rest)
    assert code == 0
