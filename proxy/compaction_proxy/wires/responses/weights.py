"""Estimates the tokens of everything in a piece that is not text.

This includes images and other parts, reasoning, and items that the provider has made. A piece is the JSON of
one core message (see `Wire`).
"""

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
from compaction_proxy.wires.responses.items import (
    CALL_TYPES_BY_OUTPUT,
    COMPACTION_TYPES,
    OUTPUT_TYPES_BY_CALL,
    decode_items,
)
from compaction_proxy.wires.responses.messages import as_string, build_record, get_kind, is_text
from compaction_proxy.wires.wire import UncountedMessage

# The largest estimate for a part of unknown kind, in tokens.
UNKNOWN_PART_TOKENS: Final = 1_000
# Bytes per character of base64, which encodes three bytes as four characters.
_BASE64_RATIO: Final = 0.75
# For English, for JSON, and for the text that was encrypted in reasoning.
_BYTES_PER_TOKEN: Final = 4

ItemFields = Mapping[str, Any]


def parse_uncounted(raw: bytes, model: str) -> UncountedMessage:
    """Parses a piece, and estimates the tokens that everything in it except text takes for `model`.

    Raises:
        UnreadableBodyError: The bytes are not a piece.
    """
    items = decode_items(raw)
    record = build_record(raw, items)
    has_nontext = record.parts or record.has_signed_reasoning
    return UncountedMessage(
        record, compute_message_digest(record), _sum_item_tokens(items, model) if has_nontext else 0
    )


def estimate_nontext_tokens(raw: bytes, model: str) -> int:
    """Estimates the tokens of everything in a piece that is not text; 0 if the bytes are not a piece.

    The estimate is not calibrated.
    """
    try:
        return _sum_item_tokens(decode_items(raw), model)
    except UnreadableBodyError:
        return 0


def _sum_item_tokens(items: Sequence[ItemFields], model: str) -> int:
    if not any(get_kind(each) in COMPACTION_TYPES for each in items):
        return sum([_estimate_item(each, model) for each in items])
    return sum([_estimate_item(each, model) + _estimate_text(each) for each in _select_read_items(items)])


def _select_read_items(items: Sequence[ItemFields]) -> Iterable[ItemFields]:
    """Returns the items that the model reads from a piece with a provider's compaction.

    Providers return a compaction item together with some messages, and the model reads both. But if the piece
    also has calls or their answers, the client sends its whole input together with the compaction item. Then
    the provider skips all items except the compaction items.
    """
    is_uncut = any(get_kind(each) in {*OUTPUT_TYPES_BY_CALL, *CALL_TYPES_BY_OUTPUT} for each in items)
    return [each for each in items if not is_uncut or get_kind(each) in COMPACTION_TYPES]


def _estimate_text(item: ItemFields) -> int:
    """Estimates the tokens of a message's text."""
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"text": as_string(content)}]
    return sum([len(each["text"]) for each in parts if is_text(each)]) // _BYTES_PER_TOKEN


def _estimate_item(item: ItemFields, model: str) -> int:
    kind = get_kind(item)
    if kind in OUTPUT_TYPES_BY_CALL or kind == "shell_call_output":  # these items hold only text
        return 0
    if kind == "reasoning":
        return _estimate_reasoning(item)
    if kind == "image_generation_call":
        return estimate_image_url_tokens(model, "data:image/png;base64," + as_string(item.get("result")))
    if kind == "message" or kind in CALL_TYPES_BY_OUTPUT or kind == "computer_call_output":
        content = item.get("content" if kind == "message" else "output")
        return _estimate_content([content] if isinstance(content, Mapping) else content, model)
    other_members = {key: value for key, value in item.items() if key != "encrypted_content"}
    return _estimate_sealed(item) + len(json.dumps(other_members)) // _BYTES_PER_TOKEN


def _estimate_sealed(item: ItemFields) -> int:
    """Estimates the tokens of encrypted content by the number of its bytes."""
    return int(len(as_string(item.get("encrypted_content"))) * _BASE64_RATIO) // _BYTES_PER_TOKEN


def _estimate_reasoning(item: ItemFields) -> int:
    """Estimates the tokens of a reasoning item.

    Providers include only the reasoning of the current turn in the prompt, and bill only this. But a piece is
    estimated only once, while it belongs to the current turn, so all reasoning counts. For earlier turns, the
    estimate is too high; this is on the safe side, and calibration corrects it. If an item has encrypted
    reasoning, its readable reasoning does not count, because the model does not get both.
    """
    readable = [*_as_list(item.get("content")), *_as_list(item.get("summary"))]
    counted = _as_list(item.get("content")) or readable
    return (
        _estimate_sealed(item)
        or sum([len(each["text"]) for each in counted if is_text(each)]) // _BYTES_PER_TOKEN
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
    # The estimate is never more tokens than the part has bytes of JSON, because the gate relies on that.
    return min(UNKNOWN_PART_TOKENS, len(json.dumps(part)))
