"""What the composition root builds: only what is configured is loaded. What it says of a store."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from structlog.testing import capture_logs

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import ListEntry, Record

SCRIPT = """
import sys
from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config

create_app(Config.model_validate({}))
print(*({{"redis", "cryptography", "fastapi", "jinja2"}} & sys.modules.keys()))
"""


def loaded(config: dict[str, dict[str, str]]) -> set[str]:
    """Which of some large libraries a process has loaded that has built the proxy from `config`."""
    run = [sys.executable, "-c", SCRIPT.format(config)]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


def test_a_library_that_the_configuration_does_not_name_is_not_loaded() -> None:
    assert loaded({}) == set()


def test_the_library_of_a_shared_store_is_loaded_with_it() -> None:
    assert "redis" in loaded({"store": {"url": "redis://127.0.0.1:1"}})


async def test_health_and_metrics_are_answered_before_the_admin_site_is_created() -> None:
    proxy = create_app(
        Config.model_validate({"server": {"admin_key": "none"}, "store": {"url": "memory://"}})
    )
    created: list[str] = []
    create = proxy._admin_site._create

    def create_and_record() -> Any:
        created.append("site")
        return create()

    proxy._admin_site._create = create_and_record
    async with serve_embedded(proxy) as url, httpx.AsyncClient(base_url=url) as client:
        statuses = [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")]
        assert (statuses, created) == ([200, 200, 200], [])
        refused = [client.post("/readyz"), client.get("/admin/v1/nothing"), client.get("/ui/nothing")]
        answers = [answer.status_code for answer in await asyncio.gather(*refused)]
    assert (answers, created) == ([405, 404, 404], ["site"])


async def test_a_store_that_cannot_be_opened_is_down_and_one_line_says_so_whatever_is_asked(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    config = Config.model_validate(
        {
            "server": {"admin_key": "none"},
            "upstream": {"base_url": "http://127.0.0.1:1/v1"},
            "store": {"url": f"sqlite:///{tmp_path}/file/state.db"},
        }
    )
    with capture_logs() as logged:
        async with serve_embedded(create_app(config)) as url, httpx.AsyncClient(base_url=url) as client:
            seen = []
            for _ in range(4):
                ready = await client.get("/readyz")
                seen.append((ready.status_code, ready.json()["store"]))
                await client.get("/admin/v1/conversations/c_1")

    failed = [event["reason"] for event in logged if event["event"] == "store.failed"]
    assert seen == [(200, "down")] * 4
    assert len(failed) == len(set(failed))
    assert "store-unwritable" in failed


async def test_a_store_that_takes_no_write_is_told_of_once_and_is_not_down() -> None:
    class Full(MemoryStore):
        async def write(self, items: Sequence[Record | ListEntry]) -> None:
            raise StoreUnavailableError("store-full")

    provider = DemoProvider(DemoProviderSettings(CharacterCounter()))
    with capture_logs() as logged:
        async with serve_embedded(provider) as upstream:
            config = Config.model_validate({"upstream": {"base_url": f"{upstream}/v1"}})
            app = create_app(config, store=Full())
            async with serve_embedded(app) as url, httpx.AsyncClient(base_url=url) as client:
                for n in range(10):
                    body = {"model": "demo-agent", "messages": [{"role": "user", "content": "hello"}]}
                    answer = await client.post(
                        "/v1/chat/completions", json=body, headers={"x-session-id": f"s{n}"}
                    )
                    assert answer.status_code == 200
                store = (await client.get("/readyz")).json()["store"]

    failed = [event["reason"] for event in logged if event["event"] == "store.failed"]
    assert (store, failed) == ("ok", ["store-full"])
