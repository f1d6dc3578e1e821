"""Converts valid requests of the Messages wire to chat prompts for the three-wire provider.

A user message with tool results becomes a tool message for each result, and one user message with the other
blocks, because Chat Completions has separate tool messages. Cache marks are removed. The prompt cache is used
up to the last message with a cache mark.
"""

from collections.abc import Iterator
from typing import Any

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.wires.json.values import encode_json
from tests.doubles.provider_wire import WireRequest

THOUGHT_TYPES = ("thinking", "redacted_thinking")


def get_blocks(message: JsonObject) -> list[Any]:
    """Returns the content of a message as blocks. A string becomes a text block."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def get_system_blocks(body: JsonObject) -> list[Any]:
    """Returns the system prompt as blocks."""
    return get_blocks({"content": body.get("system")}) if body.get("system") else []


def _has_cache_mark(block: JsonObject) -> bool:
    """Returns whether a block, or a block within it, carries a cache mark."""
    inner = get_blocks(block) if block.get("type") == "tool_result" else ()
    return bool(block.get("cache_control")) or any(each.get("cache_control") for each in inner)


def is_thinking(body: JsonObject) -> bool:
    """Returns whether thinking is on."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and str(thinking.get("type")) in {"enabled", "adaptive"}


def _is_thinking_between_calls(body: JsonObject) -> bool:
    """Returns whether the model also has a thought before a reply to tool results.

    Newer models do, unless the request asks for low effort. `body` must have thinking on.
    """
    effort = body.get("output_config")
    hurried = isinstance(effort, dict) and effort.get("effort") == "low"
    return body["thinking"]["type"] == "adaptive" and not hurried


def _drop_cache_mark(block: JsonObject) -> JsonObject:
    return {key: value for key, value in block.items() if key != "cache_control"}


def _convert_call(block: JsonObject) -> JsonObject:
    function = {"name": block.get("name"), "arguments": encode_json(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _convert_assistant_blocks(content_blocks: list[Any]) -> JsonObject:
    content = [_drop_cache_mark(block) for block in content_blocks if block["type"] != "tool_use"]
    calls = [_convert_call(block) for block in content_blocks if block["type"] == "tool_use"]
    message: JsonObject = {"role": "assistant", "content": content or None}
    return {**message, "tool_calls": calls} if calls else message


def _convert_user_blocks(content_blocks: list[Any]) -> Iterator[JsonObject]:
    for block in content_blocks:
        if block["type"] == "tool_result":
            content = [_drop_cache_mark(each) for each in get_blocks(block)]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    rest = [_drop_cache_mark(block) for block in content_blocks if block["type"] != "tool_result"]
    if rest:
        yield {"role": "user", "content": rest}


def _convert_messages(body: JsonObject) -> Iterator[tuple[JsonObject, bool]]:
    """Yields the messages of the prompt, and for each whether the client has set a cache mark at its end."""
    system = get_system_blocks(body)
    if system:
        yield (
            {"role": "system", "content": [_drop_cache_mark(each) for each in system]},
            any(map(_has_cache_mark, system)),
        )
    for index, message in enumerate(body["messages"]):
        blocks = get_blocks(message)
        marked = any(map(_has_cache_mark, blocks))
        auto_marked = bool(body.get("cache_control")) and index == len(body["messages"]) - 1
        converted = (
            [_convert_assistant_blocks(blocks)]
            if message["role"] == "assistant"
            else list(_convert_user_blocks(blocks))
        )
        yield from ((each, (marked or auto_marked) and each is converted[-1]) for each in converted)


def _convert_tools(body: JsonObject) -> list[JsonObject]:
    return [{"type": "function", "function": _drop_cache_mark(tool)} for tool in body.get("tools") or ()]


def read_request(body: JsonObject) -> WireRequest:
    """Converts a valid request to a `WireRequest`.

    If thinking is on, the reply to a user message has a thought. The reply to tool results has one only with
    newer models.
    """
    marked_messages = list(_convert_messages(body))
    messages = [message for message, _ in marked_messages]
    cached_messages = max(
        (index for index, (_, marked) in enumerate(marked_messages, 1) if marked), default=0
    )
    prompt = {"model": body["model"], "messages": messages, "tools": _convert_tools(body)}
    return WireRequest(
        body,
        prompt,
        body.get("max_tokens") or 0,
        streamed=bool(body.get("stream")),
        thinks=is_thinking(body) and (messages[-1]["role"] == "user" or _is_thinking_between_calls(body)),
        cached_messages=cached_messages,
    )
