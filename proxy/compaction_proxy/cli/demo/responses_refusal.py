"""What the demo provider refuses on the Responses wire, in OpenAI's own words."""

import re
from collections.abc import Iterator
from itertools import chain

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.responses_reading import CALLS, OUTPUTS, call_id, is_said, kind
from compaction_proxy.cli.demo.signing import is_sealed
from compaction_proxy.cli.demo.validation import Refusal

ROLES = ("assistant", "system", "developer", "user")
SPOKEN = ("output_text", "refusal")
HEARD = ("input_text", "input_image", "input_file", "input_audio")
OTHERS = (
    "message", "reasoning", "web_search_call", "file_search_call", "image_generation_call",
    "code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "compaction", "compaction_summary", "context_compaction", "item_reference",
)  # fmt: skip

# An id of ours that tells what reasoning its item came of.
_REASONED = re.compile(r"[a-z]+_(?P<mark>r[0-9a-f]+)_\d+")

Found = Iterator[Refusal]


def _missing(name: str) -> Refusal:
    return Refusal(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def _mistyped(name: str, wanted: str) -> Refusal:
    return Refusal(f"Invalid type for '{name}': expected {wanted}.", name, "invalid_type")


def _invalid(value: object, known: tuple[str, ...], where: str) -> Refusal:
    names = ", ".join(f"'{name}'" for name in known[:-1])
    text = f"Invalid value: '{value}'. Supported values are: {names}, and '{known[-1]}'."
    return Refusal(text, where, "invalid_value")


def _message(item: JsonObject, where: str) -> Found:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        yield _invalid(role, ROLES, f"{where}.role")
    if content is None:
        yield _missing(f"{where}.content")
    elif not isinstance(content, str | list):
        yield _mistyped(f"{where}.content", "one of an array of objects or string")
    known = SPOKEN if role == "assistant" else HEARD
    for index, part in enumerate(content if isinstance(content, list) else ()):
        found = part.get("type") if isinstance(part, dict) else None
        if found not in known:
            yield _invalid(found, known, f"{where}.content[{index}]")


def _shape(item: object, where: str) -> Found:
    if not isinstance(item, dict):
        yield _mistyped(where, "an object")
        return
    name = kind(item)
    if name == "message":
        yield from _message(item, where)
    elif name in CALLS or name in OUTPUTS:
        key = "output" if name in OUTPUTS else CALLS[name][1]
        wanted = (key,) if "local_shell" in name else ("call_id", key)
        yield from (_missing(f"{where}.{each}") for each in wanted if item.get(each) is None)
    elif name not in OTHERS:
        yield _invalid(name, (*OTHERS, *CALLS, *OUTPUTS), where)


def _pairing(given: list[JsonObject]) -> Found:
    asked: set[tuple[str, str]] = set()
    pending: dict[tuple[str, str], None] = {}
    for item in given:
        name = kind(item)
        if name in CALLS:
            asked |= {(name, str(item[key])) for key in ("call_id", "id") if item.get(key)}
            pending[name, call_id(item)] = None
        elif name in OUTPUTS:
            own = (OUTPUTS[name], call_id(item))
            if own not in asked:
                text = f"No tool call found for {CALLS[own[0]][0]} output with call_id {own[1]}."
                yield Refusal(text, "input")
            pending.pop(own, None)
    for name, wanted in pending:
        yield Refusal(f"No tool output found for {CALLS[name][0]} {wanted}.", "input")


def _thought(item: JsonObject, following: JsonObject | None) -> Found:
    own, seal = item.get("id"), item.get("encrypted_content")
    if following is None or not is_said(following):
        text = f"Item '{own}' of type 'reasoning' was provided without its required following item."
        yield Refusal(text, "input")
    if seal and not is_sealed(seal):
        text = (
            f"The encrypted content for item {own} could not be verified. "
            "Reason: Encrypted content could not be decrypted or parsed."
        )
        yield Refusal(text, code="invalid_encrypted_content")


def _reasoning(given: list[JsonObject]) -> Found:
    thoughts = set()
    for item, following in zip(given, [*given[1:], None], strict=True):
        own = str(item.get("id"))
        if kind(item) == "reasoning":
            thoughts.add(own)
            yield from _thought(item, following)
        found = _REASONED.fullmatch(own)
        if found and f"rs_{found['mark']}" not in thoughts:
            text = (
                f"Item '{own}' of type '{kind(item)}' was provided without its required 'reasoning' item: "
                f"'rs_{found['mark']}'."
            )
            yield Refusal(text, "input")


def _repeated(given: list[JsonObject]) -> Found:
    seen = set()
    for item in given:
        own = "" if kind(item) in OUTPUTS else str(item.get("id") or "")
        if own and own in seen:
            text = (
                f"Duplicate item found with id {own}. Remove duplicate items from your input and try again."
            )
            yield Refusal(text, "input")
        seen.add(own)


def _unknown(given: list[JsonObject]) -> Found:
    """References that are still there when what is known stands in its place."""
    for item in given:
        if kind(item) == "item_reference":
            yield Refusal(f"Item with id '{item.get('id')}' not found.", "input", status=404)


def _array(given: list[JsonObject]) -> Found:
    if not given:
        text = "Invalid 'input': empty array. Expected an array with minimum length 1."
        yield Refusal(text, "input", "empty_array")
    yield from chain.from_iterable(_shape(item, f"input[{index}]") for index, item in enumerate(given))
    for rule in (_unknown, _pairing, _reasoning, _repeated):
        yield from rule(given)


def _all(body: JsonObject) -> Found:
    earlier, given = body.get("previous_response_id"), body.get("input")
    if not isinstance(body.get("model"), str):
        yield _missing("model")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        yield _mistyped("tools", "an array of objects")
    if body.get("conversation"):
        yield Refusal(f"Conversation with id '{body['conversation']}' not found.", "conversation", status=404)
    if earlier:
        text = f"Previous response with id '{earlier}' not found."
        yield Refusal(text, "previous_response_id", "previous_response_not_found")
    if given is None:
        yield _missing("input")
    elif isinstance(given, list):
        yield from _array(given)
    elif not isinstance(given, str):
        yield _mistyped("input", "one of an array of objects or string")


def judge(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request, or None."""
    return next(_all(body), None)
