"""Windows are asked for at first sight of a model: once, and not where they are configured."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.gateway.window_finder import DISCOVERY_INTERVAL_S, WindowFinder
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

SCOPE: dict[str, Any] = {"headers": [(b"authorization", b"Bearer k")]}


class Scene:
    """A finder, and what it has asked the upstream."""

    def __init__(self, base_url: str = "http://127.0.0.1:9/v1") -> None:
        self.seconds, self.asked = 0.0, list[tuple[str, Mapping[str, str], str]]()
        self.limits = ModelLimits(RecordStore(MemoryStore(), lambda _: None), lambda: 5.0)
        config = Config.model_validate({"models": {"known": {"window": 9_000}}})
        engine: Any = None  # nothing is forwarded
        upstream = Upstream(base_url, "", "0" * 16, engine, 1.0, 1.0)
        self.finder = WindowFinder(config, upstream, self.limits, self, clock=lambda: self.seconds)

    async def discover_window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        self.asked.append((base_url, headers, model))
        return 4_096

    async def settle(self) -> None:
        while self.limits._discoveries.has_running_tasks:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("base_url", "is_local"),
    [("http://127.0.0.1:9/v1", True), ("http://gateway:4000", True), ("https://api.openai.com/v1", False)],
)
def test_a_local_upstream_is_recognised_by_its_address(base_url: str, *, is_local: bool) -> None:
    assert Scene(base_url).finder.is_upstream_local is is_local


async def test_a_window_is_asked_for_once_with_the_clients_credential() -> None:
    scene = Scene()
    for scene.seconds in (0.0, 1.0, DISCOVERY_INTERVAL_S + 1):
        scene.finder.start_discovery(SCOPE, "t", "m")
        await scene.settle()
    assert scene.asked == [("http://127.0.0.1:9/v1", {"authorization": "Bearer k"}, "m")]
    assert await scene.limits.list_discovered_windows("http://127.0.0.1:9") == {"m": 4_096}


async def test_a_configured_window_is_not_asked_for() -> None:
    scene = Scene()
    scene.finder.start_discovery(SCOPE, "t", "known")
    await scene.settle()
    assert scene.asked == []
