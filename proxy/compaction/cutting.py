"""The floor of the ladder at work: a list is brought under its limit without a model, and counted again."""

from collections.abc import Sequence

from proxy.compaction.view import View
from proxy.core.digest import message_id
from proxy.core.ladder import GONE, WHOLE, squeeze
from proxy.core.message import Message
from proxy.dialects.chat_message import shortened
from proxy.reading import Reading

# Rounds of cutting until a list fits: an estimate of how characters turn into tokens is never exact.
CUTS = 4
CUT_MARGIN = 0.92
# A size in tokens at which a ratio shows in full.
SCALE = 1_000_000
# What the notice of what is missing and the frame of a message take.
NOTICE_TOKENS = 30


async def sized(messages: Sequence[Message], view: View, reading: Reading) -> tuple[Message, ...]:
    """The messages, those of ours among them counted."""
    new = [each for each in messages if not each.tokens]
    counted = iter(await reading.counted(new, view.gauge))
    return tuple(each if each.tokens else next(counted) for each in messages)


async def cut(messages: tuple[Message, ...], view: View, reading: Reading) -> tuple[Message, ...]:
    """The list, as much of it as fits the view's limit."""
    ours = {id(each) for each in (view.earlier.stand_ins if view.earlier else ()) if each}
    stand_ins = frozenset(k for k, each in enumerate(messages) if id(each) in ours)
    names = {id(each): message_id(prefix) for each, prefix in zip(view.body, view.prefixes, strict=True)}
    room = view.budget.limit * SCALE // view.calibration.bound(SCALE) - view.overhead
    most = view.most * SCALE // view.calibration.size(SCALE) - view.overhead
    kept = messages
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


def _allowed(message: Message, tokens: int | None, handle: str) -> Message | None:
    """The message brought down to about `tokens`, the notice of what is missing included."""
    if tokens is WHOLE:
        return message
    if tokens == GONE:
        return None
    return shortened(message, max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / message.tokens, handle)
