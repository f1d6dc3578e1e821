"""A message of a client's made shorter, block by block: what need not change keeps its bytes.

What a model has thought is sealed by its provider, so it stays as it is. The client's cache marks go: a
shortened message keeps its bytes ever after, while marks move on with each request.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import TextCutter, cut_inside, encode_json
from compaction_proxy.wires.messages.blocks import (
    CALL,
    MARK,
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

_MARKED: Final = b'"%b"' % MARK.encode()

BlockChange = Callable[[Any], Any]


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """The message with about `share` (0..1) of its text, head and tail, and without cache marks.

    Long texts inside what a call is given are shortened as well, and blocks that are not text become a note.
    Never longer than the message is: where nothing can be won, it is the message itself without its marks.
    """
    raw = record.raw or encode_message(record)
    cut = partial(build_excerpt, share=share, handle=handle)
    try:
        made = _change_content(raw, partial(_shorten_block, cut=cut, handle=handle))
        if len(made) >= len(raw) and _MARKED in raw:
            made = _change_content(raw, drop_cache_marks)
    except (UnreadableBodyError, ValueError, RecursionError):
        return record
    return parse_message(made) if len(made) < len(raw) else record


def _change_content(raw: bytes, change: BlockChange) -> bytes:
    """The message with its content changed; every other byte is its own."""
    at = find_message_members(raw).get("content")
    if at is None:
        return raw
    content = raw[at.start : at.stop]
    if content.startswith(b"["):
        values = [(block, large.decode_value(block)) for block in split_blocks(content)]
        kept = _find_unpaired_ids([value for _, value in values])
        made = b"[%b]" % b",".join([_change_block(block, value, change, kept) for block, value in values])
    else:
        made = encode_json(change(large.decode_value(content)))
    return b"".join((raw[: at.start], made, raw[at.stop :]))


def _change_block(raw: bytes, value: Any, change: BlockChange, unpaired_ids: frozenset[str]) -> bytes:
    if get_kind(value) in THINKING:
        return raw
    stays = isinstance(value, Mapping) and _get_pair_id(value) in unpaired_ids
    changed = drop_cache_marks(value) if stays else change(value)
    return raw if changed == value else encode_json(changed)


def _get_pair_id(block: Mapping[str, Any]) -> str:
    """The id by which a call of a provider's own tool and its result belong together; else empty."""
    if get_kind(block) in {CALL, RESULT}:
        return ""
    told = block.get("tool_use_id", block.get("id"))
    return told if isinstance(told, str) else ""


def _find_unpaired_ids(values: list[Any]) -> frozenset[str]:
    """Ids of such calls and results of which one half stands in another message: neither may go alone."""
    ids = [_get_pair_id(each) for each in values if isinstance(each, Mapping)]
    return frozenset(each for each in ids if each and ids.count(each) == 1)


def _shorten_block(value: Any, cut: TextCutter, handle: str) -> Any:
    """A block with less text, without its mark."""
    if isinstance(value, str):
        return cut(value)
    block = drop_cache_marks(value)
    if is_text(block):
        text = cut(block["text"])
        uncited = {key: each for key, each in block.items() if key != "citations"}
        return block if text == block["text"] else {**uncited, "text": text}
    kind = block.get("type", "part") if isinstance(block, dict) else "part"
    if kind == CALL:
        return {**block, "input": cut_inside(block.get("input", {}), cut)}
    if kind == RESULT:
        return _shorten_result(block, cut, handle)
    return {"type": TEXT, "text": f"[{kind} of {handle} left out]"}


def _shorten_result(block: dict[str, Any], cut: TextCutter, handle: str) -> dict[str, Any]:
    held = block.get("content")
    if isinstance(held, str):
        return {**block, "content": cut(held)}
    if isinstance(held, list):
        return {**block, "content": [_shorten_block(each, cut, handle) for each in held]}
    return block
