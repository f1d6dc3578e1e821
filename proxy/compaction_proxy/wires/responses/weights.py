"""What of a piece that is no text weighs, in tokens: parts, reasoning, and items that a provider has made."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.media import (
    estimate_audio_tokens,
    estimate_file_tokens,
    estimate_image_tokens,
    estimate_image_url_tokens,
)
from compaction_proxy.wires.responses.items import ANSWER_OF, ANSWERED, COMPACTED, decode_items
from compaction_proxy.wires.responses.messages import as_string, build_record, get_kind, is_text
from compaction_proxy.wires.wire import UncountedMessage

# A part of a kind we do not know, in tokens, at most.
UNKNOWN_PART_TOKENS: Final = 1_000
# Base64 carries three bytes in four characters.
_BASE64_RATIO: Final = 0.75
# Of English, of JSON, and of what reasoning is sealed from.
_BYTES_PER_TOKEN: Final = 4

ItemFields = Mapping[str, Any]


def parse_uncounted(raw: bytes, model: str) -> UncountedMessage:
    """A piece, and what of it that is no text weighs.

    Raises:
        Unreadable: The bytes are no piece.
    """
    items = decode_items(raw)
    record = build_record(raw, items)
    held = record.parts or record.signed
    return UncountedMessage(
        record, compute_message_digest(record), _sum_item_tokens(items, model) if held else 0
    )


def estimate_part_tokens(raw: bytes, model: str) -> int:
    """Tokens of all of a piece that is no text, before calibration."""
    try:
        return _sum_item_tokens(decode_items(raw), model)
    except UnreadableBodyError:
        return 0


def _sum_item_tokens(items: Sequence[ItemFields], model: str) -> int:
    if not any(get_kind(each) in COMPACTED for each in items):
        return sum([_estimate_item(each, model) for each in items])
    return sum([_estimate_item(each, model) + _estimate_text(each) for each in _select_read_items(items)])


def _select_read_items(items: Sequence[ItemFields]) -> Iterable[ItemFields]:
    """What of a compacted beginning the model reads.

    Providers give back messages with what they have compacted. A client that has left calls and answers in
    front of it has cleared nothing away, and its provider passes over them.
    """
    whole = any(get_kind(each) in {*ANSWER_OF, *ANSWERED} for each in items)
    return [each for each in items if not whole or get_kind(each) in COMPACTED]


def _estimate_text(item: ItemFields) -> int:
    """Tokens of a message's text, about."""
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"text": as_string(content)}]
    return sum([len(each["text"]) for each in parts if is_text(each)]) // _BYTES_PER_TOKEN


def _estimate_item(item: ItemFields, model: str) -> int:
    kind = get_kind(item)
    if kind in ANSWER_OF or kind == "shell_call_output":  # all of it is text
        return 0
    if kind == "reasoning":
        return _estimate_reasoning(item)
    if kind == "image_generation_call":
        return estimate_image_url_tokens(model, "data:image/png;base64," + as_string(item.get("result")))
    if kind == "message" or kind in ANSWERED or kind == "computer_call_output":
        held = item.get("content" if kind == "message" else "output")
        return _estimate_content([held] if isinstance(held, Mapping) else held, model)
    rest = {key: value for key, value in item.items() if key != "encrypted_content"}
    return _estimate_sealed(item) + len(json.dumps(rest)) // _BYTES_PER_TOKEN


def _estimate_sealed(item: ItemFields) -> int:
    """Tokens of what only the provider can read: no more than fit into its bytes."""
    return int(len(as_string(item.get("encrypted_content"))) * _BASE64_RATIO) // _BYTES_PER_TOKEN


def _estimate_reasoning(item: ItemFields) -> int:
    """Tokens of a reasoning item.

    Providers take those of the turn under way into the prompt and leave out, unbilled, those of turns before
    it. A piece is weighed once, wherever it comes to stand, so all count: too much is on the safe side, and
    calibration takes it up. What is shown of the reasoning the model does not get where it gets the rest.
    """
    shown = [*_as_list(item.get("content")), *_as_list(item.get("summary"))]
    read = _as_list(item.get("content")) or shown
    return (
        _estimate_sealed(item)
        or sum([len(each["text"]) for each in read if is_text(each)]) // _BYTES_PER_TOKEN
    )


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _estimate_content(content: object, model: str) -> int:
    return sum([_estimate_part(part, model) for part in content]) if isinstance(content, list) else 0


def _estimate_part(part: Any, model: str) -> int:
    if not isinstance(part, Mapping) or is_text(part) or part.get("type") == "refusal":
        return 0
    if get_kind(part) in {"input_image", "computer_screenshot"}:
        url, detail = part.get("image_url"), as_string(part.get("detail")) or "auto"
        return (
            estimate_image_url_tokens(model, url, detail)
            if isinstance(url, str)
            else estimate_image_tokens(model, None, detail)
        )
    if part.get("type") == "input_file":
        data = as_string(part.get("file_data"))
        return estimate_file_tokens(int(len(data) * _BASE64_RATIO) if data else None)
    inner = part.get("input_audio")
    if part.get("type") == "input_audio" and isinstance(inner, Mapping):
        size = int(len(as_string(inner.get("data"))) * _BASE64_RATIO)
        return estimate_audio_tokens(model, size, as_string(inner.get("format")))
    # Never more than its bytes, because the gate counts on that.
    return min(UNKNOWN_PART_TOKENS, len(json.dumps(part)))
