"""openai-python through the proxy: what it makes of good answers."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "Say héllo 🙂"}]
ECHO = 'You said "Say héllo 🙂". I was sent 1 messages.'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("search", "open")
]
ASKED = [{"role": "user", "content": 'call search {"query": "Grüße"}\ncall open {"path": "a/b.py"}'}]
CALLS = [("search", '{"query": "Grüße"}'), ("open", '{"path": "a/b.py"}')]


class City(BaseModel):
    city: str
    degrees: int


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_a_plain_answer_arrives(sdk: Any) -> None:
    answer = await sdk.create(messages=HELLO)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ECHO, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


async def test_a_streamed_answer_arrives(sdk: Any) -> None:
    chunks = await sdk.stream(messages=HELLO)
    assert text_of(chunks) == ECHO
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.usage for chunk in chunks} == {None}  # nothing was asked for, nothing is injected


async def test_usage_arrives_where_it_was_asked_for(sdk: Any) -> None:
    chunks = await sdk.stream(messages=HELLO, stream_options={"include_usage": True})
    assert text_of(chunks) == ECHO
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens > 0) == ([], True)


async def test_parallel_tool_calls_are_made_and_answered(sdk: Any) -> None:
    answer = await sdk.create(messages=ASKED, tools=TOOLS)
    message = answer.choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLS
    assert answer.choices[0].finish_reason == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {call.function.name}"}
        for call in message.tool_calls
    ]
    answer = await sdk.create(messages=[*ASKED, message.model_dump(exclude_none=True), *results], tools=TOOLS)
    assert answer.choices[0].message.content == 'The tool returned "result open". I was sent 4 messages.'


async def test_parallel_tool_calls_are_streamed(sdk: Any) -> None:
    chunks = await sdk.stream(messages=ASKED, tools=TOOLS, parallel_tool_calls=True)
    calls: dict[int, list[str]] = {}
    for piece in (piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()):
        held = calls.setdefault(piece.index, ["", ""])
        held[0] += piece.function.name or ""
        held[1] += piece.function.arguments or ""
    assert [tuple(call) for _, call in sorted(calls.items())] == CALLS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_raw_responses_show_our_headers_and_the_upstream_s(sdk: Any, *, stream: bool) -> None:
    _, fields = await sdk.fields(messages=HELLO, stream=stream)
    shown = dict(fields)
    assert shown["x-compaction-status"] == "none"
    assert shown["openai-version"] == "2020-10-01"


async def test_both_cookies_and_every_header_of_the_upstream_survive(sdk: Any, greeting: str) -> None:
    answer, fields = await sdk.fields(messages=HELLO, extra_headers={"x-answer": "cookies"})
    assert [value for name, value in fields if name == "set-cookie"] == ["a=1; Path=/", "b=2; Path=/"]
    shown = dict(fields)
    assert (shown["x-request-id"], shown["x-ratelimit-remaining-tokens"]) == ("req_200", "149")
    assert answer.choices[0].message.content == greeting
    assert answer._request_id == "req_200"


def test_a_streaming_response_can_be_read_line_by_line(client: openai.OpenAI) -> None:
    asked = client.chat.completions.with_streaming_response.create(
        model="demo-agent",
        messages=HELLO,
        stream=True,
    )
    with asked as response:
        assert response.headers["x-compaction-status"] == "none"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") for line in lines[:-1]
    ]
    assert "".join(piece or "" for piece in text) == ECHO


async def test_a_streaming_response_can_be_read_asynchronously(aclient: openai.AsyncOpenAI) -> None:
    asked = aclient.chat.completions.with_streaming_response.create(
        model="demo-agent",
        messages=HELLO,
    )
    async with asked as response:
        assert response.headers["x-compaction-status"] == "none"
        assert json.loads(await response.read())["choices"][0]["message"]["content"] == ECHO


@pytest.mark.parametrize("answer", ["unicode", "zipped-stream"])
async def test_text_survives_a_stream_however_it_is_sliced_or_packed(
    sdk: Any, greeting: str, answer: str
) -> None:
    assert text_of(await sdk.stream(messages=HELLO, extra_headers={"x-answer": answer})) == greeting


async def test_a_compressed_answer_is_read(sdk: Any, greeting: str) -> None:
    answer, fields = await sdk.fields(messages=HELLO, extra_headers={"x-answer": "zipped"})
    assert answer.choices[0].message.content == greeting
    assert dict(fields)["content-encoding"] == "gzip"


async def test_unicode_reaches_the_upstream_as_it_was_sent(
    sdk: Any, stack: Any, key: str, greeting: str
) -> None:
    asked = [{"role": "user", "content": greeting, "name": "Zoë"}]
    await sdk.create(messages=asked)
    [seen] = stack.seen(key)
    assert seen.json()["messages"] == asked


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo-agent",
        messages=[{"role": "user", "content": "Weather?"}],
        response_format=City,
        extra_headers={"x-answer": "city"},
    )
    assert answer.choices[0].message.parsed == City(city="Zürich", degrees=21)


async def test_structured_output_is_parsed_from_a_stream(aclient: openai.AsyncOpenAI) -> None:
    asked = aclient.chat.completions.stream(
        model="demo-agent",
        messages=[{"role": "user", "content": "Weather?"}],
        response_format=City,
        extra_headers={"x-answer": "city-stream"},
    )
    async with asked as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.parsed == City(city="Zürich", degrees=21)
