"""A real browser on the pages: nothing to complain about, nothing from elsewhere, no sideways scrolling."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright

from tests.dashboard import NAME, PLACE, FakeApi, pages, sample

CHROMIUM = Path("/usr/bin/chromium")
ONE = f"/ui/conversations/{NAME}"
PAGES = ("/ui", "/ui/conversations", ONE, f"{ONE}/compactions/{PLACE}", "/ui/failures", "/ui/settings")
LOOKS = (
    (1280, "light", ""),
    (390, "dark", '"><img src=x onerror=alert(1)><script>alert(2)</script>'),
)

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")


@asynccontextmanager
async def browsing(api: FakeApi, width: int, scheme: str, troubles: list[str]) -> AsyncIterator[Page]:
    """A page of a browser at our server; what it complains of, and what it loads from elsewhere, is noted."""
    async with pages(api) as client, async_playwright() as playwright:
        base = str(client.base_url).rstrip("/")
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(
            base_url=base,
            viewport={"width": width, "height": 844},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.on("console", lambda said: troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(base) else troubles.append(asked.url))
        yield page
        await browser.close()


@pytest.mark.parametrize(("width", "scheme", "added"), LOOKS)
async def test_no_page_gives_trouble_runs_what_others_wrote_or_is_too_wide(
    width: int, scheme: str, added: str
) -> None:
    troubles: list[str] = []
    api = FakeApi(sample(lambda text: f"{added}{text}"))
    async with browsing(api, width, scheme, troubles) as page:
        for path in PAGES:
            await page.goto(path)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
            drawn = await page.locator("[data-chart] canvas").count()
            assert drawn == await page.locator("[data-chart]").count(), path
            assert await page.locator("img:not([alt=''])").count() == 0, path
    assert troubles == []


async def test_a_person_searches_asks_for_the_prompt_and_tries_strategies() -> None:
    troubles: list[str] = []
    api = FakeApi({**sample(), f"conversations/{NAME}/pins": {}})
    async with browsing(api, 1280, "light", troubles) as page:
        await page.goto(ONE)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await page.fill("#words", "502")
        await page.press("#words", "Enter")
        await page.locator("#hits li").wait_for()
        assert "said 502" in await page.inner_text("#hits")
        assert page.url.endswith(ONE)  # without leaving the page
        await page.fill("#pin", "Use metric units")
        await page.press("#pin", "Enter")
        await page.wait_for_url("**?done=pin")
        await page.goto(f"{ONE}/compactions/{PLACE}")
        await page.get_by_text("Show what the summary model was asked").click()
        await page.locator("#prompts .text").first.wait_for()
        assert "Summarise." in await page.inner_text("#prompts")
        await page.goto(f"/ui/playground?conversation={NAME}")
        await page.fill("#trigger", "40000")
        assert await page.inner_text("output[for=trigger]") == "40,000"
        await page.get_by_role("button", name="Try").click()
        await page.locator("[data-chart] canvas").wait_for()
    assert ("POST", f"conversations/{NAME}/pins", {}, {"text": "Use metric units"}) in api.asked
    assert [told["trigger_tokens"] for _, path, _, told in api.asked if path == "replay"] == [40_000]
    assert troubles == []
