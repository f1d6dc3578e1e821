"""One chat message: its bytes to a core record, and bytes for a message of ours or one made shorter."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from proxy.core.digest import message_digest
from proxy.core.json_bounds import is_crowded
from proxy.core.message import Call, Message, Part
from proxy.core.render import excerpt
from proxy.dialects import long_json
from proxy.dialects.json_slices import DECODER
from proxy.errors import Unreadable

# More parts than this are no message that a model could read.
MAX_PARTS = 10_000
# Text inside the arguments of a call is shortened where it is at least this long, in characters.
LONG_ARGUMENT = 200
# Roles that make no calls, whatever fields their messages carry.
_CALL_NOTHING = frozenset({"system", "developer", "user", "tool", "function"})
# Fields that carry calls.
_CALLING = frozenset({"tool_calls", "function_call"})

Cut = Callable[[str], str]


def decoded(raw: bytes) -> dict[str, Any]:
    """One message as a mapping.

    Raises:
        Unreadable: It is not one: `not-json`, `no-messages` or `too-deep`.
    """
    value = long_json.value(raw)
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
    answers = (_string(fields.get("tool_call_id")),) if role in {"tool", "function"} else ()
    audio = fields.get("audio")
    if audio and isinstance(audio, Mapping) and audio.get("id"):
        parts = (*parts, Part("audio", _sha256(_string(audio.get("id"))), len(text)))
    return Message(
        role=role,
        text=text,
        parts=parts,
        refusal=_string(fields.get("refusal")),
        name=_string(fields.get("name")),
        calls=() if role in _CALL_NOTHING or _CALLING.isdisjoint(fields) else tuple(_calls(fields)),
        answers=answers,
        raw=raw,
    )


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


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
        else:
            kind = _string(each.get("type")) if isinstance(each, Mapping) else ""
            parts.append(Part(kind or "unknown", _payload(kind, each), len(text)))
    return text, tuple(parts)


def _payload(kind: str, part: Any) -> bytes:
    """SHA-256 of what a part carries: inline data, an http address without its query, else its JSON."""
    inner = part.get(kind) if isinstance(part, Mapping) else None
    if isinstance(inner, str):
        return _address(inner)
    if isinstance(inner, Mapping):
        for key in ("url", "data", "file_data"):
            if isinstance(inner.get(key), str):
                return _address(inner[key])
    plain = {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part
    return _sha256(json.dumps(plain, sort_keys=True, default=str))


def _address(url: str) -> bytes:
    """SHA-256 of what is meant by it."""
    if url.startswith(("http://", "https://")):
        return _sha256(url.partition("?")[0])
    head, comma, data = url.rpartition(",")
    if comma and not head.endswith(";base64"):
        return _sha256(url)
    try:
        return long_json.base64_sha256(data)
    except ValueError:
        return _sha256(url)


def compose(record: Message) -> bytes:
    """The bytes of a message of ours."""
    fields: dict[str, Any] = {"role": record.role}
    if record.role == "function":
        fields["name"] = record.name
    elif record.answers:
        fields["tool_call_id"] = record.answers[0]
    fields["content"] = record.text
    return _json(fields)


def with_parts(record: Message, source: Message) -> Message:
    """A message of ours that also carries the parts of another's content that are no text, as they came."""
    content = decoded(source.raw).get("content")
    parts = [
        each
        for each in (content if isinstance(content, list) else ())
        if not isinstance(each, str) and not (isinstance(each, dict) and isinstance(each.get("text"), str))
    ]
    return message(_json({"role": record.role, "content": [{"type": "text", "text": record.text}, *parts]}))


def _json(fields: Mapping[str, Any]) -> bytes:
    text = _written(fields)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate: it can travel as an escape only
        return json.dumps(fields, separators=(",", ":")).encode()


def _written(value: Any) -> str:
    """Compact JSON; ValueError if a number is too large for any, which Python would write as Infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def shortened(record: Message, share: float, handle: str) -> Message:
    """The message with about `share` (0..1) of its text, head and tail; unknown fields stay.

    Text in the arguments of calls is shortened where it is long, and parts that are not text become a note.
    Never longer than the message is: where nothing can be won, it is the message itself.
    """
    raw = record.raw or compose(record)
    fields = decoded(raw)
    cut = partial(excerpt, share=share, handle=handle)
    if isinstance(fields.get("refusal"), str):
        fields["refusal"] = cut(fields["refusal"])
    if isinstance(fields.get("content"), str):
        fields["content"] = cut(fields["content"])
    elif isinstance(fields.get("content"), list):
        fields["content"] = [_shortened_part(each, cut, handle) for each in fields["content"]]
    for _, made in _made(fields):
        if isinstance(made.get("arguments"), str):
            made["arguments"] = _shortened_arguments(made["arguments"], cut)
        if isinstance(made.get("input"), str):
            made["input"] = _cut_if_long(made["input"], cut)
    try:
        made_raw = _json(fields)
    except (ValueError, RecursionError):
        return record
    return message(made_raw) if len(made_raw) < len(raw) else record


def _shortened_part(part: Any, cut: Cut, handle: str) -> Any:
    if isinstance(part, str):
        return cut(part)
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return {**part, key: cut(part[key])}
    kind = part.get("type", "part") if isinstance(part, dict) else "part"
    return {"type": "text", "text": f"[{kind} of {handle} left out]"}


def _cut_if_long(text: str, cut: Cut) -> str:
    return cut(text) if len(text) >= LONG_ARGUMENT else text


def _shortened_arguments(arguments: str, cut: Cut) -> str:
    """Arguments that parse still do, with the same keys; others, and crowded ones, are plain text."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return _cut_if_long(value, cut)
        if isinstance(value, list):
            return [walk(each) for each in value]
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        return value

    if is_crowded(arguments):
        return _cut_if_long(arguments, cut)
    try:
        value = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return _cut_if_long(arguments, cut)
    try:
        return min(arguments, _written(walk(value)), key=len)
    except (ValueError, RecursionError):
        return arguments
