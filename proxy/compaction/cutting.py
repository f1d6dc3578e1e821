"""The floor of the ladder at work: a list is brought under its limit without a model, and counted again."""

from collections.abc import Sequence
from dataclasses import replace

from proxy.compaction.view import View
from proxy.core.digest import message_id
from proxy.core.ladder import GONE, WHOLE, squeeze
from proxy.core.masks import MASK_TOKENS, answered_calls, first_to_go, masked_text
from proxy.core.message import Message, units
from proxy.dialects.chat_message import compose, message, shortened
from proxy.reading import Reading

# Rounds of cutting until a list fits: an estimate of how characters turn into tokens is never exact.
CUTS = 4
CUT_MARGIN = 0.92
# What the notice of what is missing and the frame of a message take.
NOTICE_TOKENS = 30


async def sized(messages: Sequence[Message], view: View, reading: Reading) -> tuple[Message, ...]:
    """The messages, those of ours among them counted."""
    new = [each for each in messages if not each.tokens]
    counted = iter(await reading.counted(new, view.gauge))
    return tuple(each if each.tokens else next(counted) for each in messages)


async def cut(messages: tuple[Message, ...], view: View, reading: Reading) -> tuple[Message, ...]:
    """The list, as much of it as fits the view's limit."""
    room, most = _room(view)
    names = _names(view)
    messages = kept = await _masked(messages, view, names, reading, room)
    if sum(each.tokens for each in messages) <= room:
        return messages
    stand_ins = frozenset(k for k, each in enumerate(messages) if id(each) in _ours(view))
    for _ in range(CUTS):
        squeezed = squeeze(messages, room, stand_ins, most)
        pairs = zip(messages, squeezed.allowances, strict=True)
        shorter = [_allowed(each, allowed, names.get(id(each), "this message")) for each, allowed in pairs]
        kept = await sized([each for each in shorter if each is not None], view, reading)
        aim = room if squeezed.limit <= room else most
        if sum(each.tokens for each in kept) <= aim or not squeezed.fits:
            break
        room, most = int(room * CUT_MARGIN), int(most * CUT_MARGIN)
    return kept


def _room(view: View) -> tuple[int, int]:
    """Counted tokens that the messages may take: with everything that is kept free, and at best."""
    size, bound = view.size(view.effective), view.bound(view.effective)
    counted = max(1, view.counted(view.effective))
    room = view.budget.limit * counted // max(1, bound) - view.overhead
    return room, view.most * counted // max(1, size) - view.overhead


def _ours(view: View) -> set[int]:
    """The messages that stand in for others, by identity."""
    earlier = view.earlier
    pieces = earlier.pieces if earlier else ()
    edited = earlier.edited if earlier else frozenset()
    return {id(each) for span, put in pieces for each in put if span.start not in edited}


def _names(view: View) -> dict[int, str]:
    """Message ids by what stands in the effective list."""
    names = {id(each): message_id(prefix) for each, prefix in zip(view.body, view.prefixes, strict=True)}
    edits = view.earlier.edits if view.earlier else {}
    return names | {id(each): message_id(view.prefixes[index]) for index, each in edits.items()}


async def _masked(
    messages: tuple[Message, ...], view: View, names: dict[int, str], reading: Reading, room: int
) -> tuple[Message, ...]:
    """The list with tool results masked, those of the last unit excepted, as far as that is needed."""
    calls = answered_calls(messages)
    last = list(units(messages))[-1] if messages else None
    old = [k for k, each in enumerate(messages[: last.start if last else 0]) if id(each) in names]
    size = sum(each.tokens for each in messages)
    masks: dict[int, Message] = {}
    for index in first_to_go(messages, [k for k in old if messages[k].tokens > 2 * MASK_TOKENS]):
        if size <= room:
            break
        result = messages[index]
        text = masked_text(result, calls.get(index), names[id(result)])
        masks[index] = message(compose(replace(result, text=text, raw=b"")))
        size -= result.tokens - MASK_TOKENS
    return await sized([masks.get(k, each) for k, each in enumerate(messages)], view, reading)


def _allowed(message: Message, tokens: int | None, handle: str) -> Message | None:
    """The message brought down to about `tokens`, the notice of what is missing included."""
    if tokens is WHOLE:
        return message
    if tokens == GONE:
        return None
    return shortened(message, max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / message.tokens, handle)
