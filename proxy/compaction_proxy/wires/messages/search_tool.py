"""The search tool on the Messages wire: its definition, the blocks that call it, and the results of calls.

Sources: Anthropic's documentation of tool use and of extended thinking with tools, 2026-11.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.chat.intercept_calls import JsonObject, is_json_object
from compaction_proxy.wires.json.slices import DECODER, find_members, read_member
from compaction_proxy.wires.messages.blocks import CALL, RESULT, TEXT, THINKING
from compaction_proxy.wires.usage import as_mapping, parse_json
from compaction_proxy.wires.wire import ToolSupport

TOOL_JSON: Final[bytes] = json.dumps(
    {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": dict(TOOL_PARAMETERS)},
    separators=(",", ":"),
    ensure_ascii=False,
).encode()
# Stop reasons after which the proxy does not answer calls: the answer was cut off or refused, or the provider
# itself will continue it (`pause_turn`).
CUT_OFF_REASONS: Final = frozenset(
    {"max_tokens", "model_context_window_exceeded", "stop_sequence", "refusal", "pause_turn"}
)
TOOL_USE_REASON: Final = "tool_use"
END_TURN_REASON: Final = "end_turn"

_CHOICE_NONE: Final = b'{"type":"none"}'


def inspect_tool_support(raw: bytes, name: str) -> ToolSupport:
    """Tells whether a tool of this name can be added to a body.

    It cannot be added in these cases:
    - The client has a tool of that name.
    - The client sets a `tool_choice` other than `auto`. With `any` or `tool`, each answer of the upstream
      must call a tool, and with `none`, no answer may call one.
    - The answer must have a format, such as JSON. The text before a call and the text after it cannot be
      joined into JSON.

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
    is_free = not choice or (bool(tools) and as_mapping(parse_json(choice)).get("type") == "auto")
    output = read_member(raw, places, "output_config")
    has_format = read_member(raw, places, "output_format") or as_mapping(parse_json(output or b"{}")).get(
        "format"
    )
    return ToolSupport(raw, places, bool(tools), is_list and is_free and not is_taken and not has_format)


def forbid_calls(raw: bytes) -> bytes:
    """Returns the body with a tool choice that forbids all calls.

    In the given body, the tool choice is absent or null.
    """
    place = find_members(raw).get("tool_choice")
    if place is not None:
        return b"".join((raw[: place.start], _CHOICE_NONE, raw[place.stop :]))
    stop = raw.rindex(b"}")
    return b'%b,"tool_choice":%b%b' % (raw[:stop], _CHOICE_NONE, raw[stop:])


@dataclass(slots=True)
class SearchToolCall:
    """A call of the search tool: a `tool_use` block, or its equivalent on the Responses wire.

    Attributes:
        arguments: The part of the call's input that has arrived, as JSON text.
    """

    arguments: str = ""


def is_call(block: Mapping[str, Any], name: str) -> bool:
    """Returns whether a block calls the tool of this name."""
    return block.get("type") == CALL and block.get("name") == name


def encode_input(block: Mapping[str, Any]) -> str:
    """Returns the input of a call as JSON; empty if it has none."""
    block_input = block.get("input")
    if isinstance(block_input, str):
        return block_input
    return json.dumps(block_input) if block_input else ""


def build_message(blocks: Iterable[JsonObject]) -> JsonObject:
    """Builds the assistant message of the next request from the blocks of the model's answer.

    Blank text is left out, and call input that is not an object becomes an empty object, because providers
    refuse both in a request. The result of the call tells the model what was wrong with the input.
    """
    content = []
    for number, block in enumerate(blocks):
        if block.get("type") == TEXT and not str(block.get("text") or "").strip():
            continue
        if block.get("type") == CALL:
            input_json = encode_input(block)
            input_value = DECODER.decode(input_json) if is_json_object(input_json) else {}
            content.append({**block, "id": block.get("id") or f"toolu_{number}", "input": input_value})
        else:
            content.append(block)
    return {"role": "assistant", "content": content}


def requires_same_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether messages hold thinking.

    Newer models accept thinking only in a request with the same tools as the request that it answers.
    """
    return any(block.get("type") in THINKING for each in messages for block in each["content"])


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the assistant message, followed by a user message with the results of its calls, in order."""
    calls = [block for block in message["content"] if block.get("type") == CALL]
    results = [
        {"type": RESULT, "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [message, {"role": "user", "content": results}]
