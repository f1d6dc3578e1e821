"""Every way into the admin API, as the application has them: closed to whoever shows no key, and to pages."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from starlette.routing import Route

from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.health import ALIVE_PATHS, READY_PATHS, Readiness
from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.watched import Watched

KEY = "an-admin-key"
KEYED = f"authorization: Bearer {KEY}"
UNKNOWN = "c_0123456789abcdef01234567"
# What those show who do not know the key, or not how to show it.
STRANGERS = (
    (), ("authorization: Bearer other",), (f"authorization: Basic {KEY}",), (f"x-api-key: {KEY}",),
    (f"cookie: authorization={KEY}",), (f"authorization: Bearer {KEY[:-1]}",),
    (f"authorization: Bearer {KEY}x",),
)  # fmt: skip
# Refused for what is asked, not for who asks.
NOTHING_THERE = {400, 404, 405, 409, 422}


def application() -> Any:
    """The application behind our own paths, to be asked for its routes."""
    admin = Watched(MemoryStore(), 60)
    ready = Readiness(ready=True, store="ok", version="1")
    return create_admin_app(
        lambda: ready,
        "",
        AdminApi(admin.steering, admin.watching, admin.replaying, AccessPolicy("127.0.0.1", KEY)),
    )


def leaves(routes: Iterable[Any]) -> Iterator[Route]:
    """Routes, those of included routers too; what is neither could have an entrance of its own."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            assert isinstance(route, Route), route
            yield route
        else:
            yield from leaves(included.routes)


def routes() -> list[tuple[str, str]]:
    """Method and path of every route, its parameters filled in."""
    found = [(method, route.path) for route in leaves(application().routes) for method in route.methods or ()]
    return sorted((method, re.sub(r"{\w+}", UNKNOWN, path)) for method, path in found)


def configured(key: str) -> Any:
    given = {
        "upstream": {"base_url": "http://127.0.0.1:9/v1"},
        "store": {"url": "memory://"},
        "server": {"admin_key": key},
    }
    return create_app(Config.model_validate(given))


async def test_every_route_but_health_answers_nobody_without_the_key(isolation: Any) -> None:
    public = {*ALIVE_PATHS, *READY_PATHS}
    wrong: list[str] = []
    assert len(routes()) > 20
    async with serve_embedded(configured(KEY)) as url:
        port = int(url.rpartition(":")[2])
        for method, path in routes():
            if path.endswith("/stream"):  # has no end: see `test_no_stream_opens_without_the_key`
                continue
            open_to_all = path in public
            for shown in STRANGERS:
                reply = await isolation.ask(port, isolation.request(method, path, *shown, body=b"{}"))
                if (reply.status == 401) == open_to_all or KEY.encode() in reply.head + reply.body:
                    wrong.append(f"{method} {path} {shown}: {reply.status}")
            reply = await isolation.ask(port, isolation.request(method, path, KEYED, body=b"{}"))
            if reply.status != 200 and reply.status not in NOTHING_THERE:
                wrong.append(f"{method} {path}: {reply.status} with the key")
            page = await isolation.ask(
                port, isolation.request(method, path, KEYED, "origin: https://evil.example", body=b"{}")
            )
            if (page.status == 403) == open_to_all or b"access-control" in page.head.lower():
                wrong.append(f"{method} {path}: {page.status} for a page")
    assert wrong == []


@pytest.mark.parametrize("key", ["none", KEY])
async def test_no_other_spelling_of_a_path_opens_it(isolation: Any, key: str) -> None:
    start = f"/admin/v1/conversations/{UNKNOWN}"
    spellings = [
        f"/{start}", f"//{start}", start.replace("/admin", "/Admin"), start.replace("/admin", "/ADMIN"),
        start.replace("/admin", "/%61dmin"), start.replace("/admin", "/admin%2f"), f"/livez/..{start}",
        f"/livez/%2e%2e{start}", f"/livez{start}", start.replace("/admin/", "/admin//"), f"/.{start}",
        start.replace("/admin", "/admin;x"), start.replace("/admin/", "/admin\\"), f"{start}/", f"{start}?",
        start.replace("/admin", "/%2561dmin"), start.replace("/admin", "/ui/../admin"), f"http://localhost{start}",
        start.replace("/v1", "/v1/../v1"), f"{start}%00", f"{start}/events#x",
        start.replace("/admin", "/adm%69n"),
    ]  # fmt: skip
    async with serve_embedded(configured(key)) as url:
        port = int(url.rpartition(":")[2])
        host = ["host: evil.example"] if key == "none" else []
        statuses = {
            spelling: (await isolation.ask(port, isolation.request("GET", spelling, *host))).status
            for spelling in spellings
        }
        opened = await isolation.ask(port, isolation.request("GET", start, KEYED))
    # Refused, not there, or taken for a path of the upstream, which is away.
    assert set(statuses.values()) <= {400, 401, 403, 404, 502}, statuses
    assert {401, 403} & set(statuses.values())
    assert b"conversation_not_found" in opened.body


async def test_no_description_and_no_page_is_served_to_strangers(isolation: Any) -> None:
    paths = ("/admin/v1/openapi.json", "/admin/v1/docs", "/admin", "/admin/", "/admin/v1", "/admin/docs")
    async with serve_embedded(configured(KEY)) as url:
        port = int(url.rpartition(":")[2])
        statuses = [(await isolation.ask(port, isolation.request("GET", path))).status for path in paths]
        for path in ("/ui/docs", "/mcp/docs"):
            assert (await isolation.ask(port, isolation.request("GET", path))).status in {401, 404}
    assert statuses == [401] * len(paths)


async def test_no_stream_opens_without_the_key(isolation: Any) -> None:
    [path] = [path for method, path in routes() if path.endswith("/stream")]
    async with serve_embedded(configured(KEY)) as url:
        port = int(url.rpartition(":")[2])
        refused = [await isolation.ask(port, isolation.request("GET", path, *shown)) for shown in STRANGERS]
        page = await isolation.ask(
            port, isolation.request("GET", path, KEYED, "origin: https://evil.example")
        )
    assert {each.status for each in refused} == {401}
    assert page.status == 403
