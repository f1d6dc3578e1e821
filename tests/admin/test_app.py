import httpx
import pytest

from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.health import Readiness
from compaction_proxy.gateway.server import serve_embedded


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
    message = f"Unknown endpoint: {method} {path}"
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    }
