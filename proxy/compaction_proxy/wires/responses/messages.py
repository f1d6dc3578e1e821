"""Converts pieces of a Responses input to core records, and encodes messages that the proxy writes.

A piece is the JSON of one core message (see `Wire`): one item, or several items that belong together.
"""

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
from compaction_proxy.wires.project_instructions import rejoin_divided_messages
from compaction_proxy.wires.responses.items import (
    CALL_TYPES_BY_OUTPUT,
    OUTPUT_TYPES_BY_CALL,
    SETTING_TYPES,
    ItemGrouping,
    classify_item,
    decode_items,
)

# Separates the texts of several messages in one answer.
_MESSAGE_SEPARATOR = "\n\n"
# Members of an item that are not part of its content, so digests leave them out.
_IDENTITY_MEMBERS = frozenset({"id", "status"})
# Types of calls that have no name: the name in the call's record, and the member that holds the arguments.
_UNNAMED_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}

JsonObject = dict[str, Any]


def parse_message(raw: bytes) -> Message:
    """Parses a piece into a core record with its digest. The `tokens` of the record are 0.

    Raises:
        UnreadableBodyError: The bytes are not a piece.
    """
    record = build_record(raw, decode_items(raw))
    return record.with_digest_and_tokens(compute_message_digest(record), 0)


def build_record(raw: bytes, items: Sequence[JsonObject]) -> Message:
    """Builds the core record, without digest, of a piece that `decode_items` has decoded.

    Raises:
        UnreadableBodyError: The items are not a piece.
    """
    try:
        return _convert_items(raw, items)
    except RecursionError:  # encoding JSON can exceed the recursion limit even if decoding it did not
        raise UnreadableBodyError("too-deep") from None


def _convert_items(raw: bytes, items: Sequence[JsonObject]) -> Message:
    groupings = [classify_item(as_string(each.get("type")), as_string(each.get("role"))) for each in items]
    if ItemGrouping.COMPACTED in groupings:
        return Message(
            "developer", parts=(ContentPart("compaction", hashlib.sha256(raw).digest(), 0),), raw=raw
        )
    if groupings[0] is ItemGrouping.RUN:
        return _convert_run(raw, items)
    item = items[0]
    kind = as_string(item.get("type"))
    if kind in CALL_TYPES_BY_OUTPUT:
        return _convert_output(raw, item, kind)
    if kind in SETTING_TYPES:
        return Message("developer", parts=(ContentPart(kind, hash_part(_drop_identity(item)), 0),), raw=raw)
    text, parts, refusal = read_content(item.get("content"))
    return Message(as_string(item.get("role")), text, parts, refusal, as_string(item.get("name")), raw=raw)


def as_string(value: object) -> str:
    """Returns the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def get_kind(item: Mapping[str, Any]) -> str:
    """Returns the type of an item. An item without a type is a message."""
    return as_string(item.get("type")) or "message"


def _convert_run(raw: bytes, items: Sequence[JsonObject]) -> Message:
    """Converts the items of one answer. Reasoning only sets `has_signed_reasoning` of the record."""
    text, refusal, signed = "", "", False
    parts: list[ContentPart] = []
    calls: list[MessageToolCall] = []
    for item in items:
        kind = get_kind(item)
        if kind == "reasoning":
            signed = True
        elif kind in OUTPUT_TYPES_BY_CALL:
            calls.append(build_call(item))
        elif kind == "message":
            message_text, message_parts, message_refusal = read_content(item.get("content"))
            text += _MESSAGE_SEPARATOR if text and message_text else ""
            parts += [
                ContentPart(each.kind, each.payload_digest, each.text_offset + len(text))
                for each in message_parts
            ]
            text, refusal = text + message_text, refusal + message_refusal
        else:
            parts.append(ContentPart(kind, hash_part(_drop_identity(item)), len(text)))
    return Message(
        "assistant", text, tuple(parts), refusal, calls=tuple(calls), raw=raw, has_signed_reasoning=signed
    )


def _drop_identity(item: Mapping[str, Any]) -> JsonObject:
    return {key: value for key, value in item.items() if key not in _IDENTITY_MEMBERS}


def build_call(item: Mapping[str, Any]) -> MessageToolCall:
    """Converts an item that is a tool call to the core's form of a call."""
    kind = get_kind(item)
    name, arguments_key = _UNNAMED_CALLS.get(
        kind, ("", "input" if kind == "custom_tool_call" else "arguments")
    )
    arguments = item.get(arguments_key, "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return MessageToolCall(_get_call_id(item), name or as_string(item.get("name")), arguments)


def _get_call_id(item: Mapping[str, Any]) -> str:
    """Returns the id that links a call to its answer. Items of a local shell may have it as `id`."""
    return as_string(item.get("call_id")) or (
        as_string(item.get("id")) if get_kind(item).startswith("local_shell") else ""
    )


def _convert_output(raw: bytes, item: Mapping[str, Any], kind: str) -> Message:
    output, answers = item.get("output"), (_get_call_id(item),)
    if kind == "shell_call_output":
        name, text = f"{kind}:{_read_outcome(output)}", "\n".join(_iter_shell_texts(output))
        return Message("tool", text, name=name, answered_call_ids=answers, raw=raw)
    text, parts, _ = read_content(output)
    name = "" if kind == "function_call_output" else kind
    if kind == "apply_patch_call_output":
        name = f"{kind}:{as_string(item.get('status'))}"
    return Message("tool", text, parts, name=name, answered_call_ids=answers, raw=raw)


def _iter_shell_texts(output: object) -> Iterator[str]:
    """Yields the texts that shell commands have written to stdout and stderr."""
    for each in output if isinstance(output, list) else ():
        if isinstance(each, Mapping):
            yield from filter(None, (as_string(each.get("stdout")), as_string(each.get("stderr"))))


def _read_outcome(output: object) -> str:
    """Returns how the last shell command ended: its exit code, or `timeout`."""
    last = output[-1] if isinstance(output, list) and output else None
    outcome = last.get("outcome") if isinstance(last, Mapping) else None
    fields = outcome if isinstance(outcome, Mapping) else {}
    return "timeout" if fields.get("type") == "timeout" else str(fields.get("exit_code", 0))


def read_content(content: object) -> tuple[str, tuple[ContentPart, ...], str]:
    """Returns the text, the other parts and the refusal of a message's content or a call's output.

    Raises:
        UnreadableBodyError: `too-many`: the content has more than `MAX_PARTS` parts.
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
    """Returns whether a part of a message's content is text."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _build_part(part: Any, text_offset: int) -> ContentPart:
    """Builds the record of a part that is not text, with the same kind and digest as on the other wires."""
    kind = as_string(part.get("type")) if isinstance(part, Mapping) else ""
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return ContentPart("image_url", hash_address(part["image_url"]), text_offset)
    if kind == "input_file":
        file_source = next(
            (part[key] for key in ("file_data", "file_url") if isinstance(part.get(key), str)), None
        )
        inner = {key: part[key] for key in ("file_id", "filename") if part.get(key)}
        return ContentPart(
            "file",
            hash_address(file_source) if file_source else hash_part({"type": "file", "file": inner}),
            text_offset,
        )
    audio = part.get(kind) if kind == "input_audio" else None
    if isinstance(audio, Mapping) and isinstance(audio.get("data"), str):
        return ContentPart(kind, hash_address(audio["data"]), text_offset)
    is_marked = isinstance(part, Mapping) and "prompt_cache_breakpoint" in part
    plain = (
        {key: each for key, each in part.items() if key != "prompt_cache_breakpoint"} if is_marked else part
    )
    return ContentPart(kind or "unknown", hash_part(plain), text_offset)


def encode_message(record: Message) -> bytes:
    """Returns the JSON of a message that the proxy has written itself.

    An assistant message gets the shape that messages have in answers, because servers that translate requests
    to Chat Completions accept no other shape.
    """
    if record.answered_call_ids:
        kind, _, ending = record.name.partition(":")
        return encode_json(
            _build_output(record, kind if kind in CALL_TYPES_BY_OUTPUT else "function_call_output", ending)
        )
    if record.role == "assistant":
        content = [{"type": "output_text", "text": record.text}]
        return encode_json({"type": "message", "role": "assistant", "content": content})
    return encode_json({"role": record.role, "content": record.text})


def _build_output(record: Message, kind: str, ending: str = "") -> JsonObject:
    """Builds the item that answers a call.

    Args:
        record: The message to encode.
        kind: The type of the item.
        ending: How the shell command or the patch ended: an exit code, `timeout` or a status. Empty if
            unknown.
    """
    call_id, text = record.answered_call_ids[0], record.text
    if kind == "shell_call_output":
        code = int(ending) if ending.isascii() and ending.isdigit() else 0
        outcome = {"type": "timeout"} if ending == "timeout" else {"type": "exit", "exit_code": code}
        shell_output = [{"stdout": text, "stderr": "", "outcome": outcome}]
        return {"type": kind, "call_id": call_id, "output": shell_output}
    if kind == "apply_patch_call_output":
        status = ending if ending in {"completed", "failed"} else "failed"
        return {"type": kind, "call_id": call_id, "status": status, "output": text}
    # Here, the specification puts the call's id into `id`, but the provider's examples put it into `call_id`.
    item_id = {"id": call_id} if kind == "local_shell_call_output" else {}
    return {"type": kind, **item_id, "call_id": call_id, "output": text}


def join_messages(messages: Sequence[Message]) -> bytes:
    """Encodes messages as items, separated by commas.

    An answer to a call that the proxy has written, such as a mask, gets the type that the call requires.
    """
    encoded: list[bytes] = []
    messages = rejoin_divided_messages(messages)
    for index, each in enumerate(messages):
        if (
            not each.raw
            and each.answered_call_ids
            and each.name.partition(":")[0] not in CALL_TYPES_BY_OUTPUT
        ):
            kind = _find_output_kind(each.answered_call_ids[0], messages[:index])
            encoded.append(encode_json(_build_output(each, kind)))
        else:
            encoded.append(each.raw or encode_message(each))
    return b",".join(encoded)


def _find_output_kind(call_id: str, before: Sequence[Message]) -> str:
    """Returns the type of the item that must answer the latest call with this id in `before`.

    Returns `function_call_output` if the call is not found.
    """
    for message in reversed(before):
        if any(call.id == call_id for call in message.calls):
            call_items = (
                (each for each in decode_items(message.raw) if get_kind(each) in OUTPUT_TYPES_BY_CALL)
                if message.raw
                else ()
            )
            return next(
                (
                    OUTPUT_TYPES_BY_CALL[get_kind(each)]
                    for each in call_items
                    if _get_call_id(each) == call_id
                ),
                "function_call_output",
            )
    return "function_call_output"
