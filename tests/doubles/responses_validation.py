"""Validates requests of the Responses wire for the three-wire provider, with OpenAI's error messages."""

import re
from collections.abc import Iterator
from itertools import chain

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.validation import Refusal
from tests.doubles.responses_request import (
    CALL_TYPES,
    OUTPUT_TYPES,
    get_call_id,
    get_item_type,
    is_model_item,
)
from tests.doubles.thought_signature import is_sealed

ROLES = ("assistant", "system", "developer", "user")
MODEL_PARTS = ("output_text", "refusal")
CLIENT_PARTS = ("input_text", "input_image", "input_file", "input_audio")
OTHER_ITEM_TYPES = (
    "message", "reasoning", "web_search_call", "file_search_call", "image_generation_call",
    "code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "compaction", "compaction_summary", "context_compaction", "item_reference",
)  # fmt: skip

# The id that the provider gives an item that belongs to a reasoning item. It contains the mark of the
# reasoning item, whose id is `rs_` and the mark.
_REASONED = re.compile(r"[a-z]+_(?P<mark>r[0-9a-f]+)_\d+")

Refusals = Iterator[Refusal]


def _refuse_missing(name: str) -> Refusal:
    return Refusal(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def _refuse_mistyped(name: str, expected: str) -> Refusal:
    return Refusal(f"Invalid type for '{name}': expected {expected}.", name, "invalid_type")


def _refuse_invalid(value: object, supported: tuple[str, ...], where: str) -> Refusal:
    names = ", ".join(f"'{name}'" for name in supported[:-1])
    text = f"Invalid value: '{value}'. Supported values are: {names}, and '{supported[-1]}'."
    return Refusal(text, where, "invalid_value")


def _check_message(item: JsonObject, where: str) -> Refusals:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        yield _refuse_invalid(role, ROLES, f"{where}.role")
    if content is None:
        yield _refuse_missing(f"{where}.content")
    elif not isinstance(content, str | list):
        yield _refuse_mistyped(f"{where}.content", "one of an array of objects or string")
    known = MODEL_PARTS if role == "assistant" else CLIENT_PARTS
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in known:
            yield _refuse_invalid(kind, known, f"{where}.content[{index}]")


def _check_item(item: object, where: str) -> Refusals:
    if not isinstance(item, dict):
        yield _refuse_mistyped(where, "an object")
        return
    name = get_item_type(item)
    if name == "message":
        yield from _check_message(item, where)
    elif name in CALL_TYPES or name in OUTPUT_TYPES:
        key = "output" if name in OUTPUT_TYPES else CALL_TYPES[name][1]
        required = (key,) if "local_shell" in name else ("call_id", key)
        yield from (_refuse_missing(f"{where}.{each}") for each in required if item.get(each) is None)
    elif name not in OTHER_ITEM_TYPES:
        yield _refuse_invalid(name, (*OTHER_ITEM_TYPES, *CALL_TYPES, *OUTPUT_TYPES), where)


def _check_pairing(items: list[JsonObject]) -> Refusals:
    calls: set[tuple[str, str]] = set()
    pending: dict[tuple[str, str], None] = {}
    for item in items:
        name = get_item_type(item)
        if name in CALL_TYPES:
            calls |= {(name, str(item[key])) for key in ("call_id", "id") if item.get(key)}
            pending[name, get_call_id(item)] = None
        elif name in OUTPUT_TYPES:
            call = (OUTPUT_TYPES[name], get_call_id(item))
            if call not in calls:
                text = f"No tool call found for {CALL_TYPES[call[0]][0]} output with call_id {call[1]}."
                yield Refusal(text, "input")
            pending.pop(call, None)
    for name, call_id in pending:
        yield Refusal(f"No tool output found for {CALL_TYPES[name][0]} {call_id}.", "input")


def _check_reasoning_item(item: JsonObject, following: JsonObject | None) -> Refusals:
    item_id, seal = item.get("id"), item.get("encrypted_content")
    if following is None or not is_model_item(following):
        text = f"Item '{item_id}' of type 'reasoning' was provided without its required following item."
        yield Refusal(text, "input")
    if seal and not is_sealed(seal):
        text = (
            f"The encrypted content for item {item_id} could not be verified. "
            "Reason: Encrypted content could not be decrypted or parsed."
        )
        yield Refusal(text, code="invalid_encrypted_content")


def _check_reasoning(items: list[JsonObject]) -> Refusals:
    thoughts = set()
    for item, following in zip(items, [*items[1:], None], strict=True):
        item_id = str(item.get("id"))
        if get_item_type(item) == "reasoning":
            thoughts.add(item_id)
            yield from _check_reasoning_item(item, following)
        match = _REASONED.fullmatch(item_id)
        if match and f"rs_{match['mark']}" not in thoughts:
            text = (
                f"Item '{item_id}' of type '{get_item_type(item)}' was provided without its required "
                f"'reasoning' item: "
                f"'rs_{match['mark']}'."
            )
            yield Refusal(text, "input")


def _check_duplicates(items: list[JsonObject]) -> Refusals:
    seen = set()
    for item in items:
        own = "" if get_item_type(item) in OUTPUT_TYPES else str(item.get("id") or "")
        if own and own in seen:
            text = (
                f"Duplicate item found with id {own}. Remove duplicate items from your input and try again."
            )
            yield Refusal(text, "input")
        seen.add(own)


def _check_references(items: list[JsonObject]) -> Refusals:
    """Refuses references to unknown items. All other references have already been replaced by their items."""
    for item in items:
        if get_item_type(item) == "item_reference":
            yield Refusal(f"Item with id '{item.get('id')}' not found.", "input", status=404)


def _check_items(items: list[JsonObject]) -> Refusals:
    if not items:
        text = "Invalid 'input': empty array. Expected an array with minimum length 1."
        yield Refusal(text, "input", "empty_array")
    yield from chain.from_iterable(_check_item(item, f"input[{index}]") for index, item in enumerate(items))
    for rule in (_check_references, _check_pairing, _check_reasoning, _check_duplicates):
        yield from rule(items)


def _check_request(body: JsonObject) -> Refusals:
    previous_id, items = body.get("previous_response_id"), body.get("input")
    if not isinstance(body.get("model"), str):
        yield _refuse_missing("model")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        yield _refuse_mistyped("tools", "an array of objects")
    if body.get("conversation"):
        yield Refusal(f"Conversation with id '{body['conversation']}' not found.", "conversation", status=404)
    if previous_id:
        text = f"Previous response with id '{previous_id}' not found."
        yield Refusal(text, "previous_response_id", "previous_response_not_found")
    if items is None:
        yield _refuse_missing("input")
    elif isinstance(items, list):
        yield from _check_items(items)
    elif not isinstance(items, str):
        yield _refuse_mistyped("input", "one of an array of objects or string")


def validate_request(body: JsonObject) -> Refusal | None:
    """Returns the first error in a request, or None."""
    return next(_check_request(body), None)
