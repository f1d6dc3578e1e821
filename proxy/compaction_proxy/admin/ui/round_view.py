"""The three panes of a round: messages that were removed, what took their place, what the model then saw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compaction_proxy.admin.ui.diff import (
    MAX_COMPARED_CHARACTERS,
    DiffPiece,
    DiffWords,
    index_words,
    split_pieces,
)
from compaction_proxy.admin.ui.shown import MessageView

STAND_IN = "stand-in"
# Of one message, and messages of one pane; the rest is a link away.
MAX_SHOWN_CHARACTERS = 4_000
MAX_SHOWN_MESSAGES = 200


@dataclass(frozen=True, slots=True)
class PaneMessage:
    """A message in a pane.

    Attributes:
        message: The message.
        pieces: Its text, or as much of it as is shown.
        left_out: Characters that are not shown.
        stand_in: Whether it is one that a round has written.
    """

    message: MessageView
    pieces: Sequence[DiffPiece]
    left_out: int
    stand_in: bool


@dataclass(frozen=True, slots=True)
class RoundPanes:
    """What a round did.

    Attributes:
        removed: Messages that it removed; pieces that the text in their place has, too, are marked.
        removed_left_out: Number of those that are not shown.
        summary: The text in their place; pieces that stand in the messages as well are marked.
        seen: What the model then saw; so are the stand-ins there.
        seen_left_out: Number of those that are not shown.
    """

    removed: Sequence[PaneMessage]
    removed_left_out: int
    summary: Sequence[DiffPiece]
    seen: Sequence[PaneMessage]
    seen_left_out: int


def build_panes(summary: str, removed: Sequence[MessageView], seen: Sequence[MessageView]) -> RoundPanes:
    """Compare what was removed with what took its place. Takes at most 100 ms, whatever the sizes are."""
    stand_ins = [each.text for each in seen if each.origin == STAND_IN]
    before = index_words(each.text for each in removed)
    after = index_words([summary, *stand_ins])
    return RoundPanes(
        removed=_compare_messages(removed[:MAX_SHOWN_MESSAGES], after, everywhere=True),
        removed_left_out=max(0, len(removed) - MAX_SHOWN_MESSAGES),
        summary=split_pieces(summary[:MAX_COMPARED_CHARACTERS], before),
        seen=_compare_messages(seen[:MAX_SHOWN_MESSAGES], before, everywhere=False),
        seen_left_out=max(0, len(seen) - MAX_SHOWN_MESSAGES),
    )


def _compare_messages(
    messages: Iterable[MessageView], other: DiffWords, *, everywhere: bool
) -> list[PaneMessage]:
    """Messages of a pane, compared as long as there is room."""
    shown: list[PaneMessage] = []
    remaining = MAX_COMPARED_CHARACTERS
    for message in messages:
        stand_in = message.origin == STAND_IN
        text = message.text[: remaining if stand_in else MAX_SHOWN_CHARACTERS]
        compared = (everywhere or stand_in) and len(text) <= remaining
        remaining -= len(text) if compared else 0
        found = split_pieces(text, other) if compared else [DiffPiece(text, is_shared=False)]
        shown.append(PaneMessage(message, found, len(message.text) - len(text), stand_in))
    return shown
