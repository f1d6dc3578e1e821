"""From spans and stand-ins to the list that is forwarded, and the text of a stand-in."""

from collections.abc import Sequence

from proxy.core.message import Message, Span
from proxy.core.policy import Policy

# What is left of a text of which nothing may be left.
MARK = "[…]"


def render(
    messages: Sequence[Message], spans: Sequence[Span], stand_ins: Sequence[Message | None]
) -> tuple[Message, ...]:
    """The effective list: each span replaced by its stand-in.

    `messages` is the client's whole list; spans count its non-privileged messages. Privileged messages are
    always the current request's: those before the end of the last span move up behind the leading ones, so
    that all of them keep their order.
    """
    head: list[Message] = []
    rest: list[Message] = []
    index = 0
    end = spans[-1].stop if spans else 0
    for message in messages:
        if message.privileged:
            (head if index < end or not rest else rest).append(message)
            continue
        at = next((k for k, span in enumerate(spans) if span.start <= index < span.stop), None)
        if at is None:
            rest.append(message)
        elif index == spans[at].start and (stand_in := stand_ins[at]) is not None:
            rest.append(stand_in)
        index += 1
    return (*head, *rest)


def excerpt(text: str, share: float, handle: str) -> str:
    """Head and tail of a text, together about `share` (0..1) of it, and between them what is missing.

    The text itself where that would be no shorter; nothing but a mark where the share is 0.
    """
    if share <= 0:
        return MARK if len(MARK) < len(text) else text
    half = max(1, int(len(text) * share / 2))
    missing = len(text) - 2 * half
    cut = f"{text[:half]}\n[… {missing:,} characters of {handle} left out …]\n{text[-half:]}"
    return cut if missing > 0 and len(cut) < len(text) else text


def stand_in_text(policy: Policy, number: int, task: str, summary: str) -> str:
    """The stand-in of a round: heading and task are ours and verbatim, the rest is the summary model's.

    An empty `task` is left out: it still stands in the conversation itself.
    """
    parts = [policy.heading.format(round=number)]
    if task:
        parts.append(f"### Original Task\n{task}")
    parts.append(summary)
    if number > 1:
        rounds = "round" if number == 2 else "rounds"
        parts.append(f"This summary incorporates context from {number - 1} previous compaction {rounds}.")
    return "\n\n".join(parts)
