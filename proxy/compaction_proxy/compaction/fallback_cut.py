"""Shortens the messages of a request without a model until they fit the context window.

The proxy has several ways to make a request fit. It tries them in a fixed order, which is called the ladder.
The cut in this module is the last of these ways.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

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
from compaction_proxy.support.offload import run_in_worker_if_large
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

_Result = TypeVar("_Result")


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
    run = partial(_run_if_large, view)
    room, max_room = goal, max_goal = await run(partial(_compute_room, view))
    message_ids = await run(partial(_map_object_ids_to_handles, view))
    masked = await run(partial(_mask_old_results, messages, view, message_ids, room))
    messages = cut = await fill_token_counts(masked, view, reader)
    cut_tokens, is_too_large = await run(partial(_measure, cut, view))
    if cut_tokens <= room and not is_too_large:
        return messages
    draft = await run(partial(_draft_cut, messages, view))
    for _ in range(MAX_CUT_ATTEMPTS):
        shorter, has_important_cuts, fits = await run(
            partial(_cut_once, draft, message_ids, room, max_room, view.request.counting_options.wire)
        )
        cut = await fill_token_counts(shorter, view, reader)
        most = max_goal if has_important_cuts else goal
        cut_tokens, is_too_large = await run(partial(_measure, cut, view))
        if (cut_tokens <= most and not is_too_large) or not fits:
            break
        # The kept part of a cut text may have more tokens per character than the whole text had. So the list
        # may still be too large, and the next attempt must aim at fewer tokens.
        share = CUT_MARGIN * min(1, most / cut_tokens)
        room, max_room = int(room * share), int(max_room * share)
    return cut


async def _run_if_large(view: RequestView, work: Callable[[], _Result]) -> _Result:
    """Runs `work` in a thread if the request is so large that cutting its messages takes long."""
    size_bytes = len(view.request.body.raw)
    return await run_in_worker_if_large(size_bytes, work, message_count=len(view.messages))


def _measure(messages: Sequence[Message], view: RequestView) -> tuple[int, bool]:
    """Returns the tokens of the messages, and whether the request does not fit with them."""
    return sum(each.tokens for each in messages), view.is_too_large(messages)


class _CutDraft(NamedTuple):
    """What does not change between two attempts to cut messages.

    Attributes:
        messages: The messages to cut.
        stand_in_indices: The indices of those that a compaction has put in place of others.
        endings: The endings that must stay whole, by index (`_find_endings`).
        reducible: The messages, with the tokens that a cut may take from each.
        fixed_tokens: Tokens of all endings together.
    """

    messages: tuple[Message, ...]
    stand_in_indices: frozenset[int]
    endings: Mapping[int, str]
    reducible: tuple[Message, ...]
    fixed_tokens: int


def _draft_cut(messages: tuple[Message, ...], view: RequestView) -> _CutDraft:
    replacement_ids = _find_replacement_object_ids(view)
    stand_ins = frozenset(k for k, each in enumerate(messages) if id(each) in replacement_ids)
    endings = _find_endings(messages, stand_ins, view)
    reducible = tuple(
        replace(each, tokens=each.tokens - _estimate_ending_tokens(each, endings[k]))
        if k in endings
        else each
        for k, each in enumerate(messages)
    )
    fixed = sum(each.tokens for each in messages) - sum(each.tokens for each in reducible)
    return _CutDraft(messages, stand_ins, endings, reducible, fixed)


def _cut_once(
    draft: _CutDraft, message_ids: Mapping[int, str], room: int, max_room: int, wire: Wire
) -> tuple[list[Message], bool, bool]:
    """Cuts the messages to `room` tokens, or to `max_room` tokens if important content must be cut.

    Returns the messages that are left, whether important content was cut, and whether the plan fits.
    """
    plan = plan_truncation(
        draft.reducible, room - draft.fixed_tokens, draft.stand_in_indices, max_room - draft.fixed_tokens
    )
    shorter = [
        _shorten_to_allowance(
            each, allowed, message_ids.get(id(each), "this message"), draft.endings.get(k, ""), wire
        )
        for k, (each, allowed) in enumerate(zip(draft.messages, plan.allowances, strict=True))
    ]
    left = [each for each in shorter if each is not None]
    return left, plan.limit_tokens > room - draft.fixed_tokens, plan.fits


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


def _mask_old_results(
    messages: tuple[Message, ...], view: RequestView, message_ids: Mapping[int, str], room_tokens: int
) -> list[Message]:
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
    return [masks.get(k, each) for k, each in enumerate(messages)]


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
