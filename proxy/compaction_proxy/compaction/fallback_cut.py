"""The floor of the ladder at work: a list is brought under its limit without a model, and counted again."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_view import View
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.masking import MASK_TOKENS, answered_calls, first_to_go, masked_text
from compaction_proxy.core.message import Message, latest_user, units
from compaction_proxy.core.render import excerpt
from compaction_proxy.core.truncate import GONE, WHOLE, squeeze
from compaction_proxy.wires.wire import Dialect

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
    """Returns as much of the list as fits the view's window; the list may be too large still."""
    room, most = _room(view)
    names, dialect = _names(view), view.gauge.dialect
    messages = kept = await _masked(messages, view, names, reading, room)
    if sum(each.tokens for each in messages) <= room and not view.hopeless(messages):
        return messages
    stand_ins = frozenset(k for k, each in enumerate(messages) if id(each) in _ours(view))
    endings = _endings(messages, stand_ins, view)
    loose = [
        replace(each, tokens=each.tokens - _ending_tokens(each, endings.get(k, "")))
        for k, each in enumerate(messages)
    ]
    fixed = sum(each.tokens for each in messages) - sum(each.tokens for each in loose)
    for _ in range(CUTS):
        squeezed = squeeze(loose, room - fixed, stand_ins, most - fixed)
        shorter = [
            _allowed(each, allowed, names.get(id(each), "this message"), endings.get(k, ""), dialect)
            for k, (each, allowed) in enumerate(zip(messages, squeezed.allowances, strict=True))
        ]
        kept = await sized([each for each in shorter if each is not None], view, reading)
        aim = room if squeezed.limit <= room - fixed else most
        is_cut = sum(each.tokens for each in kept) <= aim and not view.hopeless(kept)
        if is_cut or not squeezed.fits:
            break
        room, most = int(room * CUT_MARGIN), int(most * CUT_MARGIN)
    return kept


def _room(view: View) -> tuple[int, int]:
    """Counted tokens that the messages may take: with what is kept free for safety, and at best."""
    size, bound = view.size(view.effective), view.bound(view.effective)
    counted = max(1, view.counted(view.effective))
    room = view.budget.input_limit * counted // max(1, bound) - view.overhead
    most = min(view.most, view.goal or view.most)
    return room, most * counted // max(1, size) - view.overhead


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
        masks[index] = _read(replace(result, text=text, raw=b""), view.gauge.dialect)
        size -= result.tokens - MASK_TOKENS
    return await sized([masks.get(k, each) for k, each in enumerate(messages)], view, reading)


def _endings(messages: Sequence[Message], stand_ins: Iterable[int], view: View) -> dict[int, str]:
    """What stand-ins must end in, by index: the latest user message, where it moved there."""
    opening, earlier = view.policy.frame.request, view.earlier
    if opening is None or earlier is None or earlier.carried is None:
        return {}
    if earlier.carried != latest_user(view.body):
        return {}
    ending = opening + view.body[earlier.carried].text
    return {k: ending for k in stand_ins if messages[k].text.endswith(ending)}


def _ending_tokens(message: Message, ending: str) -> int:
    return message.tokens * len(ending) // max(1, len(message.text))


def _allowed(
    message: Message, tokens: int | None, handle: str, ending: str, dialect: Dialect
) -> Message | None:
    """The message brought down to about `tokens`, the notice of what is missing included, its ending not."""
    if tokens is WHOLE:
        return message
    if tokens == GONE and not ending:
        return None
    size = message.tokens - _ending_tokens(message, ending)
    share = max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / max(1, size)
    if not ending:
        return dialect.shortened(message, share, handle)
    text = excerpt(message.text.removesuffix(ending), share, handle) + "\n\n" + ending
    ours = Message(role=message.role, text=text)
    return dialect.with_parts(ours, message) if message.parts else _read(ours, dialect)


def _read(ours: Message, dialect: Dialect) -> Message:
    """A message of ours as it will be read when it comes back."""
    return dialect.message(dialect.compose(ours))
