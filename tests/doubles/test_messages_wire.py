import json

import httpx

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.types import TokenCounter
from tests.doubles.thought_signature import sign_thought
from tests.doubles.three_wire_provider import ThreeWireProvider

HEADERS = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "hello there"}
HELLO: JsonObject = {"model": "demo-agent", "max_tokens": 99, "messages": [USER]}
ECHO = 'You said "hello there". I was sent 1 messages.'
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 50}}
THOUGHT = "The last of 1 messages decides what I say next."
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]
MARK = {"cache_control": {"type": "ephemeral"}}


def events(answer: httpx.Response) -> list[JsonObject]:
    """The events, each named as its data says."""
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    found = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    assert [frame.partition("\n")[0] for frame in frames] == [f"event: {each['type']}" for each in found]
    return found


async def test_a_plain_answer_has_the_shape_of_a_message(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = await http.post(f"{url}/v1/messages", json={**HELLO, **THINKING}, headers=HEADERS)
    assert answer.headers["request-id"] == "req_" + "1".zfill(24)
    assert answer.json() == {
        "id": "msg_" + "1".zfill(24),
        "type": "message",
        "role": "assistant",
        "model": "demo-agent",
        "content": [
            {"type": "thinking", "thinking": THOUGHT, "signature": sign_thought(THOUGHT)},
            {"type": "text", "text": ECHO},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 9,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 10 + 9,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "service_tier": "standard",
        },
    }


async def test_a_stream_holds_the_blocks_of_the_plain_answer(words: TokenCounter) -> None:
    body = {**HELLO, **THINKING, "tools": TOOLS, "stream": True}
    body["messages"] = [{"role": "user", "content": 'call look {"at": "the long way round"}'}]
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        plain = (
            await http.post(f"{url}/v1/messages", json={**body, "stream": False}, headers=HEADERS)
        ).json()
        found = events(await http.post(f"{url}/v1/messages", json=body, headers=HEADERS))
    kinds = [each["delta"]["type"] if "index" in each and "delta" in each else each["type"] for each in found]
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *["thinking_delta"] * 4,
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        *["input_json_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    joined = {key: "".join(str(each.get(key, "")) for each in deltas) for key in ("thinking", "partial_json")}
    thought, call = plain["content"]
    assert (joined["thinking"], json.loads(joined["partial_json"])) == (thought["thinking"], call["input"])
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == plain["usage"]["output_tokens"]


async def test_calls_follow_calls_without_a_thought_of_their_own(words: TokenCounter) -> None:
    body = {**HELLO, **THINKING, "tools": TOOLS}
    body["messages"] = [{"role": "user", "content": "call look"}]
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        first = (await http.post(f"{url}/v1/messages", json=body, headers=HEADERS)).json()["content"]
        result = {"type": "tool_result", "tool_use_id": first[1]["id"], "content": "ok"}
        answered = [{"role": "assistant", "content": first}, {"role": "user", "content": [result]}]
        body["messages"] += answered
        second = (await http.post(f"{url}/v1/messages", json=body, headers=HEADERS)).json()["content"]
        body["messages"][1]["content"] = first[1:]
        bare = await http.post(f"{url}/v1/messages", json=body, headers=HEADERS)
    assert second == [{"type": "text", "text": 'The tool returned "ok". I was sent 3 messages.'}]
    assert (bare.status_code, bare.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_the_cache_takes_in_what_is_marked(words: TokenCounter) -> None:
    long = {"type": "text", "text": "word " * 2000}
    provider = ThreeWireProvider(DemoProviderSettings(words))
    marked = {**HELLO, "system": [{**long, **MARK}]}
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        answers = [
            (await http.post(f"{url}/v1/messages", json=body, headers=HEADERS)).json()
            for body in ({**HELLO, "system": [long]}, marked, marked)
        ]
    known = 2004 - 2004 % 128
    usages = [answer["usage"] for answer in answers]
    assert [(usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) for usage in usages] == [
        (0, 0),
        (0, known),
        (known, 0),
    ]


async def test_tokens_are_counted_without_an_answer(words: TokenCounter) -> None:
    provider = ThreeWireProvider(DemoProviderSettings(words, window=5))
    body = {"model": "demo-agent", "messages": [USER], "tools": TOOLS, "system": "be kind"}
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        counted = await http.post(f"{url}/v1/messages/count_tokens", json=body, headers=HEADERS)
        asked = await http.post(f"{url}/v1/messages", json={**body, "max_tokens": 1}, headers=HEADERS)
    assert counted.json() == {"input_tokens": provider.log[1].prompt_tokens}
    assert asked.json()["error"]["message"] == (
        f"prompt is too long: {counted.json()['input_tokens']} tokens > 5 maximum"
    )


async def test_the_version_is_asked_for_and_the_models_are_listed(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        refused = await http.post(f"{url}/v1/messages", json=HELLO)
        models = (await http.get(f"{url}/v1/models", headers=HEADERS)).json()
    assert refused.json()["error"]["message"] == "anthropic-version: header is required"
    assert [(row["type"], row["id"]) for row in models["data"]] == [
        ("model", "demo-agent"),
        ("model", "demo-summary"),
    ]
