"""How the demo provider reads the Responses wire: a valid request as a chat prompt.

Everything the model said in a row is one assistant message of the prompt, as on the chat wire: its texts,
its calls, and a part for each item that is neither.
"""

from collections.abc import Iterator
from typing import Any

from compaction_proxy.cli.demo.chat import DemoRequest, JsonObject, encode_json

# Calls that the client answers: the name in errors, and the key of what is asked for.
CALLS = {
    "function_call": ("function call", "arguments"),
    "custom_tool_call": ("custom tool call", "input"),
    "local_shell_call": ("local shell call", "action"),
    "shell_call": ("shell call", "action"),
    "apply_patch_call": ("apply patch call", "operation"),
    "computer_call": ("computer call", "action"),
}
OUTPUTS = {f"{name}_output": name for name in CALLS}


def get_item_type(item: JsonObject) -> str:
    """The type of an item; a message may do without."""
    return str(item.get("type") or ("message" if "role" in item else ""))


def get_call_id(item: JsonObject) -> str:
    """What pairs a call with its output; outputs of a local shell may name it `id`."""
    return str(item.get("call_id") or item.get("id"))


def get_items(body: JsonObject) -> list[JsonObject]:
    """The input as a list of items."""
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def is_model_item(item: JsonObject) -> bool:
    """Whether an item is one that a model writes."""
    return get_item_type(item) not in OUTPUTS and (
        get_item_type(item) != "message" or item["role"] == "assistant"
    )


def _convert_call(item: JsonObject) -> JsonObject:
    what = item[CALLS[get_item_type(item)][1]]
    arguments = what if isinstance(what, str) else encode_json(what).decode()
    name = str(item.get("name") or get_item_type(item).removesuffix("_call"))
    return {"id": get_call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


def _merge_run(run: list[JsonObject]) -> JsonObject:
    """One assistant message of what the model said in a row."""
    parts: list[Any] = []
    calls = []
    for item in run:
        if get_item_type(item) in CALLS:
            calls.append(_convert_call(item))
        elif get_item_type(item) == "message":
            content = item["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        else:
            parts.append({key: value for key, value in item.items() if key != "text"})
    message: JsonObject = {"role": "assistant", "content": parts or None}
    return {**message, "tool_calls": calls} if calls else message


def _convert_items(given: list[JsonObject]) -> Iterator[JsonObject]:
    run: list[JsonObject] = []
    for item in given:
        if is_model_item(item):
            run.append(item)
            continue
        if run:
            yield _merge_run(run)
            run = []
        if get_item_type(item) in OUTPUTS:
            output = item["output"]
            content = output if isinstance(output, str | list) else encode_json(output).decode()
            yield {"role": "tool", "tool_call_id": get_call_id(item), "content": content}
        else:
            yield {"role": item["role"], "content": item["content"]}
    if run:
        yield _merge_run(run)


def _convert_tools(body: JsonObject) -> list[JsonObject]:
    """The tools as a chat request offers them; those without a name are called by their type."""
    offered = body.get("tools") or ()
    return [{"type": "function", "function": {**tool, "name": get_tool_name(tool)}} for tool in offered]


def get_tool_name(tool: JsonObject) -> str:
    """What a call names."""
    return str(tool.get("name") or tool.get("type"))


def read_request(body: JsonObject) -> DemoRequest:
    """A valid request."""
    instructions = body.get("instructions")
    leading = [{"role": "system", "content": instructions}] if instructions else []
    prompt = {
        "model": body["model"],
        "messages": [*leading, *_convert_items(get_items(body))],
        "tools": _convert_tools(body),
    }
    asked = body.get("max_output_tokens")
    reasoning = body.get("reasoning")
    return DemoRequest(
        body,
        prompt,
        asked if isinstance(asked, int) else 0,
        streamed=bool(body.get("stream")),
        thinks=isinstance(reasoning, dict) and reasoning.get("effort") != "none",
    )
