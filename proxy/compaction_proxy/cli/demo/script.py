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
class Step:
    """One assistant message: text, tool calls or both.

    In `text`, `{name}` stands for a planted fact that the model must find in what it sees.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and the assistant messages that follow it."""

    user: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Script:
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
    turns: tuple[Turn, ...]
    results: dict[str, str]


def _call(data: JsonObject) -> ToolCall:
    return ToolCall(data["id"], data["name"], json.dumps(data["arguments"], separators=(",", ":")))


def _step(data: JsonObject) -> Step:
    return Step(data["text"], tuple(map(_call, data.get("calls", ()))))


@cache
def load() -> Script:
    """The conversation that ships with the package."""
    data = json.loads((files("compaction_proxy.cli.demo") / "conversation.json").read_text("utf-8"))
    calls = [call for turn in data["turns"] for step in turn["steps"] for call in step.get("calls", ())]
    return Script(
        system=data["system"],
        tools=data["tools"],
        facts=data["facts"],
        turns=tuple(Turn(turn["user"], tuple(map(_step, turn["steps"]))) for turn in data["turns"]),
        results={call["id"]: call["result"] for call in calls},
    )
