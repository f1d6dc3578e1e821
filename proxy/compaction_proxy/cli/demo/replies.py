"""Composes the replies of the demo models.

The model `demo-agent` plays the assistant of the scripted conversation. The model uses only the messages of
the request. It finds the next assistant message of the script by the last message of the request, so a
compaction of earlier messages does not change the choice. Early messages of the script contain planted facts.
The model can name a planted fact only if a message of the request still contains the fact.

In any other conversation, the model echoes the last message. If the last message is a user message or a tool
result with lines such as `call search {"query": "x"}`, the model calls these tools instead, provided that the
request offers them.

The script is the file `conversation.json` next to this module. In this invented conversation, an engineer and
an agent look for the cause of wrong invoices. The last turns ask about the planted facts of the first turns.
In this way, the demo shows that the facts survive compaction.
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
    """An assistant message of the script: text, tool calls or both.

    In `text`, `{name}` is a placeholder for the planted fact with this name, which the model must find in the
    request.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """A user message of the script, and the assistant messages that follow it."""

    user: str
    steps: tuple[ScriptStep, ...]


@dataclass(frozen=True, slots=True)
class DemoScript:
    """The whole scripted conversation.

    Attributes:
        system: The system prompt.
        tools: The offered tools, in the format of Chat Completions.
        facts: Maps the name of each planted fact to its exact text.
        turns: The turns in order.
        results: Maps the id of each tool call to the text of its result.
    """

    system: str
    tools: list[JsonObject]
    facts: dict[str, str]
    turns: tuple[ScriptTurn, ...]
    results: dict[str, str]


@cache
def load_script() -> DemoScript:
    """Loads the scripted conversation that is part of the package."""
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
    """Finds the step whose tool call has the last message as its result, and returns the step after it.

    Returns None if no step of the script has this tool call, or if the step is the last one of its turn.
    """
    call_id = messages[-1].get("tool_call_id")
    for turn in script.turns:
        for step, following in zip(turn.steps, turn.steps[1:], strict=False):
            if any(call.id == call_id for call in step.calls):
                return following
    return None


def _find_next_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """Returns the step of the script that replies to the last message, or None if there is none."""
    if messages[-1]["role"] == "tool":
        return _find_following_step(messages, script)
    text = extract_text(messages[-1])
    return next((turn.steps[0] for turn in script.turns if turn.user == text), None)


def fill_in_facts(text: str, messages: Sequence[JsonObject], facts: dict[str, str]) -> str:
    """Replaces each placeholder such as `{name}` in a text by the planted fact of that name.

    If no message contains the fact, replaces the placeholder by the text `FORGOTTEN`.
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
        number: A number that no other reply has. It is part of the ids of tool calls that are not in the
            script. The number of messages is not suitable, because after a compaction a request can have as
            many messages as an earlier one.
    """
    step = _find_next_step(body["messages"], script)
    if step is None:
        return _build_echo(body, number)
    text = fill_in_facts(step.text, body["messages"], script.facts)
    return Reply(text, step.calls, "tool_calls" if step.calls else "stop")
