"""Items of a Responses input, and what the wire reads from them."""

import json
from typing import Any

from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.responses.wire import RESPONSES

PNG = "data:image/png;base64,iVBORw0KGgo="
ASKED = {"role": "user", "content": "do it"}
RULES = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA" * 400}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on it"}]}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "read", "arguments": '{"path":"x"}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin"}
ANSWERED = {"type": "function_call_output", "call_id": "a", "output": "text of x"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "b", "output": "Done"}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
COMPACTED = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA" * 100}


def raw_of(item: Any) -> bytes:
    return json.dumps(item).encode()


def body(items: Any, **members: Any) -> bytes:
    return json.dumps({"model": "gpt-5", **members, "input": items}).encode()


def pieces(*items: Any) -> list[list[Any]]:
    return [json.loads(b"[%b]" % each) for each in parse_body(body(items), RESPONSES).messages]


def record(*items: Any) -> Message:
    return RESPONSES.parse_message(b",".join(map(raw_of, items)))


def records(items: list[Any]) -> list[Message]:
    return [RESPONSES.parse_message(each) for each in parse_body(body(items), RESPONSES).messages]
