"""Who may look at the pages: who shows the admin key as a password; and pages of others may do nothing."""

from base64 import b64encode

import pytest

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
