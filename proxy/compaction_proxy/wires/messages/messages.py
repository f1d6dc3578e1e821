"""Converts pieces of the list `messages` to core records, and encodes messages that the proxy writes.

A piece is the JSON of one core message (see `Wire`). The same content gives the same record and digest as on
the Chat Completions wire. For example, the record of a tool result has the role `tool`, and the input of a
call becomes its arguments as text.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.media import estimate_file_tokens, estimate_image_url_tokens
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import encode_json
from compaction_proxy.wires.messages.blocks import (
    CACHE_MARK,
    CALL,
    RESULT,
    TEXT,
    THINKING,
    is_decoded_reminder,
)
from compaction_proxy.wires.messages.thinking import has_thoughts
from compaction_proxy.wires.payload_digest import hash_address, hash_part, hash_text
from compaction_proxy.wires.wire import UncountedMessage

# A message with more blocks than this is not parsed, because no model could read it.
MAX_BLOCKS: Final = 10_000
# The `name` in the record of a failed tool result. A mask that replaces the text keeps the name, so the
# result still counts as failed.
FAILED_RESULT_NAME: Final = "error"
# Kinds of blocks that go neither into the `text` nor into the `parts` of a record. Calls have their own
# field, and thinking is left out because only the model reads it.
_NONCONTENT_KINDS: Final = THINKING | {CALL}
# Kinds of blocks, with their names on the Chat Completions wire.
_CHAT_KINDS: Final = {"image": "image_url", "document": "file"}


def decode_fields(raw: bytes) -> dict[str, Any]:
    """Decodes the JSON of one piece.

    Raises:
        UnreadableBodyError: `not-json`, `no-messages` (not an object), `too-many` or `too-deep`.
    """
    value = large.decode_value(raw)
    if not isinstance(value, dict):
        raise UnreadableBodyError("no-messages")
    return value


def parse_message(raw: bytes) -> Message:
    """Parses one piece into a core record with its digest. The `tokens` of the record are 0.

    Raises:
        UnreadableBodyError: The bytes are not a message.
    """
    record = build_record(raw, decode_fields(raw))
    return record.with_digest_and_tokens(compute_message_digest(record), 0)


def build_record(raw: bytes, fields: Mapping[str, Any]) -> Message:
    """Builds the core record, without digest, of a piece that `decode_fields` has decoded.

    Raises:
        UnreadableBodyError: The fields are not a message.
    """
    try:
        return _convert_fields(raw, fields)
    except RecursionError:  # encoding JSON can exceed the recursion limit even if decoding it did not
        raise UnreadableBodyError("too-deep") from None


def find_result(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tool result block of a piece; None if the piece is not a tool result.

    Only reminders may follow the block (see `blocks.is_reminder`).
    """
    content = fields.get("content")
    if not isinstance(content, list) or fields.get("role") != "user":
        return None
    first, *rest = content or [None]
    is_result = isinstance(first, dict) and first.get("type") == RESULT
    return (
        first
        if is_result and all(isinstance(each, dict) and is_decoded_reminder(each) for each in rest)
        else None
    )


def _convert_fields(raw: bytes, fields: Mapping[str, Any]) -> Message:
    result = find_result(fields)
    if result is not None:
        text, parts = _read_content(result.get("content"))
        failure_name = FAILED_RESULT_NAME if result.get("is_error") is True else ""
        answers = (_as_string(result.get("tool_use_id")),)
        return Message("tool", text, parts, name=failure_name, answered_call_ids=answers, raw=raw)
    role = _as_string(fields.get("role"))
    content = fields.get("content")
    if role != "assistant" or not isinstance(content, list):
        text, parts = _read_content(content)
        return Message(role, text, parts, raw=raw)
    plain = [each for each in content if get_kind(each) not in _NONCONTENT_KINDS]
    text, parts = _read_content(plain)
    calls = tuple(_build_call(each) for each in content if get_kind(each) == CALL)
    return Message(role, text, parts, calls=calls, raw=raw)


def _as_string(value: object) -> str:
    return value if isinstance(value, str) else ""


def get_kind(block: object) -> str:
    """Returns the kind of a decoded block; empty if it has none."""
    return _as_string(block.get("type")) if isinstance(block, Mapping) else ""


def _build_call(block: Mapping[str, Any]) -> MessageToolCall:
    block_input = block.get("input", {})
    arguments = block_input if isinstance(block_input, str) else _dump_compact(block_input)
    return MessageToolCall(_as_string(block.get("id")), _as_string(block.get("name")), arguments)


def _dump_compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_content(content: object) -> tuple[str, tuple[ContentPart, ...]]:
    """Returns the text and the other parts of the content of a message or a tool result."""
    if not isinstance(content, list):
        plain = content is None or isinstance(content, str)
        return _as_string(content) if plain else json.dumps(content, sort_keys=True), ()
    if len(content) > MAX_BLOCKS:
        raise UnreadableBodyError("too-many")
    text = ""
    parts: list[ContentPart] = []
    for each in content:
        if is_text(each):
            text += each if isinstance(each, str) else each["text"]
        else:
            kind = get_kind(each)
            parts.append(
                ContentPart(_CHAT_KINDS.get(kind, kind) or "unknown", _hash_payload(kind, each), len(text))
            )
    return text, tuple(parts)


def is_text(block: object) -> bool:
    """Returns whether a decoded block is plain text."""
    if not isinstance(block, Mapping):
        return isinstance(block, str)
    return isinstance(block.get("text"), str) and block.get("type", TEXT) == TEXT


def _hash_payload(kind: str, block: Any) -> bytes:
    """Returns the SHA-256 of a block's inline data or URL (see `hash_address`), or else of its JSON."""
    source = block.get("source") if kind in _CHAT_KINDS else None
    if isinstance(source, Mapping):
        for key in ("data", "url"):
            if isinstance(source.get(key), str):
                return hash_text(source[key]) if source.get("type") == TEXT else hash_address(source[key])
        return hash_part(source)
    return hash_part(block)


def encode_message(record: Message) -> bytes:
    """Returns the JSON of a message that the proxy has written itself. A privileged role becomes `user`."""
    if record.answered_call_ids:
        result = {"type": RESULT, "tool_use_id": record.answered_call_ids[0], "content": record.text}
        error_mark = {"is_error": True} if record.name == FAILED_RESULT_NAME else {}
        return encode_json({"role": "user", "content": [{**result, **error_mark}]})
    return encode_json({"role": _choose_role(record), "content": record.text})


def _choose_role(record: Message) -> str:
    return "assistant" if record.role == "assistant" else "user"


def attach_parts(record: Message, source: Message) -> Message:
    """Returns a message with the text of `record` and all parts of `source` that are not text.

    The parts lose the client's cache marks, because the marks move with each request, but the bytes of a
    replacement never change. Otherwise, the parts stay unchanged.

    Args:
        record: A message that the proxy has written itself.
        source: A message of the client.
    """
    content = decode_fields(source.raw).get("content")
    parts = [
        drop_cache_marks(each)
        for each in (content if isinstance(content, list) else ())
        if not is_text(each) and get_kind(each) not in {*_NONCONTENT_KINDS, RESULT}
    ]
    text = [{"type": TEXT, "text": record.text}] if record.text.strip() or not parts else []
    role = _choose_role(source if parts else record)
    return parse_message(encode_json({"role": role, "content": [*text, *parts]}))


def drop_cache_marks(value: Any) -> Any:
    """Returns a block without the client's cache marks, including those of blocks inside it."""
    if not isinstance(value, Mapping):
        return value
    plain = {key: each for key, each in value.items() if key != CACHE_MARK}
    if isinstance(plain.get("content"), list):
        plain["content"] = [drop_cache_marks(each) for each in plain["content"]]
    if isinstance(plain.get("source"), Mapping):
        plain["source"] = drop_cache_marks(plain["source"])
    return plain


# Bytes per character of base64, which encodes three bytes as four characters.
_BASE64_RATIO: Final = 0.75
# Characters per token, for text whose tokens are only estimated.
_TOKEN_CHARACTERS: Final = 4
# How many characters of an image's base64 data are searched for its header, which holds its size.
_HEADER_CHARACTERS: Final = 128 * 1024


def parse_uncounted(raw: bytes, model: str) -> UncountedMessage:
    """Parses one piece, and estimates the tokens that its blocks other than text take for `model`.

    Raises:
        UnreadableBodyError: The bytes are not a message.
    """
    fields = decode_fields(raw)
    record = build_record(raw, fields)
    return UncountedMessage(
        record,
        compute_message_digest(record),
        _sum_block_tokens(fields, model) if _has_nontext(record) else 0,
    )


def estimate_nontext_tokens(raw: bytes, model: str) -> int:
    """Estimates the tokens of a piece's blocks that are not text; 0 if the bytes are not a piece.

    The estimate is not calibrated.
    """
    try:
        return _sum_block_tokens(decode_fields(raw), model)
    except UnreadableBodyError:
        return 0


def _has_nontext(record: Message) -> bool:
    return bool(record.parts) or has_thoughts(record)


def _sum_block_tokens(fields: Mapping[str, Any], model: str) -> int:
    content = fields.get("content")
    return sum([_estimate_block(each, model) for each in content]) if isinstance(content, list) else 0


def _estimate_block(block: Any, model: str) -> int:
    if is_text(block) or not isinstance(block, Mapping):
        return 0
    kind, source = get_kind(block), block.get("source")
    if kind == RESULT:
        return _sum_block_tokens(block, model)
    if kind in THINKING:
        return _estimate_thought(block)
    if kind == "image" and isinstance(source, Mapping):
        return estimate_image_url_tokens(model, _get_image_url(source))
    if kind == "document" and isinstance(source, Mapping):
        return _estimate_document(source, model)
    return 0 if kind == CALL else _estimate_unknown(block)


def _get_image_url(source: Mapping[str, Any]) -> str:
    """Returns the URL of an image. Inline data is cut, because only its header with the size is needed."""
    data = source.get("data")
    return (
        f"data:;base64,{data[:_HEADER_CHARACTERS]}" if isinstance(data, str) else str(source.get("url", ""))
    )


def _estimate_document(source: Mapping[str, Any], model: str) -> int:
    data = source.get("data")
    if isinstance(data, str):
        plain = source.get("type") == "text"
        return (
            len(data) // _TOKEN_CHARACTERS if plain else estimate_file_tokens(int(len(data) * _BASE64_RATIO))
        )
    content = source.get("content")
    if isinstance(content, list):
        return _estimate_unknown([each for each in content if is_text(each)]) + _sum_block_tokens(
            source, model
        )
    return len(content) // _TOKEN_CHARACTERS if isinstance(content, str) else estimate_file_tokens(None)


def _estimate_thought(block: Mapping[str, Any]) -> int:
    """Estimates the tokens of a thinking block by the longer of its text and its encrypted copy."""
    text_length = max(len(str(block.get(key, ""))) for key in ("thinking", "data"))
    sealed_length = int(len(str(block.get("signature", ""))) * _BASE64_RATIO)
    return max(text_length, sealed_length) // _TOKEN_CHARACTERS


def _estimate_unknown(block: Any) -> int:
    """Estimates the tokens of a block of unknown kind, such as a result of a provider's own tool.

    The estimate never exceeds the number of the block's bytes.
    """
    return len(json.dumps(block, ensure_ascii=False)) // _TOKEN_CHARACTERS
