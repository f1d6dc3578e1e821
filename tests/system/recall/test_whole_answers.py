"""The model searches in the middle of an answer that is no stream."""

import gzip
import json
from typing import Any

import pytest


def outcome(answer: Any) -> tuple[Any, ...]:
    told = answer.json()
    choice = told["choices"][0]
    calls = [call["id"] for call in choice["message"].get("tool_calls", ())]
    return choice["message"]["content"], calls, choice["finish_reason"], told["usage"]["prompt_tokens"]


async def test_an_answer_that_searches_nothing_is_the_upstream_s_byte_for_byte(stack: Any, s: Any) -> None:
    plain, calls = s.said("Plain."), s.said("Calls.", s.opened(1))
    packed = gzip.compress(stack.written(plain))
    zipped = s.Raw(
        [packed], fields=[s.JSON, ("content-encoding", "gzip"), ("content-length", str(len(packed)))]
    )
    stack.script(
        plain, calls, zipped, s.Raw([b""], fields=[s.JSON]), s.Raw([b'"tool_calls"{'], fields=[s.JSON])
    )
    got = [await stack.post() for _ in range(5)]
    assert [each.content for each in got] == [
        stack.written(plain, 1),
        stack.written(calls, 2),
        stack.written(plain, 1),
        b"",
        b'"tool_calls"{',
    ]
    assert got[2].headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([("", 1), ("Five.", 0)], ("Five.", [], "stop", 400)),
        ([("Let me see.", 1), ("Five.", 0)], ("Let me see.\n\nFive.", [], "stop", 400)),
        ([("It is ", 1), ("five", 1), (" dollars.", 0)], ("It is five dollars.", [], "stop", 900)),
        ([("It is five.", 1), ("", 0)], ("It is five.", [], "stop", 400)),
        ([("Two.", 2), ("Found.", 0)], ("Two.\n\nFound.", [], "stop", 500)),
    ],
)
async def test_several_answers_are_one(stack: Any, s: Any, answers: Any, told: Any) -> None:
    stack.script(*[s.said(text, *[s.recall(at) for at in range(calls)]) for text, calls in answers])
    got = await stack.post()
    assert outcome(got) == told
    assert (got.json()["id"], got.json()["model"], got.headers["x-request-id"]) == (
        "chatcmpl-1",
        "m-1",
        "req_1",
    )
    assert got.headers["content-length"] == str(len(got.content))


async def test_beside_the_client_s_calls_ours_is_left_out(stack: Any, s: Any) -> None:
    stack.script(s.said("Both.", s.recall(), s.opened()))
    assert outcome(await stack.post()) == ("Both.", ["call_o1"], "tool_calls", 100)
    assert len(stack.asked) == 1


async def test_a_search_before_the_client_s_calls_is_run(stack: Any, s: Any) -> None:
    stack.script(s.said("", s.recall()), s.said("Open it.", s.opened()))
    assert outcome(await stack.post()) == ("Open it.", ["call_o1"], "tool_calls", 400)


async def test_broken_arguments_are_answered_with_what_is_wanted(stack: Any, s: Any) -> None:
    stack.script(s.said("", s.recall(1, "{broken")), s.said("Sorry."))
    assert outcome(await stack.post()) == ("Sorry.", [], "stop", 400)
    [_, call, result] = stack.asked[1].messages
    assert call["tool_calls"][0]["function"]["arguments"] == "{}"
    assert '{"query": "words to look for"}' in result["content"]


async def test_one_that_searches_for_ever_is_stopped(stack: Any, s: Any) -> None:
    stack.script(s.said("a", s.recall()))
    assert outcome(await stack.post()) == ("aaaaa", [], "stop", 2500)
    assert len(stack.asked) == 5


async def test_of_many_calls_at_once_some_are_run(stack: Any, s: Any) -> None:
    stack.script(s.said("", *[s.recall(at) for at in range(10)]), s.said("Enough."))
    await stack.post()
    results = [each["content"] for each in stack.asked[1].messages if each["role"] == "tool"]
    assert [each.startswith("Not run") for each in results] == [False] * 8 + [True] * 2


async def test_the_upstream_s_error_on_the_way_is_the_client_s(stack: Any, s: Any) -> None:
    body = json.dumps({"error": {"message": "Slow down.", "code": "rate_limit_exceeded"}}).encode()
    stack.script(s.said("So", s.recall()), s.Raw([body], 429, [s.JSON, ("retry-after", "7")]))
    got = await stack.post()
    assert (got.status_code, got.content, got.headers["retry-after"]) == (429, body, "7")


@pytest.mark.parametrize("body", [b"no json", b"[]"])
async def test_an_answer_on_the_way_that_is_none_is_a_502(stack: Any, s: Any, body: bytes) -> None:
    stack.script(s.said("So", s.recall()), s.Raw([body], fields=[s.JSON]))
    got = await stack.post()
    assert (got.status_code, got.json()["error"]["code"]) == (502, "upstream_protocol_error")


async def test_probabilities_of_all_answers_are_told(stack: Any, s: Any) -> None:
    bodies = []
    for number, reply in ((1, s.said("So", s.recall())), (2, s.said(" five."))):
        told = json.loads(stack.written(reply, number))
        told["choices"][0]["logprobs"] = {"content": [{"token": str(number)}]}
        bodies.append(s.Raw([json.dumps(told).encode()], fields=[s.JSON]))
    stack.script(*bodies)
    assert (await stack.post()).json()["choices"][0]["logprobs"]["content"] == [
        {"token": "1"},
        {"token": "2"},
    ]
