"""One chat message: its bytes to a core record, and bytes for a message of ours or one made shorter."""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from proxy.core.digest import message_digest
from proxy.core.message import Call, Message, Part
from proxy.core.render import excerpt
from proxy.errors import Unreadable

# Text inside the arguments of a call is shortened where it is at least this long, in characters.
LONG_ARGUMENT = 200


def _decoded(raw: bytes) -> dict[str, Any]:
    """One message as a mapping.

    Raises:
        Unreadable: It is not one: `not-json` or `too-deep`.
    """
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            raise Unreadable("not-json") from None
    except RecursionError:
        raise Unreadable("too-deep") from None
    if not isinstance(value, dict):
        raise Unreadable("no-messages")
    return value


def message(raw: bytes) -> Message:
    """The core record of one message, with its digest; `tokens` is left to be counted.

    Raises:
        Unreadable: The bytes are no message.
    """
    fields = _decoded(raw)
    role = _string(fields.get("role"))
    text, parts = _content(fields.get("content"))
    answers = (_string(fields.get("tool_call_id")),) if role in {"tool", "function"} else ()
    audio = fields.get("audio")
    if isinstance(audio, Mapping) and audio.get("id"):
        parts = (*parts, Part("audio", _sha256(_string(audio.get("id"))), len(text)))
    record = Message(
        role=role,
        text=text,
        parts=parts,
        refusal=_string(fields.get("refusal")),
        name=_string(fields.get("name")),
        calls=tuple(_calls(fields)),
        answers=answers,
        raw=raw,
    )
    return replace(record, digest=message_digest(record))


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _sha256(value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.sha256(data).digest()


def _calls(fields: Mapping[str, Any]) -> Iterator[Call]:
    listed = fields.get("tool_calls")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, Mapping):
            made = each.get("function") or each.get("custom") or {}
            yield _call(_string(each.get("id")), made)
    legacy = fields.get("function_call")
    if isinstance(legacy, Mapping):
        yield _call("", legacy)


def _call(call_id: str, made: Any) -> Call:
    if not isinstance(made, Mapping):
        return Call(call_id, "", "")
    arguments = made.get("arguments", made.get("input", ""))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return Call(call_id, _string(made.get("name")), arguments)


def _content(content: object) -> tuple[str, tuple[Part, ...]]:
    if not isinstance(content, list):
        return _string(content), ()
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
    if isinstance(inner, Mapping):
        for key in ("url", "data", "file_data"):
            if isinstance(inner.get(key), str):
                return _sha256(_address(inner[key]))
    plain = {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part
    return _sha256(json.dumps(plain, sort_keys=True, default=str))


def _address(url: str) -> str | bytes:
    if url.startswith(("http://", "https://")):
        return url.partition("?")[0]
    head, comma, data = url.rpartition(",")
    if comma and not head.endswith(";base64"):
        return url
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return url


def compose(record: Message) -> bytes:
    """The bytes of a message of ours."""
    fields: dict[str, Any] = {"role": record.role}
    if record.role == "function":
        fields["name"] = record.name
    elif record.answers:
        fields["tool_call_id"] = record.answers[0]
    fields["content"] = record.text
    return _json(fields)


def _json(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate: it can travel as an escape only
        return json.dumps(fields, separators=(",", ":")).encode()


def shortened(record: Message, share: float, handle: str) -> Message:
    """The message with about `share` (0..1) of its text, head and tail; unknown fields stay.

    Text in the arguments of calls is shortened where it is long, and parts that are not text become a note.
    """
    fields = _decoded(record.raw or compose(record))
    content = fields.get("content")
    if isinstance(content, str):
        fields["content"] = excerpt(content, share, handle)
    elif isinstance(content, list):
        fields["content"] = [_shortened_part(each, share, handle) for each in content]
    for call in fields.get("tool_calls") or ():
        made = call.get("function") if isinstance(call, dict) else None
        if isinstance(made, dict) and isinstance(made.get("arguments"), str):
            made["arguments"] = _shortened_arguments(made["arguments"], share, handle)
    return message(_json(fields))


def _shortened_part(part: Any, share: float, handle: str) -> Any:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": excerpt(part["text"], share, handle)}
    kind = part.get("type", "part") if isinstance(part, dict) else "part"
    return {"type": "text", "text": f"[{kind} of {handle} left out]"}


def _shortened_arguments(arguments: str, share: float, handle: str) -> str:
    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return excerpt(value, share, handle) if len(value) >= LONG_ARGUMENT else value
        if isinstance(value, list):
            return [walk(each) for each in value]
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        return value

    try:
        return json.dumps(walk(json.loads(arguments)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
