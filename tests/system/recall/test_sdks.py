"""The official SDKs see one valid answer, whatever the model searches for in the middle of it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers import openai_node
from tests.system.clients.environments import python_environment

RUNNER = Path(__file__).parent / "runner.mjs"
ANTHROPIC_RUNNER = Path(__file__).parent / "anthropic_runner.py"
PLAY_TIMEOUT_S = 50
CALL = ["call_o1", "open", '{"path":"1.py"}']
NEXT = ["call_o2", "open", '{"path":"2.py"}']


def scripts(s: Any) -> dict[str, list[Any]]:
    """Answers of the provider, by what is searched and when."""
    search, twice = s.recall(), (s.recall(1), s.recall(2, '{"query":"ceiling"}'))
    return {
        "start": [s.said("", search), s.said("It was five thousand dollars.")],
        "middle": [s.said("Let me see. ", search), s.said("It was five thousand dollars.")],
        "end": [s.said("It was five thousand dollars.", search), s.said("")],
        "twice": [s.said("One ", search), s.said("two ", search), s.said("three.")],
        "parallel": [s.said("Both: ", *twice), s.said("found.")],
        "broken arguments": [s.said("", s.recall(1, '{"query":')), s.said("Never mind.")],
        "before the client's": [s.said("Opening ", search), s.said("it.", s.opened(1), s.opened(2))],
        "with the client's": [s.said("Both.", search, s.opened(1), s.recall(2), s.opened(2))],
        "for ever": [s.said("a", search)],
        "not at all": [s.said("I know it.", s.opened(1))],
    }


# Text, the client's calls, the reason of the end, input tokens of all answers.
EXPECTED: dict[str, tuple[str, list[list[str]], str, int]] = {
    "start": ("It was five thousand dollars.", [], "stop", 400),
    "middle": ("Let me see. It was five thousand dollars.", [], "stop", 400),
    "end": ("It was five thousand dollars.", [], "stop", 400),
    "twice": ("One two three.", [], "stop", 900),
    "parallel": ("Both: found.", [], "stop", 500),
    "broken arguments": ("Never mind.", [], "stop", 400),
    "before the client's": ("Opening it.", [CALL, NEXT], "tool_calls", 400),
    "with the client's": ("Both.", [CALL, NEXT], "tool_calls", 100),
    "for ever": ("aaaaa", [], "stop", 2500),
    "not at all": ("I know it.", [CALL], "tool_calls", 100),
}
every_case = pytest.mark.parametrize("case", EXPECTED)


def told(answer: Any) -> tuple[str, list[list[str]], str, int]:
    """What an SDK has made of an answer."""
    choice, message = answer.choices[0], answer.choices[0].message
    assert (message.role, answer.id) == ("assistant", "chatcmpl-1")
    calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return message.content or "", calls, choice.finish_reason, answer.usage.prompt_tokens


@pytest.fixture
def asked(s: Any) -> dict[str, Any]:
    return {"model": "always", "messages": s.hello, "tools": s.tools}


@every_case
def test_python_gets_one_answer(stack: Any, s: Any, client: openai.OpenAI, asked: Any, case: str) -> None:
    stack.script(*scripts(s)[case])
    assert told(client.chat.completions.create(**asked)) == EXPECTED[case]


@every_case
async def test_python_streams_one_answer(
    stack: Any, s: Any, aclient: openai.AsyncOpenAI, asked: Any, case: str
) -> None:
    """By the helper, which puts the pieces together and is strict about their indices."""
    stack.script(*scripts(s)[case])
    async with aclient.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        seen = [event.type async for event in stream]
        assert told(await stream.get_final_completion()) == EXPECTED[case]
    assert seen.count("tool_calls.function.arguments.done") == len(EXPECTED[case][1])


def test_python_streams_chunks_that_belong_together(
    stack: Any, s: Any, client: openai.OpenAI, asked: Any
) -> None:
    stack.script(*scripts(s)["middle"])
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        ("chatcmpl-1", 1_700_000_001, "m-1")
    }
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == EXPECTED["middle"][0]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert {chunk.usage for chunk in chunks} == {None}  # nobody asked


def test_python_is_told_where_a_stream_cannot_go_on(
    stack: Any, s: Any, client: openai.OpenAI, asked: Any
) -> None:
    refused = json.dumps({"error": {"message": "Overloaded.", "code": "overloaded"}}).encode()
    stack.script(s.said("So", s.recall()), s.Raw([refused], 503, [s.JSON]))
    with pytest.raises(openai.APIError, match="Overloaded"):
        list(client.chat.completions.create(**asked, stream=True))


@pytest.fixture(scope="module")
def play(
    servers: Any, s: Any, new_stack: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What came of every case in JavaScript, asked for both ways."""
    keys = {}
    for way in ("create", "helper"):
        for case, answers in scripts(s).items():
            stack = new_stack()
            stack.script(*answers)
            keys[f"{way} {case}"] = stack.key
    folder = tmp_path_factory.mktemp("node")
    given = {"ROOT_URL": servers.url, "KEYS": json.dumps(keys)}
    found: dict[str, Any] = json.loads(openai_node.play(RUNNER, folder, PLAY_TIMEOUT_S, **given))
    return found


@every_case
@pytest.mark.parametrize("way", ["create", "helper"])
def test_javascript_gets_one_answer(play: dict[str, Any], way: str, case: str) -> None:
    text, calls, finish, tokens = EXPECTED[case]
    assert play[f"{way} {case}"] == {
        "id": "chatcmpl-1", "role": "assistant", "text": text, "calls": calls, "finish": finish,
        "tokens": tokens,
    }  # fmt: skip


def count_asked(stack: Any) -> int:
    """Tokens that the provider has counted of all requests of a key."""
    return sum(100 * len(asked.messages) for asked in stack.asked)


def read_response(response: Any) -> tuple[str, list[list[str]], str, int]:
    assert (response.id, response.status) == (f"resp_{1:048d}", "completed")
    items = [item for item in response.output if item.type == "function_call"]
    calls = [[item.call_id, item.name, item.arguments] for item in items]
    return response.output_text, calls, "tool_calls" if calls else "stop", response.usage.input_tokens


@every_case
def test_python_gets_one_response(stack: Any, s: Any, client: openai.OpenAI, case: str) -> None:
    stack.script(*scripts(s)[case])
    response = client.responses.create(model="always", **s.wires["responses"].request)
    assert read_response(response) == (*EXPECTED[case][:3], count_asked(stack))


@every_case
def test_python_streams_one_response(stack: Any, s: Any, client: openai.OpenAI, case: str) -> None:
    """By the helper, which puts the items together by their indices."""
    stack.script(*scripts(s)[case])
    with client.responses.stream(model="always", **s.wires["responses"].request) as stream:
        kinds = [event.type for event in stream]
        assert read_response(stream.get_final_response()) == (*EXPECTED[case][:3], count_asked(stack))
    assert (kinds.count("response.created"), kinds.count("response.completed")) == (1, 1)
    assert kinds.count("response.function_call_arguments.done") == len(EXPECTED[case][1])


def test_python_is_told_where_a_response_cannot_go_on(stack: Any, s: Any, client: openai.OpenAI) -> None:
    refused = json.dumps({"error": {"message": "Overloaded.", "code": "overloaded"}}).encode()
    stack.script(s.said("So", s.recall()), s.Raw([refused], 503, [s.JSON]))
    with pytest.raises(openai.APIError, match="Overloaded"):
        list(client.responses.create(model="always", stream=True, **s.wires["responses"].request))


@pytest.fixture(scope="module")
def messages_play(servers: Any, s: Any, new_stack: Callable[[], Any]) -> dict[str, Any]:
    """What came of every case with the anthropic package, and the tokens that the provider counted."""
    stacks = {}
    for way in ("create", "stream"):
        for case, answers in scripts(s).items():
            stacks[f"{way} {case}"] = made = new_stack()
            made.script(*answers)
    keys = {name: made.key for name, made in stacks.items()}
    given = {"PATH": os.environ["PATH"], "ROOT_URL": servers.url, "KEYS": json.dumps(keys)}
    command = [str(python_environment("anthropic")), str(ANTHROPIC_RUNNER)]
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=PLAY_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {name: {**each, "counted": count_asked(stacks[name])} for name, each in found.items()}


@every_case
@pytest.mark.parametrize("way", ["create", "stream"])
def test_the_anthropic_package_gets_one_message(messages_play: dict[str, Any], way: str, case: str) -> None:
    text, calls, finish, _ = EXPECTED[case]
    got = messages_play[f"{way} {case}"]
    assert got == {
        "id": f"msg_{1:024d}",
        "role": "assistant",
        "text": text,
        "calls": [[call_id, name, json.loads(given)] for call_id, name, given in calls],
        "finish": {"stop": "end_turn", "tool_calls": "tool_use"}[finish],
        "tokens": got["counted"],
        "counted": got["counted"],
    }
