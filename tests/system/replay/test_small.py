"""The replay that needs nothing but the repository: a few conversations before the demo provider."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider

CONVERSATIONS = Path(__file__).resolve().parents[2] / "fixtures" / "conversations.jsonl"
MODEL = "demo-agent"
SUMMARIES = {"model": "demo-summary"}
AMPLE = 1_000_000

JsonObject = dict[str, Any]


def rows() -> list[JsonObject]:
    with CONVERSATIONS.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@dataclass
class Demo:
    """Demo providers of any window, counting with one tokenizer."""

    counter: TiktokenCounter

    def provider(self, window: int) -> DemoProvider:
        return DemoProvider(DemoProviderSettings(self.counter, window))

    def tokens(self, messages: list[JsonObject], tools: list[JsonObject] | None) -> int:
        body = {"model": MODEL, "messages": messages, **({"tools": tools} if tools else {})}
        return SimulatedProvider(self.counter).count_prompt_tokens(ProviderPrompt.from_body(body))

    def window(self, step: Any) -> int:
        """Of the irreducible part and 40 % of the rest, with room for the answer."""
        kept = self.tokens(step.irreducible(), step.tools)
        return kept + int(0.4 * (self.tokens(step.messages, step.tools) - kept))


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(TiktokenCounter(print))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
async def test_a_conversation_goes_on_past_its_window(
    row: JsonObject, demo: Demo, proxied: Any, replaying: Any
) -> None:
    steps = replaying.steps_of(row)
    window = max(map(demo.window, steps))
    assert demo.tokens(steps[-1].messages, steps[-1].tools) > window
    provider = demo.provider(window)
    wrong: list[str] = []
    async with serve_embedded(provider) as upstream, proxied(upstream, summary=SUMMARIES) as client:
        for number, step in enumerate(steps):
            answer = await client.post("/v1/chat/completions", json=step.body(MODEL, stream=number % 2 == 0))
            assert (answer.status_code, answer.text[:300] if answer.status_code != 200 else "") == (200, "")
            sent = [seen for seen in provider.log if seen.model == MODEL and seen.status == 200]
            wrong += step.wrongs(json.loads(sent[-1].body)["messages"])
    assert "\n".join(wrong) == ""


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
async def test_a_conversation_that_fits_passes_byte_for_byte(
    row: JsonObject, demo: Demo, proxied: Any
) -> None:
    provider = demo.provider(AMPLE)
    raw = json.dumps({"messages": row["messages"], "model": MODEL, "seed": 2**70}, indent=1).encode()
    async with serve_embedded(provider) as upstream, proxied(upstream, summary=SUMMARIES) as client:
        await client.post("/v1/chat/completions", content=raw)
    assert [seen.body for seen in provider.log] == [raw]


async def test_short_chats_pass_byte_for_byte(shared: Path, demo: Demo, proxied: Any) -> None:
    provider = demo.provider(AMPLE)
    path = shared / "data" / "conversations" / "short_chat.jsonl"
    chats = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    raws = [
        json.dumps({"model": MODEL, "messages": chat[:length]}).encode()
        for chat in chats
        for length in range(1, len(chat) + 1, 2)
    ]
    async with serve_embedded(provider) as upstream, proxied(upstream, summary=SUMMARIES) as client:
        answers = [await client.post("/v1/chat/completions", content=raw) for raw in raws]
    assert {answer.status_code for answer in answers} == {200}
    assert [seen.body for seen in provider.log] == raws


def malformed(shared: Path) -> list[JsonObject]:
    path = shared / "data" / "malformed" / "malformed.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_what_is_malformed_passes_byte_for_byte_while_it_fits(
    shared: Path, demo: Demo, proxied: Any
) -> None:
    provider = demo.provider(AMPLE)
    raws = [
        json.dumps({"model": MODEL, "messages": row["messages"][:40]}).encode() for row in malformed(shared)
    ]
    async with serve_embedded(provider) as upstream, proxied(upstream, summary=SUMMARIES) as client:
        for raw in raws:
            await client.post("/v1/chat/completions", content=raw)
    assert [seen.body for seen in provider.log] == raws


async def test_what_is_malformed_is_repaired_where_it_is_compacted(
    shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    wrong: list[str] = []
    steps = [step for row in malformed(shared) for step in replaying.steps_of(row, 3)]
    models = {f"replay-{number}": {"window": step.limit()} for number, step in enumerate(steps)}
    async with proxied(scripted.url, models=models) as client:
        for number, step in enumerate(steps):
            answer = await client.post(
                "/v1/chat/completions",
                json=step.body(f"replay-{number}", stream=False),
                headers={"x-fake-context-limit": str(step.limit()), "x-compaction-trigger-tokens": "1000"},
            )
            if answer.status_code != 200:
                wrong.append(f"{step.name}: {answer.text[:200]}")
    assert len(steps) > 10
    assert "\n".join(wrong) == ""
