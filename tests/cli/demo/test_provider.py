import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.types import TokenCounter

HELLO: JsonObject = {"model": "demo-agent", "messages": [{"role": "user", "content": "hello there"}]}
ECHO = 'You said "hello there". I was sent 1 messages.'
USAGE = {
    "prompt_tokens": 1 + 2 + 3 + 3,
    "completion_tokens": 9,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "find")
]
TWO_CALLS: list[Any] = [{"role": "user", "content": 'call look {"at": "the long way round"}\ncall find {}'}]


def events(answer: httpx.Response) -> list[JsonObject]:
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_plain_answer_has_the_shape_of_a_completion(words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = (await http.post(f"{url}/openai/deployments/x/chat/completions?v=1", json=HELLO)).json()
    message: JsonObject = {"role": "assistant", "content": ECHO, "refusal": None, "annotations": []}
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "chatcmpl-" + "1".zfill(29),
        "object": "chat.completion",
        "model": "demo-agent",
        "service_tier": "default",
        "system_fingerprint": "fp_demo",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }


async def test_a_stream_has_usage_only_where_it_was_asked_for(words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        path = f"{url}/v1/chat/completions"
        bare = events(await http.post(path, json={**HELLO, "stream": True}))
        asked = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        counted = events(await http.post(path, json=asked))
    assert all("usage" not in event for event in bare)
    assert [event["usage"] for event in counted] == [None] * (len(counted) - 1) + [USAGE]
    assert counted[-1]["choices"] == []
    assert [event["choices"] for event in bare] == [event["choices"] for event in counted[:-1]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in bare) == ECHO


async def test_an_answer_is_cut_at_the_tokens_asked_for(words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = await http.post(f"{url}/v1/chat/completions", json={**HELLO, "max_tokens": 4})
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('You said "hello', "length")


@pytest.mark.parametrize("size", [{"max_tokens": 92}, {"max_completion_tokens": 92}])
async def test_an_overflow_is_refused_before_anything_is_streamed(
    words: TokenCounter, size: dict[str, int]
) -> None:
    provider = DemoProvider(DemoProviderSettings(words, window=100))
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json={**HELLO, "stream": True, **size})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    seen = provider.log[0]
    assert (seen.status, seen.code, seen.prompt_tokens, seen.output_tokens) == (
        400,
        "context_length_exceeded",
        9,
        92,
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, None),
        ("POST", "/v1/chat/completions", b"[]", 400, None),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400, None),
        (
            "POST",
            "/v1/chat/completions",
            json.dumps({**HELLO, "model": "x"}).encode(),
            404,
            "model_not_found",
        ),
        ("GET", "/v1/files", b"", 404, None),
        ("POST", "/v1/responses", json.dumps(HELLO).encode(), 404, None),
        ("POST", "/v1/messages", json.dumps(HELLO).encode(), 404, None),
        ("GET", "/v1/chat/completions", b"", 404, None),
    ],
)
async def test_what_cannot_be_served_is_refused_in_the_error_shape(
    words: TokenCounter, method: str, path: str, body: bytes, status: int, code: str | None
) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = await http.request(method, url + path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_models_and_log_are_listed_without_credentials(words: TokenCounter) -> None:
    provider = DemoProvider(DemoProviderSettings(words, log_records=2))
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        for _ in range(3):
            await http.post(
                f"{url}/v1/chat/completions", json=HELLO, headers={"authorization": "Bearer hidden"}
            )
        models = (await http.get(f"{url}/v1/models")).json()
        log = await http.get(f"{url}/__log")
    assert [row["id"] for row in models["data"]] == ["demo-agent", "demo-summary"]
    assert [row["number"] for row in log.json()] == [2, 3]
    assert "hidden" not in log.text
    assert [seen.parse_messages() for seen in provider.log] == [HELLO["messages"]] * 2
    assert ("authorization", "Bearer hidden") in provider.log[0].headers


async def test_the_same_request_gets_the_same_answer(words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answers = [(await http.post(f"{url}/v1/chat/completions", json=HELLO)).json() for _ in range(2)]
    for answer in answers:
        del answer["id"], answer["created"]
    assert answers[0] == answers[1]


def _talk(url: str) -> tuple[str | None, str, list[tuple[str, str]]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client:
        plain = client.chat.completions.create(**HELLO)
        stream = client.chat.completions.create(**HELLO, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        called = client.chat.completions.create(model="demo-agent", messages=TWO_CALLS, tools=TOOLS)
        made = called.choices[0].message.tool_calls or []
        calls = [(each.function.name, each.function.arguments) for each in made if each.type == "function"]
        return plain.choices[0].message.content, text, calls


async def test_the_openai_client_talks_to_it(words: TokenCounter) -> None:
    async with serve_embedded(DemoProvider(DemoProviderSettings(words))) as url:
        talked = await asyncio.to_thread(_talk, url)
    assert talked == (ECHO, ECHO, [("look", '{"at": "the long way round"}'), ("find", "{}")])


async def test_the_asynchronous_openai_client_streams_parallel_calls(words: TokenCounter) -> None:
    arguments: dict[int, str] = {}
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="demo-agent", messages=TWO_CALLS, tools=TOOLS, stream=True
        )
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert arguments == {0: '{"at": "the long way round"}', 1: "{}"}


async def test_the_openai_client_raises_what_the_provider_refuses(words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words, window=5))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**HELLO)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"model": "demo-agent", "seed": NaN}', b'{"user": "\xff"}'])
async def test_what_is_no_json_object_is_refused(body: bytes, words: TokenCounter) -> None:
    async with (
        serve_embedded(DemoProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = await http.post(f"{url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("We could not parse the JSON body")
