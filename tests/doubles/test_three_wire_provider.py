"""What holds on every wire: one conversation, the same replies, counts and troubles."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import pytest

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.cli.demo.replies import load_script
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.types import TokenCounter
from tests.doubles.three_wire_provider import ThreeWireProvider

SCRIPT = load_script()
HEADERS = {"anthropic-version": "2023-06-01"}
MARK = {"cache_control": {"type": "ephemeral"}}
TURNS = 8


@dataclass(frozen=True, slots=True)
class Said:
    """What came back: text, calls, what the client puts into its history, and what it cost."""

    text: str
    calls: list[tuple[str, str, Any]]
    kept: list[JsonObject]
    usage: JsonObject


class Chat:
    path = "/v1/chat/completions"
    tools: ClassVar[list[JsonObject]] = SCRIPT.tools

    def body(self, history: list[JsonObject]) -> JsonObject:
        system = {"role": "system", "content": SCRIPT.system}
        return {"messages": [system, *history], "max_tokens": 512}

    def result(self, call_id: str, text: str) -> JsonObject:
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    def said(self, answer: JsonObject) -> Said:
        message = answer["choices"][0]["message"]
        made = [(each["id"], each["function"]) for each in message.get("tool_calls", ())]
        calls = [(own, each["name"], json.loads(each["arguments"])) for own, each in made]
        usage = answer["usage"]
        cost = (usage["prompt_tokens"], usage["completion_tokens"])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Said(message["content"] or "", calls, [message], {"cost": cost, "cached": cached})


class Responses:
    path = "/v1/responses"
    tools: ClassVar[list[JsonObject]] = [{"type": "function", **tool["function"]} for tool in SCRIPT.tools]

    def body(self, history: list[JsonObject]) -> JsonObject:
        return {"instructions": SCRIPT.system, "input": history, "max_output_tokens": 512, "store": False}

    def result(self, call_id: str, text: str) -> JsonObject:
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    def said(self, answer: JsonObject) -> Said:
        output = answer["output"]
        spoken = [item["content"][0]["text"] for item in output if item["type"] == "message"]
        made = [item for item in output if item["type"] == "function_call"]
        calls = [(each["call_id"], each["name"], json.loads(each["arguments"])) for each in made]
        usage = answer["usage"]
        cost = (usage["input_tokens"], usage["output_tokens"])
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Said("".join(spoken), calls, output, {"cost": cost, "cached": cached})


class Messages:
    path = "/v1/messages"
    tools: ClassVar[list[JsonObject]] = [
        {
            "name": tool["function"]["name"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in SCRIPT.tools
    ]

    def body(self, history: list[JsonObject]) -> JsonObject:
        return {"system": SCRIPT.system, "messages": history, "max_tokens": 512, **MARK}

    def result(self, call_id: str, text: str) -> JsonObject:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        return {"role": "user", "content": [block]}

    def said(self, answer: JsonObject) -> Said:
        content = answer["content"]
        spoken = [block["text"] for block in content if block["type"] == "text"]
        made = [block for block in content if block["type"] == "tool_use"]
        calls = [(each["id"], each["name"], each["input"]) for each in made]
        usage = answer["usage"]
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        cost = (usage["input_tokens"] + read + written, usage["output_tokens"])
        kept = [{"role": "assistant", "content": content}]
        return Said("".join(spoken), calls, kept, {"cost": cost, "cached": read})


WIRES = (Chat(), Responses(), Messages())
Wire = Chat | Responses | Messages
every_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.path)


async def _ask(
    http: httpx.AsyncClient, url: str, wire: Wire, history: list[JsonObject], tools: object = None
) -> Said:
    body = {"model": "demo-agent", "tools": tools or wire.tools, **wire.body(history)}
    answer = await http.post(url + wire.path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return wire.said(answer.json())


async def _played(provider: ThreeWireProvider, wire: Wire) -> list[Said]:
    """The first turns of the script."""
    history: list[JsonObject] = []
    said: list[Said] = []
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        for turn in SCRIPT.turns[:TURNS]:
            history.append({"role": "user", "content": turn.user})
            for _ in turn.steps:
                said.append(await _ask(http, url, wire, history))
                history += said[-1].kept
                history += [wire.result(call[0], SCRIPT.results[call[0]]) for call in said[-1].calls]
    return said


async def test_the_script_is_played_alike_on_every_wire(words: TokenCounter) -> None:
    played = [
        await _played(ThreeWireProvider(DemoProviderSettings(words, window=100_000)), wire) for wire in WIRES
    ]
    for chat, *others in zip(*played, strict=True):
        for other in others:
            assert (other.text, other.calls) == (chat.text, chat.calls)
    steps = [step for turn in SCRIPT.turns[:TURNS] for step in turn.steps]
    assert [len(said.calls) for said in played[0]] == [len(step.calls) for step in steps]


async def test_a_summary_is_the_same_on_every_wire(words: TokenCounter) -> None:
    asked = [{"role": "user", "content": "They changed a/b.py, and kept all below /srv/data."}]
    said = []
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        for wire in WIRES:
            body = {"model": "demo-summary", **wire.body(asked)}
            said.append(wire.said((await http.post(url + wire.path, json=body, headers=HEADERS)).json()))
    assert [each.text for each in said] == [said[0].text] * 3
    assert "They changed a/b.py, and kept all below /srv/data." in said[0].text


@every_wire
async def test_a_growing_conversation_is_cached_and_counted(words: TokenCounter, wire: Wire) -> None:
    said = await _played(ThreeWireProvider(DemoProviderSettings(words, window=100_000)), wire)
    prompts = [each.usage["cost"][0] for each in said]
    cached = [each.usage["cached"] for each in said]
    assert prompts == sorted(prompts)
    assert cached[0] == 0
    assert 1024 <= cached[-1] < prompts[-1]


@every_wire
async def test_a_test_may_ask_for_calls(words: TokenCounter, wire: Wire) -> None:
    provider = ThreeWireProvider(DemoProviderSettings(words))
    ask = [
        {"role": "user", "content": f'call {tool["function"]["name"]} {{"n": 1}}'} for tool in SCRIPT.tools
    ]
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        said = await _ask(http, url, wire, ask[:1])
    assert [call[1:] for call in said.calls] == [(SCRIPT.tools[0]["function"]["name"], {"n": 1})]


def _small(wire: Wire, **more: object) -> Mapping[str, object]:
    return {"model": "demo-agent", **wire.body([{"role": "user", "content": "hello there " * 20}]), **more}


@every_wire
async def test_trouble_on_demand_has_the_shape_of_the_wire(words: TokenCounter, wire: Wire) -> None:
    provider = ThreeWireProvider(DemoProviderSettings(words))
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:

        async def ask(fault: str, **more: object) -> httpx.Response:
            headers = {**HEADERS, "x-demo-fault": fault}
            return await http.post(url + wire.path, json=_small(wire, **more), headers=headers)

        limited = (await ask("status=429")).json()
        unknown = (await ask("", model="x")).json()
        garbage = await ask("garbage", stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            await ask("cut=2", stream=True)
    native = isinstance(wire, Messages)
    assert limited["error"]["type"] == ("rate_limit_error" if native else "server_error")
    assert ("type" in unknown, "code" in unknown["error"]) == (native, not native)
    assert [seen.status for seen in provider.log] == [429, 404, 200, 200]
    assert garbage.content.startswith(b"\x00\xff")


@every_wire
async def test_an_overflow_is_refused_before_anything_is_streamed(words: TokenCounter, wire: Wire) -> None:
    provider = ThreeWireProvider(DemoProviderSettings(words, window=100))
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(url + wire.path, json=_small(wire, stream=True), headers=HEADERS)
    assert answer.status_code == 400
    assert [(seen.status, seen.code) for seen in provider.log] == [(400, "context_length_exceeded")]
