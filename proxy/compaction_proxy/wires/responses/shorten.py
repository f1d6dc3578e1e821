"""Pieces of a Responses input made shorter, and messages of ours that carry a client's images along.

Reasoning, and items that only the provider reads, are sealed or refer to each other: not a byte of them
changes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.message import Message
from compaction_proxy.core.render import excerpt
from compaction_proxy.wires.json.large import value
from compaction_proxy.wires.json.shorten import Cut, cut_arguments, cut_if_long, cut_inside, encoded
from compaction_proxy.wires.responses.items import cut_up, decoded
from compaction_proxy.wires.responses.messages import compose, is_text, kind_of, message

JsonObject = dict[str, Any]
_Shorter = Callable[[JsonObject, Cut, str], JsonObject]


def shortened(record: Message, share: float, handle: str) -> Message:
    """The piece with about `share` (0..1) of its text, head and tail; unknown fields stay.

    Text in the arguments of calls is shortened where it is long, and parts of a user's message or a tool's
    answer that are not text become a note. Never longer than the piece is: where nothing can be won, it is
    the piece itself.
    """
    raw = record.raw or compose(record)
    if record.privileged:
        return record
    cut = partial(excerpt, share=share, handle=handle)
    made = b",".join([_shorter(each, cut, handle) for each in cut_up(raw)])
    return message(made) if len(made) < len(raw) else record


def _shorter(raw: bytes, cut: Cut, handle: str) -> bytes:
    """An item, or its own bytes where nothing can be won."""
    item = value(raw)
    way = _WAYS.get(kind_of(item))
    if way is None:
        return raw
    try:
        return min(raw, encoded(way(item, cut, handle)), key=len)
    except (ValueError, RecursionError):
        return raw


def _message(item: JsonObject, cut: Cut, handle: str) -> JsonObject:
    spoken = item.get("role") == "assistant"
    return _with(item, "content", cut, "" if spoken else handle)


def _output(item: JsonObject, cut: Cut, handle: str) -> JsonObject:
    return _with(item, "output", cut, handle)


def _with(item: JsonObject, key: str, cut: Cut, handle: str) -> JsonObject:
    """The item with a shorter content; what is no text becomes a note if there is a handle to name."""
    held = item.get(key)
    if isinstance(held, str):
        return {**item, key: cut(held)}
    if isinstance(held, list):
        return {**item, key: [_part(each, cut, handle) for each in held]}
    return item


def _part(part: Any, cut: Cut, handle: str) -> Any:
    if isinstance(part, str):
        return cut(part)
    if is_text(part):
        text = cut(part["text"])
        return part if text == part["text"] else _recited(part, text)
    if isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
        return {**part, "refusal": cut(part["refusal"])}
    if not handle:
        return part
    kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
    return {"type": "input_text", "text": f"[{kind} of {handle} left out]"}


def _recited(part: Mapping[str, Any], text: str) -> JsonObject:
    """A part with another text, to whose characters nothing refers any more."""
    kept = {key: each for key, each in part.items() if key != "logprobs"}
    return {**kept, "text": text, **({"annotations": []} if "annotations" in kept else {})}


def _shell(item: JsonObject, cut: Cut, _: str) -> JsonObject:
    held = item.get("output")
    listed = held if isinstance(held, list) else []
    return {**item, "output": [_streams(each, cut) for each in listed]}


def _streams(shown: Any, cut: Cut) -> Any:
    if not isinstance(shown, dict):
        return shown
    texts = {key: shown[key] for key in ("stdout", "stderr") if isinstance(shown.get(key), str)}
    return {**shown, **{key: cut(text) for key, text in texts.items()}}


def _function(item: JsonObject, cut: Cut, _: str) -> JsonObject:
    arguments = item.get("arguments")
    return {**item, "arguments": cut_arguments(arguments, cut)} if isinstance(arguments, str) else item


def _custom(item: JsonObject, cut: Cut, _: str) -> JsonObject:
    given = item.get("input")
    return {**item, "input": cut_if_long(given, cut)} if isinstance(given, str) else item


def _action(item: JsonObject, cut: Cut, _: str) -> JsonObject:
    held = {key: item[key] for key in ("action", "operation") if key in item}
    return {**item, **{key: cut_inside(each, cut) for key, each in held.items()}}


_WAYS: Final[Mapping[str, _Shorter]] = {
    "message": _message,
    "function_call": _function,
    "custom_tool_call": _custom,
    "local_shell_call": _action,
    "shell_call": _action,
    "apply_patch_call": _action,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
    "shell_call_output": _shell,
    "apply_patch_call_output": _output,
}


def with_parts(record: Message, source: Message) -> Message:
    """A message of ours that also carries the parts of another's content that are no text, as they came.

    Only what a user says may hold images and files, so it is the user who says it then.
    """
    [item, *_] = decoded(source.raw) if source.raw else [{}]
    content = item.get("content")
    held = content if isinstance(content, list) else []
    parts = [each for each in held if not isinstance(each, str) and not is_text(each)]
    if not parts:
        return message(compose(record))
    said = [{"type": "input_text", "text": record.text}, *parts]
    return message(encoded({"role": "user", "content": said}))
