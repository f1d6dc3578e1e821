"""`POST …/responses/compact` over real sockets: who answers, and what OpenAI's client makes of it."""

import json
from typing import Any

import openai
import pytest

PATH = "/v1/responses/compact"
NO_SUCH_PATH = json.dumps({"detail": "Not Found"}).encode()
NO_SUCH_MODEL = json.dumps({"error": {"message": "?", "code": "model_not_found"}}).encode()
ITEMS: list[Any] = [{"role": "developer", "content": "Be brief."}]
for _turn in range(60):
    ITEMS += [
        {"role": "user", "content": f"Step {_turn}: " + "please look again " * 20},
        {"type": "function_call", "call_id": f"c{_turn}", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{_turn}", "output": "line of code; " * 30},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": f"Done {_turn}."}],
        },
    ]
ITEMS.append({"role": "user", "content": "And now?"})


def answering(status: int, body: bytes) -> Any:
    async def script(exchange: Any) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await exchange.send(head % (status, len(body)) + body)

    return script


@pytest.mark.parametrize("who", ["auto", "answer"])
async def test_a_shorter_input_is_read_by_openais_client_and_goes_on(wire: Any, who: str) -> None:
    async with (
        wire.running_upstream(answering(404, NO_SUCH_PATH)) as upstream,
        wire.running_proxy(upstream.port, upstream={"responses_compact": who}) as port,
        openai.AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client,
    ):
        made = await client.responses.compact(model="m", input=ITEMS)
        output: Any = made.to_dict(warnings=False)["output"]
        again = await client.responses.compact(model="m", input=output)
    assert (made.object, made.id[:5], made.usage.input_tokens > made.usage.output_tokens) == (
        "response.compaction",
        "resp_",
        True,
    )
    assert len(json.dumps(output)) < len(json.dumps(ITEMS)) / 2
    assert output[0]["content"] == [{"type": "input_text", "text": "Be brief."}]
    assert output[-1]["content"] == [{"type": "input_text", "text": "And now?"}]
    assert all(each["type"] in {"message", "function_call", "function_call_output"} for each in output)
    kept = {
        kind: [each["call_id"] for each in output if each["type"] == kind]
        for kind in ("function_call", "function_call_output")
    }
    assert kept["function_call"] == kept["function_call_output"]
    assert again.output[-1] == made.output[-1]
    asked = [seen.target for seen in upstream.seen]
    assert asked == ([PATH.encode()] * 2 if who == "auto" else [])


@pytest.mark.parametrize(
    ("status", "said"),
    [(200, b'{"object":"response.compaction"}'), (404, NO_SUCH_MODEL), (400, b"{}"), (500, b"{}")],
)
async def test_what_an_upstream_answers_by_itself_is_relayed(wire: Any, status: int, said: bytes) -> None:
    body = json.dumps({"model": "m", "input": ITEMS}).encode()
    async with (
        wire.running_upstream(answering(status, said)) as upstream,
        wire.running_proxy(upstream.port) as port,
    ):
        reply = await wire.ask(port, wire.post(PATH, body))
    assert (reply.status, reply.body, upstream.seen[0].body) == (status, said, body)


async def test_what_only_the_upstream_knows_is_its_to_judge(wire: Any) -> None:
    body = json.dumps({"model": "m", "input": "?", "previous_response_id": "resp_1"}).encode()
    async with wire.running_upstream(answering(404, NO_SUCH_PATH)) as upstream:
        async with wire.running_proxy(upstream.port) as port:
            relayed = await wire.ask(port, wire.post(PATH, body))
        async with wire.running_proxy(upstream.port, upstream={"responses_compact": "relay"}) as port:
            blind = await wire.ask(port, wire.post(PATH, b"any"))
        async with wire.running_proxy(upstream.port, upstream={"responses_compact": "answer"}) as port:
            refused = await wire.ask(port, wire.post(PATH, body))
    assert [(each.status, each.body) for each in (relayed, blind)] == [(404, NO_SUCH_PATH)] * 2
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "stateful")
    assert len(upstream.seen) == 2


async def test_an_input_that_is_one_text_comes_back_as_its_message(wire: Any) -> None:
    body = json.dumps({"model": "m", "input": "Hello"}).encode()
    async with wire.running_proxy(9, upstream={"responses_compact": "answer"}) as port:
        reply = await wire.ask(port, wire.post(PATH, body))
    assert json.loads(reply.body)["output"] == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    ]


async def test_its_summary_is_asked_for_on_the_same_wire_and_with_the_clients_key(wire: Any) -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "### A. Goal"}],
    }
    answer = json.dumps({"object": "response", "status": "completed", "output": [said]}).encode()
    body = json.dumps({"model": "m", "input": ITEMS}).encode()
    sections = {"upstream": {"responses_compact": "answer"}, "summary": {"model": "cheap"}}
    async with (
        wire.running_upstream(answering(200, answer)) as upstream,
        wire.running_proxy(upstream.port, **sections) as port,
    ):
        reply = await wire.ask(port, wire.post(f"{PATH}?api-version=1", body, "authorization: Bearer k"))
    assert reply.status == 200
    first = upstream.seen[0]
    assert (first.target, json.loads(first.body)["model"]) == (b"/v1/responses?api-version=1", "cheap")
    assert dict(first.fields)[b"authorization"] == b"Bearer k"


async def test_reasoning_stays_with_its_calls(wire: Any) -> None:
    items: list[Any] = [ITEMS[0], {"role": "user", "content": "Look through all of it."}]
    for step in range(60):
        items += [
            {"type": "reasoning", "id": f"c{step}", "summary": [], "encrypted_content": "sealed" * 200},
            {"type": "function_call", "call_id": f"c{step}", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{step}", "output": "line of code; " * 90},
        ]
    body = json.dumps({"model": "m", "input": items}).encode()
    async with wire.running_proxy(9, upstream={"responses_compact": "answer"}) as port:
        reply = await wire.ask(port, wire.post(PATH, body))
    kept: dict[str, list[str]] = {"reasoning": [], "function_call": [], "function_call_output": []}
    for each in json.loads(reply.body)["output"]:
        kept.get(each["type"], []).append(each.get("call_id") or each.get("id"))
    thought, called, answered = kept.values()
    assert thought == called == answered
    assert 0 < len(thought) <= 60
