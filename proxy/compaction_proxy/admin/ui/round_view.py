"""Builds the three panes of a compaction's page.

They show the removed messages, their replacement, and the messages that the model saw after the compaction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compaction_proxy.admin.ui.diff import (
    MAX_COMPARED_CHARACTERS,
    DiffPiece,
    DiffWords,
    index_words,
    split_pieces,
)
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import STAND_IN, VisibleMessage

# Largest number of characters that are shown of a message, and of messages in a pane. The page links to the
# rest.
MAX_SHOWN_CHARACTERS = 4_000
MAX_SHOWN_MESSAGES = 200


@dataclass(frozen=True, slots=True)
class PaneMessage:
    """A message in a pane.

    Attributes:
        message: The message.
        pieces: The shown part of its text, in pieces.
        left_out: Number of characters that are not shown.
        stand_in: Whether the message is a replacement, written by a compaction.
    """

    message: RemovedMessage | VisibleMessage
    pieces: Sequence[DiffPiece]
    left_out: int
    stand_in: bool


@dataclass(frozen=True, slots=True)
class RoundPanes:
    """The three panes of a compaction.

    Attributes:
        removed: Messages that the compaction removed. Pieces that the replacement contains are marked.
        removed_left_out: Number of removed messages that are not shown.
        summary: Text of the replacement. Pieces that the removed messages contain are marked.
        seen: Messages that the model saw after the compaction. In replacements, pieces that the removed
            messages contain are marked.
        seen_left_out: Number of seen messages that are not shown.
    """

    removed: Sequence[PaneMessage]
    removed_left_out: int
    summary: Sequence[DiffPiece]
    seen: Sequence[PaneMessage]
    seen_left_out: int


def build_panes(
    summary: str, removed: Sequence[RemovedMessage], seen: Sequence[VisibleMessage]
) -> RoundPanes:
    """Builds the panes. Takes at most 100 ms, because only a limited part of the texts is compared."""
    stand_ins = [each.text for each in seen if each.origin == STAND_IN]
    before = index_words(each.text for each in removed)
    after = index_words([summary, *stand_ins])
    return RoundPanes(
        removed=_compare_messages(removed[:MAX_SHOWN_MESSAGES], after),
        removed_left_out=max(0, len(removed) - MAX_SHOWN_MESSAGES),
        summary=split_pieces(summary[:MAX_COMPARED_CHARACTERS], before),
        seen=_compare_messages(seen[:MAX_SHOWN_MESSAGES], before),
        seen_left_out=max(0, len(seen) - MAX_SHOWN_MESSAGES),
    )


def _compare_messages(
    messages: Iterable[RemovedMessage | VisibleMessage], other: DiffWords
) -> list[PaneMessage]:
    """Builds the messages of a pane, and marks the pieces that `other` contains.

    Compares removed messages and replacements, at most `MAX_COMPARED_CHARACTERS` of them. Messages that were
    kept are not compared.
    """
    panes: list[PaneMessage] = []
    remaining = MAX_COMPARED_CHARACTERS
    for message in messages:
        stand_in = isinstance(message, VisibleMessage) and message.origin == STAND_IN
        text = message.text[: remaining if stand_in else MAX_SHOWN_CHARACTERS]
        compared = (stand_in or isinstance(message, RemovedMessage)) and len(text) <= remaining
        remaining -= len(text) if compared else 0
        pieces = split_pieces(text, other) if compared else [DiffPiece(text, is_shared=False)]
        panes.append(PaneMessage(message, pieces, len(message.text) - len(text), stand_in))
    return panes
