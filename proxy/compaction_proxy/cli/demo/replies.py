"""What the demo models say.

`demo-agent` plays the assistant of the scripted conversation. It is told nothing but the request: it finds
its place from the end of the messages, so it does not matter what has become of the earlier ones, and it can
name a planted fact only if that fact still stands somewhere in what it was sent. In any other conversation
it says what it heard, and calls the tools that the last message, a user's or a tool's, asks for in lines
such as `call search {"query": "x"}`.
"""

import json
import re
from collections.abc import Sequence

from compaction_proxy.cli.demo.chat import JsonObject, Reply, ToolCall
from compaction_proxy.cli.demo.script import Script, Step
from compaction_proxy.replay.prompt_size import text_of

FORGOTTEN = "(I can no longer see the {name})"
ECHO_CHARACTERS = 200

_CALL = re.compile(r"^call ([\w.-]+) *(\{.*\})? *$", re.MULTILINE)


def _answered_step(messages: Sequence[JsonObject], script: Script) -> Step | None:
    """The step after the one whose calls the last message answers."""
    call_id = messages[-1].get("tool_call_id")
    for turn in script.turns:
        for step, following in zip(turn.steps, turn.steps[1:], strict=False):
            if any(call.id == call_id for call in step.calls):
                return following
    return None


def _next_step(messages: Sequence[JsonObject], script: Script) -> Step | None:
    """The scripted step that comes next, or None when this is another conversation."""
    if messages[-1]["role"] == "tool":
        return _answered_step(messages, script)
    said = text_of(messages[-1])
    return next((turn.steps[0] for turn in script.turns if turn.user == said), None)


def recalled(text: str, messages: Sequence[JsonObject], facts: dict[str, str]) -> str:
    """The text with each `{fact}` filled in, as far as the messages still hold it."""
    for name, fact in facts.items():
        mark = "{" + name + "}"
        if mark in text:
            seen = any(fact in text_of(message) for message in messages)
            text = text.replace(mark, fact if seen else FORGOTTEN.format(name=name))
    return text


def _requested_calls(text: str, body: JsonObject, number: int) -> tuple[ToolCall, ...]:
    offered = {(tool.get("function") or {}).get("name") for tool in body.get("tools") or ()}
    wanted = [found for found in _CALL.findall(text) if found[0] in offered]
    return tuple(
        ToolCall(f"call_demo_{number:04d}_{index}", name, arguments or "{}")
        for index, (name, arguments) in enumerate(wanted)
    )


def _echo(body: JsonObject, number: int) -> Reply:
    messages = body["messages"]
    last = messages[-1]
    said = " ".join(text_of(last).split())
    quoted = json.dumps(said[:ECHO_CHARACTERS], ensure_ascii=False)
    calls = _requested_calls(text_of(last), body, number) if last["role"] in ("user", "tool") else ()
    if calls:
        return Reply(calls=calls, finish_reason="tool_calls")
    if last["role"] == "tool":
        return Reply(f"The tool returned {quoted}. I was sent {len(messages)} messages.")
    return Reply(f"You said {quoted}. I was sent {len(messages)} messages.")


def thought(messages: Sequence[JsonObject]) -> str:
    """What the model thinks before it speaks, on wires that have a place for it."""
    return f"The last of {len(messages)} messages decides what I say next."


def answer(body: JsonObject, script: Script, number: int = 1) -> Reply:
    """What the conversation model says to a valid chat request.

    Ids of calls that are not of the script are made of `number`, which no two answers share: that of messages
    does not do, because it shrinks where a conversation is compacted.
    """
    step = _next_step(body["messages"], script)
    if step is None:
        return _echo(body, number)
    text = recalled(step.text, body["messages"], script.facts)
    return Reply(text, step.calls, "tool_calls" if step.calls else "stop")
