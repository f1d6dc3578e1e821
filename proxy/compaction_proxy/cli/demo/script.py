"""The scripted conversation, read from `conversation.json` beside this module.

It is fiction: an engineer and an agent look for the cause of wrong invoices. Facts are planted in its first
turns, and its last turns ask about them.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from compaction_proxy.cli.demo.chat import JsonObject, ToolCall


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """One assistant message: text, tool calls or both.

    In `text`, `{name}` stands for a planted fact that the model must find in what it sees.
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
    """The whole conversation.

    Attributes:
        system: The system prompt.
        tools: The tools offered, in the wire format.
        facts: What must not be forgotten: name to exact text.
        turns: In order.
        results: What each tool call returns, by call id.
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
    """The conversation that ships with the package."""
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
