"""Builds the effective list from spans and replacements, and formats the text of a replacement."""

import re
from collections.abc import Collection, Sequence
from operator import attrgetter

from compaction_proxy.core.message import Message, Span
from compaction_proxy.core.sanitize import escape_frames_and_headings, remove_invisible
from compaction_proxy.core.strategies import SummaryFrame

# `build_excerpt` returns this text if its caller allows no part of a text to be quoted.
OMISSION_MARK = "[…]"

_is_fixed = attrgetter("is_fixed")


def build_effective_list(
    messages: Sequence[Message],
    spans: Sequence[Span],
    replacements: Sequence[Sequence[Message]],
    edited_starts: Collection[int] = (),
) -> tuple[Message, ...]:
    """Builds the effective list: the client's list with each span replaced.

    Args:
        messages: The client's whole list. Privileged messages before the end of the last removed span move to
            the start of the list, after the privileged messages that are there already. The moved messages
            keep their order. Project instructions stay in place.
        spans: The spans to replace. Their indices count the messages that are not fixed.
        replacements: The replacements of each span.
        edited_starts: Starts of the spans that consist of one shortened message, which stays in place.
    """
    leading = next((k for k, each in enumerate(messages) if not each.is_fixed), len(messages))
    body = messages[leading:]
    if any(map(_is_fixed, body)):
        return _build_around_fixed_messages(messages, spans, replacements, edited_starts)
    effective, copied = list(messages[:leading]), 0
    for span, replacement in zip(spans, replacements, strict=True):
        effective += body[copied : span.start]
        effective += replacement
        copied = span.stop
    effective += body[copied:]
    return tuple(effective)


def _build_around_fixed_messages(
    messages: Sequence[Message],
    spans: Sequence[Span],
    replacements: Sequence[Sequence[Message]],
    edited_starts: Collection[int],
) -> tuple[Message, ...]:
    """Builds the effective list for a client's list in which fixed messages follow other messages."""
    head, rest = list[Message](), list[Message]()
    starts = {span.start: k for k, span in enumerate(spans)}
    end = max((span.stop for span in spans if span.start not in edited_starts), default=0)
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


def build_excerpt(text: str, share: float, source_name: str) -> str:
    """Returns the beginning and the end of a text, together about `share` (0..1) of its length.

    A line between them gives the number of characters that are left out, and `source_name`, the handle of the
    message with the whole text. With a share of 0, the excerpt is `OMISSION_MARK`. If the excerpt would be no
    shorter than the text, the text itself is returned.
    """
    if share <= 0:
        return OMISSION_MARK if len(OMISSION_MARK) < len(text) else text
    half = max(1, int(len(text) * share / 2))
    missing = len(text) - 2 * half
    cut = f"{text[:half]}\n[… {missing:,} characters of {source_name} left out …]\n{text[-half:]}"
    return cut if missing > 0 and len(cut) < len(text) else text


def _escape_summary(text: str, closing: str) -> str:
    """Changes phrases of a summary that look like its end or like a heading of the proxy.

    A character is inserted into each such phrase, so that it no longer looks like one. `closing` is the text
    that follows the summary in its replacement; empty if there is none.
    """
    safe = escape_frames_and_headings(remove_invisible(text))
    if not closing:
        return safe
    return re.sub(
        re.escape(closing), lambda found: f"{found[0][0]} {found[0][1:]}", safe, flags=re.IGNORECASE
    )


def format_replacement_text(
    frame: SummaryFrame, round_number: int, summary: str, *, task: str = "", request: str = ""
) -> str:
    """Formats the text of a replacement: the summary in its frame, with texts of the user quoted verbatim.

    Args:
        frame: The texts before and after the summary.
        round_number: Number of the compaction.
        summary: Text of the summary or extract.
        task: The text of the task; empty if the conversation itself still contains the task.
        request: The text of the latest user message if it moves into the replacement, else empty.
    """
    parts = [f"{frame.task_heading}\n{task}"] if frame.task_heading is not None and task else []
    parts.append(_escape_summary(summary, frame.closing.strip()))
    if frame.mentions_earlier_rounds and round_number > 1:
        rounds = "round" if round_number == 2 else "rounds"
        parts.append(
            f"This summary incorporates context from {round_number - 1} previous compaction {rounds}."
        )
    text = frame.opening.replace("{round}", str(round_number)) + "\n\n".join(parts) + frame.closing
    return (
        f"{text}\n\n{frame.request_introduction}{request}" if frame.request_introduction and request else text
    )
