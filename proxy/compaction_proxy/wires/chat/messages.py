"""Converts chat messages to core records and back, and shortens them.

It also estimates the tokens of their parts that are not text.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.media import estimate_audio_tokens, estimate_file_tokens, estimate_image_url_tokens
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.chat.continuation import REASONING_FIELDS
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import TextCutter, cut_arguments, cut_long_argument, encode_json
from compaction_proxy.wires.payload_digest import hash_address, hash_part, hash_text
from compaction_proxy.wires.wire import UncountedMessage

# A message with more content parts than this is not parsed, because no model could read it.
MAX_PARTS = 10_000
# Messages with these roles make no tool calls, whatever fields they have.
_ROLES_WITHOUT_CALLS = frozenset({"system", "developer", "user", "tool", "function"})
# Content parts that hold a model's thinking. They are not part of the answer.
_THINKING_KINDS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Fields with data that a provider has signed or encrypted: in a message (OpenRouter, LiteLLM, Copilot,
# Gemini), or in one of its calls (Gemini).
_SIGNED_FIELDS = frozenset(
    {"reasoning_details", "thinking_blocks", "reasoning_opaque", "reasoning_signature", "extra_content"}
)
# Fields that hold tool calls.
_CALL_FIELDS = frozenset({"tool_calls", "function_call"})


def decode_fields(raw: bytes) -> dict[str, Any]:
    """Decodes one message.

    Raises:
        UnreadableBodyError: `not-json`, `no-messages` (not an object), `too-many` or `too-deep`.
    """
    value = large.decode_value(raw)
    if not isinstance(value, dict):
        raise UnreadableBodyError("no-messages")
    return value


def parse_message(raw: bytes) -> Message:
    """Parses one message into a core record with its digest. The `tokens` of the record are 0.

    Raises:
        UnreadableBodyError: The bytes are not a message.
    """
    record = build_record(raw, decode_fields(raw))
    return record.with_digest_and_tokens(compute_message_digest(record), 0)


def build_record(raw: bytes, fields: Mapping[str, Any]) -> Message:
    """Builds the core record, without digest, of a message that `decode_fields` has decoded.

    Raises:
        UnreadableBodyError: The fields are not a message.
    """
    try:
        return _convert_fields(raw, fields)
    except RecursionError:  # encoding JSON can exceed the recursion limit even if decoding it did not
        raise UnreadableBodyError("too-deep") from None


def _convert_fields(raw: bytes, fields: Mapping[str, Any]) -> Message:
    role = _as_string(fields.get("role"))
    text, parts = _read_content(fields.get("content"))
    calls = (
        () if role in _ROLES_WITHOUT_CALLS or _CALL_FIELDS.isdisjoint(fields) else tuple(_iter_calls(fields))
    )
    answers = (_as_string(fields.get("tool_call_id")),) if role in {"tool", "function"} else ()
    audio = fields.get("audio")
    if audio and isinstance(audio, Mapping) and audio.get("id"):
        parts = (*parts, ContentPart("audio", hash_text(_as_string(audio.get("id"))), len(text)))
    return Message(
        role=role,
        text=text,
        parts=parts,
        refusal=_as_string(fields.get("refusal")),
        name=_as_string(fields.get("name")),
        calls=calls,
        answered_call_ids=answers,
        raw=raw,
        has_signed_reasoning=bool(calls) and _has_signature(fields),
    )


def _has_signature(fields: Mapping[str, Any]) -> bool:
    """Returns whether a message with calls carries thinking that its provider verifies."""
    tool_calls, content = fields.get("tool_calls"), fields.get("content")
    calls = [each for each in tool_calls if isinstance(each, dict)] if isinstance(tool_calls, list) else []
    thoughts = isinstance(content, list) and any(map(_is_thought, content))
    return thoughts or any(
        each.get(name) for each in (fields, *calls) for name in _SIGNED_FIELDS.intersection(each)
    )


def _is_thought(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _THINKING_KINDS


def _as_string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _iter_calls(fields: Mapping[str, Any]) -> Iterator[MessageToolCall]:
    for call_id, content in _iter_call_contents(fields):
        yield _build_call(_as_string(call_id), content)


def _iter_call_contents(fields: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the id and the content of each call. The legacy `function_call` has no id."""
    calls = fields.get("tool_calls")
    for each in calls if isinstance(calls, list) else ():
        if isinstance(each, dict):
            content = each.get("function") or each.get("custom")
            yield each.get("id"), content if isinstance(content, dict) else {}
    legacy = fields.get("function_call")
    if isinstance(legacy, dict):
        yield "", legacy


def _build_call(call_id: str, content: Mapping[str, Any]) -> MessageToolCall:
    arguments = content.get("arguments", content.get("input", ""))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return MessageToolCall(call_id, _as_string(content.get("name")), arguments)


def _read_content(content: object) -> tuple[str, tuple[ContentPart, ...]]:
    if not isinstance(content, list):
        plain = content is None or isinstance(content, str)
        return _as_string(content) if plain else json.dumps(content, sort_keys=True), ()
    if len(content) > MAX_PARTS:
        raise UnreadableBodyError("too-many")
    text = ""
    parts: list[ContentPart] = []
    for each in content:
        if isinstance(each, str):
            text += each
        elif isinstance(each, Mapping) and isinstance(each.get("text"), str):
            text += each["text"]
        elif isinstance(each, Mapping) and isinstance(each.get("refusal"), str):
            text += each["refusal"]
        elif not _is_thought(each):
            kind = _as_string(each.get("type")) if isinstance(each, Mapping) else ""
            parts.append(ContentPart(kind or "unknown", _hash_payload(kind, each), len(text)))
    return text, tuple(parts)


def _hash_payload(kind: str, part: Any) -> bytes:
    """Returns the SHA-256 of a part's inline data or URL (see `hash_address`), or else of its JSON."""
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
    content = decode_fields(source.raw).get("content")
    parts = [
        each
        for each in (content if isinstance(content, list) else ())
        if not isinstance(each, str) and not (isinstance(each, dict) and isinstance(each.get("text"), str))
    ]
    return parse_message(
        encode_json({"role": record.role, "content": [{"type": "text", "text": record.text}, *parts]})
    )


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Unknown fields stay. Text in the arguments of calls is shortened if it is long. Each part that is not text
    is replaced by a note with the `handle`. A message with calls and signed thinking is returned unchanged,
    because the provider verifies them together. From a message without calls, thinking and its signature are
    removed. If the result would not be shorter, the same message is returned.
    """
    if record.has_signed_reasoning:
        return record
    raw = record.raw or encode_message(record)
    fields = decode_fields(raw)
    fields = fields if record.calls else _drop_thoughts(fields)
    _shorten_fields(fields, partial(build_excerpt, share=share, source_name=handle), handle)
    try:
        shortened = encode_json(fields)
    except (ValueError, RecursionError):
        return record
    return parse_message(shortened) if len(shortened) < len(raw) else record


def _shorten_fields(fields: dict[str, Any], cut: TextCutter, handle: str) -> None:
    if isinstance(fields.get("refusal"), str):
        fields["refusal"] = cut(fields["refusal"])
    if isinstance(fields.get("content"), str):
        fields["content"] = cut(fields["content"])
    elif isinstance(fields.get("content"), list):
        fields["content"] = [_shorten_part(each, cut, handle) for each in fields["content"]]
    for _, content in _iter_call_contents(fields):
        if isinstance(content.get("arguments"), str):
            content["arguments"] = cut_arguments(content["arguments"], cut)
        if isinstance(content.get("input"), str):
            content["input"] = cut_long_argument(content["input"], cut)


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


# The largest estimate for a part of unknown kind, and the estimate for a video, in tokens.
UNKNOWN_PART_TOKENS = 1_000
# Bytes per character of base64, which encodes three bytes as four characters.
_BASE64_RATIO = 0.75


def parse_uncounted(raw: bytes, model: str) -> UncountedMessage:
    """Parses one message, and estimates the tokens that its parts other than text take for `model`.

    Raises:
        UnreadableBodyError: The bytes are not a message.
    """
    fields = decode_fields(raw)
    record = build_record(raw, fields)
    return UncountedMessage(
        record, compute_message_digest(record), _sum_part_tokens(fields, model) if record.parts else 0
    )


def estimate_nontext_tokens(raw: bytes, model: str) -> int:
    """Estimates the tokens of a message's parts that are not text; 0 if the bytes are not a message.

    The estimate is not calibrated.
    """
    try:
        return _sum_part_tokens(decode_fields(raw), model)
    except UnreadableBodyError:
        return 0


def _sum_part_tokens(fields: Mapping[str, Any], model: str) -> int:
    content = fields.get("content")
    return sum([_estimate_part(part, model) for part in content]) if isinstance(content, list) else 0


def _estimate_part(part: Any, model: str) -> int:
    if not isinstance(part, dict) or isinstance(part.get("text"), str) or part.get("type") == "refusal":
        return 0
    inner = part.get(str(part.get("type")))
    if isinstance(inner, str):
        inner = {"url": inner}
    if not isinstance(inner, dict):
        return _estimate_unknown(part)
    if part.get("type") == "image_url":
        return estimate_image_url_tokens(model, str(inner.get("url", "")), str(inner.get("detail", "auto")))
    if part.get("type") == "input_audio":
        data = str(inner.get("data", ""))
        return estimate_audio_tokens(model, int(len(data) * _BASE64_RATIO), str(inner.get("format", "")))
    if part.get("type") == "file":
        data = str(inner.get("file_data", ""))
        return estimate_file_tokens(int(len(data) * _BASE64_RATIO) if data else None)
    return UNKNOWN_PART_TOKENS if part.get("type") == "video_url" else _estimate_unknown(part)


def _estimate_unknown(part: dict[str, Any]) -> int:
    """Estimates the tokens of a part of unknown kind.

    The estimate is never more tokens than the part has bytes of JSON, because the gate relies on that.
    """
    return min(UNKNOWN_PART_TOKENS, len(json.dumps(part)))
