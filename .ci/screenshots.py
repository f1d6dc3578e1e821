"""Takes the pictures of the dashboard that the documentation shows.

    uv run --with pillow python .ci/screenshots.py [--conversations FOLDER] [--to docs/images] [--only PAGE]

A proxy in a process of its own, with a store in a temporary folder and prices in its configuration, stands
before the demo provider. Its clock is set back, and a day of traffic passes in a minute: conversations from
the folder of recorded ones (without it, the one that the package ships), sent request by request, each as its
client did. The summaries of two models fail. Then a browser visits every page. Tokens, rounds, dollars and
texts are what the proxy has made of that; the summaries are the demo provider's, and the prices are made up.
"""

# ruff: noqa: INP001 - a script, not a package

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.cli.demo.replies import load_script
from compaction_proxy.cli.demo.run import build_opening, build_tool_message
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for the tests' doubles

from tests.doubles.faulty_provider import Fault, FaultyProvider  # noqa: E402

JsonObject = dict[str, Any]
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
DESKTOP, PHONE = (1440, 900), (390, 844)
LOOKS = (("", DESKTOP, "light"), ("-dark", DESKTOP, "dark"), ("-phone", PHONE, "light"))
MAX_PICTURE_BYTES = 150_000
# Pixels of a picture for one of the page.
SCALE = 1.5
COLOURS = 96
HOUR_S = 3_600.0
# Where a page ends, or else its window, in pixels from the top.
END = "Math.min(innerHeight, document.querySelector('footer').getBoundingClientRect().bottom)"
# The journal writes once a second; an hour is over only when its figures are written.
FLUSHED_S = 1.3
# The clock is read from a file once a second; more often would show in the overhead.
CLOCK_READ_S = 1.1
# Strategies take their time with a long conversation.
LIMIT_MS = 120_000
PROVIDER_WINDOW_TOKENS = 400_000
CLIENT = {"authorization": "Bearer sk-demo"}
MODELS = (
    "agent-large", "agent-small", "agent-trial", "agent-beta",
    "summary-small", "summary-down", "summary-empty",
)  # fmt: skip
FAULTS = {
    "summary-small": Fault(first_byte_s=0.2),
    "summary-down": Fault(status=503),
    "summary-empty": Fault(empty=True),
}
# Where DejaVu Sans is all that a system has for its pages, its narrow cut comes nearer to what others have.
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><include>/etc/fonts/fonts.conf</include><selectfont><rejectfont>
<glob>*/DejaVuSans.ttf</glob><glob>*/DejaVuSans-Bold.ttf</glob></rejectfont></selectfont></fontconfig>
"""

CONFIG = """
server: {admin_key: none}
upstream: {base_url: "%(upstream)s/v1"}
store: {url: "sqlite:///%(folder)s/state.db"}
summary: {model: summary-small}
session: {store_names: true}
models:
  agent-large: {window: 32000, prices: {input: 2.5, cached: 0.25, output: 10}}
  agent-small: {window: 16000, prices: {input: 0.4, cached: 0.04, output: 1.6}}
  agent-trial: {window: 12000, prices: {input: 0.4, output: 1.6}, summary: {model: summary-down}}
  agent-beta: {window: 12000, prices: {input: 0.4, output: 1.6}, summary: {model: summary-empty}}
  summary-small: {window: 128000, prices: {input: 0.1, cached: 0.025, output: 0.4}}
"""


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation and when its requests are sent.

    Attributes:
        name: What the client calls the session.
        file: Where it is recorded, without `.jsonl`.
        row: Its line there, from 0.
        model: Who is asked.
        ago_h: When it begins, in hours before now.
        takes_h: Until its last request, in hours.
        messages: How many of its messages are sent.
    """

    name: str
    file: str
    row: int
    model: str
    ago_h: float
    takes_h: float
    messages: int | None = None


# All of licences that let their texts be shown; docs/images/NOTICE says which.
DAY = (
    Played("pi", "coding_pi", 0, "agent-large", 9.4, 9.3, 330),
    Played("ponyc-4595", "coding_openhands", 0, "agent-large", 19.5, 4.2),
    Played("marshmallow-1867", "coding_sweagent", 12, "agent-small", 12.2, 2.6),
    Played("katy", "coding_sweagent", 3, "agent-small", 3.4, 2.1),
    Played("airline-2", "tau_airline", 22, "agent-small", 21.3, 2.5),
    Played("airline-3", "tau_airline", 3, "agent-small", 6.2, 3.1),
    Played("airline-8", "tau_airline", 28, "agent-small", 15.1, 1.8),
    Played("stocks-116", "bfcl_multi_turn", 29, "agent-trial", 5.3, 1.6),
    Played("stocks-128", "bfcl_multi_turn", 32, "agent-beta", 7.7, 2.2),
    Played("rock", "coding_sweagent", 7, "agent-trial", 1.9, 1.2),
)
# What is searched among all that rounds have removed.
QUERY = "flight HAT028 price"
# A message that no round can make fit into the window of its model.
TOO_LONG = "The log of the last night, line by line. " * 1_500


@dataclass(slots=True)
class Proxy:
    """A running proxy, the clock that it goes by, and the ids of its conversations by the clients' names."""

    url: str
    clock: Path
    ids: dict[str, str] = field(default_factory=dict)

    def set_back(self, seconds: float) -> None:
        """Make its clock this much late."""
        self.clock.write_text(f"-{seconds:.0f}\n" if seconds else "+0\n")


def recorded(folder: Path, played: Played) -> JsonObject:
    """The conversation as it was recorded; where there is none, the demo's."""
    path = folder / f"{played.file}.jsonl"
    if not path.is_file():
        return {"messages": list(_demo()), "tools": load_script().tools}
    with path.open(encoding="utf-8") as lines:
        row: JsonObject = json.loads(next(line for number, line in enumerate(lines) if number == played.row))
    return row


def _demo() -> Iterator[JsonObject]:
    script = load_script()
    yield from build_opening(script)
    for turn in script.turns:
        yield {"role": "user", "content": turn.user}
        for step in turn.steps:
            made = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in step.calls
            ]
            yield {"role": "assistant", "content": step.text} | ({"tool_calls": made} if made else {})
            yield from (build_tool_message(call.id, script) for call in step.calls)


def asked(messages: Sequence[JsonObject]) -> list[int]:
    """The lengths at which the client asked: before each assistant message."""
    return [index for index, each in enumerate(messages) if index and each["role"] == "assistant"]


def timeline(folder: Path, now: float) -> list[tuple[float, Played, JsonObject]]:
    """Requests of the day in their order: when, whose, and the body."""
    found = []
    for played in DAY:
        row = recorded(folder, played)
        messages = row["messages"][: played.messages]
        lengths = asked(messages)
        for number, length in enumerate(lengths):
            share = number / max(1, len(lengths) - 1)
            at = now - HOUR_S * (played.ago_h - played.takes_h * share)
            body = {"model": played.model, "messages": messages[:length], "max_tokens": 400}
            found.append((at, played, body | ({"tools": row["tools"]} if row.get("tools") else {})))
    return sorted(found, key=lambda each: each[0])


async def play(client: httpx.AsyncClient, proxy: Proxy, folder: Path) -> None:
    """Let the day pass."""
    now = time.time()
    hour = None
    for at, played, body in timeline(folder, now):
        if hour != at // HOUR_S:
            await asyncio.sleep(FLUSHED_S)
            proxy.set_back(time.time() - at)
            await asyncio.sleep(CLOCK_READ_S)
        hour = at // HOUR_S
        headers = {"x-session-id": played.name, **CLIENT}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        if "x-compaction-session" in answer.headers:
            proxy.ids[played.name] = answer.headers["x-compaction-session"]
    await asyncio.sleep(FLUSHED_S)
    proxy.set_back(0)
    await asyncio.sleep(CLOCK_READ_S)


async def wish(client: httpx.AsyncClient, proxy: Proxy) -> None:
    """Pins, a round undone, and a request that is too long."""
    pins = {"text": "Never push to main without asking first"}, {"text": "Tests run with: npm test -- --run"}
    for pin in pins:
        await client.post(f"/admin/v1/conversations/{proxy.ids['pi']}/pins", json=pin)
    await client.post(f"/admin/v1/conversations/{proxy.ids['airline-8']}/undo")
    body = {"model": "agent-beta", "messages": [{"role": "user", "content": TOO_LONG}]}
    await client.post("/v1/chat/completions", json=body, headers={"x-session-id": "log", **CLIENT})
    await asyncio.sleep(FLUSHED_S)


def _faketime() -> dict[str, str]:
    """The environment of a process that has its wall clock told."""
    spec = importlib.util.find_spec("libfaketime")
    if spec is None or spec.origin is None:
        sys.exit("needs libfaketime, which is among the development dependencies on Linux")
    (library,) = Path(spec.origin).parent.rglob("libfaketime.so.1")
    return {"LD_PRELOAD": str(library), "FAKETIME_CACHE_DURATION": "1", "NO_FAKE_STAT": "1"} | dict.fromkeys(
        ("FAKETIME_DONT_FAKE_MONOTONIC", "DONT_FAKE_MONOTONIC"), "1"
    )


@asynccontextmanager
async def proxied(folder: Path, upstream: str) -> AsyncIterator[Proxy]:
    """A proxy in a process of its own."""
    config, clock = folder / "config.yaml", folder / "clock"
    config.write_text(CONFIG % {"upstream": upstream, "folder": folder})
    clock.write_text("+0\n")
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "compaction_proxy", "serve", "--port", "0"),
        cwd=folder,
        env={
            **kept,
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT / "proxy"),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            **_faketime(),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=(folder / "log").open("wb"),
    )
    assert process.stdout is not None  # noqa: S101 - it was asked for
    url = ""
    async for line in process.stdout:
        url = url or line.decode().strip().rpartition(" ")[2]
        if b"OPENAI_BASE_URL" in line:
            break
    else:
        sys.exit((folder / "log").read_text())
    try:
        yield Proxy(url, clock)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


def _with_fonts(folder: Path) -> dict[str, str | float | bool]:
    path = folder / "fonts.conf"
    path.write_text(FONTS)
    return {**os.environ, "FONTCONFIG_FILE": str(path)}


async def newest_round(client: httpx.AsyncClient, name: str) -> str:
    """The place of a conversation's newest round that a model has written."""
    told = (await client.get(f"/admin/v1/conversations/{name}/compactions")).json()["compactions"]
    return str(next(each["place"] for each in reversed(told) if each["model"]))


async def best_hit(client: httpx.AsyncClient, name: str) -> str:
    """The path of the page of the removed message that answers the query best."""
    asked = {"q": QUERY, "scope": "tenant", "limit": "1"}
    (hit,) = (await client.get(f"/admin/v1/conversations/{name}/search", params=asked)).json()["hits"]
    return f"/conversations/{hit['conversation']}/messages/{hit['message_id']}"


async def pages(client: httpx.AsyncClient, proxy: Proxy) -> dict[str, str]:
    """What is photographed: the picture's name, and the path."""
    coding, patched, service = (proxy.ids[each] for each in ("pi", "ponyc-4595", "airline-2"))
    return {
        "overview": "",
        "conversations": "/conversations",
        "conversation": f"/conversations/{coding}",
        "transcript": f"/conversations/{service}/transcript",
        "compaction": f"/conversations/{coding}/compactions/{await newest_round(client, coding)}",
        "search": f"/conversations/{service}/search?{urlencode({'q': QUERY, 'scope': 'tenant'})}",
        "search-message": await best_hit(client, service),
        "failures": "/failures",
        "playground": f"/playground?conversation={patched}",
        "settings": "/settings",
    }


async def shoot(browser: Browser, proxy: Proxy, shown: dict[str, str], folder: Path) -> None:
    """Visit each page in each look."""
    for ending, (width, height), scheme in LOOKS:
        page = await browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=SCALE,
        )
        page.set_default_timeout(LIMIT_MS)
        for name, path in shown.items():
            await page.goto(f"{proxy.url}/ui{path}", wait_until="load")
            if name == "playground":
                await tried(page)
            end = await page.evaluate(END)
            shot = await page.screenshot(clip={"x": 0, "y": 0, "width": width, "height": end})
            save(shot, folder / f"{name}{ending}.png")
        await page.close()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with a palette: pages have few colours."""
    with Image.open(BytesIO(picture)) as opened:
        full = opened.convert("RGB")
    few = full.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    # The palette has means of colours. The background, which is in the corner, is the same in all pictures.
    corner, palette = int(few.getpixel((0, 0))), few.getpalette()
    palette[3 * corner : 3 * corner + 3] = full.getpixel((0, 0))
    few.putpalette(palette)
    few.save(path, optimize=True)


async def tried(page: Page) -> None:
    """Let three strategies try, and look at what came of it."""
    for name in ("iterations", "chained"):
        await page.check(f"input[value={name}]")
    await page.get_by_role("button", name="Try").click()
    await page.locator("[data-chart] canvas").wait_for()
    await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def heavy(folder: Path) -> list[str]:
    """Pictures that would make a page slow to load."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.png"))}
    return [f"{name}: {size:,} bytes" for name, size in sizes.items() if size > MAX_PICTURE_BYTES]


async def main(conversations: Path, to: Path, only: Sequence[str], *, hold: bool) -> int:
    """Exit code 1 if a picture is too heavy."""
    counter = TiktokenCounter(lambda line: print(line, file=sys.stderr))  # noqa: T201 - a script prints
    provider = FaultyProvider(DemoProviderSettings(counter, PROVIDER_WINDOW_TOKENS, MODELS), FAULTS)
    with tempfile.TemporaryDirectory() as scratch:
        async with serve_embedded(provider) as upstream, proxied(Path(scratch), upstream) as proxy:
            async with httpx.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False) as client:
                await play(client, proxy, conversations)
                await wish(client, proxy)
                shown = await pages(client, proxy)
                shown = {name: path for name, path in shown.items() if not only or name in only}
            if hold:
                print(proxy.url, json.dumps(shown), flush=True)  # noqa: T201 - a script prints
            async with async_playwright() as playwright:
                chromium = await playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=FLAGS, env=_with_fonts(Path(scratch))
                )
                await shoot(chromium, proxy, shown, to)
                await chromium.close()
            if hold:
                await asyncio.Event().wait()
    lines = heavy(to)
    print("\n".join(lines) or f"pictures in {to}")  # noqa: T201 - a script prints
    return 1 if lines else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes the pictures of the dashboard.")
    parser.add_argument(
        "--conversations", type=Path, default=ROOT.parent / "shared" / "data" / "conversations"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", action="append", default=[], metavar="PAGE", help="no other page")
    parser.add_argument("--hold", action="store_true", help="leave the proxy running")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    sys.exit(asyncio.run(main(options.conversations, options.to, options.only, hold=options.hold)))
