"""Composes the replies of the demo models.

`demo-agent` plays the assistant of the scripted conversation and knows nothing but the request. It finds its
place in the script by the last message, so compaction of earlier messages does not confuse it. It can name a
planted fact only if some message of the request still contains it. In any other conversation it echoes the
last message. If that message is a user's or a tool's, it also calls the tools that the message requests in
lines such as `call search {"query": "x"}`.
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
    """Returns the step after the one whose tool calls the last message answers."""
    call_id = messages[-1].get("tool_call_id")
    for turn in script.turns:
        for step, following in zip(turn.steps, turn.steps[1:], strict=False):
            if any(call.id == call_id for call in step.calls):
                return following
    return None


def _find_next_step(messages: Sequence[JsonObject], script: DemoScript) -> ScriptStep | None:
    """Returns the next scripted step, or None in another conversation."""
    if messages[-1]["role"] == "tool":
        return _find_following_step(messages, script)
    text = extract_text(messages[-1])
    return next((turn.steps[0] for turn in script.turns if turn.user == text), None)


def fill_in_facts(text: str, messages: Sequence[JsonObject], facts: dict[str, str]) -> str:
    """Fills in each `{fact}` in the text, if the messages still contain that fact."""
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


def compose_thought(messages: Sequence[JsonObject]) -> str:
    """Composes the model's thought before a reply, for wires that can carry a thought."""
    return f"The last of {len(messages)} messages decides what I say next."


def compose_reply(body: JsonObject, script: DemoScript, number: int = 1) -> Reply:
    """Composes the conversation model's reply to a valid chat request.

    Args:
        body: The request.
        script: The scripted conversation.
        number: A number unique to this answer, from which ids of unscripted tool calls are made. The number
            of messages would not be unique, because it shrinks when a conversation is compacted.
    """
    step = _find_next_step(body["messages"], script)
    if step is None:
        return _build_echo(body, number)
    text = fill_in_facts(step.text, body["messages"], script.facts)
    return Reply(text, step.calls, "tool_calls" if step.calls else "stop")
