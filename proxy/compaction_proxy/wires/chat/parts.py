"""What the parts of a chat message that are not text weigh, in tokens."""

import json
from collections.abc import Mapping
from typing import Any

from compaction_proxy.core.digest import message_digest
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.media import audio_tokens, file_tokens, image_url_tokens
from compaction_proxy.wires.chat.messages import decoded, record_of
from compaction_proxy.wires.wire import Weighed

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
