"""Shortens the messages of a request without a model until they fit the context window.

The proxy has several ways to make a request fit. It tries them in a fixed order, which is called the ladder.
The cut in this module is the last of these ways.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.masking import (
    MASK_TOKENS,
    format_mask,
    map_results_to_calls,
    order_results_to_mask,
)
from compaction_proxy.core.message import Message, find_latest_user_message, iter_units
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.core.truncate import KEEP_WHOLE, LEAVE_OUT, plan_truncation
from compaction_proxy.wires.wire import Wire

# Texts are cut after a number of characters, so the number of tokens of the cut list is not known in advance.
# The proxy counts the tokens after the cut. If there are too many, it cuts the list again, up to this many
# times in all.
MAX_CUT_ATTEMPTS = 4
# A message is cut to this share of the tokens that it may keep, because estimates are not exact. If the cut
# list still has too many tokens, the list is cut again with a lower size limit: the old limit times this
# share, times the ratio of the allowed tokens to the counted tokens (at most 1).
CUT_MARGIN = 0.92
# Tokens that are reserved in a cut message for the notice that text is missing, and for the role and the
# other fields of the message.
NOTICE_TOKENS = 30


async def fill_token_counts(
    messages: Sequence[Message], view: RequestView, reader: MessageReader
) -> tuple[Message, ...]:
    """Counts the tokens of those messages that have no count. Returns all messages, in the same order."""
    uncounted = [each for each in messages if not each.tokens]
    counted = iter(await reader.add_token_counts(uncounted, view.request.counting_options))
    return tuple(each if each.tokens else next(counted) for each in messages)


async def cut_to_fit(
    messages: tuple[Message, ...], view: RequestView, reader: MessageReader
) -> tuple[Message, ...]:
    """Masks and cuts messages to make the list fit the context window.

    If even the last attempt does not cut enough, the result is still too large.
    """
    room, max_room = goal, max_goal = _compute_room(view)
    message_ids, dialect = _map_object_ids_to_handles(view), view.request.counting_options.wire
    messages = cut = await _mask_old_results(messages, view, message_ids, reader, room)
    if sum(each.tokens for each in messages) <= room and not view.is_too_large(messages):
        return messages
    stand_ins = frozenset(
        k for k, each in enumerate(messages) if id(each) in _find_replacement_object_ids(view)
    )
    endings = _find_endings(messages, stand_ins, view)
    reducible = [
        replace(each, tokens=each.tokens - _estimate_ending_tokens(each, endings.get(k, "")))
        for k, each in enumerate(messages)
    ]
    fixed = sum(each.tokens for each in messages) - sum(each.tokens for each in reducible)
    for _ in range(MAX_CUT_ATTEMPTS):
        plan = plan_truncation(reducible, room - fixed, stand_ins, max_room - fixed)
        shorter = [
            _shorten_to_allowance(
                each, allowed, message_ids.get(id(each), "this message"), endings.get(k, ""), dialect
            )
            for k, (each, allowed) in enumerate(zip(messages, plan.allowances, strict=True))
        ]
        cut = await fill_token_counts([each for each in shorter if each is not None], view, reader)
        most = goal if plan.limit_tokens <= room - fixed else max_goal
        cut_tokens = sum(each.tokens for each in cut)
        if (cut_tokens <= most and not view.is_too_large(cut)) or not plan.fits:
            break
        # The kept part of a cut text may have more tokens per character than the whole text had. So the list
        # may still be too large, and the next attempt must aim at fewer tokens.
        share = CUT_MARGIN * min(1, most / cut_tokens)
        room, max_room = int(room * share), int(max_room * share)
    return cut


def _compute_room(view: RequestView) -> tuple[int, int]:
    """Returns two limits for the size of the messages, in counted tokens.

    The first limit includes a safety margin. The second limit has no margin: important content is cut only if
    the list exceeds the second limit.
    """
    size, bound = (
        view.effective_estimate,
        view.effective_bound,
    )
    counted = max(1, view.effective_tokens)
    room = view.budget.input_limit * counted // max(1, bound) - view.overhead_tokens
    max_tokens = min(view.max_prompt_tokens, view.cut_goal_tokens or view.max_prompt_tokens)
    return room, max_tokens * counted // max(1, size) - view.overhead_tokens


def _find_replacement_object_ids(view: RequestView) -> set[int]:
    """Returns the Python ids (`id()`) of the replacements in the effective list.

    Masked and capped messages are not included.
    """
    checkpoint = view.checkpoint
    pieces = checkpoint.span_replacements if checkpoint else ()
    edited = checkpoint.edited if checkpoint else frozenset()
    return {id(each) for span, put in pieces for each in put if span.start not in edited}


def _map_object_ids_to_handles(view: RequestView) -> dict[int, str]:
    """Maps the Python id (`id()`) of each message that is not fixed to the handle of the message, `m_…`.

    Masked and capped versions of these messages are included. Replacements of spans are not included.
    """
    names = {
        id(each): format_message_id(prefix)
        for each, prefix in zip(view.unfixed_messages, view.prefixes, strict=True)
    }
    edits = view.checkpoint.edited_messages if view.checkpoint else {}
    return names | {id(each): format_message_id(view.prefixes[index]) for index, each in edits.items()}


async def _mask_old_results(
    messages: tuple[Message, ...],
    view: RequestView,
    message_ids: dict[int, str],
    reader: MessageReader,
    room_tokens: int,
) -> tuple[Message, ...]:
    """Masks tool results, one by one, until the list takes at most `room_tokens`, if possible.

    The results in the last unit are never masked.
    """
    calls = map_results_to_calls(messages)
    last = list(iter_units(messages))[-1] if messages else None
    candidates = [
        k for k, each in enumerate(messages[: last.start if last else 0]) if id(each) in message_ids
    ]
    size = sum(each.tokens for each in messages)
    masks: dict[int, Message] = {}
    for index in order_results_to_mask(
        messages, [k for k in candidates if messages[k].tokens > 2 * MASK_TOKENS]
    ):
        if size <= room_tokens:
            break
        result = messages[index]
        text = format_mask(result, calls.get(index), message_ids[id(result)])
        masks[index] = round_trip_message(
            replace(result, text=text, raw=b""), view.request.counting_options.wire
        )
        size -= result.tokens - MASK_TOKENS
    return await fill_token_counts([masks.get(k, each) for k, each in enumerate(messages)], view, reader)


def _find_endings(
    messages: Sequence[Message], replacement_indices: Iterable[int], view: RequestView
) -> dict[int, str]:
    """Finds replacements at whose end an earlier compaction has put the text of the latest user message.

    This ending of a replacement must stay whole. The result maps the index of each such replacement to its
    ending. The result is empty if no compaction has moved the latest user message.
    """
    opening, earlier = view.policy.frame.request_introduction, view.checkpoint
    if opening is None or earlier is None or earlier.carried is None:
        return {}
    if earlier.carried != find_latest_user_message(view.unfixed_messages):
        return {}
    ending = opening + view.unfixed_messages[earlier.carried].text
    return {k: ending for k in replacement_indices if messages[k].text.endswith(ending)}


def _estimate_ending_tokens(message: Message, ending: str) -> int:
    return message.tokens * len(ending) // max(1, len(message.text))


def _shorten_to_allowance(
    message: Message, tokens: int | None, handle: str, ending: str, wire: Wire
) -> Message | None:
    """Shortens a message to about `tokens` tokens, including a notice that text is missing.

    The text `ending` at the end of the message stays whole, and `tokens` does not include it. Returns the
    message unchanged if `tokens` is `KEEP_WHOLE`. Returns None if `tokens` is `LEAVE_OUT` and there is no
    ending.
    """
    if tokens is KEEP_WHOLE:
        return message
    if tokens == LEAVE_OUT and not ending:
        return None
    size = message.tokens - _estimate_ending_tokens(message, ending)
    share = max(0, CUT_MARGIN * tokens - NOTICE_TOKENS) / max(1, size)
    if not ending:
        return wire.shorten_message(message, share, handle)
    text = build_excerpt(message.text.removesuffix(ending), share, handle) + "\n\n" + ending
    shortened = Message(role=message.role, text=text)
    return wire.attach_parts(shortened, message) if message.parts else round_trip_message(shortened, wire)


def round_trip_message(message: Message, wire: Wire) -> Message:
    """Encodes a new message and parses the bytes again.

    So the result equals the message that is read from the same bytes later.
    """
    return wire.parse_message(wire.encode_message(message))
