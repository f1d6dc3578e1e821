"""The pages over the real admin API, about a conversation that was really compacted."""

import asyncio
from base64 import b64encode
from typing import Any

import httpx

from compaction_proxy.admin.ui.templates import _create_environment
from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.helpers.dashboard import Read

KEY = "an-admin-key"
SESSION = {"authorization": "Bearer sk-somebody", "x-session-id": "s"}
ADMIN = {"authorization": "Basic " + b64encode(f"me:{KEY}".encode()).decode()}
TURNS = 9


def config(upstream: str) -> Config:
    return Config.model_validate(
        {
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": "demo-summary"},
            "server": {"admin_key": KEY, "base_path": "/own"},
            "models": {"demo-*": {"window": 4_096}},
        }
    )


async def talked(client: httpx.AsyncClient) -> None:
    """A conversation that grows far beyond the window."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append(
            {"role": "user", "content": f"Look at src/part{turn}.py, line {turn}. " + "Think. " * 200}
        )
        asked = {"model": "demo-agent", "messages": messages, "max_tokens": 50}
        answer = await client.post("/v1/chat/completions", json=asked, headers=SESSION)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": f"src/part{turn}.py is fine. " + "Thought. " * 100})


async def listed(client: httpx.AsyncClient) -> str:
    """The path of the conversation's page, once the list has it."""
    async with asyncio.timeout(100):
        while True:
            page = Read((await client.get("/own/ui/conversations", headers=ADMIN)).text)
            found = [each["href"] for each in page.all("a") if each.get("class") == "id"]
            if found and "not inspected" not in page.text:
                return str(found[0])
            await asyncio.sleep(0.1)


async def test_what_was_compacted_is_shown_from_the_list_to_the_round() -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(CharacterCounter(), window=4_096))) as upstream,
        serve_embedded(create_app(config(upstream))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        await talked(client)
        one = await listed(client)
        conversation = Read((await client.get(one, headers=ADMIN)).text)
        rounds = [str(a["href"]) for a in conversation.all("a") if "/compactions/" in str(a.get("href"))]
        made = (await client.get(rounds[-1], headers=ADMIN)).text
        shown = Read(made).text
        assert "src/part0.py" in shown
        assert "written by this proxy" in shown
        assert "<mark>" in made
        pages = (
            "", "?since=30d", "/failures", "/settings", f"/playground?conversation={one.rpartition('/')[2]}",
        )  # fmt: skip
        found_at = f"{one}/search?q=part0.py"
        more = (f"{one}/transcript", f"{rounds[-1]}/prompts", found_at, *(f"/own/ui{path}" for path in pages))
        found = {path: await client.get(path, headers=ADMIN) for path in more}
        assert {path: answer.status_code for path, answer in found.items()} == dict.fromkeys(more, 200)
        hit = next(a for a in Read(found[found_at].text).all("a") if "/messages/" in str(a.get("href")))
        assert "src/<mark>part0.py</mark>" in (await client.get(str(hit["href"]), headers=ADMIN)).text
        for action, said in (
            ("bypass", "Bypassed:"),
            ("resume", "is compacted again"),
            ("undo", "is undone."),
            ("redo", "Undo Round"),
        ):
            answer = await client.post(f"{one}/{action}", headers=ADMIN, follow_redirects=True)
            assert said in Read(answer.text).text
        answer = await client.post(f"{one}/delete", headers=ADMIN, follow_redirects=True)
        assert "All stored data of the conversation is deleted." in answer.text
        assert (await client.get(one, headers=ADMIN)).status_code == 404


def test_one_request_is_not_many() -> None:
    parts: Any = _create_environment().get_template("parts.html").make_module({})
    shown = [parts.coverage(1, total, "request", "the price is not known") for total in (1, 2)]
    assert ["of 1 request." in shown[0], "of 2 requests." in shown[1]] == [True, True]
    assert parts.coverage(0, 1, "request", "the price is not known").strip() == ""
