"""The floor of the ladder at work: a list is brought under its limit without a model, and counted again."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.masking import MASK_TOKENS, find_answered_calls, format_mask, order_results_to_mask
from compaction_proxy.core.message import Message, find_latest_user_message, iter_units
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.core.truncate import GONE, WHOLE, plan_truncation
from compaction_proxy.wires.wire import Wire

# Rounds of cutting until a list fits: an estimate of how characters turn into tokens is never exact.
MAX_CUT_ATTEMPTS = 4
CUT_MARGIN = 0.92
# What the notice of what is missing and the frame of a message take.
NOTICE_TOKENS = 30


async def fill_token_counts(
    messages: Sequence[Message], view: RequestView, reader: MessageReader
) -> tuple[Message, ...]:
    """The messages, those of ours among them counted."""
    new = [each for each in messages if not each.tokens]
    counted = iter(await reader.add_token_counts(new, view.counting_options))
    return tuple(each if each.tokens else next(counted) for each in messages)


async def cut_to_fit(
    messages: tuple[Message, ...], view: RequestView, reader: MessageReader
) -> tuple[Message, ...]:
    """Returns as much of the list as fits the view's window; the list may be too large still."""
    room, most = _compute_room(view)
    names, dialect = _map_message_ids(view), view.counting_options.wire
    messages = kept = await _mask_old_results(messages, view, names, reader, room)
    if sum(each.tokens for each in messages) <= room and not view.is_too_large(messages):
        return messages
    stand_ins = frozenset(k for k, each in enumerate(messages) if id(each) in _find_replacement_ids(view))
    endings = _find_endings(messages, stand_ins, view)
    loose = [
        replace(each, tokens=each.tokens - _estimate_ending_tokens(each, endings.get(k, "")))
        for k, each in enumerate(messages)
    ]
    fixed = sum(each.tokens for each in messages) - sum(each.tokens for each in loose)
    for _ in range(MAX_CUT_ATTEMPTS):
        squeezed = plan_truncation(loose, room - fixed, stand_ins, most - fixed)
        shorter = [
            _shorten_to_allowance(
                each, allowed, names.get(id(each), "this message"), endings.get(k, ""), dialect
            )
            for k, (each, allowed) in enumerate(zip(messages, squeezed.allowances, strict=True))
        ]
        kept = await fill_token_counts([each for each in shorter if each is not None], view, reader)
        aim = room if squeezed.limit <= room - fixed else most
        is_cut = sum(each.tokens for each in kept) <= aim and not view.is_too_large(kept)
        if is_cut or not squeezed.fits:
            break
        room, most = int(room * CUT_MARGIN), int(most * CUT_MARGIN)
    return kept


def _compute_room(view: RequestView) -> tuple[int, int]:
    """Counted tokens that the messages may take: with what is kept free for safety, and at best."""
    size, bound = view.estimate_tokens(view.effective), view.estimate_upper_bound(view.effective)
    counted = max(1, view.count_tokens(view.effective))
    room = view.budget.input_limit * counted // max(1, bound) - view.overhead
    most = min(view.max_prompt_tokens, view.cut_goal_tokens or view.max_prompt_tokens)
    return room, most * counted // max(1, size) - view.overhead


def _find_replacement_ids(view: RequestView) -> set[int]:
    """The messages that stand in for others, by identity."""
    earlier = view.checkpoint
    pieces = earlier.span_replacements if earlier else ()
    edited = earlier.edited if earlier else frozenset()
    return {id(each) for span, put in pieces for each in put if span.start not in edited}


def _map_message_ids(view: RequestView) -> dict[int, str]:
    """Message ids by what stands in the effective list."""
    names = {
        id(each): format_message_id(prefix) for each, prefix in zip(view.body, view.prefixes, strict=True)
    }
    edits = view.checkpoint.edited_messages if view.checkpoint else {}
    return names | {id(each): format_message_id(view.prefixes[index]) for index, each in edits.items()}


async def _mask_old_results(
    messages: tuple[Message, ...], view: RequestView, names: dict[int, str], reader: MessageReader, room: int
) -> tuple[Message, ...]:
    """The list with tool results masked, those of the last unit excepted, as far as that is needed."""
    calls = find_answered_calls(messages)
    last = list(iter_units(messages))[-1] if messages else None
    old = [k for k, each in enumerate(messages[: last.start if last else 0]) if id(each) in names]
    size = sum(each.tokens for each in messages)
    masks: dict[int, Message] = {}
    for index in order_results_to_mask(messages, [k for k in old if messages[k].tokens > 2 * MASK_TOKENS]):
        if size <= room:
            break
        result = messages[index]
        text = format_mask(result, calls.get(index), names[id(result)])
        masks[index] = _round_trip_message(replace(result, text=text, raw=b""), view.counting_options.wire)
        size -= result.tokens - MASK_TOKENS
    return await fill_token_counts([masks.get(k, each) for k, each in enumerate(messages)], view, reader)


def _find_endings(messages: Sequence[Message], stand_ins: Iterable[int], view: RequestView) -> dict[int, str]:
    """What stand-ins must end in, by index: the latest user message, where it moved there."""
    opening, earlier = view.policy.frame.request, view.checkpoint
    if opening is None or earlier is None or earlier.carried is None:
        return {}
    if earlier.carried != find_latest_user_message(view.body):
        return {}
    ending = opening + view.body[earlier.carried].text
    return {k: ending for k in stand_ins if messages[k].text.endswith(ending)}


def _estimate_ending_tokens(message: Message, ending: str) -> int:
    return message.tokens * len(ending) // max(1, len(message.text))


def _shorten_to_allowance(
    message: Message, tokens: int | None, handle: str, ending: str, dialect: Wire
) -> Message | None:
    """The message brought down to about `tokens`, the notice of what is missing included, its ending not."""
    if tokens is WHOLE:
        return message
    if tokens == GONE and not ending:
        return None
    size = message.tokens - _estimate_ending_tokens(message, ending)
    share = max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / max(1, size)
    if not ending:
        return dialect.shorten_message(message, share, handle)
    text = build_excerpt(message.text.removesuffix(ending), share, handle) + "\n\n" + ending
    ours = Message(role=message.role, text=text)
    return dialect.attach_parts(ours, message) if message.parts else _round_trip_message(ours, dialect)


def _round_trip_message(ours: Message, dialect: Wire) -> Message:
    """A message of ours as it will be read when it comes back."""
    return dialect.parse_message(dialect.encode_message(ours))
