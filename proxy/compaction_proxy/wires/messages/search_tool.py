"""The search tool on the Messages wire: how it is offered, which blocks call it, and what answers a call.

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
# Ends of an answer behind which its calls are not to be run: it was cut, refused, or is the provider's to
# go on with.
CUT_OFF: Final = frozenset(
    {"max_tokens", "model_context_window_exceeded", "stop_sequence", "refusal", "pause_turn"}
)
CALLED: Final = "tool_use"
ENDED: Final = "end_turn"

_CHOICE: Final = b'{"type":"none"}'


def inspect_tools(raw: bytes, name: str) -> ToolSupport:
    """Returns how a body stands to a tool of this name.

    The tool has no place where the client has one of that name, where the client chooses among tools
    (`tool_choice` other than `auto`: with `any` or `tool` each answer of the upstream must call one, with
    `none` none may), and where the answer has a format, because JSON cannot be put together from what was
    said before a call and what comes behind it.

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
    free = not choice or (bool(tools) and as_mapping(parse_json(choice)).get("type") == "auto")
    output = read_member(raw, places, "output_config")
    shaped = read_member(raw, places, "output_format") or as_mapping(parse_json(output or b"{}")).get(
        "format"
    )
    return ToolSupport(raw, places, bool(tools), listed and free and not taken and not shaped)


def forbid_calls(raw: bytes) -> bytes:
    """Returns a body without tool choice, or with null for one, that forbids every call."""
    place = find_members(raw).get("tool_choice")
    if place is not None:
        return b"".join((raw[: place.start], _CHOICE, raw[place.stop :]))
    stop = raw.rindex(b"}")
    return b'%b,"tool_choice":%b%b' % (raw[:stop], _CHOICE, raw[stop:])


@dataclass(slots=True)
class SearchUse:
    """A `tool_use` block that calls the search tool.

    Attributes:
        arguments: Its input as JSON, as far as it has come.
    """

    arguments: str = ""


def is_call(block: Mapping[str, Any], name: str) -> bool:
    """Whether a block calls the tool of this name."""
    return block.get("type") == CALL and block.get("name") == name


def write_input(block: Mapping[str, Any]) -> str:
    """Returns the input of a call as JSON; empty where it has none."""
    held = block.get("input")
    if isinstance(held, str):
        return held
    return json.dumps(held) if held else ""


def build_message(blocks: Iterable[JsonObject]) -> JsonObject:
    """Returns the assistant message of these blocks, as its provider takes it back.

    Blank text is left out, and input that is no object becomes an empty one: providers refuse both. What is
    wrong with the input is said by the result.
    """
    content = []
    for number, block in enumerate(blocks):
        if block.get("type") == TEXT and not str(block.get("text") or "").strip():
            continue
        if block.get("type") == CALL:
            told = write_input(block)
            given = DECODER.decode(told) if is_json_object(told) else {}
            content.append({**block, "id": block.get("id") or f"toolu_{number}", "input": given})
        else:
            content.append(block)
    return {"role": "assistant", "content": content}


def binds_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether thoughts stand in messages: newer models take them back only behind the same tools."""
    return any(block.get("type") in THINKING for each in messages for block in each["content"])


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the assistant message, and a message with a result for each of its calls, in their order."""
    calls = [block for block in message["content"] if block.get("type") == CALL]
    results = [
        {"type": RESULT, "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [message, {"role": "user", "content": results}]
