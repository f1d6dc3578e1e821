"""Health checks: what they answer while the proxy is ready, unready, or without its store."""

import httpx
import pytest

from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.health import ALIVE_PATHS, READY_PATHS, Readiness
from compaction_proxy.gateway.server import serve_embedded


@pytest.mark.parametrize("base_path", ["", "/compaction"])
@pytest.mark.parametrize("store", ["ok", "down"])
async def test_a_store_that_is_down_does_not_make_it_unready(base_path: str, store: str) -> None:
    now = Readiness(ready=True, store="down" if store == "down" else "ok", version="1")
    async with (
        serve_embedded(create_admin_app(lambda: now, base_path)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answers = [await client.get(base_path + path) for path in READY_PATHS]
    expected = (200, {"status": "ok", "ready": True, "store": store, "version": "1"})
    assert [(answer.status_code, answer.json()) for answer in answers] == [expected] * len(READY_PATHS)


@pytest.mark.parametrize(("ready", "expected"), [(True, (200, "degraded")), (False, (503, "unready"))])
async def test_problems_make_it_degraded_and_leave_it_ready(
    *, ready: bool, expected: tuple[int, str]
) -> None:
    now = Readiness(ready=ready, store="ok", version="1", problems=("The store is full.",))
    async with (
        serve_embedded(create_admin_app(lambda: now)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == expected
    assert answer.json()["problems"] == ["The store is full."]


async def test_while_unready_it_is_alive_but_not_ready() -> None:
    now = Readiness(ready=False, store="ok", version="1")
    async with (
        serve_embedded(create_admin_app(lambda: now)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        ready = [(await client.get(path)).status_code for path in READY_PATHS]
        alive = [(await client.get(path)).json() for path in ALIVE_PATHS]
        head = await client.head("/livez")
    assert ready == [503] * len(READY_PATHS)
    assert alive == [{"status": "ok", "version": "1"}] * len(ALIVE_PATHS)
    assert (head.status_code, head.content) == (200, b"")
