"""A real browser on the pages of a proxy that has compacted: what people do there, what must not happen.

Whatever a page does, its browser has nothing to complain about, loads nothing from elsewhere, runs nothing
that a conversation holds, and need not be scrolled sideways.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.doubles.faulty_provider import Fault, FaultyProvider
from tests.helpers.dashboard import NAME, PLACE, FakeAdmin, pages, sample

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WINDOW_TOKENS = 4_096
TURNS = 9
HOSTILE = (
    '"><img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    "<svg/onload=window.hit=1>' onfocus=window.hit=1 autofocus x='{{7*7}}</textarea></title>"
    '<iframe srcdoc="<script>parent.hit=1</script>"></iframe><a href="javascript:window.hit=1" autofocus>'
    "![x](https://evil.example/x.png) [y](javascript:window.hit=1) `<img src=x onerror=window.hit=1>`"
)
MODEL = "demo-<img src=x onerror=window.hit=1>"
UNLUCKY = "demo-unlucky"
# Says on the console what a page's policy has refused; a page of ours gives no reason to.
WATCH = "document.addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.blockedURI))"
PATIENCE_MS = 120_000  # on a busy machine
LOOKS = [
    (1440, "light"),
    (390, "dark"),
    pytest.param(1440, "dark", marks=pytest.mark.slow),
    pytest.param(390, "light", marks=pytest.mark.slow),
]
# Rules of WCAG A and AA, among them contrast and labels.
AXE = files("axe_playwright_python") / "axe.min.js"
AXE_OPTIONS = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    "resultTypes": ["violations"],
}
# Boxes of the content that scroll by themselves.
INNER_SCROLLS = """[...document.querySelectorAll("main *")].filter((each) => each.tagName !== "TEXTAREA"
  && /auto|scroll/.test(getComputedStyle(each).overflow + getComputedStyle(each).overflowX)
  && (each.scrollHeight > each.clientHeight + 1 || each.scrollWidth > each.clientWidth + 1))
  .map((each) => each.className)"""
OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true })"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Scene:
    """A proxy that has compacted, its provider, and a browser.

    Attributes:
        url: Base URL of the proxy.
        client: Asks the proxy.
        browser: Looks at it.
        id: Of the conversation.
        messages: What its client has said so far.
    """

    url: str
    client: httpx.AsyncClient
    browser: Browser
    id: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def talk(self, session: str, model: str, messages: list[dict[str, Any]]) -> httpx.Response:
        body = {"model": model, "messages": messages, "max_tokens": 50}
        headers = {"authorization": "Bearer sk-somebody", "x-session-id": session}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def turn(self) -> None:
        """Let the conversation grow by a turn."""
        turn = len(self.messages) // 2
        said = f"{HOSTILE} Look at src/part{turn}.py, line {turn}. " + "Think. " * 160
        self.messages.append({"role": "user", "content": said})
        answer = await self.talk(HOSTILE, MODEL, self.messages)
        self.id = answer.headers.get("x-compaction-session", self.id)
        self.messages.append({"role": "assistant", "content": f"src/part{turn}.py is fine. " + "Hm. " * 100})

    async def told(self, path: str) -> Any:
        """What the admin API says."""
        return (await self.client.get(f"/admin/v1/{path}")).json()

    async def written(self, requests: int) -> None:
        """Wait until so many requests of the conversation are on record."""
        path = f"conversations/{self.id}/exchanges"
        async with asyncio.timeout(100):
            while len((await self.told(path)).get("exchanges", ())) < requests:  # noqa: ASYNC110 - what is asked sets no event
                await asyncio.sleep(0.05)

    async def round(self) -> str:
        """The path of a round's page."""
        made = (await self.told(f"conversations/{self.id}/compactions"))["compactions"]
        place = next(each["place"] for each in reversed(made) if each["model"])
        return f"/ui/conversations/{self.id}/compactions/{place}"

    @asynccontextmanager
    async def looking(
        self, width: int = 1440, scheme: str = "light", base: str = "", zone: str = "UTC"
    ) -> AsyncIterator[Page]:
        """A page of the browser, of which nothing may be left to say in the end."""
        base = base or self.url
        troubles: list[str] = []
        page = await self.browser.new_page(
            base_url=base,
            viewport={"width": width, "height": 844},
            color_scheme="dark" if scheme == "dark" else "light",
            timezone_id=zone,
        )
        page.set_default_timeout(PATIENCE_MS)
        await page.add_init_script(WATCH)
        page.on("console", lambda said: troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda asked: None if asked.url.startswith(base) else troubles.append(asked.url))
        yield page
        assert await page.evaluate("window.hit") is None
        await page.close()
        assert troubles == []


def config(upstream: str) -> Config:
    prices = {"input": 2.5, "cached": 0.25, "output": 10}
    return Config.model_validate(
        {
            "server": {"admin_key": "none"},
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": "demo-summary"},
            "compaction": {"counter": "characters"},
            "models": {
                UNLUCKY: {"window": WINDOW_TOKENS, "summary": {"model": "summary-down"}},
                "*": {"window": WINDOW_TOKENS, "prices": prices},
            },
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    settings = DemoProviderSettings(
        CharacterCounter(),
        window=WINDOW_TOKENS,
        models=(MODEL, UNLUCKY, "demo-summary", "summary-down"),
    )
    async with (
        serve_embedded(FaultyProvider(settings, {"summary-down": Fault(status=503)})) as upstream,
        serve_embedded(create_app(config(upstream))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        made = Scene(url, client, browser)
        for _ in range(TURNS):
            await made.turn()
        said = [{**each, "content": each["content"].upper()} for each in made.messages]
        await made.talk("unlucky", UNLUCKY, said)
        await made.written(TURNS)
        yield made
        await browser.close()


async def fits(page: Page, path: str) -> None:
    """The page is no wider than its window, and its charts are drawn."""
    wide, inner = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner, path
    assert await page.locator("[data-chart] canvas").count() == await page.locator("[data-chart]").count(), (
        path
    )
    if inner < 500:
        assert await page.evaluate(INNER_SCROLLS) == [], path


async def obeys(page: Page, path: str) -> None:
    """The page has the contrast, the labels and the roles that WCAG AA asks for."""
    await page.evaluate(AXE.read_text("utf-8"))
    found = await page.evaluate("(options) => axe.run(document, options)", AXE_OPTIONS)
    told = [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found["violations"]]
    assert told == [], path


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
async def test_no_page_gives_trouble_is_too_wide_or_shuts_anybody_out(
    scene: Scene, width: int, scheme: str
) -> None:
    one, made = f"/ui/conversations/{scene.id}", await scene.round()
    shown = (
        "/ui", "/ui?since=30d&model=unused", "/ui?since=custom", "/ui/conversations",
        "/ui/conversations?label=unused", one, f"{one}/transcript", made, f"{made}/prompts", "/ui/failures",
        "/ui/settings", f"{one}/search?q=part0.py", "/ui/playground", "/ui/playground?example",
    )  # fmt: skip
    async with scene.looking(width, scheme) as page:
        for path in shown:
            await page.goto(path)
            await page.evaluate(OPEN_ALL)
            await fits(page, path)
            await obeys(page, path)


async def test_whatever_the_api_tells_is_only_text(scene: Scene) -> None:
    one = f"/ui/conversations/{NAME}"
    told = sample(lambda text: f"{HOSTILE}{text}")
    async with pages(FakeAdmin(told)) as client, scene.looking(390, base=str(client.base_url)) as page:
        for path in (
            "/ui",
            "/ui/conversations",
            one,
            f"{one}/transcript",
            f"{one}/compactions/{PLACE}",
            "/ui/failures",
            "/ui/settings",
        ):
            await page.goto(path)
            await fits(page, path)
            assert await page.locator("img:not([alt='']), iframe, main script").count() == 0, path
        await page.goto(f"/ui/playground?conversation={NAME}")
        await page.get_by_role("button", name="Try").click()
        await page.locator("[data-chart] canvas").wait_for()
        await fits(page, "playground")


@pytest.mark.parametrize("width", [1440, 390])
async def test_no_name_is_too_long_for_a_page(scene: Scene, width: int) -> None:
    one = f"/ui/conversations/{NAME}"
    told = sample(lambda text: f"{'name' * 100}{text}")
    async with pages(FakeAdmin(told)) as client, scene.looking(width, base=str(client.base_url)) as page:
        for path in (
            "/ui", "/ui/conversations", one, f"{one}/transcript", f"{one}/compactions/{PLACE}",
            f"{one}/compactions/{PLACE}/prompts", f"{one}/messages/m_2", f"{one}/search?q={'x' * 900}",
            "/ui/failures", "/ui/settings", f"/ui/playground?conversation={NAME}",
        ):  # fmt: skip
            await page.goto(path)
            await page.evaluate(OPEN_ALL)
            await fits(page, path)
        await page.get_by_role("button", name="Try").click()
        await page.locator("[data-chart] canvas").wait_for()
        await fits(page, "playground")


async def test_the_overview_leads_by_links_to_what_a_round_removed_and_what_the_model_then_saw(
    scene: Scene,
) -> None:
    async with scene.looking() as page:
        await page.goto("/ui")
        assert (await page.locator(".figure.first .value").inner_text()).startswith(("$", "−$"))  # noqa: RUF001
        await page.get_by_role("link", name="Conversations").click()
        await page.locator(f"a.id[href$='{scene.id}']").click()
        marks = json.loads(await page.locator("[data-chart]").get_attribute("data-chart") or "")
        (at, *_) = (index for index, place in enumerate(marks["places"]) if place)
        over = page.locator(".u-over")
        box = await over.bounding_box()
        assert box is not None
        spot = {"x": box["width"] * (at + 0.7) / (len(marks["x"]) + 0.4), "y": box["height"] - 5}
        await over.hover(position=spot)  # type: ignore[arg-type]  # a dict of the two
        await over.click(position=spot)  # type: ignore[arg-type]
        await page.wait_for_url(f"**/compactions/{marks['places'][at]}")
        assert "src/part0.py" in await page.locator(".round").inner_text()
        replaced = page.locator(".replaced")
        assert await replaced.locator(".before .message").count() > 1
        assert "written by this proxy" in await replaced.locator(".now").inner_text()
        assert await replaced.locator("mark").count() > 0


async def test_hands_on_the_keyboard_find_the_content_search_pin_and_press_buttons(scene: Scene) -> None:
    one = f"/ui/conversations/{scene.id}"
    async with scene.looking() as page:
        await page.goto(one)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await page.keyboard.press("Enter")
        for _ in range(2):  # past the link to all conversations
            await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Compact next request"
        await page.keyboard.press("Enter")
        await page.get_by_text("The next request will be compacted.").wait_for()
        await page.fill("#words", "part0.py")
        await page.press("#words", "Enter")
        await page.locator("#hits li").first.wait_for()
        assert page.url.endswith("?done=compact")  # found without leaving the page
        await page.fill("#pin", f"Metric units {HOSTILE}")
        await page.press("#pin", "Enter")
        await page.locator(".pins .text", has_text="Metric units").wait_for()
        await page.get_by_role("button", name="Unpin").press("Enter")
        await page.locator(".pins").wait_for(state="detached")


async def test_a_search_puts_the_best_first_reaches_other_conversations_if_asked_and_opens_what_it_found(
    scene: Scene,
) -> None:
    async with scene.looking() as page:
        await page.goto(f"/ui/conversations/{scene.id}/search")
        await page.fill("#words", "src/part1.py")
        await page.get_by_role("button", name="Search").click()
        hits = page.locator("#hits li")
        assert "src/part1.py" in await hits.first.locator(".text").inner_text()
        assert await hits.locator("a.id").count() == 0  # no other conversation's
        await page.select_option("#scope", "tenant")
        await page.get_by_role("button", name="Search").click()
        await page.locator("#hits a.id").first.wait_for()
        assert await page.input_value("#scope") == "tenant"
        assert await page.input_value("#words") == "src/part1.py"
        other = hits.filter(has=page.locator("a.id")).first
        assert "SRC/PART1.PY" in await other.locator(".text").inner_text()
        await other.locator("a:has(.role)").click()
        assert "SRC/PART1.PY" in await page.locator(".message .text").inner_text()


async def test_bypass_resume_and_undo_are_done_and_said(scene: Scene) -> None:
    made = len((await scene.told(f"conversations/{scene.id}/compactions"))["compactions"])
    async with scene.looking(390) as page:
        await page.goto(f"/ui/conversations/{scene.id}")
        for button, said in (
            ("Bypass", "Bypassed: the proxy sends requests unchanged"),
            ("Resume", "This conversation is compacted again."),
        ):
            await page.get_by_role("button", name=button).click()
            await page.get_by_text(said).first.wait_for()
        redo = page.get_by_role("button", name="Redo Round")
        for _ in range(2):
            await page.locator("summary", has_text="Undo Round").click()
            await page.get_by_role("button", name="Undo Round").click()
            await page.get_by_text("is undone.").wait_for()
            await redo.click()
            await expect(redo).to_have_count(0)
        await page.locator("summary", has_text="Undo Round").click()
        await page.get_by_role("button", name="Undo Round").click()
        await redo.wait_for()
        assert await page.locator(".timeline .undone").count() >= 1
        assert await page.locator(".timeline a[href*='/compactions/']").count() == made
    assert not (await scene.told(f"conversations/{scene.id}"))["bypass"]


async def test_the_list_follows_requests_by_itself(scene: Scene) -> None:
    async with scene.looking() as page:
        await page.clock.install()
        await page.goto("/ui/conversations")
        row = page.locator("#rows tr", has=page.locator(f"a[href$='{scene.id}']")).locator("td").first
        before = int(await row.inner_text())
        await scene.turn()
        await scene.written(before + 1)
        await page.clock.run_for(5_000)
        await expect(row).to_have_text(str(before + 1))


async def test_the_prompt_opens_in_its_place_and_the_playground_tries_what_its_sliders_say(
    scene: Scene,
) -> None:
    async with scene.looking() as page:
        await page.goto(await scene.round())
        await page.get_by_text("Show the prompt of the summary model").click()
        await page.locator("#prompts .text").first.wait_for()
        await page.goto(f"/ui/playground?conversation={scene.id}")
        await page.check("input[value=chained]")
        await page.fill("#trigger", "2000")
        assert await page.inner_text("output[for=trigger]") == "2,000"
        await page.get_by_role("button", name="Try").press("Enter")
        await page.locator("[data-chart] canvas").wait_for()
        assert await page.locator(".outcomes tbody th").all_inner_texts() == ["anchored", "chained"]


async def test_a_summary_model_that_fails_is_told_among_the_failures(scene: Scene) -> None:
    async with scene.looking(390) as page:
        await page.goto("/ui/failures")
        assert "returned an error (http-503)" in await page.inner_text("#failures")
        request = await page.locator("#failures .id.whole").last.inner_text()
        assert request.startswith("r_")


async def test_times_are_local_and_the_page_says_how_old_its_figures_are(scene: Scene) -> None:
    async with scene.looking(zone="Asia/Tokyo") as page:
        await page.goto(f"/ui/conversations/{scene.id}")
        shown = page.locator(".timeline time").first
        at = datetime.fromisoformat(str(await shown.get_attribute("datetime")))
        local = at.astimezone(timezone(timedelta(hours=9)))
        assert await shown.inner_text() == f"{local:%d %b %H:%M:%S}"
        assert await page.inner_text("#zone") == "Asia/Tokyo"
        assert (await page.inner_text("#refreshed")).endswith("s ago")


async def test_what_a_reader_has_opened_stays_open_when_the_page_follows(scene: Scene) -> None:
    async with scene.looking() as page:
        await page.clock.install()
        await page.goto(f"/ui/conversations/{scene.id}")
        table = page.locator("#state details", has=page.locator("table"))
        await table.locator("summary").click()
        await page.evaluate("document.activeElement.blur()")
        rows = table.locator("tbody tr")
        before = await rows.count()
        await scene.turn()
        await scene.written(before + 1)
        await page.clock.run_for(5_000)
        await expect(rows).to_have_count(before + 1)
        assert await table.get_attribute("open") is not None
