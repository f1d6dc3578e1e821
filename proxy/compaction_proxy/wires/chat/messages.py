"""Converts messages of the Chat Completions wire to `Message` objects and back, and shortens messages.

It also estimates the tokens of the parts of messages that are not text.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.media import estimate_audio_tokens, estimate_file_tokens, estimate_image_url_tokens
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.chat.search_tool import REASONING_FIELDS
from compaction_proxy.wires.content import (
    UNKNOWN_PART_TOKENS,
    PieceParser,
    count_base64_bytes,
    decode_fields,
    estimate_unknown_part,
    get_kind,
    hash_address,
    hash_part,
    hash_text,
    read_content,
    shorten_member,
)
from compaction_proxy.wires.json.values import (
    JsonObject,
    TextCutter,
    as_list,
    as_object,
    as_string,
    cut_arguments,
    cut_long_argument,
    encode_json,
)

# A message with one of these roles makes no tool calls. If it nevertheless has a field for tool calls, the
# proxy ignores this field.
_ROLES_WITHOUT_CALLS = frozenset({"system", "developer", "user", "tool", "function"})
# Types of content parts that contain a model's thinking. They are not part of the reply.
_THINKING_KINDS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Fields that contain thinking which the provider has signed or encrypted. They are fields of a message
# (OpenRouter, LiteLLM, Copilot, Gemini) or of a tool call (Gemini).
_SIGNED_FIELDS = frozenset(
    {"reasoning_details", "thinking_blocks", "reasoning_opaque", "reasoning_signature", "extra_content"}
)
_CALL_FIELDS = frozenset({"tool_calls", "function_call"})


def _convert_fields(raw: bytes, fields: Mapping[str, Any]) -> Message:
    role = as_string(fields.get("role"))
    text, parts = read_content(fields.get("content"), _read_text, _build_part)
    has_calls = role not in _ROLES_WITHOUT_CALLS and not _CALL_FIELDS.isdisjoint(fields)
    calls = tuple(_iter_calls(fields)) if has_calls else ()
    answers = (as_string(fields.get("tool_call_id")),) if role in {"tool", "function"} else ()
    audio_id = as_object(fields.get("audio")).get("id")
    if audio_id:
        parts = (*parts, ContentPart("audio", hash_text(as_string(audio_id)), len(text)))
    return Message(
        role=role,
        text=text,
        parts=parts,
        refusal=as_string(fields.get("refusal")),
        name=as_string(fields.get("name")),
        calls=calls,
        answered_call_ids=answers,
        raw=raw,
        has_signed_reasoning=bool(calls) and _has_signature(fields),
    )


def _has_signature(fields: Mapping[str, Any]) -> bool:
    """Returns whether a message contains thinking, or has one of the `_SIGNED_FIELDS`.

    Providers verify both, so the proxy must not change them.
    """
    holders = [fields, *(each for each in as_list(fields.get("tool_calls")) if isinstance(each, dict))]
    return any(map(_is_thought, as_list(fields.get("content")))) or any(
        each.get(name) for each in holders for name in _SIGNED_FIELDS.intersection(each)
    )


def _is_thought(part: Any) -> bool:
    return get_kind(part) in _THINKING_KINDS


def _iter_calls(fields: Mapping[str, Any]) -> Iterator[MessageToolCall]:
    for call_id, content in _iter_call_contents(fields):
        arguments = content.get("arguments", content.get("input", ""))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield MessageToolCall(as_string(call_id), as_string(content.get("name")), arguments)


def _iter_call_contents(fields: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the id and the content of each call. The id of the legacy `function_call` is an empty string."""
    for each in as_list(fields.get("tool_calls")):
        if isinstance(each, dict):
            yield each.get("id"), as_object(each.get("function") or each.get("custom"))
    legacy = fields.get("function_call")
    if isinstance(legacy, dict):
        yield "", legacy


def _read_text(part: Any) -> str | None:
    """Returns the text or the refusal in a content part; None if the part has neither."""
    if isinstance(part, dict):
        return next((part[key] for key in ("text", "refusal") if isinstance(part.get(key), str)), None)
    return part if isinstance(part, str) else None


def _build_part(part: Any, text_offset: int) -> ContentPart | None:
    if _is_thought(part):
        return None
    kind = get_kind(part)
    return ContentPart(kind or "unknown", _hash_payload(kind, part), text_offset)


def _hash_payload(kind: str, part: Any) -> bytes:
    """Returns the SHA-256 of a part's inline data or URL (see `hash_address`).

    If the part has neither, returns the SHA-256 of its JSON.
    """
    inner = part.get(kind) if isinstance(part, Mapping) else None
    if isinstance(inner, str):
        return hash_address(inner)
    if isinstance(inner, Mapping):
        for key in ("url", "data", "file_data"):
            if isinstance(inner.get(key), str):
                return hash_address(inner[key])
    return hash_part(part)


def encode_message(record: Message) -> bytes:
    """Returns the JSON of a message that the proxy has written itself."""
    fields: dict[str, Any] = {"role": record.role}
    if record.role == "function":
        fields["name"] = record.name
    elif record.answered_call_ids:
        fields["tool_call_id"] = record.answered_call_ids[0]
    fields["content"] = record.text
    return encode_json(fields)


def attach_parts(record: Message, source: Message) -> Message:
    """Returns a message with the text of `record` and all parts of `source` that are not text.

    Args:
        record: A message that the proxy has written itself.
        source: A message of the client. Its parts are copied unchanged.
    """
    parts = [
        each
        for each in as_list(decode_fields(source.raw).get("content"))
        if not isinstance(each, str) and not (isinstance(each, dict) and isinstance(each.get("text"), str))
    ]
    return PARSER.parse_message(
        encode_json({"role": record.role, "content": [{"type": "text", "text": record.text}, *parts]})
    )


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Also shortens long texts in the arguments of calls. Replaces each part that is not text by a note that
    contains the `handle`. Removes thinking and its signature from a message without calls. Keeps unknown
    fields. Returns `record` itself if it has both calls and signed thinking, because the provider verifies
    the two together, or if the result would not be shorter.
    """
    if record.has_signed_reasoning:
        return record
    raw = record.raw or encode_message(record)
    fields = decode_fields(raw)
    fields = fields if record.calls else _drop_thoughts(fields)
    fields = _shorten_fields(fields, partial(build_excerpt, share=share, source_name=handle), handle)
    try:
        shortened = encode_json(fields)
    except (ValueError, RecursionError):
        return record
    return PARSER.parse_message(shortened) if len(shortened) < len(raw) else record


def _shorten_fields(fields: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    if isinstance(fields.get("refusal"), str):
        fields["refusal"] = cut(fields["refusal"])
    fields = shorten_member(fields, "content", cut, partial(_shorten_part, cut=cut, handle=handle))
    for _, content in _iter_call_contents(fields):
        if isinstance(content.get("arguments"), str):
            content["arguments"] = cut_arguments(content["arguments"], cut)
        if isinstance(content.get("input"), str):
            content["input"] = cut_long_argument(content["input"], cut)
    return fields


def _drop_thoughts(fields: dict[str, Any]) -> dict[str, Any]:
    remaining = {
        name: value
        for name, value in fields.items()
        if name not in _SIGNED_FIELDS and name not in REASONING_FIELDS
    }
    if isinstance(remaining.get("content"), list):
        remaining["content"] = [each for each in remaining["content"] if not _is_thought(each)]
    return remaining


def _shorten_part(part: Any, cut: TextCutter, handle: str) -> Any:
    if isinstance(part, str):
        return cut(part)
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return {**part, key: cut(part[key])}
    kind = part.get("type", "part") if isinstance(part, dict) else "part"
    return {"type": "text", "text": f"[{kind} of {handle} left out]"}


def _sum_part_tokens(fields: Mapping[str, Any], model: str) -> int:
    return sum([_estimate_part(part, model) for part in as_list(fields.get("content"))])


def _estimate_part(part: Any, model: str) -> int:
    if not isinstance(part, dict) or isinstance(part.get("text"), str) or part.get("type") == "refusal":
        return 0
    kind = str(part.get("type"))
    inner = part.get(kind)
    if isinstance(inner, str):
        inner = {"url": inner}
    if not isinstance(inner, dict):
        return estimate_unknown_part(part)
    if kind == "image_url":
        return estimate_image_url_tokens(model, str(inner.get("url", "")), str(inner.get("detail", "auto")))
    if kind == "input_audio":
        size = count_base64_bytes(str(inner.get("data", "")))
        return estimate_audio_tokens(model, size, str(inner.get("format", "")))
    if kind == "file":
        data = str(inner.get("file_data", ""))
        return estimate_file_tokens(count_base64_bytes(data) if data else None)
    return UNKNOWN_PART_TOKENS if kind == "video_url" else estimate_unknown_part(part)


def _has_parts(record: Message) -> bool:
    return bool(record.parts)


PARSER: Final = PieceParser[JsonObject](decode_fields, _convert_fields, _has_parts, _sum_part_tokens)
