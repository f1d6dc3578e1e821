"""Composes the replies of the demo models.

`demo-agent` plays the assistant of the scripted conversation. It has no memory beyond the request. It finds
its place in the script by the last message, so compaction of earlier messages does not confuse it. Early
messages of the script contain facts. The model can name such a fact only if a message of the request still
contains it. In any other conversation the model echoes the last message. But if the last message is a user's
or a tool's and has lines such as `call search {"query": "x"}`, the model calls these tools instead.

The script is `conversation.json` next to this module. It is invented: an engineer and an agent look for the
cause of wrong invoices. The last turns ask about the facts of the first turns (planted facts). So the demo
can show that they survive compaction.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from compaction_proxy.cli.demo.chat import JsonObject, Reply, ToolCall
from compaction_proxy.replay.provider import extract_text

FORGOTTEN = "(I can no longer see the {name})"
ECHO_CHARACTERS = 200

_CALL = re.compile(r"^call ([\w.-]+) *(\{.*\})? *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """An assistant message: text, tool calls or both.

    In `text`, `{name}` stands for a planted fact that the model must find in the request.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """A user message and the assistant messages that follow it."""

    user: str
    steps: tuple[ScriptStep, ...]


@dataclass(frozen=True, slots=True)
class DemoScript:
    """The whole scripted conversation.

    Attributes:
        system: The system prompt.
        tools: The offered tools, in the wire format.
        facts: The planted facts, by name, with their exact text.
        turns: The turns in order.
        results: The text of each tool call's result, by call id.
    """

    system: str
    tools: list[JsonObject]
    facts: dict[str, str]
    turns: tuple[ScriptTurn, ...]
    results: dict[str, str]


@cache
def load_script() -> DemoScript:
    """Loads the conversation that ships with the package."""
    data = json.loads((files("compaction_proxy.cli.demo") / "conversation.json").read_text("utf-8"))
    calls = [call for turn in data["turns"] for step in turn["steps"] for call in step.get("calls", ())]
    return DemoScript(
        system=data["system"],
        tools=data["tools"],
        facts=data["facts"],
        turns=tuple(
            ScriptTurn(turn["user"], tuple(map(_parse_step, turn["steps"]))) for turn in data["turns"]
        ),
        results={call["id"]: call["result"] for call in calls},
    )


def _parse_step(data: JsonObject) -> ScriptStep:
    calls = (
        ToolCall(call["id"], call["name"], json.dumps(call["arguments"], separators=(",", ":")))
        for call in data.get("calls", ())
    )
    return ScriptStep(data["text"], tuple(calls))


def _find_following_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """Returns the scripted step that follows the tool result in the last message; None if there is none."""
    call_id = messages[-1].get("tool_call_id")
    for turn in script.turns:
        for step, following in zip(turn.steps, turn.steps[1:], strict=False):
            if any(call.id == call_id for call in step.calls):
                return following
    return None


def _find_next_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """Returns the next scripted step; None if the request does not follow the script."""
    if messages[-1]["role"] == "tool":
        return _find_following_step(messages, script)
    text = extract_text(messages[-1])
    return next((turn.steps[0] for turn in script.turns if turn.user == text), None)


def fill_in_facts(text: str, messages: Sequence[JsonObject], facts: dict[str, str]) -> str:
    """Replaces each placeholder such as `{name}` in a text by the planted fact of that name.

    If the messages no longer contain the fact, the text says instead that the model can no longer see it.
    """
    for name, fact in facts.items():
        placeholder = "{" + name + "}"
        if placeholder in text:
            is_seen = any(fact in extract_text(message) for message in messages)
            text = text.replace(placeholder, fact if is_seen else FORGOTTEN.format(name=name))
    return text


def _parse_requested_calls(text: str, body: JsonObject, number: int) -> tuple[ToolCall, ...]:
    offered = {(tool.get("function") or {}).get("name") for tool in body.get("tools") or ()}
    requested = [match for match in _CALL.findall(text) if match[0] in offered]
    return tuple(
        ToolCall(f"call_demo_{number:04d}_{index}", name, arguments or "{}")
        for index, (name, arguments) in enumerate(requested)
    )


def _build_echo(body: JsonObject, number: int) -> Reply:
    messages = body["messages"]
    last = messages[-1]
    text = " ".join(extract_text(last).split())
    quoted = json.dumps(text[:ECHO_CHARACTERS], ensure_ascii=False)
    calls = (
        _parse_requested_calls(extract_text(last), body, number) if last["role"] in ("user", "tool") else ()
    )
    if calls:
        return Reply(calls=calls, finish_reason="tool_calls")
    if last["role"] == "tool":
        return Reply(f"The tool returned {quoted}. I was sent {len(messages)} messages.")
    return Reply(f"You said {quoted}. I was sent {len(messages)} messages.")


def compose_reply(body: JsonObject, script: DemoScript, number: int = 1) -> Reply:
    """Composes the reply of `demo-agent` to a valid request.

    Args:
        body: The request.
        script: The scripted conversation.
        number: A number that no other answer has. Ids of unscripted tool calls contain it. The number of
            messages could not be used, because it can occur twice when a conversation is compacted.
    """
    step = _find_next_step(body["messages"], script)
    if step is None:
        return _build_echo(body, number)
    text = fill_in_facts(step.text, body["messages"], script.facts)
    return Reply(text, step.calls, "tool_calls" if step.calls else "stop")
