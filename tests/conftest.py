"""Options, and what tests of the whole product share: the proxy on a socket, a provider behind it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import Store
from tests.helpers.redis_servers import RedisServer
from tests.helpers.ssl_contexts import cache_ssl_contexts
from tests.helpers.virtual_time import VirtualTimeLoop

ROOT = Path(__file__).resolve().parent.parent
# A busy machine answers late. httpx waits 5 s by default; a test that hangs is ended by pytest's own timeout.
for name in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, name, 100.0)
cache_ssl_contexts()  # tests make thousands of clients
SUMMARY_MODEL = "summary-small"

# `--hypothesis-profile=full`: tests/core/test_properties.py tries 10,000 cases of each property, not 250.
# On a busy machine any example may take long; a hang is caught by pytest's own timeout.
for profile in ("default", "full"):
    settings.register_profile(profile, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--runslow"):
        return
    skipped = pytest.mark.skip(reason="slow: needs --runslow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skipped)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test: a virtual clock if the test is marked `virtual_time`, else asyncio's own."""
    is_virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualTimeLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of conversations and tools that stands beside a working copy on machines that have it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared")
    return folder


class Scripted:
    """The scripted provider of ../shared/tools, a process of its own.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=60)

    def control(self, **settings: Any) -> None:
        assert self._client.post("/__control", json=settings).status_code == 200

    def reset(self) -> None:
        """Forget every setting and request."""
        assert self._client.post("/__reset").status_code == 200

    def log(self, model: str) -> list[dict[str, Any]]:
        """The requests for one model, oldest first; `body` is what it was sent."""
        found: list[dict[str, Any]] = json.loads(
            self._client.get("/__log", params={"full": 1, "model": model}).content
        )
        return found

    def forget(self) -> None:
        """Forget every request."""
        self._client.delete("/__log")

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session")
def scripted_process(shared: Path) -> Iterator[Scripted]:
    with subprocess.Popen(
        [sys.executable, shared / "tools" / "fake_upstream.py", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        provider = Scripted(url)
        try:
            yield provider
        finally:
            provider.close()
            process.kill()


@pytest.fixture
def scripted(scripted_process: Scripted) -> Scripted:
    """The scripted provider as it is after its start."""
    scripted_process.reset()
    return scripted_process


Proxied = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def proxied() -> Proxied:
    """Runs the proxy on a socket before an upstream; gives a client whose base URL it is."""

    @asynccontextmanager
    async def running(
        upstream: str, *, store: Store | None = None, **sections: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        config = Config.model_validate(
            {
                "upstream": {"base_url": f"{upstream}/v1"},
                "store": {"url": "memory://"},
                "summary": {"model": SUMMARY_MODEL},
                **sections,
                "server": {"admin_key": "none", **sections.get("server", {})},
            }
        )
        limits = httpx.Limits(max_connections=8)
        async with (
            serve_embedded(create_app(config, store=store)) as url,
            httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client,
        ):
            client.headers["authorization"] = "Bearer sk-test"
            yield client

    return running


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, empty."""
    if request.param == "redis":
        with RedisServer(tmp_path) as server:
            made: Store = RedisStore(parse_redis_url(server.url))
            yield made
            await made.close()
        return
    made = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "state.db")
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command under test has said of logging holds for no other test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
