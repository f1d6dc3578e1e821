"""What of a piece that is no text weighs, in tokens: parts, reasoning, and items that a provider has made."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.digest import message_digest
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.media import audio_tokens, file_tokens, image_tokens, image_url_tokens
from compaction_proxy.wires.responses.items import ANSWER_OF, ANSWERED, COMPACTED, decoded
from compaction_proxy.wires.responses.messages import is_text, kind_of, record_of, string
from compaction_proxy.wires.wire import Weighed

# A part of a kind we do not know, in tokens, at most.
UNKNOWN_PART_TOKENS: Final = 1_000
# Base64 carries three bytes in four characters.
_BASE64_RATIO: Final = 0.75
# Of English, of JSON, and of what reasoning is sealed from.
_BYTES_PER_TOKEN: Final = 4

Item = Mapping[str, Any]


def weighed(raw: bytes, model: str) -> Weighed:
    """A piece, and what of it that is no text weighs.

    Raises:
        Unreadable: The bytes are no piece.
    """
    items = decoded(raw)
    record = record_of(raw, items)
    held = record.parts or record.signed
    return Weighed(record, message_digest(record), _sum(items, model) if held else 0)


def part_tokens(raw: bytes, model: str) -> int:
    """Tokens of all of a piece that is no text, before calibration."""
    try:
        return _sum(decoded(raw), model)
    except Unreadable:
        return 0


def _sum(items: Sequence[Item], model: str) -> int:
    if not any(kind_of(each) in COMPACTED for each in items):
        return sum([_item(each, model) for each in items])
    return sum([_item(each, model) + _text(each) for each in _carried(items)])


def _carried(items: Sequence[Item]) -> Iterable[Item]:
    """What of a compacted beginning the model reads.

    Providers give back messages with what they have compacted. A client that has left calls and answers in
    front of it has cleared nothing away, and its provider passes over them.
    """
    whole = any(kind_of(each) in {*ANSWER_OF, *ANSWERED} for each in items)
    return [each for each in items if not whole or kind_of(each) in COMPACTED]


def _text(item: Item) -> int:
    """Tokens of a message's text, about."""
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"text": string(content)}]
    return sum([len(each["text"]) for each in parts if is_text(each)]) // _BYTES_PER_TOKEN


def _item(item: Item, model: str) -> int:
    kind = kind_of(item)
    if kind in ANSWER_OF or kind == "shell_call_output":  # all of it is text
        return 0
    if kind == "reasoning":
        return _reasoning(item)
    if kind == "image_generation_call":
        return image_url_tokens(model, "data:image/png;base64," + string(item.get("result")))
    if kind == "message" or kind in ANSWERED or kind == "computer_call_output":
        held = item.get("content" if kind == "message" else "output")
        return _content([held] if isinstance(held, Mapping) else held, model)
    rest = {key: value for key, value in item.items() if key != "encrypted_content"}
    return _sealed(item) + len(json.dumps(rest)) // _BYTES_PER_TOKEN


def _sealed(item: Item) -> int:
    """Tokens of what only the provider can read: no more than fit into its bytes."""
    return int(len(string(item.get("encrypted_content"))) * _BASE64_RATIO) // _BYTES_PER_TOKEN


def _reasoning(item: Item) -> int:
    """Tokens of a reasoning item.

    Providers take those of the turn under way into the prompt and leave out, unbilled, those of turns before
    it. A piece is weighed once, wherever it comes to stand, so all count: too much is on the safe side, and
    calibration takes it up. What is shown of the reasoning the model does not get where it gets the rest.
    """
    shown = [*_listed(item.get("content")), *_listed(item.get("summary"))]
    read = _listed(item.get("content")) or shown
    return _sealed(item) or sum([len(each["text"]) for each in read if is_text(each)]) // _BYTES_PER_TOKEN


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _content(content: object, model: str) -> int:
    return sum([_tokens(part, model) for part in content]) if isinstance(content, list) else 0


def _tokens(part: Any, model: str) -> int:
    if not isinstance(part, Mapping) or is_text(part) or part.get("type") == "refusal":
        return 0
    if kind_of(part) in {"input_image", "computer_screenshot"}:
        url, detail = part.get("image_url"), string(part.get("detail")) or "auto"
        return (
            image_url_tokens(model, url, detail)
            if isinstance(url, str)
            else image_tokens(model, None, detail)
        )
    if part.get("type") == "input_file":
        data = string(part.get("file_data"))
        return file_tokens(int(len(data) * _BASE64_RATIO) if data else None)
    inner = part.get("input_audio")
    if part.get("type") == "input_audio" and isinstance(inner, Mapping):
        size = int(len(string(inner.get("data"))) * _BASE64_RATIO)
        return audio_tokens(model, size, string(inner.get("format")))
    # Never more than its bytes, because the gate counts on that.
    return min(UNKNOWN_PART_TOKENS, len(json.dumps(part)))
