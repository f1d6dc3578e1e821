"""How the demo provider reads the Responses wire: what it refuses, and the request as a chat prompt.

Everything the model said in a row is one assistant message of the prompt, as on the chat wire: its texts,
its calls, and a part for each item that is neither.
"""

import re
from collections.abc import Iterator
from typing import Any

from proxy.demo.refusal import Refusal
from proxy.demo.signing import is_sealed
from proxy.demo.wire import Asked, JsonObject, dumps

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
ROLES = ("assistant", "system", "developer", "user")
SPOKEN = ("output_text", "refusal")
HEARD = ("input_text", "input_image", "input_file", "input_audio")
OTHERS = {
    "message", "reasoning", "web_search_call", "file_search_call", "image_generation_call",
    "code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "compaction", "compaction_summary", "context_compaction", "item_reference",
}  # fmt: skip

# An id of ours that tells what reasoning its item came of.
_REASONED = re.compile(r"[a-z]+_(?P<mark>r[0-9a-f]+)_\d+")


def kind(item: JsonObject) -> str:
    """The type of an item; a message may do without."""
    return str(item.get("type") or ("message" if "role" in item else ""))


def call_id(item: JsonObject) -> str:
    """What pairs a call with its output; outputs of a local shell may name it `id`."""
    return str(item.get("call_id") or item.get("id"))


def items(body: JsonObject) -> list[JsonObject]:
    """The input as a list of items."""
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def _missing(name: str) -> Refusal:
    return Refusal(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def _invalid(value: object, known: tuple[str, ...], where: str) -> Refusal:
    names = ", ".join(f"'{name}'" for name in known[:-1])
    text = f"Invalid value: '{value}'. Supported values are: {names}, and '{known[-1]}'."
    return Refusal(text, where, "invalid_value")


def _message(item: JsonObject, where: str) -> Refusal | None:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        return _invalid(role, ROLES, f"{where}.role")
    if content is None:
        return _missing(f"{where}.content")
    if not isinstance(content, str | list):
        return Refusal(
            f"Invalid type for '{where}.content': expected one of an array of objects or string.",
            f"{where}.content",
            "invalid_type",
        )
    known = SPOKEN if role == "assistant" else HEARD
    for index, part in enumerate(content if isinstance(content, list) else ()):
        found = part.get("type") if isinstance(part, dict) else None
        if found not in known:
            return _invalid(found, known, f"{where}.content[{index}]")
    return None


def _shape(item: object, where: str) -> Refusal | None:
    if not isinstance(item, dict):
        return Refusal(f"Invalid type for '{where}': expected an object.", where, "invalid_type")
    name = kind(item)
    if name == "message":
        return _message(item, where)
    if name in CALLS or name in OUTPUTS:
        keys = ("output",) if name in OUTPUTS else (CALLS[name][1],)
        wanted = keys if "local_shell" in name else ("call_id", *keys)
        return next((_missing(f"{where}.{key}") for key in wanted if item.get(key) is None), None)
    if name not in OTHERS:
        return _invalid(name, tuple(sorted({*OTHERS, *CALLS, *OUTPUTS})), where)
    return None


def _pairing(given: list[JsonObject]) -> Iterator[Refusal]:
    asked: set[tuple[str, str]] = set()
    pending: dict[tuple[str, str], None] = {}
    for item in given:
        name = kind(item)
        if name in CALLS:
            keys = {(name, str(item[key])) for key in ("call_id", "id") if item.get(key)}
            asked |= keys
            pending[name, call_id(item)] = None
        elif name in OUTPUTS:
            key = (OUTPUTS[name], call_id(item))
            if key not in asked:
                text = f"No tool call found for {CALLS[key[0]][0]} output with call_id {key[1]}."
                yield Refusal(text, "input")
            pending.pop(key, None)
    for name, wanted in pending:
        yield Refusal(f"No tool output found for {CALLS[name][0]} {wanted}.", "input")


def _is_said(item: JsonObject | None) -> bool:
    """Whether an item is one that a model writes."""
    return (
        item is not None
        and kind(item) not in OUTPUTS
        and (kind(item) != "message" or item["role"] == "assistant")
    )


def _reasoning(given: list[JsonObject]) -> Iterator[Refusal]:
    thoughts = set()
    for item, following in zip(given, [*given[1:], None], strict=True):
        name, own = kind(item), item.get("id")
        if name == "reasoning":
            thoughts.add(str(own))
            if not _is_said(following):
                text = f"Item '{own}' of type 'reasoning' was provided without its required following item."
                yield Refusal(text, "input")
            if item.get("encrypted_content") and not is_sealed(item["encrypted_content"]):
                text = (
                    f"The encrypted content for item {own} could not be verified. "
                    "Reason: Encrypted content could not be decrypted or parsed."
                )
                yield Refusal(text, code="invalid_encrypted_content")
        found = _REASONED.fullmatch(str(own))
        if found and f"rs_{found['mark']}" not in thoughts:
            text = (
                f"Item '{own}' of type '{name}' was provided without its required 'reasoning' item: "
                f"'rs_{found['mark']}'."
            )
            yield Refusal(text, "input")


def _repeated(given: list[JsonObject]) -> Iterator[Refusal]:
    seen = set()
    for item in given:
        own = item.get("id")
        if own and own in seen and kind(item) not in OUTPUTS:
            text = (
                f"Duplicate item found with id {own}. Remove duplicate items from your input and try again."
            )
            yield Refusal(text, "input")
        seen.add(own)


def judge(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request, or None."""
    if not isinstance(body.get("model"), str):
        return _missing("model")
    earlier, given = body.get("previous_response_id"), body.get("input")
    if earlier:
        text = f"Previous response with id '{earlier}' not found."
        return Refusal(text, "previous_response_id", "previous_response_not_found")
    if given is None:
        return _missing("input")
    if isinstance(given, str):
        return None
    if not isinstance(given, list):
        text = "Invalid type for 'input': expected one of an array of objects or string."
        return Refusal(text, "input", "invalid_type")
    if not given:
        text = "Invalid 'input': empty array. Expected an array with minimum length 1."
        return Refusal(text, "input", "empty_array")
    shapes = (_shape(item, f"input[{index}]") for index, item in enumerate(given))
    wrong = next(filter(None, shapes), None)
    return wrong or next((each for rule in (_pairing, _reasoning, _repeated) for each in rule(given)), None)


def _call(item: JsonObject) -> JsonObject:
    what = item[CALLS[kind(item)][1]]
    arguments = what if isinstance(what, str) else dumps(what).decode()
    name = str(item.get("name") or kind(item).removesuffix("_call"))
    return {"id": call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


def _spoken(run: list[JsonObject]) -> JsonObject:
    """One assistant message of what the model said in a row."""
    parts: list[Any] = []
    calls = []
    for item in run:
        if kind(item) in CALLS:
            calls.append(_call(item))
        elif kind(item) == "message":
            content = item["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        else:
            parts.append({key: value for key, value in item.items() if key != "text"})
    message: JsonObject = {"role": "assistant", "content": parts or None}
    return {**message, "tool_calls": calls} if calls else message


def _messages(given: list[JsonObject]) -> Iterator[JsonObject]:
    run: list[JsonObject] = []
    for item in given:
        if _is_said(item):
            run.append(item)
            continue
        if run:
            yield _spoken(run)
            run = []
        if kind(item) in OUTPUTS:
            output = item["output"]
            content = output if isinstance(output, str | list) else dumps(output).decode()
            yield {"role": "tool", "tool_call_id": call_id(item), "content": content}
        else:
            yield {"role": item["role"], "content": item["content"]}
    if run:
        yield _spoken(run)


def _tools(body: JsonObject) -> list[JsonObject]:
    """The tools as a chat request offers them; those without a name are called by their type."""
    offered = body.get("tools") or ()
    return [{"type": "function", "function": {**tool, "name": tool_name(tool)}} for tool in offered]


def tool_name(tool: JsonObject) -> str:
    """What a call names."""
    return str(tool.get("name") or tool.get("type"))


def read(body: JsonObject) -> Asked:
    """A valid request."""
    instructions = body.get("instructions")
    leading = [{"role": "system", "content": instructions}] if instructions else []
    prompt = {
        "model": body["model"],
        "messages": [*leading, *_messages(items(body))],
        "tools": _tools(body),
    }
    asked = body.get("max_output_tokens")
    reasoning = body.get("reasoning")
    return Asked(
        body,
        prompt,
        asked if isinstance(asked, int) else 0,
        streamed=bool(body.get("stream")),
        thinks=isinstance(reasoning, dict) and reasoning.get("effort") != "none",
    )
