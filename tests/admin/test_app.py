import httpx
import pytest

from compaction_proxy.admin.app import ALIVE_PATHS, READY_PATHS, Readiness, create_admin_app
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


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/admin/v1/sessions", 404, "not_found"),
        ("GET", "/ui", 404, "not_found"),
        ("GET", "/ui/", 404, "not_found"),
        ("POST", "/mcp", 404, "not_found"),
        ("POST", "/v1/compact", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("POST", "/readyz", 405, "method_not_allowed"),
    ],
)
async def test_a_path_without_an_answer_is_refused_in_openai_s_shape(
    method: str, path: str, status: int, code: str
) -> None:
    now = Readiness(ready=True, store="ok", version="1")
    async with (
        serve_embedded(create_admin_app(lambda: now)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.request(method, path)
    message = f"{method} {path} is not something this proxy answers"
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    }
