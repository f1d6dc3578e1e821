"""What the blocks of a message that are not text weigh, in tokens."""

import json
from collections.abc import Mapping
from typing import Any, Final

from compaction_proxy.core.digest import message_digest
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.media import file_tokens, image_url_tokens
from compaction_proxy.core.message import Message
from compaction_proxy.wires.messages.blocks import CALL, RESULT, THINKING
from compaction_proxy.wires.messages.messages import decoded, is_text, kind_told, record_of
from compaction_proxy.wires.messages.thinking import has_thoughts
from compaction_proxy.wires.wire import Weighed

# Base64 carries three bytes in four characters.
_BASE64_RATIO: Final = 0.75
# Characters of a token in text that nobody counts.
_TOKEN_CHARACTERS: Final = 4
# Of inline data an image's header is looked at, in characters.
_HEADER_CHARACTERS: Final = 128 * 1024


def weighed(raw: bytes, model: str) -> Weighed:
    """One piece, and what its blocks that are not text weigh.

    Raises:
        Unreadable: The bytes are no message.
    """
    fields = decoded(raw)
    record = record_of(raw, fields)
    return Weighed(record, message_digest(record), _sum(fields, model) if _heavy(record) else 0)


def part_tokens(raw: bytes, model: str) -> int:
    """Tokens of all the blocks of a piece that are not text, before calibration."""
    try:
        return _sum(decoded(raw), model)
    except Unreadable:
        return 0


def _heavy(record: Message) -> bool:
    return bool(record.parts) or has_thoughts(record)


def _sum(fields: Mapping[str, Any], model: str) -> int:
    content = fields.get("content")
    return sum([_tokens(each, model) for each in content]) if isinstance(content, list) else 0


def _tokens(block: Any, model: str) -> int:
    if is_text(block) or not isinstance(block, Mapping):
        return 0
    kind, source = kind_told(block), block.get("source")
    if kind == RESULT:
        return _sum(block, model)
    if kind in THINKING:
        return _thought(block)
    if kind == "image" and isinstance(source, Mapping):
        return image_url_tokens(model, _url(source))
    if kind == "document" and isinstance(source, Mapping):
        return _document(source, model)
    return 0 if kind == CALL else _unknown(block)


def _url(source: Mapping[str, Any]) -> str:
    """The address of an image; of inline data as much as tells its size."""
    data = source.get("data")
    return (
        f"data:;base64,{data[:_HEADER_CHARACTERS]}" if isinstance(data, str) else str(source.get("url", ""))
    )


def _document(source: Mapping[str, Any], model: str) -> int:
    data = source.get("data")
    if isinstance(data, str):
        plain = source.get("type") == "text"
        return len(data) // _TOKEN_CHARACTERS if plain else file_tokens(int(len(data) * _BASE64_RATIO))
    held = source.get("content")
    if isinstance(held, list):
        return _unknown([each for each in held if is_text(each)]) + _sum(source, model)
    return len(held) // _TOKEN_CHARACTERS if isinstance(held, str) else file_tokens(None)


def _thought(block: Mapping[str, Any]) -> int:
    """What was thought: the text of it, or where that was left out, what its sealed copy may hold."""
    told = max(len(str(block.get(key, ""))) for key in ("thinking", "data"))
    sealed = int(len(str(block.get("signature", ""))) * _BASE64_RATIO)
    return max(told, sealed) // _TOKEN_CHARACTERS


def _unknown(block: Any) -> int:
    """Of a kind we do not know, such as what a provider's own tools found: never more than its bytes."""
    return len(json.dumps(block, ensure_ascii=False)) // _TOKEN_CHARACTERS
