"""Pieces of a Responses input made shorter, and messages of ours that carry a client's images along.

Reasoning, and items that only the provider reads, are sealed or refer to each other: not a byte of them
changes.
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
    cut_if_long,
    cut_inside,
    encode_json,
)
from compaction_proxy.wires.responses.items import decode_items, split_items
from compaction_proxy.wires.responses.messages import encode_message, get_kind, is_text, parse_message

JsonObject = dict[str, Any]
_ItemShortener = Callable[[JsonObject, TextCutter, str], JsonObject]


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """The piece with about `share` (0..1) of its text, head and tail; unknown fields stay.

    Text in the arguments of calls is shortened where it is long, and parts of a user's message or a tool's
    answer that are not text become a note. Never longer than the piece is: where nothing can be won, it is
    the piece itself.
    """
    raw = record.raw or encode_message(record)
    if record.is_privileged:
        return record
    cut = partial(build_excerpt, share=share, handle=handle)
    made = b",".join([_shorten_item(each, cut, handle) for each in split_items(raw)])
    return parse_message(made) if len(made) < len(raw) else record


def _shorten_item(raw: bytes, cut: TextCutter, handle: str) -> bytes:
    """An item, or its own bytes where nothing can be won."""
    item = decode_value(raw)
    way = _SHORTENERS.get(get_kind(item))
    if way is None:
        return raw
    try:
        return min(raw, encode_json(way(item, cut, handle)), key=len)
    except (ValueError, RecursionError):
        return raw


def _shorten_message_item(item: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    spoken = item.get("role") == "assistant"
    return _shorten_content(item, "content", cut, "" if spoken else handle)


def _shorten_output(item: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    return _shorten_content(item, "output", cut, handle)


def _shorten_content(item: JsonObject, key: str, cut: TextCutter, handle: str) -> JsonObject:
    """The item with a shorter content; what is no text becomes a note if there is a handle to name."""
    held = item.get(key)
    if isinstance(held, str):
        return {**item, key: cut(held)}
    if isinstance(held, list):
        return {**item, key: [_shorten_part(each, cut, handle) for each in held]}
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
    """A part with another text, to whose characters nothing refers any more."""
    kept = {key: each for key, each in part.items() if key != "logprobs"}
    return {**kept, "text": text, **({"annotations": []} if "annotations" in kept else {})}


def _shorten_shell_output(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    held = item.get("output")
    listed = held if isinstance(held, list) else []
    return {**item, "output": [_shorten_streams(each, cut) for each in listed]}


def _shorten_streams(shown: Any, cut: TextCutter) -> Any:
    if not isinstance(shown, dict):
        return shown
    texts = {key: shown[key] for key in ("stdout", "stderr") if isinstance(shown.get(key), str)}
    return {**shown, **{key: cut(text) for key, text in texts.items()}}


def _shorten_function_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    arguments = item.get("arguments")
    return {**item, "arguments": cut_arguments(arguments, cut)} if isinstance(arguments, str) else item


def _shorten_custom_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    given = item.get("input")
    return {**item, "input": cut_if_long(given, cut)} if isinstance(given, str) else item


def _shorten_action_call(item: JsonObject, cut: TextCutter, _: str) -> JsonObject:
    held = {key: item[key] for key in ("action", "operation") if key in item}
    return {**item, **{key: cut_inside(each, cut) for key, each in held.items()}}


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
    """A message of ours that also carries the parts of another's content that are no text, as they came.

    Only what a user says may hold images and files, so it is the user who says it then.
    """
    [item, *_] = decode_items(source.raw) if source.raw else [{}]
    content = item.get("content")
    held = content if isinstance(content, list) else []
    parts = [each for each in held if not isinstance(each, str) and not is_text(each)]
    if not parts:
        return parse_message(encode_message(record))
    said = [{"type": "input_text", "text": record.text}, *parts]
    return parse_message(encode_json({"role": "user", "content": said}))
