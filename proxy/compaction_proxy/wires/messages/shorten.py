"""Shortens a client's message block by block. Blocks that need no change keep their bytes.

Thinking is signed by its provider, so it stays unchanged. The client's cache marks (`cache_control`) are
removed: the client moves them with each request, but a shortened message must keep its bytes in all later
requests.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import TextCutter, cut_long_texts, encode_json
from compaction_proxy.wires.messages.blocks import (
    CACHE_MARK,
    CALL,
    RESULT,
    TEXT,
    THINKING,
    find_message_members,
    split_blocks,
)
from compaction_proxy.wires.messages.messages import (
    drop_cache_marks,
    encode_message,
    get_kind,
    is_text,
    parse_message,
)

_MARKED: Final = b'"%b"' % CACHE_MARK.encode()

BlockChange = Callable[[Any], Any]


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Long texts in the input of calls are shortened as well. Blocks such as images are replaced by a note with
    the `handle`. Cache marks are removed. If the result would not be shorter, only the marks are removed; if
    there are none, the same record is returned.
    """
    raw = record.raw or encode_message(record)
    cut = partial(build_excerpt, share=share, source_name=handle)
    try:
        shortened = _change_content(raw, partial(_shorten_block, cut=cut, handle=handle))
        if len(shortened) >= len(raw) and _MARKED in raw:
            shortened = _change_content(raw, drop_cache_marks)
    except (UnreadableBodyError, ValueError, RecursionError):
        return record
    return parse_message(shortened) if len(shortened) < len(raw) else record


def _change_content(raw: bytes, change: BlockChange) -> bytes:
    """Returns the message with `change` applied to each block of its content. All other bytes stay the same.

    Thinking stays unchanged. Blocks whose other half is in another message lose only their cache marks (see
    `_find_unpaired_ids`).
    """
    place = find_message_members(raw).get("content")
    if place is None:
        return raw
    content = raw[place.start : place.stop]
    if content.startswith(b"["):
        values = [(block, large.decode_value(block)) for block in split_blocks(content)]
        unpaired_ids = _find_unpaired_ids([value for _, value in values])
        changed = b"[%b]" % b",".join(
            [_change_block(block, value, change, unpaired_ids) for block, value in values]
        )
    else:
        changed = encode_json(change(large.decode_value(content)))
    return b"".join((raw[: place.start], changed, raw[place.stop :]))


def _change_block(raw: bytes, value: Any, change: BlockChange, unpaired_ids: frozenset[str]) -> bytes:
    if get_kind(value) in THINKING:
        return raw
    is_unpaired = isinstance(value, Mapping) and _get_pair_id(value) in unpaired_ids
    changed = drop_cache_marks(value) if is_unpaired else change(value)
    return raw if changed == value else encode_json(changed)


def _get_pair_id(block: Mapping[str, Any]) -> str:
    """Returns the id that links a call of a provider's own tool to its result; empty for other blocks."""
    if get_kind(block) in {CALL, RESULT}:
        return ""
    pair_id = block.get("tool_use_id", block.get("id"))
    return pair_id if isinstance(pair_id, str) else ""


def _find_unpaired_ids(values: list[Any]) -> frozenset[str]:
    """Returns the ids of calls and results of a provider's own tools whose other half is in another message.

    Such a block is not replaced by a note, because providers refuse one half of a pair without the other.
    """
    ids = [_get_pair_id(each) for each in values if isinstance(each, Mapping)]
    return frozenset(each for each in ids if each and ids.count(each) == 1)


def _shorten_block(value: Any, cut: TextCutter, handle: str) -> Any:
    """Returns a block with less text and without its cache marks."""
    if isinstance(value, str):
        return cut(value)
    block = drop_cache_marks(value)
    if is_text(block):
        text = cut(block["text"])
        uncited = {key: each for key, each in block.items() if key != "citations"}
        return block if text == block["text"] else {**uncited, "text": text}
    kind = block.get("type", "part") if isinstance(block, dict) else "part"
    if kind == CALL:
        return {**block, "input": cut_long_texts(block.get("input", {}), cut)}
    if kind == RESULT:
        return _shorten_result(block, cut, handle)
    return {"type": TEXT, "text": f"[{kind} of {handle} left out]"}


def _shorten_result(block: dict[str, Any], cut: TextCutter, handle: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, str):
        return {**block, "content": cut(content)}
    if isinstance(content, list):
        return {**block, "content": [_shorten_block(each, cut, handle) for each in content]}
    return block
