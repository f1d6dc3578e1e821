"""The search tool on the Responses wire: its definition, the items that call it, and the results of calls.

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

# On this wire, `strict` is on by default. It is off here because it does not allow optional arguments, and
# all arguments of the tool are optional.
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
# Types of items that the client need not answer: the model's text and reasoning, and calls of tools that the
# provider runs itself.
_SELF_CONTAINED_TYPES: Final = frozenset(
    {"message", _REASONING, "web_search_call", "file_search_call", "code_interpreter_call"}
    | {"image_generation_call", "mcp_call", "mcp_list_tools", "compaction"}
)
# If a request has one of these members, the provider stores the answer, or uses stored tools, which the
# request's own tools would replace.
_STATEFUL_MEMBERS: Final = ("previous_response_id", "conversation", "prompt")


def inspect_tool_support(raw: bytes, name: str) -> ToolSupport:
    """Tells whether a tool of this name can be added to a body.

    It cannot be added in these cases:
    - The provider stores the answers, for example because `store` is not false. The client could then
      continue a stored answer by its id, although that answer ends in a call of the proxy's tool.
    - The client has a tool of that name.
    - The client sets a `tool_choice` other than `auto`.
    - The answer must be JSON. The text before a call and the text after it cannot be joined into JSON.

    Raises:
        UnreadableBodyError: The body is not a request (see `json.slices.find_members`).
    """
    try:
        places = find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    tools = read_member(raw, places, "tools")
    choice = read_member(raw, places, "tool_choice")
    is_list = not tools or tools.startswith(b"[")
    is_taken = b'"%b"' % name.encode() in tools
    is_free = not choice or (bool(tools) and choice == b'"auto"')
    is_stored = read_member(raw, places, "store") != b"false"
    is_stored = is_stored or read_member(raw, places, "background") == b"true"
    is_stored = is_stored or any(read_member(raw, places, each) for each in _STATEFUL_MEMBERS)
    text = as_mapping(parse_json(read_member(raw, places, "text") or b"{}"))
    has_format = as_mapping(text.get("format")).get("type") not in {None, "text"}
    can_add_tool = is_list and is_free and not (is_taken or is_stored or has_format)
    return ToolSupport(raw, places, bool(tools), can_add_tool)


def continue_request(raw: bytes, items: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the body with more items at the end of its `input`. A string becomes a list of one message.

    Raises:
        UnreadableBodyError: The body has no input.
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
    """Returns whether an item calls the tool of this name."""
    return item.get("type") == CALL and item.get("name") == name


def must_client_answer(item: Mapping[str, Any]) -> bool:
    """Returns whether an item of an answer is a call that the client must answer; True for unknown types."""
    return item.get("type") not in _SELF_CONTAINED_TYPES


def read_arguments(item: Mapping[str, Any]) -> str:
    """Returns the arguments of a call as the model wrote them; as JSON if the provider has parsed them."""
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def build_message(items: Iterable[JsonObject]) -> JsonObject:
    """Returns an object whose `output` has the items of an answer as the provider accepts them in a request.

    Reasoning stays unchanged, with its encrypted content. Reasoning without content is left out, because a
    provider that stores nothing does not know it by its id. In this case, the ids of all other items are
    removed, because the provider refuses items with ids if the reasoning before them is missing. Call
    arguments that are not an object become an empty object.
    """
    all_items = list(items)
    remaining = [item for item in all_items if item.get("type") != _REASONING or _has_content(item)]
    if len(remaining) < len(all_items):
        remaining = [{name: value for name, value in item.items() if name != "id"} for item in remaining]
    return {"output": [_mend_call(item, number) for number, item in enumerate(remaining)]}


def _has_content(item: Mapping[str, Any]) -> bool:
    return bool(item.get("encrypted_content") or item.get("content"))


def _mend_call(item: JsonObject, number: int) -> JsonObject:
    if item.get("type") != CALL:
        return item
    arguments = read_arguments(item)
    valid_arguments = arguments if is_json_object(arguments) else "{}"
    return {**item, "call_id": item.get("call_id") or f"call_{number}", "arguments": valid_arguments}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the items of the answer, followed by an item with the result of each call, in order."""
    calls = [item for item in message["output"] if item.get("type") == CALL]
    results = [
        {"type": RESULT, "call_id": call["call_id"], "output": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [*message["output"], *results]
