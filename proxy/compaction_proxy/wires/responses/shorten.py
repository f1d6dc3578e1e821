"""Shortens pieces of a Responses input, and adds a client's images to messages that the proxy writes.

A piece is the JSON of one core message (see `Wire`). Reasoning, and items that only the provider reads, keep
their bytes, because they are encrypted or refer to each other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.message import Message
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.json.large import decode_value
from compaction_proxy.wires.json.shorten import (
    TextCutter,
    cut_arguments,
    cut_long_argument,
    cut_long_texts,
    encode_json,
)
from compaction_proxy.wires.responses.items import decode_items, split_items
from compaction_proxy.wires.responses.messages import encode_message, get_kind, is_text, parse_message

JsonObject = dict[str, Any]
_ItemShortener = Callable[[JsonObject, TextCutter, str], JsonObject]


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Unknown fields stay. Text in the arguments of calls is shortened if it is long. In a user's message or a
    tool's result, each part that is not text is replaced by a note with the `handle`. A privileged message is
    not shortened. If the result would not be shorter, the same record is returned.
    """
    raw = record.raw or encode_message(record)
    if record.is_privileged:
        return record
    cut = partial(build_excerpt, share=share, source_name=handle)
    shortened = b",".join([_shorten_item(each, cut, handle) for each in split_items(raw)])
    return parse_message(shortened) if len(shortened) < len(raw) else record


def _shorten_item(raw: bytes, cut: TextCutter, handle: str) -> bytes:
    """Returns a shorter item, or its own bytes if nothing can be saved."""
    item = decode_value(raw)
    shortener = _SHORTENERS.get(get_kind(item))
    if shortener is None:
        return raw
    try:
        return min(raw, encode_json(shortener(item, cut, handle)), key=len)
    except (ValueError, RecursionError):
        return raw


def _shorten_message_item(item: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    is_answer = item.get("role") == "assistant"
    return _shorten_content(item, "content", cut, "" if is_answer else handle)


def _shorten_output(item: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    return _shorten_content(item, "output", cut, handle)


def _shorten_content(item: JsonObject, key: str, cut: TextCutter, handle: str) -> JsonObject:
    """Returns the item with shorter content in the member `key`.

    A note with the `handle` replaces each part that is not text. If `handle` is empty, such parts stay.
    """
    content = item.get(key)
    if isinstance(content, str):
        return {**item, key: cut(content)}
    if isinstance(content, list):
        return {**item, key: [_shorten_part(each, cut, handle) for each in content]}
    return item


def _shorten_part(part: Any, cut: TextCutter, handle: str) -> Any:
    if isinstance(part, str):
        return cut(part)
    if is_text(part):
        text = cut(part["text"])
        return part if text == part["text"] else _replace_text(part, text)
    if isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
        return {**part, "refusal": cut(part["refusal"])}
    if not handle:
        return part
    kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
    return {"type": "input_text", "text": f"[{kind} of {handle} left out]"}


def _replace_text(part: Mapping[str, Any], text: str) -> JsonObject:
    """Returns a part with another text, and without members that refer to positions in the old text."""
    remaining = {key: each for key, each in part.items() if key != "logprobs"}
    return {**remaining, "text": text, **({"annotations": []} if "annotations" in remaining else {})}


def _shorten_shell_output(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    output = item.get("output")
    results = output if isinstance(output, list) else []
    return {**item, "output": [_shorten_streams(each, cut) for each in results]}


def _shorten_streams(shown: Any, cut: TextCutter) -> Any:
    if not isinstance(shown, dict):
        return shown
    texts = {key: shown[key] for key in ("stdout", "stderr") if isinstance(shown.get(key), str)}
    return {**shown, **{key: cut(text) for key, text in texts.items()}}


def _shorten_function_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    arguments = item.get("arguments")
    return {**item, "arguments": cut_arguments(arguments, cut)} if isinstance(arguments, str) else item


def _shorten_custom_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    call_input = item.get("input")
    return {**item, "input": cut_long_argument(call_input, cut)} if isinstance(call_input, str) else item


def _shorten_action_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    values = {key: item[key] for key in ("action", "operation") if key in item}
    return {**item, **{key: cut_long_texts(each, cut) for key, each in values.items()}}


_SHORTENERS: Final[Mapping[str, _ItemShortener]] = {
    "message": _shorten_message_item,
    "function_call": _shorten_function_call,
    "custom_tool_call": _shorten_custom_call,
    "local_shell_call": _shorten_action_call,
    "shell_call": _shorten_action_call,
    "apply_patch_call": _shorten_action_call,
    "function_call_output": _shorten_output,
    "custom_tool_call_output": _shorten_output,
    "local_shell_call_output": _shorten_output,
    "shell_call_output": _shorten_shell_output,
    "apply_patch_call_output": _shorten_output,
}


def attach_parts(record: Message, source: Message) -> Message:
    """Returns a message with the text of `record` and all parts of `source` that are not text.

    Only user messages may hold images and files, so a message with such parts gets the role `user`.

    Args:
        record: A message that the proxy has written itself.
        source: A message of the client. Its parts are copied unchanged.
    """
    [item, *_] = decode_items(source.raw) if source.raw else [{}]
    content = item.get("content")
    content_list = content if isinstance(content, list) else []
    parts = [each for each in content_list if not isinstance(each, str) and not is_text(each)]
    if not parts:
        return parse_message(encode_message(record))
    content_parts = [{"type": "input_text", "text": record.text}, *parts]
    return parse_message(encode_json({"role": "user", "content": content_parts}))
