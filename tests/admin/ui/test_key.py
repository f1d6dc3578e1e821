"""Who may look at the pages: who shows the admin key as a password; and pages of others may do nothing."""

from base64 import b64encode
from typing import Any

import httpx
import pytest

from compaction_proxy.admin.app import mount_pages
from compaction_proxy.admin.browser_sessions import build_link
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from tests.helpers.dashboard import NAME, FakeAdmin, pages, sample

KEY = "k:ey-ü"


def basic(text: str) -> dict[str, str]:
    return {"authorization": "Basic " + b64encode(text.encode()).decode()}


async def test_a_browser_is_asked_for_the_key_and_let_in_with_it() -> None:
    async with pages(FakeAdmin(sample()), key=KEY) as client:
        asked = await client.get("/ui")
        assert (asked.status_code, asked.headers["www-authenticate"]) == (
            401, 'Basic realm="compaction-proxy", charset="UTF-8"',
        )  # fmt: skip
        for wrong in (
            basic(":"),
            basic("k"),
            basic("user:" + KEY + "x"),
            basic(KEY),
            {"authorization": "Basic ?"},
        ):
            assert (await client.get("/ui/static/pages.css", headers=wrong)).status_code == 401
        for right in (basic(f"anyone:{KEY}"), basic(f":{KEY}"), {"authorization": f"Bearer {KEY}".encode()}):
            assert (await client.get("/ui/settings", headers=right)).status_code == 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example"}],
)
async def test_pages_of_others_change_nothing(headers: dict[str, str]) -> None:
    admin = FakeAdmin({"undo_round": None})
    async with pages(admin) as client:
        refused = await client.post(f"/ui/conversations/{NAME}/undo", headers=headers)
        assert (refused.status_code, admin.asked) == (403, [])
        ours = {"origin": str(client.base_url).rstrip("/")}
        assert (await client.post(f"/ui/conversations/{NAME}/undo", headers=ours)).status_code == 303


async def test_nothing_below_ui_is_open_to_strangers() -> None:
    admin = FakeAdmin(sample())
    one = f"/ui/conversations/{NAME}"
    async with pages(admin, key=KEY) as client:
        for path in (
            "/ui",
            "/ui/",
            "/ui/conversations",
            one,
            "/ui/nothing",
            "/ui/static/pages.js",
            "/ui/../ui",
        ):
            assert (await client.get(path)).status_code == 401, path
        for path in (f"{one}/undo", f"{one}/delete", f"{one}/pin", "/ui/playground"):
            assert (await client.post(path)).status_code == 401, path
    assert admin.asked == []


@pytest.mark.parametrize(("scheme", "secure"), [("http", False), ("https", True)])
async def test_the_cookie_of_a_session_that_began_over_tls_is_sent_over_tls_only(
    scheme: str, *, secure: bool
) -> None:
    api = FakeAdmin(sample()).api(KEY)
    object.__setattr__(api.queries, "records", RecordStore(MemoryStore(), lambda _: None))
    nothing_else: Any = None
    transport = httpx.ASGITransport(app=mount_pages(nothing_else, api))
    async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://localhost") as client:
        opened = await client.get(build_link("/ui", KEY))
        assert (opened.status_code, "; Secure" in opened.headers["set-cookie"]) == (303, secure)
        assert (await client.get("/ui/settings")).status_code == 200


async def test_whoever_has_access_already_does_not_use_a_link_up() -> None:
    async with pages(FakeAdmin(sample()), key=KEY) as client:
        opened = await client.get(build_link("/ui", KEY), headers=basic(f":{KEY}"))
        assert (opened.status_code, "set-cookie" in opened.headers) == (303, False)
