"""What the demo provider refuses on the Messages wire, in Anthropic's own words."""

import re
from collections.abc import Iterator
from typing import Any

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.messages_binding import beginnings, binds, refuses
from compaction_proxy.cli.demo.messages_reading import THOUGHTS, blocks, system_blocks, thinks
from compaction_proxy.cli.demo.signing import bound_to, is_sealed
from compaction_proxy.cli.demo.validation import Refusal

MAX_MARKS = 4
# Blocks that only one role may hold.
HOLDERS = {**dict.fromkeys((*THOUGHTS, "tool_use"), "assistant"), "tool_result": "user"}

_ID = re.compile(r"[a-zA-Z0-9_-]+")

Found = Iterator[str]


def _text(block: JsonObject, where: str) -> Found:
    said = str(block.get("text") or "")
    if not said and block.get("cache_control"):
        yield f"{where}.cache_control: cache_control cannot be set for empty text blocks"
    if not said:
        yield "messages: text content blocks must be non-empty"
    if not said.strip():
        yield "messages: text content blocks must contain non-whitespace text"


def _thinking(block: JsonObject, where: str) -> Found:
    if block.get("cache_control"):
        yield f"{where}.{block['type']}.cache_control: Extra inputs are not permitted"
    if block["type"] == "redacted_thinking" and not is_sealed(block.get("data")):
        yield f"{where}: Invalid `data` in `redacted_thinking` block"
    if block["type"] == "thinking" and bound_to(str(block.get("thinking")), block.get("signature")) is None:
        yield f"{where}: Invalid `signature` in `thinking` block"


def _tool_use(block: JsonObject, where: str) -> Found:
    if not _ID.fullmatch(str(block.get("id"))):
        yield f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
    if not isinstance(block.get("input"), dict):
        yield f"{where}.tool_use.input: Input should be a valid dictionary"


def _tool_result(block: JsonObject, where: str) -> Found:
    content = block.get("content")
    for index, each in enumerate(content if isinstance(content, list) else ()):
        yield from _block(each, "user", f"{where}.tool_result.content.{index}")


_RULES = {
    "text": _text,
    "thinking": _thinking,
    "redacted_thinking": _thinking,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
}


def _block(block: object, role: str, where: str) -> Found:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        yield f"{where}.type: Field required"
        return
    name = block["type"]
    if HOLDERS.get(name, role) != role:
        yield f"{where}: `{name}` blocks can only be in `{HOLDERS[name]}` messages"
    if name in _RULES:
        yield from _RULES[name](block, where)


def _content(content: str | list[Any], role: str, where: str, *, last: bool) -> Found:
    prefill = last and role == "assistant"
    if not content and not prefill:
        yield (
            f"{where}: all messages must have non-empty content except for the optional final assistant "
            "message"
        )
    if isinstance(content, list):
        for index, block in enumerate(content):
            yield from _block(block, role, f"{where}.content.{index}")
    elif prefill and content != content.rstrip():
        yield "messages: final assistant content cannot end with trailing whitespace"


def _message(message: object, where: str, *, last: bool) -> Found:
    if not isinstance(message, dict):
        yield f"{where}: Input should be a valid dictionary or object to extract fields from"
        return
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):  # a tuple: what a client sends need not be hashable
        yield (
            f'messages: Unexpected role "{role}". The Messages API accepts a top-level `system` parameter, '
            'not "system" as an input message role.'
        )
    elif isinstance(content, str | list):
        yield from _content(content, role, where, last=last)
    else:
        yield f"{where}.content: Field required"


def _joined(messages: list[JsonObject]) -> list[tuple[int, list[Any]]]:
    """The messages with neighbours of one role taken together, each with the index of its last."""
    found: list[tuple[int, list[Any]]] = []
    for index, message in enumerate(messages):
        if index and messages[index - 1]["role"] == message["role"]:
            found[-1] = (index, found[-1][1] + blocks(message))
        else:
            found.append((index, blocks(message)))
    return found


def _results(said: list[Any]) -> list[str]:
    """What the tool results at the beginning answer: behind anything else they count for nothing."""
    others = (index for index, block in enumerate(said) if block["type"] != "tool_result")
    return [str(block.get("tool_use_id")) for block in said[: next(others, len(said))]]


def _orphans(said: list[Any], asked: list[str], index: int) -> Found:
    seen = set()
    for at, block in enumerate(said):
        where, own = f"messages.{index}.content.{at}", str(block.get("tool_use_id"))
        if block["type"] != "tool_result":
            continue
        if own not in asked:
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


def _unanswered(wanted: list[str], index: int) -> Found:
    if wanted:
        yield (
            f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(wanted)}. Each `tool_use` block must have a corresponding `tool_result` block in "
            "the next message."
        )


def _pairing(body: JsonObject) -> Found:
    asked: list[str] = []
    known: set[str] = set()
    before = 0
    for index, said in _joined(body["messages"]):
        answered = _results(said)
        yield from _unanswered([each for each in asked if each not in answered], before)
        yield from _orphans(said, asked, index)
        asked = [str(block["id"]) for block in said if block["type"] == "tool_use"]
        if len({*asked}) < len(asked) or known & {*asked}:
            yield "messages: `tool_use` ids must be unique"
        known |= {*asked}
        before = index
    yield from _unanswered(asked, before)


def _bare_loop(body: JsonObject) -> Found:
    """Where an older model thinks, an unfinished run of calls begins with the thought that they came of."""
    turns = _joined(body["messages"])
    first = None
    while len(turns) >= 2 and _results(turns[-1][1]):
        first = turns[-2]
        turns = turns[:-2]
    if first and thinks(body) and not binds(body) and first[1][0]["type"] not in THOUGHTS:
        yield (
            f"messages.{first[0]}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{first[1][0]['type']}`. When `thinking` is enabled, a final `assistant` message must start "
            "with a thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). "
            "To avoid this requirement, disable `thinking`."
        )


def _moved_thoughts(body: JsonObject) -> Found:
    """Where a newer model thinks, a thought stands behind what it was produced behind."""
    if not refuses(body):
        return
    for where, block, before in beginnings(body):
        if block.get("type") == "thinking":
            bound = bound_to(str(block.get("thinking")), block.get("signature"))
            if bound and bound != before:
                yield (
                    f"{where}: Invalid `signature` in `thinking` block. The block is bound to a different "
                    "conversation. Remove the block, or set "
                    '`thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
                )


def _markable(body: JsonObject) -> Iterator[JsonObject]:
    """Everything that may carry a mark for the cache."""
    yield body
    yield from body.get("tools") or ()
    yield from system_blocks(body)
    for message in body["messages"]:
        for block in blocks(message):
            yield block
            yield from blocks(block) if block["type"] == "tool_result" else ()


def _conversation(body: JsonObject) -> Found:
    """What is wrong with messages that are each as they should be."""
    if body["messages"][0]["role"] != "user":
        yield 'messages: first message must use the "user" role'
    marks = sum(bool(block.get("cache_control")) for block in _markable(body))
    if marks > MAX_MARKS:
        yield f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {marks}."
    if any(not block.get("text") for block in system_blocks(body)):
        yield "system: text content blocks must be non-empty"
    yield from _pairing(body)
    yield from _bare_loop(body)
    yield from _moved_thoughts(body)


def _top(body: JsonObject) -> Found:
    """What is wrong beside the messages."""
    for key in ("tools", "system"):
        given = body.get(key) or []
        if key == "system" and isinstance(given, str):
            continue
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            yield f"{key}: Input should be a valid list"


def _counted(body: JsonObject) -> Found:
    yield from _top(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        yield "messages: Field required"
        return
    if not messages:
        yield "messages: at least one message is required"
    for index, message in enumerate(messages):
        yield from _message(message, f"messages.{index}", last=index == len(messages) - 1)
    yield from _conversation(body)


def _answered(body: JsonObject) -> Found:
    tokens = body.get("max_tokens")
    if not isinstance(tokens, int):
        yield "max_tokens: Field required"
    elif tokens < 1:
        yield "max_tokens: Input should be greater than or equal to 1"
    yield from _counted(body)


def _first(body: JsonObject, found: Found) -> Refusal | None:
    if not isinstance(body.get("model"), str):
        return Refusal("model: Field required")
    text = next(found, None)
    return None if text is None else Refusal(text)


def judge_counting(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request whose prompt is to be counted, or None."""
    return _first(body, _counted(body))


def judge(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request, or None."""
    return _first(body, _answered(body))
