"""How the demo provider reads the Messages wire: what it refuses, and the request as a chat prompt.

A user message with tool results becomes a tool message for each and one user message of the rest, as on the
chat wire; marks for the cache are taken out, but the last of them says how far the cache goes.
"""

import re
from collections.abc import Iterator
from typing import Any

from proxy.demo.refusal import Refusal
from proxy.demo.signing import is_sealed, signature
from proxy.demo.wire import Asked, JsonObject, dumps

MAX_MARKS = 4
THOUGHTS = ("thinking", "redacted_thinking")

_ID = re.compile(r"[a-zA-Z0-9_-]+")


def blocks(message: JsonObject) -> list[Any]:
    """The content as blocks; a string is a text block."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _system(body: JsonObject) -> list[Any]:
    return blocks({"content": body.get("system")}) if body.get("system") else []


def _all_blocks(body: JsonObject) -> Iterator[JsonObject]:
    """Everything that may carry a mark for the cache, in the order in which the cache reads."""
    yield from body.get("tools") or ()
    yield from _system(body)
    for message in body["messages"]:
        yield from blocks(message)
        for block in blocks(message):
            if block.get("type") == "tool_result":
                yield from blocks(block)
    yield body


def _marked(block: JsonObject) -> bool:
    """Whether a block, or something within it, carries a mark."""
    inner = blocks(block) if block.get("type") == "tool_result" else ()
    return bool(block.get("cache_control")) or any(each.get("cache_control") for each in inner)


def _wrong(text: str) -> Refusal:
    return Refusal(text)


def _text(block: JsonObject, where: str) -> Refusal | None:
    if not block.get("text"):
        if block.get("cache_control"):
            return _wrong(f"{where}.cache_control: cache_control cannot be set for empty text blocks")
        return _wrong("messages: text content blocks must be non-empty")
    if not str(block["text"]).strip():
        return _wrong("messages: text content blocks must contain non-whitespace text")
    return None


def _thought(block: JsonObject, where: str) -> Refusal | None:
    name = block["type"]
    if block.get("cache_control"):
        return _wrong(f"{where}.{name}.cache_control: Extra inputs are not permitted")
    if name == "redacted_thinking" and not is_sealed(block.get("data")):
        return _wrong(f"{where}: Invalid `data` in `redacted_thinking` block")
    if name == "thinking" and block.get("signature") != signature(str(block.get("thinking"))):
        return _wrong(f"{where}: Invalid `signature` in `thinking` block")
    return None


def _block(block: object, role: str, where: str) -> Refusal | None:
    name = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(name, str):
        return _wrong(f"{where}.type: Field required")
    if name == "text":
        return _text(block, where)
    if (name in THOUGHTS or name == "tool_use") and role != "assistant":
        return _wrong(f"{where}: `{name}` blocks can only be in `assistant` messages")
    if name == "tool_result" and role != "user":
        return _wrong(f"{where}: `tool_result` blocks can only be in `user` messages")
    if name in THOUGHTS:
        return _thought(block, where)
    if name == "tool_use":
        if not _ID.fullmatch(str(block.get("id"))):
            return _wrong(f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
        if not isinstance(block.get("input"), dict):
            return _wrong(f"{where}.tool_use.input: Input should be a valid dictionary")
    if name == "tool_result" and isinstance(block.get("content"), list):
        return next(filter(None, (_block(each, "user", where) for each in block["content"])), None)
    return None


def _message(message: object, index: int, *, last: bool) -> Refusal | None:
    where = f"messages.{index}"
    if not isinstance(message, dict):
        return _wrong(f"{where}: Input should be a valid dictionary or object to extract fields from")
    role, content = message.get("role"), message.get("content")
    if role not in {"user", "assistant"}:
        return _wrong(
            f'messages: Unexpected role "{role}". The Messages API accepts a top-level `system` parameter, '
            'not "system" as an input message role.'
        )
    if content is None or not isinstance(content, str | list):
        return _wrong(f"{where}.content: Field required")
    if not content and not (last and role == "assistant"):
        return _wrong(
            f"{where}: all messages must have non-empty content except for the optional final assistant message"
        )
    if last and role == "assistant" and isinstance(content, str) and content != content.rstrip():
        return _wrong("messages: final assistant content cannot end with trailing whitespace")
    if isinstance(content, str):
        return None
    found = (_block(block, role, f"{where}.content.{at}") for at, block in enumerate(content))
    return next(filter(None, found), None)


def _joined(messages: list[JsonObject]) -> Iterator[tuple[int, str, list[Any]]]:
    """The messages with neighbours of one role taken together, each with the index of its first."""
    found: list[tuple[int, str, list[Any]]] = []
    for index, message in enumerate(messages):
        if found and found[-1][1] == message["role"]:
            found[-1][2].extend(blocks(message))
        else:
            found.append((index, message["role"], blocks(message)))
    yield from found


def _results(said: list[Any]) -> list[str]:
    """What the tool results at the beginning answer: behind anything else they count for nothing."""
    found = []
    for block in said:
        if block["type"] != "tool_result":
            break
        found.append(str(block.get("tool_use_id")))
    return found


def _orphans(said: list[Any], asked: list[str], index: int) -> Iterator[Refusal]:
    seen = set()
    for at, block in enumerate(said):
        own = str(block.get("tool_use_id"))
        if block["type"] != "tool_result":
            continue
        if own not in asked:
            yield _wrong(
                f"messages.{index}.content.{at}: unexpected `tool_use_id` found in `tool_result` blocks: {own}. "
                "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
        if own in seen:
            yield _wrong(
                f"messages.{index}.content.{at}: each tool_use must have a single result. "
                f"Found multiple `tool_result` blocks with id: {own}"
            )
        seen.add(own)


def _unanswered(open_ids: list[str], index: int) -> Refusal:
    return _wrong(
        f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(open_ids)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
        "next message."
    )


def _pairing(messages: list[JsonObject]) -> Iterator[Refusal]:
    asked: list[str] = []
    before, known = 0, set()
    for index, _role, said in _joined(messages):
        open_ids = [each for each in asked if each not in _results(said)]
        if open_ids:
            yield _unanswered(open_ids, before)
        yield from _orphans(said, asked, index)
        asked = [str(block["id"]) for block in said if block["type"] == "tool_use"]
        if len({*asked}) < len(asked) or known & {*asked}:
            yield _wrong("messages: `tool_use` ids must be unique")
        known |= {*asked}
        before = index
    if asked:
        yield _unanswered(asked, before)


def _thinks(body: JsonObject) -> bool:
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") in {"enabled", "adaptive"}


def _bare_loop(body: JsonObject) -> Iterator[Refusal]:
    """Where thinking is on, an unfinished run of calls begins with the thought that they came of."""
    turns = list(_joined(body["messages"]))
    first: tuple[int, str, list[Any]] | None = None
    while len(turns) >= 2 and _results(turns[-1][2]):
        first = turns[-2]
        turns = turns[:-2]
    if _thinks(body) and first and first[2][0]["type"] not in THOUGHTS:
        yield _wrong(
            f"messages.{first[0]}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{first[2][0]['type']}`. When `thinking` is enabled, a final `assistant` message must start with a "
            "thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). To avoid this "
            "requirement, disable `thinking`."
        )


def judge_counting(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request whose prompt is to be counted, or None."""
    if not isinstance(body.get("model"), str):
        return _wrong("model: Field required")
    messages = body.get("messages")
    if not isinstance(messages, list):
        return _wrong("messages: Field required")
    if not messages:
        return _wrong("messages: at least one message is required")
    last = len(messages) - 1
    shapes = (_message(each, index, last=index == last) for index, each in enumerate(messages))
    wrong = next(filter(None, shapes), None)
    if wrong:
        return wrong
    if messages[0]["role"] != "user":
        return _wrong('messages: first message must use the "user" role')
    marks = sum(bool(block.get("cache_control")) for block in _all_blocks(body))
    if marks > MAX_MARKS:
        return _wrong(f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {marks}.")
    if any(not block.get("text") for block in _system(body)):
        return _wrong("system: text content blocks must be non-empty")
    return next(_pairing(messages), None) or next(_bare_loop(body), None)


def judge(body: JsonObject) -> Refusal | None:
    """The first thing wrong with a request, or None."""
    if not isinstance(body.get("model"), str):
        return _wrong("model: Field required")
    if not isinstance(body.get("max_tokens"), int):
        return _wrong("max_tokens: Field required")
    if body["max_tokens"] < 1:
        return _wrong("max_tokens: Input should be greater than or equal to 1")
    return judge_counting(body)


def _clean(block: JsonObject) -> JsonObject:
    return {key: value for key, value in block.items() if key != "cache_control"}


def _call(block: JsonObject) -> JsonObject:
    function = {"name": block.get("name"), "arguments": dumps(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _spoken(said: list[Any]) -> JsonObject:
    content = [_clean(block) for block in said if block["type"] != "tool_use"]
    calls = [_call(block) for block in said if block["type"] == "tool_use"]
    message: JsonObject = {"role": "assistant", "content": content or None}
    return {**message, "tool_calls": calls} if calls else message


def _heard(said: list[Any]) -> Iterator[JsonObject]:
    for block in said:
        if block["type"] == "tool_result":
            content = [_clean(each) for each in blocks(block)]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    rest = [_clean(block) for block in said if block["type"] != "tool_result"]
    if rest:
        yield {"role": "user", "content": rest}


def _messages(body: JsonObject) -> Iterator[tuple[JsonObject, bool]]:
    """The messages of the prompt, each with whether the cache is marked up to it."""
    system = _system(body)
    if system:
        yield {"role": "system", "content": [_clean(each) for each in system]}, any(map(_marked, system))
    for index, message in enumerate(body["messages"]):
        said = blocks(message)
        marked = any(map(_marked, said))
        automatic = bool(body.get("cache_control")) and index == len(body["messages"]) - 1
        found = [_spoken(said)] if message["role"] == "assistant" else list(_heard(said))
        yield from ((each, (marked or automatic) and each is found[-1]) for each in found)


def _tools(body: JsonObject) -> list[JsonObject]:
    return [{"type": "function", "function": _clean(tool)} for tool in body.get("tools") or ()]


def read(body: JsonObject) -> Asked:
    """A valid request. A thought begins a turn; in the midst of its calls there is none."""
    found = list(_messages(body))
    messages = [message for message, _ in found]
    remembered = max((index for index, (_, marked) in enumerate(found, 1) if marked), default=0)
    prompt = {"model": body["model"], "messages": messages, "tools": _tools(body)}
    thinks = _thinks(body) and messages[-1]["role"] == "user"
    return Asked(
        body, prompt, body.get("max_tokens") or 0, bool(body.get("stream")), thinks, remembered=remembered
    )
