import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.types import TokenCounter
from tests.doubles.three_wire_provider import ThreeWireProvider

HELLO: JsonObject = {"model": "demo-agent", "input": "hello there"}
ECHO = 'You said "hello there". I was sent 1 messages.'
THOUGHT = "The last of 1 messages decides what I say next."
TOOLS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "edit"},
    {"type": "local_shell"},
]
CALLS = 'call look {"at": "the long way round"}\ncall edit {"x": 1}\ncall local_shell {"command": ["ls"]}'


def events(answer: httpx.Response) -> list[JsonObject]:
    """The events, each named as its data says and numbered from 0."""
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    found = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    assert [frame.partition("\n")[0] for frame in frames] == [f"event: {each['type']}" for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


async def test_a_plain_answer_has_the_shape_of_a_response(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = (await http.post(f"{url}/v1/responses", json=HELLO)).json()
    [message] = answer["output"]
    assert message == {
        "id": message["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": ECHO}],
    }
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    assert answer["usage"] == {
        "input_tokens": 1 + 2 + 3 + 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


async def test_a_stream_has_every_event_in_its_place(words: TokenCounter) -> None:
    body = {**HELLO, "stream": True, "reasoning": {"summary": "auto"}, "max_output_tokens": 4}
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        found = events(await http.post(f"{url}/v1/responses", json=body))
    summary = "response.reasoning_summary"
    assert [each["type"] for each in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        f"{summary}_part.added",
        *[f"{summary}_text.delta"] * 4,
        f"{summary}_text.done",
        f"{summary}_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = found[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"] == [each["item"] for each in found if each["type"].endswith("item.done")]


def _talk(url: str) -> tuple[str, list[tuple[str, str]], str]:
    """A text, the types and ids of streamed calls, and what is said when they are answered."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client:
        plain = client.responses.create(**HELLO)
        asked: list[Any] = [{"role": "user", "content": CALLS}]
        with client.responses.stream(
            model="demo-agent", input=asked, tools=TOOLS, reasoning={"effort": "low"}, store=False
        ) as stream:
            kinds = [event.type for event in stream]
            made = stream.get_final_response().output
        assert kinds[-1] == "response.completed"
        given: list[Any] = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in made]
        answers: list[Any] = [
            {
                "type": f"{item['type']}_output",
                "call_id": item["call_id"],
                "id": item["call_id"],
                "output": "ok",
            }
            for item in given[1:]
        ]
        done = client.responses.create(model="demo-agent", input=[*asked, *given, *answers], tools=TOOLS)
        calls = [(item["type"], item["call_id"]) for item in given[1:]]
        return plain.output_text, calls, done.output_text


async def test_the_openai_client_talks_to_it(words: TokenCounter) -> None:
    async with serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url:
        text, calls, after = await asyncio.to_thread(_talk, url)
    assert (text, after) == (ECHO, 'The tool returned "ok". I was sent 5 messages.')
    assert [kind for kind, _ in calls] == ["function_call", "custom_tool_call", "local_shell_call"]
    assert len({own for _, own in calls}) == 3


async def test_the_asynchronous_openai_client_puts_streams_together(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client,
        client.responses.stream(**HELLO, reasoning={"summary": "auto"}) as stream,
    ):
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    reasoning = final.output[0]
    assert reasoning.type == "reasoning"
    assert ("".join(deltas), final.output_text, reasoning.summary[0].text) == (ECHO, ECHO, THOUGHT)


async def test_the_openai_client_raises_what_the_provider_refuses(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words, window=5))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**HELLO)
    assert refused.value.code == "context_length_exceeded"


async def test_a_stored_response_may_be_gone_on_from_by_name(words: TokenCounter) -> None:
    async with (
        serve_embedded(ThreeWireProvider(DemoProviderSettings(words))) as url,
        httpx.AsyncClient(trust_env=False) as http,
    ):

        async def ask(given: object, **more: object) -> httpx.Response:
            return await http.post(f"{url}/v1/responses", json={**HELLO, "input": given, **more})

        first = (await ask("one", store=True)).json()
        second = await ask("two", previous_response_id=first["id"])
        named = await ask(
            [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "x"}]
        )
        hidden = (await ask("three", store=False)).json()
        unknown = [
            await ask("four", previous_response_id=hidden["id"]),
            await ask([{"type": "item_reference", "id": hidden["output"][0]["id"]}]),
        ]
    said = [answer.json()["output"][0]["content"][0]["text"] for answer in (second, named)]
    assert said == ['You said "two". I was sent 3 messages.', 'You said "x". I was sent 2 messages.']
    assert [answer.status_code for answer in unknown] == [400, 404]
