"""Validates requests of the Messages wire for the three-wire provider, with Anthropic's error messages."""

import re
from collections.abc import Iterator
from typing import Any

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.validation import Refusal
from tests.doubles.messages_request import (
    THOUGHT_TYPES,
    get_blocks,
    get_system_blocks,
    is_thinking,
)
from tests.doubles.thought_binding import (
    has_bound_thoughts,
    iter_prefixes,
    should_refuse_moved_thoughts,
)
from tests.doubles.thought_signature import is_sealed, read_binding

MAX_MARKS = 4
# The role of the messages that may contain a block, by the type of the block. Types without an entry may
# occur in messages of both roles.
ROLE_BY_BLOCK_TYPE = {**dict.fromkeys((*THOUGHT_TYPES, "tool_use"), "assistant"), "tool_result": "user"}

_ID = re.compile(r"[a-zA-Z0-9_-]+")

Reasons = Iterator[str]


def _check_text(block: JsonObject, where: str) -> Reasons:
    text = str(block.get("text") or "")
    if not text and block.get("cache_control"):
        yield f"{where}.cache_control: cache_control cannot be set for empty text blocks"
    if not text:
        yield "messages: text content blocks must be non-empty"
    if not text.strip():
        yield "messages: text content blocks must contain non-whitespace text"


def _check_thinking(block: JsonObject, where: str) -> Reasons:
    if block.get("cache_control"):
        yield f"{where}.{block['type']}.cache_control: Extra inputs are not permitted"
    if block["type"] == "redacted_thinking" and not is_sealed(block.get("data")):
        yield f"{where}: Invalid `data` in `redacted_thinking` block"
    if (
        block["type"] == "thinking"
        and read_binding(str(block.get("thinking")), block.get("signature")) is None
    ):
        yield f"{where}: Invalid `signature` in `thinking` block"


def _check_tool_use(block: JsonObject, where: str) -> Reasons:
    if not _ID.fullmatch(str(block.get("id"))):
        yield f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
    if not isinstance(block.get("input"), dict):
        yield f"{where}.tool_use.input: Input should be a valid dictionary"


def _check_tool_result(block: JsonObject, where: str) -> Reasons:
    content = block.get("content")
    for index, each in enumerate(content if isinstance(content, list) else ()):
        yield from _check_block(each, "user", f"{where}.tool_result.content.{index}")


_RULES = {
    "text": _check_text,
    "thinking": _check_thinking,
    "redacted_thinking": _check_thinking,
    "tool_use": _check_tool_use,
    "tool_result": _check_tool_result,
}


def _check_block(block: object, role: str, where: str) -> Reasons:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        yield f"{where}.type: Field required"
        return
    name = block["type"]
    if ROLE_BY_BLOCK_TYPE.get(name, role) != role:
        yield f"{where}: `{name}` blocks can only be in `{ROLE_BY_BLOCK_TYPE[name]}` messages"
    if name in _RULES:
        yield from _RULES[name](block, where)


def _check_content(content: str | list[Any], role: str, where: str, *, last: bool) -> Reasons:
    prefill = last and role == "assistant"
    if not content and not prefill:
        yield (
            f"{where}: all messages must have non-empty content except for the optional final assistant "
            "message"
        )
    if isinstance(content, list):
        for index, block in enumerate(content):
            yield from _check_block(block, role, f"{where}.content.{index}")
    elif prefill and content != content.rstrip():
        yield "messages: final assistant content cannot end with trailing whitespace"


def _check_message(message: object, where: str, *, last: bool) -> Reasons:
    if not isinstance(message, dict):
        yield f"{where}: Input should be a valid dictionary or object to extract fields from"
        return
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):  # a tuple, because a client may send an unhashable value
        yield (
            f'messages: Unexpected role "{role}". The Messages API accepts a top-level `system` parameter, '
            'not "system" as an input message role.'
        )
    elif isinstance(content, str | list):
        yield from _check_content(content, role, where, last=last)
    else:
        yield f"{where}.content: Field required"


def _merge_same_role(messages: list[JsonObject]) -> list[tuple[int, list[Any]]]:
    """Merges consecutive messages of the same role.

    Returns for each merged message the index of its last part in `messages`, and all its blocks.
    """
    merged: list[tuple[int, list[Any]]] = []
    for index, message in enumerate(messages):
        if index and messages[index - 1]["role"] == message["role"]:
            merged[-1] = (index, merged[-1][1] + get_blocks(message))
        else:
            merged.append((index, get_blocks(message)))
    return merged


def _list_answered_ids(content_blocks: list[Any]) -> list[str]:
    """Returns the ids of the calls that the tool results at the start of a message answer.

    Tool results after other blocks are not included, because the API does not accept them there.
    """
    others = (index for index, block in enumerate(content_blocks) if block["type"] != "tool_result")
    return [str(block.get("tool_use_id")) for block in content_blocks[: next(others, len(content_blocks))]]


def _check_orphan_results(content_blocks: list[Any], call_ids: list[str], index: int) -> Reasons:
    seen = set()
    for position, block in enumerate(content_blocks):
        where, own = f"messages.{index}.content.{position}", str(block.get("tool_use_id"))
        if block["type"] != "tool_result":
            continue
        if own not in call_ids:
            yield (
                f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {own}. Each `tool_result` "
                "block must have a corresponding `tool_use` block in the previous message."
            )
        if own in seen:
            yield (
                f"{where}: each tool_use must have a single result. "
                f"Found multiple `tool_result` blocks with id: {own}"
            )
        seen.add(own)


def _check_unanswered_calls(unanswered_ids: list[str], index: int) -> Reasons:
    if unanswered_ids:
        yield (
            f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {', '.join(unanswered_ids)}. Each `tool_use` block must have a corresponding "
            "`tool_result` block in the next message."
        )


def _check_pairing(body: JsonObject) -> Reasons:
    call_ids: list[str] = []
    seen_ids: set[str] = set()
    previous_index = 0
    for index, blocks in _merge_same_role(body["messages"]):
        answered_ids = _list_answered_ids(blocks)
        yield from _check_unanswered_calls(
            [each for each in call_ids if each not in answered_ids], previous_index
        )
        yield from _check_orphan_results(blocks, call_ids, index)
        call_ids = [str(block["id"]) for block in blocks if block["type"] == "tool_use"]
        if len({*call_ids}) < len(call_ids) or seen_ids & {*call_ids}:
            yield "messages: `tool_use` ids must be unique"
        seen_ids |= {*call_ids}
        previous_index = index
    yield from _check_unanswered_calls(call_ids, previous_index)


def _check_unthought_loop(body: JsonObject) -> Reasons:
    """Checks that the tool calls since the last user message begin with a thought.

    The rule applies only if the request ends with tool results, and an older model thinks.
    """
    turns = _merge_same_role(body["messages"])
    first = None
    while len(turns) >= 2 and _list_answered_ids(turns[-1][1]):
        first = turns[-2]
        turns = turns[:-2]
    if (
        first
        and is_thinking(body)
        and not has_bound_thoughts(body)
        and first[1][0]["type"] not in THOUGHT_TYPES
    ):
        yield (
            f"messages.{first[0]}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{first[1][0]['type']}`. When `thinking` is enabled, a final `assistant` message must start "
            "with a thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). "
            "To avoid this requirement, disable `thinking`."
        )


def _check_moved_thoughts(body: JsonObject) -> Reasons:
    """Checks that what precedes each thought is the same as when the thought was produced.

    The rule applies to newer models only (`thought_binding`).
    """
    if not should_refuse_moved_thoughts(body):
        return
    for where, block, prefix_digest in iter_prefixes(body):
        if block.get("type") == "thinking":
            bound = read_binding(str(block.get("thinking")), block.get("signature"))
            if bound and bound != prefix_digest:
                yield (
                    f"{where}: Invalid `signature` in `thinking` block. The block is bound to a different "
                    "conversation. Remove the block, or set "
                    '`thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
                )


def _iter_markable(body: JsonObject) -> Iterator[JsonObject]:
    """Yields every object in the request that may carry a cache mark."""
    yield body
    yield from body.get("tools") or ()
    yield from get_system_blocks(body)
    for message in body["messages"]:
        for block in get_blocks(message):
            yield block
            yield from get_blocks(block) if block["type"] == "tool_result" else ()


def _check_conversation(body: JsonObject) -> Reasons:
    """Checks the messages as a sequence, once each message is valid by itself."""
    if body["messages"][0]["role"] != "user":
        yield 'messages: first message must use the "user" role'
    marks = sum(bool(block.get("cache_control")) for block in _iter_markable(body))
    if marks > MAX_MARKS:
        yield f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {marks}."
    if any(not block.get("text") for block in get_system_blocks(body)):
        yield "system: text content blocks must be non-empty"
    yield from _check_pairing(body)
    yield from _check_unthought_loop(body)
    yield from _check_moved_thoughts(body)


def _check_top_level(body: JsonObject) -> Reasons:
    """Checks the types of the fields `tools` and `system`."""
    for key in ("tools", "system"):
        value = body.get(key) or []
        if key == "system" and isinstance(value, str):
            continue
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            yield f"{key}: Input should be a valid list"


def _check_count_request(body: JsonObject) -> Reasons:
    yield from _check_top_level(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        yield "messages: Field required"
        return
    if not messages:
        yield "messages: at least one message is required"
    for index, message in enumerate(messages):
        yield from _check_message(message, f"messages.{index}", last=index == len(messages) - 1)
    yield from _check_conversation(body)


def _check_request(body: JsonObject) -> Reasons:
    tokens = body.get("max_tokens")
    if not isinstance(tokens, int):
        yield "max_tokens: Field required"
    elif tokens < 1:
        yield "max_tokens: Input should be greater than or equal to 1"
    yield from _check_count_request(body)


def _get_first_refusal(body: JsonObject, reasons: Reasons) -> Refusal | None:
    if not isinstance(body.get("model"), str):
        return Refusal("model: Field required")
    text = next(reasons, None)
    return None if text is None else Refusal(text)


def validate_count_request(body: JsonObject) -> Refusal | None:
    """Returns the first error in a request that counts tokens, or None."""
    return _get_first_refusal(body, _check_count_request(body))


def validate_request(body: JsonObject) -> Refusal | None:
    """Returns the first error in a request, or None."""
    return _get_first_refusal(body, _check_request(body))
