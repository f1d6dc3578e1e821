"""One chat message: its bytes to a core record, and bytes for a message of ours or one made shorter."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from compaction_proxy.core.digest import message_digest
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.media import audio_tokens, file_tokens, image_url_tokens
from compaction_proxy.core.message import Call, Message, Part
from compaction_proxy.core.render import excerpt
from compaction_proxy.wires.chat.continuation import REASONING
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import Cut, cut_arguments, cut_if_long, encoded
from compaction_proxy.wires.payload_digest import address, opaque, sha256
from compaction_proxy.wires.wire import Weighed

# More parts than this are no message that a model could read.
MAX_PARTS = 10_000
# Roles that make no calls, whatever fields their messages carry.
_CALL_NOTHING = frozenset({"system", "developer", "user", "tool", "function"})
# What a model has thought, as parts of its content: no part of what it said.
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# Fields that carry what a provider has signed or sealed: in a message (OpenRouter, LiteLLM, Copilot, Gemini),
# or in one of its calls (Gemini).
_SIGNING = frozenset(
    {"reasoning_details", "thinking_blocks", "reasoning_opaque", "reasoning_signature", "extra_content"}
)
# Fields that carry calls.
_CALLING = frozenset({"tool_calls", "function_call"})


def decoded(raw: bytes) -> dict[str, Any]:
    """One message as a mapping.

    Raises:
        Unreadable: It is not one: `not-json`, `no-messages` or `too-deep`.
    """
    value = large.value(raw)
    if not isinstance(value, dict):
        raise Unreadable("no-messages")
    return value


def message(raw: bytes) -> Message:
    """The core record of one message, with its digest; `tokens` is left to be counted.

    Raises:
        Unreadable: The bytes are no message.
    """
    record = record_of(raw, decoded(raw))
    return record.known(message_digest(record), 0)


def record_of(raw: bytes, fields: Mapping[str, Any]) -> Message:
    """The same for a message that is `decoded` already, without its digest.

    Raises:
        Unreadable: It is no message.
    """
    try:
        return _record(raw, fields)
    except RecursionError:  # what could just be decoded cannot always be written again
        raise Unreadable("too-deep") from None


def _record(raw: bytes, fields: Mapping[str, Any]) -> Message:
    role = _string(fields.get("role"))
    text, parts = _content(fields.get("content"))
    calls = () if role in _CALL_NOTHING or _CALLING.isdisjoint(fields) else tuple(_calls(fields))
    answers = (_string(fields.get("tool_call_id")),) if role in {"tool", "function"} else ()
    audio = fields.get("audio")
    if audio and isinstance(audio, Mapping) and audio.get("id"):
        parts = (*parts, Part("audio", sha256(_string(audio.get("id"))), len(text)))
    return Message(
        role=role,
        text=text,
        parts=parts,
        refusal=_string(fields.get("refusal")),
        name=_string(fields.get("name")),
        calls=calls,
        answers=answers,
        raw=raw,
        signed=bool(calls) and _signed(fields),
    )


def _signed(fields: Mapping[str, Any]) -> bool:
    """Whether a message that makes calls carries reasoning that its provider knows again."""
    listed, content = fields.get("tool_calls"), fields.get("content")
    calls = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    thoughts = isinstance(content, list) and any(map(_is_thought, content))
    return thoughts or any(
        each.get(name) for each in (fields, *calls) for name in _SIGNING.intersection(each)
    )


def _is_thought(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _THOUGHTS


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _calls(fields: Mapping[str, Any]) -> Iterator[Call]:
    for call_id, made in _made(fields):
        yield _call(_string(call_id), made)


def _made(fields: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Id and content of each call; the legacy `function_call` has no id."""
    listed = fields.get("tool_calls")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            made = each.get("function") or each.get("custom")
            yield each.get("id"), made if isinstance(made, dict) else {}
    legacy = fields.get("function_call")
    if isinstance(legacy, dict):
        yield "", legacy


def _call(call_id: str, made: Mapping[str, Any]) -> Call:
    arguments = made.get("arguments", made.get("input", ""))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(call_id, _string(made.get("name")), arguments)


def _content(content: object) -> tuple[str, tuple[Part, ...]]:
    if not isinstance(content, list):
        plain = content is None or isinstance(content, str)
        return _string(content) if plain else json.dumps(content, sort_keys=True), ()
    if len(content) > MAX_PARTS:
        raise Unreadable("too-many")
    text = ""
    parts: list[Part] = []
    for each in content:
        if isinstance(each, str):
            text += each
        elif isinstance(each, Mapping) and isinstance(each.get("text"), str):
            text += each["text"]
        elif isinstance(each, Mapping) and isinstance(each.get("refusal"), str):
            text += each["refusal"]
        elif not _is_thought(each):
            kind = _string(each.get("type")) if isinstance(each, Mapping) else ""
            parts.append(Part(kind or "unknown", _payload(kind, each), len(text)))
    return text, tuple(parts)


def _payload(kind: str, part: Any) -> bytes:
    """SHA-256 of what a part carries: inline data, an http address without its query, else its JSON."""
    inner = part.get(kind) if isinstance(part, Mapping) else None
    if isinstance(inner, str):
        return address(inner)
    if isinstance(inner, Mapping):
        for key in ("url", "data", "file_data"):
            if isinstance(inner.get(key), str):
                return address(inner[key])
    return opaque(part)


def compose(record: Message) -> bytes:
    """The bytes of a message of ours."""
    fields: dict[str, Any] = {"role": record.role}
    if record.role == "function":
        fields["name"] = record.name
    elif record.answers:
        fields["tool_call_id"] = record.answers[0]
    fields["content"] = record.text
    return encoded(fields)


def with_parts(record: Message, source: Message) -> Message:
    """A message of ours that also carries the parts of another's content that are no text, as they came."""
    content = decoded(source.raw).get("content")
    parts = [
        each
        for each in (content if isinstance(content, list) else ())
        if not isinstance(each, str) and not (isinstance(each, dict) and isinstance(each.get("text"), str))
    ]
    return message(encoded({"role": record.role, "content": [{"type": "text", "text": record.text}, *parts]}))


def shortened(record: Message, share: float, handle: str) -> Message:
    """The message with about `share` (0..1) of its text, head and tail; unknown fields stay.

    Text in the arguments of calls is shortened where it is long, and parts that are not text become a note.
    Calls that go with signed reasoning stay as they are, for they are known by it; what was thought before a
    mere answer, and that answer's signature, go. Never longer than the message is: where nothing can be won,
    it is the message itself.
    """
    if record.signed:
        return record
    raw = record.raw or compose(record)
    fields = decoded(raw)
    fields = fields if record.calls else _without_thoughts(fields)
    _shorten(fields, partial(excerpt, share=share, handle=handle), handle)
    try:
        made_raw = encoded(fields)
    except (ValueError, RecursionError):
        return record
    return message(made_raw) if len(made_raw) < len(raw) else record


def _shorten(fields: dict[str, Any], cut: Cut, handle: str) -> None:
    if isinstance(fields.get("refusal"), str):
        fields["refusal"] = cut(fields["refusal"])
    if isinstance(fields.get("content"), str):
        fields["content"] = cut(fields["content"])
    elif isinstance(fields.get("content"), list):
        fields["content"] = [_shortened_part(each, cut, handle) for each in fields["content"]]
    for _, made in _made(fields):
        if isinstance(made.get("arguments"), str):
            made["arguments"] = cut_arguments(made["arguments"], cut)
        if isinstance(made.get("input"), str):
            made["input"] = cut_if_long(made["input"], cut)


def _without_thoughts(fields: dict[str, Any]) -> dict[str, Any]:
    said = {name: held for name, held in fields.items() if name not in _SIGNING and name not in REASONING}
    if isinstance(said.get("content"), list):
        said["content"] = [each for each in said["content"] if not _is_thought(each)]
    return said


def _shortened_part(part: Any, cut: Cut, handle: str) -> Any:
    if isinstance(part, str):
        return cut(part)
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return {**part, key: cut(part[key])}
    kind = part.get("type", "part") if isinstance(part, dict) else "part"
    return {"type": "text", "text": f"[{kind} of {handle} left out]"}


# A part of a kind we do not know, in tokens, at most.
UNKNOWN_PART_TOKENS = 1_000
# Base64 carries three bytes in four characters.
_BASE64_RATIO = 0.75


def weighed(raw: bytes, model: str) -> Weighed:
    """One message, and what its parts that are not text weigh.

    Raises:
        Unreadable: The bytes are no message.
    """
    fields = decoded(raw)
    record = record_of(raw, fields)
    return Weighed(record, message_digest(record), _sum(fields, model) if record.parts else 0)


def part_tokens(raw: bytes, model: str) -> int:
    """Tokens of all the parts of a message that are not text, before calibration."""
    try:
        return _sum(decoded(raw), model)
    except Unreadable:
        return 0


def _sum(fields: Mapping[str, Any], model: str) -> int:
    content = fields.get("content")
    return sum([_tokens(part, model) for part in content]) if isinstance(content, list) else 0


def _tokens(part: Any, model: str) -> int:
    if not isinstance(part, dict) or isinstance(part.get("text"), str) or part.get("type") == "refusal":
        return 0
    inner = part.get(str(part.get("type")))
    if isinstance(inner, str):
        inner = {"url": inner}
    if not isinstance(inner, dict):
        return _unknown(part)
    if part.get("type") == "image_url":
        return image_url_tokens(model, str(inner.get("url", "")), str(inner.get("detail", "auto")))
    if part.get("type") == "input_audio":
        data = str(inner.get("data", ""))
        return audio_tokens(model, int(len(data) * _BASE64_RATIO), str(inner.get("format", "")))
    if part.get("type") == "file":
        data = str(inner.get("file_data", ""))
        return file_tokens(int(len(data) * _BASE64_RATIO) if data else None)
    return UNKNOWN_PART_TOKENS if part.get("type") == "video_url" else _unknown(part)


def _unknown(part: dict[str, Any]) -> int:
    """Of a kind we do not know: never more than its bytes, because the gate counts on that."""
    return min(UNKNOWN_PART_TOKENS, len(json.dumps(part)))
