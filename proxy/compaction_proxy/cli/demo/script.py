"""Loads the scripted conversation from `conversation.json` next to this module.

The conversation is invented: an engineer and an agent look for the cause of wrong invoices. The first turns
contain facts (planted facts), and the last turns ask about them. So the demo can show that they survive
compaction.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from compaction_proxy.cli.demo.chat import JsonObject, ToolCall


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


def _parse_call(data: JsonObject) -> ToolCall:
    return ToolCall(data["id"], data["name"], json.dumps(data["arguments"], separators=(",", ":")))


def _parse_step(data: JsonObject) -> ScriptStep:
    return ScriptStep(data["text"], tuple(map(_parse_call, data.get("calls", ()))))


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
