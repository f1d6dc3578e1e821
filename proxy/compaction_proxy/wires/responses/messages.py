"""A piece of a Responses input as a core record, and the bytes of a message of ours."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.wires.chat.messages import MAX_PARTS
from compaction_proxy.wires.json.shorten import encode_json
from compaction_proxy.wires.payload_digest import hash_address, hash_part
from compaction_proxy.wires.project_instructions import join_sources
from compaction_proxy.wires.responses.items import (
    ANSWER_OF,
    ANSWERED,
    STANDING,
    ItemGrouping,
    classify_item,
    decode_items,
)

# Between the messages of one answer.
_BREAK = "\n\n"
# Members of an item that say nothing about what it is.
_NAMING = frozenset({"id", "status"})
# Calls that have no name of their own, and where their arguments stand.
_BUILT_IN = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}

JsonObject = dict[str, Any]


def parse_message(raw: bytes) -> Message:
    """The core record of a piece, with its digest; `tokens` is left to be counted.

    Raises:
        Unreadable: The bytes are no piece.
    """
    record = build_record(raw, decode_items(raw))
    return record.with_digest_and_tokens(compute_message_digest(record), 0)


def build_record(raw: bytes, items: Sequence[JsonObject]) -> Message:
    """The same for a piece that is `decoded` already, without its digest.

    Raises:
        Unreadable: It is no piece.
    """
    try:
        return _convert_items(raw, items)
    except RecursionError:  # what could just be decoded cannot always be written again
        raise UnreadableBodyError("too-deep") from None


def _convert_items(raw: bytes, items: Sequence[JsonObject]) -> Message:
    sides = [classify_item(as_string(each.get("type")), as_string(each.get("role"))) for each in items]
    if ItemGrouping.COMPACTED in sides:
        return Message(
            "developer", parts=(ContentPart("compaction", hashlib.sha256(raw).digest(), 0),), raw=raw
        )
    if sides[0] is ItemGrouping.RUN:
        return _convert_run(raw, items)
    item = items[0]
    kind = as_string(item.get("type"))
    if kind in ANSWERED:
        return _convert_output(raw, item, kind)
    if kind in STANDING:
        return Message("developer", parts=(ContentPart(kind, hash_part(_drop_identity(item)), 0),), raw=raw)
    text, parts, refusal = read_content(item.get("content"))
    return Message(as_string(item.get("role")), text, parts, refusal, as_string(item.get("name")), raw=raw)


def as_string(value: object) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def get_kind(item: Mapping[str, Any]) -> str:
    """The kind of an item; that of a message may be left out."""
    return as_string(item.get("type")) or "message"


def _convert_run(raw: bytes, items: Sequence[JsonObject]) -> Message:
    """Everything of an answer but its reasoning, which only says that it is signed."""
    text, refusal, signed = "", "", False
    parts: list[ContentPart] = []
    calls: list[MessageToolCall] = []
    for item in items:
        kind = get_kind(item)
        if kind == "reasoning":
            signed = True
        elif kind in ANSWER_OF:
            calls.append(build_call(item))
        elif kind == "message":
            said, among, refused = read_content(item.get("content"))
            text += _BREAK if text and said else ""
            parts += [ContentPart(each.kind, each.payload, each.at + len(text)) for each in among]
            text, refusal = text + said, refusal + refused
        else:
            parts.append(ContentPart(kind, hash_part(_drop_identity(item)), len(text)))
    return Message("assistant", text, tuple(parts), refusal, calls=tuple(calls), raw=raw, signed=signed)


def _drop_identity(item: Mapping[str, Any]) -> JsonObject:
    return {key: value for key, value in item.items() if key not in _NAMING}


def build_call(item: Mapping[str, Any]) -> MessageToolCall:
    """The call that an item makes."""
    kind = get_kind(item)
    name, held = _BUILT_IN.get(kind, ("", "input" if kind == "custom_tool_call" else "arguments"))
    arguments = item.get(held, "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return MessageToolCall(_get_call_id(item), name or as_string(item.get("name")), arguments)


def _get_call_id(item: Mapping[str, Any]) -> str:
    """The id that pairs a call with its answer; a local shell's answer may have it as its own."""
    return as_string(item.get("call_id")) or (
        as_string(item.get("id")) if get_kind(item).startswith("local_shell") else ""
    )


def _convert_output(raw: bytes, item: Mapping[str, Any], kind: str) -> Message:
    output, answers = item.get("output"), (_get_call_id(item),)
    if kind == "shell_call_output":
        name, text = f"{kind}:{_read_outcome(output)}", "\n".join(_iter_shell_texts(output))
        return Message("tool", text, name=name, answers=answers, raw=raw)
    text, parts, _ = read_content(output)
    name = "" if kind == "function_call_output" else kind
    if kind == "apply_patch_call_output":
        name = f"{kind}:{as_string(item.get('status'))}"
    return Message("tool", text, parts, name=name, answers=answers, raw=raw)


def _iter_shell_texts(output: object) -> Iterator[str]:
    """What commands of a shell have written."""
    for each in output if isinstance(output, list) else ():
        if isinstance(each, Mapping):
            yield from filter(None, (as_string(each.get("stdout")), as_string(each.get("stderr"))))


def _read_outcome(output: object) -> str:
    """How the last command of a shell ended: its exit code, or `timeout`."""
    last = output[-1] if isinstance(output, list) and output else None
    outcome = last.get("outcome") if isinstance(last, Mapping) else None
    told = outcome if isinstance(outcome, Mapping) else {}
    return "timeout" if told.get("type") == "timeout" else str(told.get("exit_code", 0))


def read_content(content: object) -> tuple[str, tuple[ContentPart, ...], str]:
    """Text, other parts, and refusal of a message's content or a call's output.

    Raises:
        Unreadable: `too-many`; it has more parts than a model could read.
    """
    if not isinstance(content, list):
        plain = content is None or isinstance(content, str)
        return as_string(content) if plain else json.dumps(content, sort_keys=True), (), ""
    if len(content) > MAX_PARTS:
        raise UnreadableBodyError("too-many")
    text, refusal = "", ""
    parts: list[ContentPart] = []
    for each in content:
        if isinstance(each, str):
            text += each
        elif is_text(each):
            text += each["text"]
        elif isinstance(each, Mapping) and isinstance(each.get("refusal"), str):
            refusal += each["refusal"]
        else:
            parts.append(_build_part(each, len(text)))
    return text, tuple(parts), refusal


def is_text(part: Any) -> bool:
    """Whether a part of a content is text."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _build_part(part: Any, at: int) -> ContentPart:
    """A part as it would be told of on any wire."""
    kind = as_string(part.get("type")) if isinstance(part, Mapping) else ""
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return ContentPart("image_url", hash_address(part["image_url"]), at)
    if kind == "input_file":
        held = next((part[key] for key in ("file_data", "file_url") if isinstance(part.get(key), str)), None)
        inner = {key: part[key] for key in ("file_id", "filename") if part.get(key)}
        return ContentPart(
            "file", hash_address(held) if held else hash_part({"type": "file", "file": inner}), at
        )
    audio = part.get(kind) if kind == "input_audio" else None
    if isinstance(audio, Mapping) and isinstance(audio.get("data"), str):
        return ContentPart(kind, hash_address(audio["data"]), at)
    marked = isinstance(part, Mapping) and "prompt_cache_breakpoint" in part
    plain = {key: each for key, each in part.items() if key != "prompt_cache_breakpoint"} if marked else part
    return ContentPart(kind or "unknown", hash_part(plain), at)


def encode_message(record: Message) -> bytes:
    """The bytes of a message of ours.

    What an assistant says has the shape of an answer: servers that translate to chat take no other.
    """
    if record.answers:
        kind, _, ending = record.name.partition(":")
        return encode_json(
            _build_output(record, kind if kind in ANSWERED else "function_call_output", ending)
        )
    if record.role == "assistant":
        said = [{"type": "output_text", "text": record.text}]
        return encode_json({"type": "message", "role": "assistant", "content": said})
    return encode_json({"role": record.role, "content": record.text})


def _build_output(record: Message, kind: str, ending: str = "") -> JsonObject:
    """An answer to a call.

    Args:
        record: What it says.
        kind: The kind of the item.
        ending: How a shell's command, or a patch, ended; empty where that is not known.
    """
    called, text = record.answers[0], record.text
    if kind == "shell_call_output":
        code = int(ending) if ending.isascii() and ending.isdigit() else 0
        outcome = {"type": "timeout"} if ending == "timeout" else {"type": "exit", "exit_code": code}
        shown = [{"stdout": text, "stderr": "", "outcome": outcome}]
        return {"type": kind, "call_id": called, "output": shown}
    if kind == "apply_patch_call_output":
        status = ending if ending in {"completed", "failed"} else "failed"
        return {"type": kind, "call_id": called, "status": status, "output": text}
    # The specification has the call's id as the item's own there, the provider's examples as `call_id`.
    own = {"id": called} if kind == "local_shell_call_output" else {}
    return {"type": kind, **own, "call_id": called, "output": text}


def join_messages(messages: Sequence[Message]) -> bytes:
    """The items of a list. An answer of ours is of the kind that its call asks for."""
    made: list[bytes] = []
    messages = join_sources(messages)
    for index, each in enumerate(messages):
        if not each.raw and each.answers and each.name.partition(":")[0] not in ANSWERED:
            kind = _find_output_kind(each.answers[0], messages[:index])
            made.append(encode_json(_build_output(each, kind)))
        else:
            made.append(each.raw or encode_message(each))
    return b",".join(made)


def _find_output_kind(called: str, before: Sequence[Message]) -> str:
    """The kind of answer to the nearest call with this id."""
    for message in reversed(before):
        if any(call.id == called for call in message.calls):
            made = (
                (each for each in decode_items(message.raw) if get_kind(each) in ANSWER_OF)
                if message.raw
                else ()
            )
            return next(
                (ANSWER_OF[get_kind(each)] for each in made if _get_call_id(each) == called),
                "function_call_output",
            )
    return "function_call_output"
