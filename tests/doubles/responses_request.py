"""Converts valid requests of the Responses wire to chat prompts for the three-wire provider.

Consecutive items that the model wrote become one assistant message, as Chat Completions would have it. The
message contains their texts, their calls, and a content part for each item of another kind.
"""

from collections.abc import Iterator
from typing import Any

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.wires.json.values import encode_json
from tests.doubles.provider_wire import WireRequest

# Types of calls that the client answers. For each: its name in error messages, and the key of its input.
CALL_TYPES = {
    "function_call": ("function call", "arguments"),
    "custom_tool_call": ("custom tool call", "input"),
    "local_shell_call": ("local shell call", "action"),
    "shell_call": ("shell call", "action"),
    "apply_patch_call": ("apply patch call", "operation"),
    "computer_call": ("computer call", "action"),
}
OUTPUT_TYPES = {f"{name}_output": name for name in CALL_TYPES}


def get_item_type(item: JsonObject) -> str:
    """Returns the type of an item. A message may have no `type`."""
    return str(item.get("type") or ("message" if "role" in item else ""))


def get_call_id(item: JsonObject) -> str:
    """Returns the id that links a call with its output. In outputs of a local shell, its key may be `id`."""
    return str(item.get("call_id") or item.get("id"))


def get_items(body: JsonObject) -> list[JsonObject]:
    """Returns the input as a list of items."""
    value = body["input"]
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


def is_model_item(item: JsonObject) -> bool:
    """Returns whether a model wrote an item."""
    return get_item_type(item) not in OUTPUT_TYPES and (
        get_item_type(item) != "message" or item["role"] == "assistant"
    )


def _convert_call(item: JsonObject) -> JsonObject:
    value = item[CALL_TYPES[get_item_type(item)][1]]
    arguments = value if isinstance(value, str) else encode_json(value).decode()
    name = str(item.get("name") or get_item_type(item).removesuffix("_call"))
    return {"id": get_call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


def _merge_run(run: list[JsonObject]) -> JsonObject:
    """Merges consecutive items of the model into an assistant message."""
    parts: list[Any] = []
    calls = []
    for item in run:
        if get_item_type(item) in CALL_TYPES:
            calls.append(_convert_call(item))
        elif get_item_type(item) == "message":
            content = item["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        else:
            parts.append({key: value for key, value in item.items() if key != "text"})
    message: JsonObject = {"role": "assistant", "content": parts or None}
    return {**message, "tool_calls": calls} if calls else message


def _convert_items(items: list[JsonObject]) -> Iterator[JsonObject]:
    run: list[JsonObject] = []
    for item in items:
        if is_model_item(item):
            run.append(item)
            continue
        if run:
            yield _merge_run(run)
            run = []
        if get_item_type(item) in OUTPUT_TYPES:
            output = item["output"]
            content = output if isinstance(output, str | list) else encode_json(output).decode()
            yield {"role": "tool", "tool_call_id": get_call_id(item), "content": content}
        else:
            yield {"role": item["role"], "content": item["content"]}
    if run:
        yield _merge_run(run)


def _convert_tools(body: JsonObject) -> list[JsonObject]:
    """Converts tools to the format of Chat Completions. A tool without a name gets its type as name."""
    offered = body.get("tools") or ()
    return [{"type": "function", "function": {**tool, "name": get_tool_name(tool)}} for tool in offered]


def get_tool_name(tool: JsonObject) -> str:
    """Returns the name by which calls refer to a tool."""
    return str(tool.get("name") or tool.get("type"))


def read_request(body: JsonObject) -> WireRequest:
    """Converts a valid request to a `WireRequest`."""
    instructions = body.get("instructions")
    leading = [{"role": "system", "content": instructions}] if instructions else []
    prompt = {
        "model": body["model"],
        "messages": [*leading, *_convert_items(get_items(body))],
        "tools": _convert_tools(body),
    }
    output_tokens = body.get("max_output_tokens")
    reasoning = body.get("reasoning")
    return WireRequest(
        body,
        prompt,
        output_tokens if isinstance(output_tokens, int) else 0,
        streamed=bool(body.get("stream")),
        thinks=isinstance(reasoning, dict) and reasoning.get("effort") != "none",
    )
