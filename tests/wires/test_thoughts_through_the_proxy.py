"""A model's thoughts in long work with tools, before a provider that checks them as Anthropic does."""

from typing import Any

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.doubles.three_wire_provider import ThreeWireProvider

WINDOW = 3_000
TURNS = 30
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
HEADERS = {"x-api-key": "k", "anthropic-version": "2023-06-01", "x-session-id": "work"}
TEXT = "what was seen there, at some length, so that it takes its room in the list " * 6


def asked(thinking: dict[str, Any], listed: list[dict[str, Any]]) -> dict[str, Any]:
    fields = {"model": "demo-agent", "max_tokens": 200, "tools": [TOOL], "messages": listed}
    return {**fields, "system": "Look around.", **thinking}


def shown(content: list[dict[str, Any]], turn: int) -> dict[str, Any]:
    """Results of an answer's calls; the demo's model does what a `call` line says."""
    text = f'call look {{"at": {turn}}}\n{TEXT}'
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": each, "content": text} for each in calls],
    }


@pytest.mark.parametrize(
    "thinking",
    [
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1200},
    ],
    ids=["before every call", "before the first call only", "told how much"],
)
async def test_no_thought_is_refused_however_long_the_work(thinking: dict[str, Any]) -> None:
    provider = ThreeWireProvider(DemoProviderSettings(CharacterCounter(), window=WINDOW))
    statuses: list[str] = []
    async with serve_embedded(provider) as upstream:
        given = {"upstream": {"base_url": f"{upstream}/v1"}, "store": {"url": "memory://"}}
        config = Config.model_validate(
            {
                **given,
                "summary": {"model": "demo-summary"},
                "models": {"*": {"window": WINDOW}},
            }
        )
        async with (
            serve_embedded(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, headers=HEADERS) as client,
        ):
            listed: list[dict[str, Any]] = [{"role": "user", "content": 'call look {"at": 0}'}]
            told: httpx.Headers = httpx.Headers()
            for turn in range(1, TURNS):
                answer = await client.post("/v1/messages", json=asked(thinking, listed))
                assert answer.status_code == httpx.codes.OK, (turn, answer.text)
                told = answer.headers
                statuses.append(told.get("x-compaction-status", ""))
                content = answer.json()["content"]
                listed += [{"role": "assistant", "content": content}, shown(content, turn)]
            undone = await client.post(
                "/v1/messages", json=asked(thinking, listed[:25]), headers={"x-compaction": "bypass"}
            )
    assert {"applied", "reused"} <= set(statuses)
    assert int(told["x-compaction-tokens-after"]) <= int(told["x-compaction-tokens-before"]) / 2
    assert undone.status_code == httpx.codes.OK, undone.text
