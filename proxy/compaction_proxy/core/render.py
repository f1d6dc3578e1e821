"""From spans and stand-ins to the list that is forwarded, and the text of a stand-in."""

import re
from collections.abc import Collection, Sequence
from operator import attrgetter

from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.sanitize import escape_frames_and_headings
from compaction_proxy.core.strategies import SummaryFrame

# What is left of a text of which nothing may be left.
OMISSION_MARK = "[…]"

_is_fixed = attrgetter("is_fixed")


def build_effective_list(
    messages: Sequence[Message],
    spans: Sequence[Span],
    replacements: Sequence[Sequence[Message]],
    edited: Collection[int] = (),
) -> tuple[Message, ...]:
    """The effective list: each span replaced by its stand-ins.

    Args:
        messages: The client's whole list. Privileged messages before the end of the last span that is gone
            move up behind the leading ones; all keep their order. Instructions of a project stay in place.
        spans: What is replaced; they count the messages that are not fixed.
        replacements: What each span is replaced by.
        edited: Starts of the spans that hold one message that stays where it is, shortened.
    """
    leading = next((k for k, each in enumerate(messages) if not each.is_fixed), len(messages))
    body = messages[leading:]
    if any(map(_is_fixed, body)):
        return _build_around_fixed_messages(messages, spans, replacements, edited)
    made, done = list(messages[:leading]), 0
    for span, put in zip(spans, replacements, strict=True):
        made += body[done : span.start]
        made += put
        done = span.stop
    made += body[done:]
    return tuple(made)


def _build_around_fixed_messages(
    messages: Sequence[Message],
    spans: Sequence[Span],
    replacements: Sequence[Sequence[Message]],
    edited: Collection[int],
) -> tuple[Message, ...]:
    """The effective list where fixed messages stand between others."""
    head, rest = list[Message](), list[Message]()
    starts = {span.start: k for k, span in enumerate(spans)}
    end = max((span.stop for span in spans if span.start not in edited), default=0)
    index = covered_to = 0
    for message in messages:
        if message.is_privileged:
            (head if index < end or not rest else rest).append(message)
            continue
        if message.instruction is not None:
            rest.append(message)
            continue
        if (k := starts.get(index)) is not None:
            rest.extend(replacements[k])
            covered_to = spans[k].stop
        if index >= covered_to:
            rest.append(message)
        index += 1
    return (*head, *rest)


def build_excerpt(text: str, share: float, handle: str) -> str:
    """Head and tail of a text, together about `share` (0..1) of it, and between them what is missing.

    The text itself where that would be no shorter; nothing but a mark where the share is 0.
    """
    if share <= 0:
        return OMISSION_MARK if len(OMISSION_MARK) < len(text) else text
    half = max(1, int(len(text) * share / 2))
    missing = len(text) - 2 * half
    cut = f"{text[:half]}\n[… {missing:,} characters of {handle} left out …]\n{text[-half:]}"
    return cut if missing > 0 and len(cut) < len(text) else text


def _escape_summary(text: str, closing: str) -> str:
    """The text without what would end it early, or read as a line of ours."""
    safe = escape_frames_and_headings(text)
    if not closing:
        return safe
    return re.sub(
        re.escape(closing), lambda found: f"{found[0][0]} {found[0][1:]}", safe, flags=re.IGNORECASE
    )


def format_replacement_text(
    frame: SummaryFrame, number: int, summary: str, *, task: str = "", request: str = ""
) -> str:
    """The stand-in of a round: everything but `summary` is ours and verbatim.

    Args:
        frame: What stands around the summary.
        number: The round's number.
        summary: What the summary model wrote.
        task: The first user message; left out where it still stands in the conversation itself.
        request: The latest user message, if it moves into the stand-in.
    """
    parts = [f"{frame.task}\n{task}"] if frame.task is not None and task else []
    parts.append(_escape_summary(summary, frame.closing.strip()))
    if frame.integrates and number > 1:
        rounds = "round" if number == 2 else "rounds"
        parts.append(f"This summary incorporates context from {number - 1} previous compaction {rounds}.")
    text = frame.opening.replace("{round}", str(number)) + "\n\n".join(parts) + frame.closing
    return f"{text}\n\n{frame.request}{request}" if frame.request and request else text
