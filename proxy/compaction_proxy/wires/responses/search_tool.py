"""The search tool on the Responses wire: how it is offered, which items call it, and what answers a call.

Sources: OpenAI's documentation of function calling and of encrypted reasoning (`store: false`), 2026-11.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.chat.continuation import encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject, is_json_object
from compaction_proxy.wires.json.slices import find_members, read_member, split_elements
from compaction_proxy.wires.usage import as_mapping, parse_json
from compaction_proxy.wires.wire import ToolSupport

# Not `strict`, which is this wire's default: no argument is required.
TOOL_JSON: Final[bytes] = json.dumps(
    {
        "type": "function",
        "name": TOOL_NAME,
        "description": TOOL_DESCRIPTION,
        "parameters": dict(TOOL_PARAMETERS),
        "strict": False,
    },
    separators=(",", ":"),
    ensure_ascii=False,
).encode()

CALL: Final = "function_call"
RESULT: Final = "function_call_output"
_REASONING: Final = "reasoning"
# Items that ask nothing of the client: what the model says, and tools that the provider runs.
_UNASKING: Final = frozenset(
    {"message", _REASONING, "web_search_call", "file_search_call", "code_interpreter_call"}
    | {"image_generation_call", "mcp_call", "mcp_list_tools", "compaction"}
)
# Members with which the provider keeps the answer, or brings tools that ours would replace.
_KEEPING: Final = ("previous_response_id", "conversation", "prompt")


def inspect_tools(raw: bytes, name: str) -> ToolSupport:
    """Returns how a body stands to a tool of this name.

    The tool has a place only where `store` is false: else the provider keeps each answer by its id, and the
    client goes on from one that ends in a call of ours. It has none where the client has a tool of that name
    or chooses among tools (`tool_choice` other than `auto`), or where the answer must be JSON.

    Raises:
        Unreadable: It is no request (see `json_slices.members`).
    """
    try:
        places = find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    tools = read_member(raw, places, "tools")
    choice = read_member(raw, places, "tool_choice")
    listed = not tools or tools.startswith(b"[")
    taken = b'"%b"' % name.encode() in tools
    free = not choice or (bool(tools) and choice == b'"auto"')
    stored = read_member(raw, places, "store") != b"false"
    stored = stored or read_member(raw, places, "background") == b"true"
    stored = stored or any(read_member(raw, places, each) for each in _KEEPING)
    text = as_mapping(parse_json(read_member(raw, places, "text") or b"{}"))
    shaped = as_mapping(text.get("format")).get("type") not in {None, "text"}
    possible = listed and free and not (taken or stored or shaped)
    return ToolSupport(raw, places, bool(tools), possible)


def continue_request(raw: bytes, items: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the body with more items behind its own; a text in place of a list becomes a message of one.

    Raises:
        Unreadable: It has no input.
    """
    place = find_members(raw).get("input")
    value = raw[place.start : place.stop] if place else b""
    more = b",".join(encode_ascii_json(each) for each in items)
    if value.startswith(b'"'):
        value = b'[{"role":"user","content":%b}]' % value
    if place is None or not value.startswith(b"[") or not split_elements(value):
        raise UnreadableBodyError("no-messages")
    return b"%b%b,%b]%b" % (raw[: place.start], value[:-1], more, raw[place.stop :])


def is_call(item: Mapping[str, Any], name: str) -> bool:
    """Whether an item calls the tool of this name."""
    return item.get("type") == CALL and item.get("name") == name


def asks_client(item: Mapping[str, Any]) -> bool:
    """Whether an item is the client's to answer, for all that is known of its type."""
    return item.get("type") not in _UNASKING


def read_arguments(item: Mapping[str, Any]) -> str:
    """Returns the arguments of a call as the model wrote them."""
    held = item.get("arguments")
    return held if isinstance(held, str) else json.dumps(held or {})


def build_message(items: Iterable[JsonObject]) -> JsonObject:
    """Returns what an answer said, as its provider takes it back: items under `output`.

    Reasoning goes back as it came, with its encrypted content. Reasoning without any content is left out,
    because a provider that stores nothing does not know it by its id; then no item has an id, because items
    that came of it could not stand without it. Arguments that are no object become an empty one.
    """
    held = list(items)
    kept = [item for item in held if item.get("type") != _REASONING or _has_content(item)]
    if len(kept) < len(held):
        kept = [{name: value for name, value in item.items() if name != "id"} for item in kept]
    return {"output": [_mend_call(item, number) for number, item in enumerate(kept)]}


def _has_content(item: Mapping[str, Any]) -> bool:
    return bool(item.get("encrypted_content") or item.get("content"))


def _mend_call(item: JsonObject, number: int) -> JsonObject:
    if item.get("type") != CALL:
        return item
    told = read_arguments(item)
    given = told if is_json_object(told) else "{}"
    return {**item, "call_id": item.get("call_id") or f"call_{number}", "arguments": given}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the items of the answer, and an output for each of its calls, in their order."""
    calls = [item for item in message["output"] if item.get("type") == CALL]
    results = [
        {"type": RESULT, "call_id": call["call_id"], "output": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [*message["output"], *results]
