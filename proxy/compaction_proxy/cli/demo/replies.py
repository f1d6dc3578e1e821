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
from compaction_proxy.cli.demo.script import DemoScript, ScriptStep
from compaction_proxy.replay.prompt_size import extract_text

FORGOTTEN = "(I can no longer see the {name})"
ECHO_CHARACTERS = 200

_CALL = re.compile(r"^call ([\w.-]+) *(\{.*\})? *$", re.MULTILINE)


def _find_following_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """The step after the one whose calls the last message answers."""
    call_id = messages[-1].get("tool_call_id")
    for turn in script.turns:
        for step, following in zip(turn.steps, turn.steps[1:], strict=False):
            if any(call.id == call_id for call in step.calls):
                return following
    return None


def _find_next_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """The scripted step that comes next, or None when this is another conversation."""
    if messages[-1]["role"] == "tool":
        return _find_following_step(messages, script)
    said = extract_text(messages[-1])
    return next((turn.steps[0] for turn in script.turns if turn.user == said), None)


def fill_in_facts(text: str, messages: Sequence[JsonObject], facts: dict[str, str]) -> str:
    """The text with each `{fact}` filled in, as far as the messages still hold it."""
    for name, fact in facts.items():
        mark = "{" + name + "}"
        if mark in text:
            seen = any(fact in extract_text(message) for message in messages)
            text = text.replace(mark, fact if seen else FORGOTTEN.format(name=name))
    return text


def _parse_requested_calls(text: str, body: JsonObject, number: int) -> tuple[ToolCall, ...]:
    offered = {(tool.get("function") or {}).get("name") for tool in body.get("tools") or ()}
    wanted = [found for found in _CALL.findall(text) if found[0] in offered]
    return tuple(
        ToolCall(f"call_demo_{number:04d}_{index}", name, arguments or "{}")
        for index, (name, arguments) in enumerate(wanted)
    )


def _build_echo(body: JsonObject, number: int) -> Reply:
    messages = body["messages"]
    last = messages[-1]
    said = " ".join(extract_text(last).split())
    quoted = json.dumps(said[:ECHO_CHARACTERS], ensure_ascii=False)
    calls = (
        _parse_requested_calls(extract_text(last), body, number) if last["role"] in ("user", "tool") else ()
    )
    if calls:
        return Reply(calls=calls, finish_reason="tool_calls")
    if last["role"] == "tool":
        return Reply(f"The tool returned {quoted}. I was sent {len(messages)} messages.")
    return Reply(f"You said {quoted}. I was sent {len(messages)} messages.")


def compose_thought(messages: Sequence[JsonObject]) -> str:
    """What the model thinks before it speaks, on wires that have a place for it."""
    return f"The last of {len(messages)} messages decides what I say next."


def compose_reply(body: JsonObject, script: DemoScript, number: int = 1) -> Reply:
    """What the conversation model says to a valid chat request.

    Ids of calls that are not of the script are made of `number`, which no two answers share: that of messages
    does not do, because it shrinks where a conversation is compacted.
    """
    step = _find_next_step(body["messages"], script)
    if step is None:
        return _build_echo(body, number)
    text = fill_in_facts(step.text, body["messages"], script.facts)
    return Reply(text, step.calls, "tool_calls" if step.calls else "stop")
