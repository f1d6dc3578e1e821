"""A message of a client's made shorter, block by block: what need not change keeps its bytes.

What a model has thought is sealed by its provider, so it stays as it is. The client's cache marks go: a
shortened message keeps its bytes ever after, while marks move on with each request.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.message import Message
from compaction_proxy.core.render import excerpt
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import Cut, cut_inside, encoded
from compaction_proxy.wires.messages.blocks import CALL, MARK, RESULT, TEXT, THINKING, places_of
from compaction_proxy.wires.messages.blocks import blocks_of as elements_of
from compaction_proxy.wires.messages.messages import compose, is_text, kind_told, message, without_mark

_MARKED: Final = b'"%b"' % MARK.encode()

Change = Callable[[Any], Any]


def shortened(record: Message, share: float, handle: str) -> Message:
    """The message with about `share` (0..1) of its text, head and tail, and without cache marks.

    Long texts inside what a call is given are shortened as well, and blocks that are not text become a note.
    Never longer than the message is: where nothing can be won, it is the message itself without its marks.
    """
    raw = record.raw or compose(record)
    cut = partial(excerpt, share=share, handle=handle)
    try:
        made = _rebuilt(raw, partial(_shorter, cut=cut, handle=handle))
        if len(made) >= len(raw) and _MARKED in raw:
            made = _rebuilt(raw, without_mark)
    except (Unreadable, ValueError, RecursionError):
        return record
    return message(made) if len(made) < len(raw) else record


def _rebuilt(raw: bytes, change: Change) -> bytes:
    """The message with its content changed; every other byte is its own."""
    at = places_of(raw).get("content")
    if at is None:
        return raw
    content = raw[at.start : at.stop]
    if content.startswith(b"["):
        values = [(block, large.value(block)) for block in elements_of(content)]
        kept = _bound_elsewhere([value for _, value in values])
        made = b"[%b]" % b",".join([_block(block, value, change, kept) for block, value in values])
    else:
        made = encoded(change(large.value(content)))
    return b"".join((raw[: at.start], made, raw[at.stop :]))


def _block(raw: bytes, value: Any, change: Change, kept: frozenset[str]) -> bytes:
    if kind_told(value) in THINKING:
        return raw
    stays = isinstance(value, Mapping) and _pair(value) in kept
    changed = without_mark(value) if stays else change(value)
    return raw if changed == value else encoded(changed)


def _pair(block: Mapping[str, Any]) -> str:
    """The id by which a call of a provider's own tool and its result belong together; else empty."""
    if kind_told(block) in {CALL, RESULT}:
        return ""
    told = block.get("tool_use_id", block.get("id"))
    return told if isinstance(told, str) else ""


def _bound_elsewhere(values: list[Any]) -> frozenset[str]:
    """Ids of such calls and results of which one half stands in another message: neither may go alone."""
    ids = [_pair(each) for each in values if isinstance(each, Mapping)]
    return frozenset(each for each in ids if each and ids.count(each) == 1)


def _shorter(value: Any, cut: Cut, handle: str) -> Any:
    """A block with less text, without its mark."""
    if isinstance(value, str):
        return cut(value)
    block = without_mark(value)
    if is_text(block):
        text = cut(block["text"])
        uncited = {key: each for key, each in block.items() if key != "citations"}
        return block if text == block["text"] else {**uncited, "text": text}
    kind = block.get("type", "part") if isinstance(block, dict) else "part"
    if kind == CALL:
        return {**block, "input": cut_inside(block.get("input", {}), cut)}
    if kind == RESULT:
        return _shorter_result(block, cut, handle)
    return {"type": TEXT, "text": f"[{kind} of {handle} left out]"}


def _shorter_result(block: dict[str, Any], cut: Cut, handle: str) -> dict[str, Any]:
    held = block.get("content")
    if isinstance(held, str):
        return {**block, "content": cut(held)}
    if isinstance(held, list):
        return {**block, "content": [_shorter(each, cut, handle) for each in held]}
    return block
