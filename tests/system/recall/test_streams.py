"""The model searches in the middle of a streamed answer: what goes over the wire on both sides."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}


def text_of(answer: httpx.Response) -> str:
    """The text of a streamed answer."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_an_answer_that_searches_nothing_is_the_upstream_s_byte_for_byte(stack: Any, s: Any) -> None:
    for number, reply in enumerate((s.said("Plain."), s.said("Calls.", s.opened(1), s.opened(2))), start=1):
        stack.script(s.said(), *[reply] * number)
        if number == 1:
            await stack.post()  # the provider numbers its answers
        got = await stack.post(**STREAM)
        assert got.content == stack.written(reply, len(stack.asked), **STREAM)
        assert (got.headers["x-request-id"], "content-length" in got.headers) == (
            f"req_{len(stack.asked)}",
            False,
        )


async def test_the_tool_is_offered_last_and_in_the_same_bytes_each_time(stack: Any, s: Any) -> None:
    stack.script(s.said("", s.recall()), s.said("Five."))
    await stack.post(**STREAM)
    first, later = stack.asked
    assert first.body["tools"] == later.body["tools"] == [*s.tools, s.tool]
    assert first.fields["accept-encoding"] == later.fields["accept-encoding"] == "identity"
    assert ("idempotency-key" in first.fields, "idempotency-key" in later.fields) == (True, False)
    messages = first.raw.index(b'"messages":[') + len(b'"messages":[')
    stop = first.raw.index(b"]", messages)
    assert later.raw.startswith(first.raw[:stop])
    assert later.raw.endswith(first.raw[stop:])
    [said, result] = later.messages[len(first.messages) :]
    assert (said["role"], said["content"], result["role"], result["tool_call_id"]) == (
        "assistant",
        None,
        "tool",
        said["tool_calls"][0]["id"],
    )
    assert "Nothing that was removed" in result["content"]


async def test_a_model_without_the_setting_is_offered_nothing(stack: Any, s: Any) -> None:
    reply = s.said("", s.recall())
    stack.script(reply)
    got = await stack.post(model="other", **STREAM)
    assert (got.content, stack.asked[0].tools) == (stack.written(reply, **STREAM), ["open"])


@pytest.mark.parametrize(
    "given",
    [
        {"n": 2},
        {"functions": [{"name": "old", "parameters": {}}], "tools": None},
        {"tools": [{"type": "function", "function": {"name": "memory_search", "parameters": {}}}]},
        {"tools": None, "tool_choice": "auto"},
        {"audio": {"voice": "x"}, "modalities": ["audio"]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So,"}]},
    ],
)
async def test_where_it_has_no_place_the_request_goes_on_as_it_came(
    stack: Any, s: Any, given: dict[str, Any]
) -> None:
    stack.script(s.said("Fine."))
    body = {"model": "always", "messages": s.hello, "tools": s.tools, **given}
    await stack.post(**given)
    assert stack.asked[0].body == body


async def test_a_request_that_is_to_go_on_as_it_came_does(stack: Any, s: Any) -> None:
    stack.script(s.said("Fine."))
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        for wish in ("bypass", "shadow"):
            given = {"model": "always", "messages": s.hello}
            url, fields = f"{stack.url}/v1/chat/completions", {**stack.fields, "x-compaction": wish}
            await client.post(url, json=given, headers=fields)
            assert stack.asked[-1].body == given


@pytest.mark.parametrize(
    ("status", "message", "asked"),
    [
        (400, "Invalid 'tools': array too long. Expected 128 at most.", 2),
        (404, "No endpoints found that support tool use.", 2),
        (500, "Function calling is not enabled for this model", 2),
        (400, "Invalid 'temperature'.", 1),
        (429, "Too many requests; see the functions of your tier.", 1),
    ],
)
async def test_where_the_tool_is_refused_the_request_goes_on_as_it_came(
    stack: Any, s: Any, status: int, message: str, asked: int
) -> None:
    refusal = json.dumps({"error": {"message": message}}).encode()
    stack.script(s.Raw([refusal], status, [s.JSON]), s.said("Fine."))
    got = await stack.post(**STREAM)
    body = {"model": "always", "messages": s.hello, "tools": s.tools, **STREAM}
    assert [each.tools for each in stack.asked] == [["open", "memory_search"], ["open"]][:asked]
    assert (stack.asked[-1].body == body, got.status_code) == (asked == 2, 200 if asked == 2 else status)


async def test_it_searches_as_often_as_it_may_and_then_has_to_answer(stack: Any, s: Any) -> None:
    stack.script(s.said("a", s.recall()))
    got = await stack.post(**STREAM)
    assert [asked.tools for asked in stack.asked] == [["open", "memory_search"]] * 4 + [["open"]]
    assert [len(asked.messages) for asked in stack.asked] == [1, 3, 5, 7, 9]
    last = [line for line in got.text.splitlines() if '"finish_reason":"' in line]
    assert (text_of(got), [json.loads(line[6:])["choices"][0]["finish_reason"] for line in last]) == (
        "aaaaa",
        ["stop"],
    )
    assert got.text.count("[DONE]") == 1
    assert '"usage":{"prompt_tokens":2500,"completion_tokens":50,"total_tokens":2550' in got.text


async def test_without_other_tools_the_last_answer_is_asked_for_with_the_tool_forbidden(
    stack: Any, s: Any
) -> None:
    stack.script(s.said("", s.recall()), s.said("Five."))
    await stack.post(model="short", tools=None, **STREAM)
    first, later = stack.asked
    assert (first.tools, later.tools) == (["memory_search"], ["memory_search"])
    assert ("tool_choice" in first.body, later.body["tool_choice"]) == (False, "none")


async def test_the_first_byte_is_not_held_back(stack: Any, s: Any) -> None:
    """Each event is at the client before the upstream sends the next one."""
    events = stack.provider.written(
        s.said("One two three four five six."), STREAM | {"messages": []}, 1
    ).chunks
    stack.script(s.Raw(events[:2], ending="open"))
    got: list[bytes] = []
    async with streamed(stack, s) as answer:
        async for chunk in answer.aiter_raw():
            got.append(chunk)
            if b"".join(got) == b"".join(events[:2]):
                break
    assert b"".join(got) == b"".join(events[:2])


async def test_a_packed_stream_is_unpacked_and_searched_in(stack: Any, s: Any) -> None:
    plain = stack.written(s.said("So", s.recall()), **STREAM)
    data = gzip.compress(plain)
    pieces = [data[at : at + 40] for at in range(0, len(data), 40)]
    packed = s.Raw(pieces, fields=[s.EVENTS, ("content-encoding", "gzip")])
    stack.script(packed, s.said(" five."))
    got = await stack.post(**STREAM)
    assert (text_of(got), "content-encoding" in got.headers) == ("So five.", False)


async def test_what_nobody_can_unpack_passes_as_it_is(stack: Any, s: Any) -> None:
    fields = [s.EVENTS, ("content-encoding", "br"), ("content-length", "6")]
    stack.script(s.Raw([b"\x8b\x02\x80"] * 2, fields=fields))
    async with streamed(stack, s) as answer:
        got = b"".join([chunk async for chunk in answer.aiter_raw()])
    assert (got, answer.headers["content-encoding"]) == (b"\x8b\x02\x80" * 2, "br")


@pytest.mark.parametrize("stage", ["first", "later"])
async def test_a_client_that_leaves_ends_it_all(stack: Any, s: Any, stage: str) -> None:
    opening = stack.provider.written(s.said("One two three four."), STREAM | {"messages": []}, 1).chunks[:2]
    waiting = s.Raw(opening, ending="open")
    stack.script(*([s.said("", s.recall())] if stage == "later" else []), waiting)
    asked = 1 if stage == "first" else 2
    task = asyncio.create_task(stack.post(**STREAM))
    await until(lambda: len(stack.asked) == asked)
    task.cancel()
    await until(lambda: stack.asked[-1].departed)
    await asyncio.gather(task, return_exceptions=True)
    assert len(stack.asked) == asked


async def until(held: Any) -> None:
    """Wait for a condition; only a hang takes longer than the limit."""
    async with asyncio.timeout(100):
        while not held():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)


ERROR = {"error": {"message": "Overloaded.", "type": "server_error", "code": None}}


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (500, json.dumps(ERROR, indent=1).encode(), ERROR),
        (503, b"<h1>Down</h1>", None),
        (200, b'{"object":"chat.completion"}', None),
    ],
)
async def test_where_it_cannot_go_on_the_client_is_told_and_cut(
    stack: Any, s: Any, status: int, body: bytes, told: Any
) -> None:
    stack.script(s.said("So", s.recall()), s.Raw([body], status, [s.JSON]))
    got, whole = await received(stack, s)
    error = json.loads(got.split(b"data: ")[-1])
    assert (error if told else error["error"]["code"]) == (told or "upstream_protocol_error")
    assert (whole, b"[DONE]" in got) == (False, False)


async def test_an_answer_that_is_cut_is_cut_for_the_client(stack: Any, s: Any) -> None:
    opening = stack.provider.written(s.said("One two three four."), STREAM | {"messages": []}, 1).chunks[:2]
    for before in ((), (s.said("So ", s.recall()),)):
        stack.key += "x"
        stack.script(*before, s.Raw(opening, ending="cut"))
        got, whole = await received(stack, s)
        assert (whole, b"One two three" in got, b'finish_reason":"' in got) == (False, True, False)


@asynccontextmanager
async def streamed(stack: Any, s: Any) -> AsyncIterator[httpx.Response]:
    """An answer that has begun."""
    async with (
        httpx.AsyncClient(trust_env=False, verify=False, timeout=100) as client,
        client.stream(
            "POST",
            f"{stack.url}/v1/chat/completions",
            json={"model": "always", "messages": s.hello, **STREAM},
            headers=stack.fields,
        ) as answer,
    ):
        yield answer


async def received(stack: Any, s: Any) -> tuple[bytes, bool]:
    """What a client got of an answer, and whether that was all of it."""
    got = b""
    async with streamed(stack, s) as answer:
        try:
            async for chunk in answer.aiter_raw():
                got += chunk
        except httpx.RemoteProtocolError:
            return got, False
    return got, True


TOO_LONG = json.dumps(
    {
        "error": {
            "message": "This model's maximum context length is 300 tokens. However, your messages resulted "
            "in 400 tokens.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
        }
    }
).encode()


async def test_what_was_found_is_left_away_where_it_makes_the_request_too_long(stack: Any, s: Any) -> None:
    stack.script(s.said("So", s.recall()), s.Raw([TOO_LONG], 400, [s.JSON]), s.said(" five."))
    got = await stack.post(**STREAM)
    assert text_of(got) == "So five."
    assert ["do not fit" in asked.messages[-1]["content"] for asked in stack.asked] == [False, False, True]


async def test_a_stream_that_lingers_after_its_end_holds_nobody_up(stack: Any, s: Any) -> None:
    events = stack.provider.written(s.said("So", s.recall()), STREAM | {"messages": []}, 1).chunks
    stack.script(s.Raw(events, ending="open"), s.said(" five."))
    async with asyncio.timeout(100):  # that stream never ends
        assert text_of(await stack.post(**STREAM)) == "So five."
