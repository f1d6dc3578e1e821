"""The three panes of a round: messages that were removed, what took their place, what the model then saw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compaction_proxy.admin.ui.diff import MAX_COMPARED_CHARACTERS, Piece, Words, pieces, words_of
from compaction_proxy.admin.ui.shown import Text

STAND_IN = "stand-in"
# Of one message, and messages of one pane; the rest is a link away.
MAX_SHOWN_CHARACTERS = 4_000
MAX_SHOWN_MESSAGES = 200


@dataclass(frozen=True, slots=True)
class Shown:
    """A message in a pane.

    Attributes:
        message: The message.
        pieces: Its text, or as much of it as is shown.
        left_out: Characters that are not shown.
        stand_in: Whether it is one that a round has written.
    """

    message: Text
    pieces: Sequence[Piece]
    left_out: int
    stand_in: bool


@dataclass(frozen=True, slots=True)
class Panes:
    """What a round did.

    Attributes:
        removed: Messages that it removed; pieces that the text in their place has, too, are marked.
        removed_left_out: Number of those that are not shown.
        summary: The text in their place; pieces that stand in the messages as well are marked.
        seen: What the model then saw; so are the stand-ins there.
        seen_left_out: Number of those that are not shown.
    """

    removed: Sequence[Shown]
    removed_left_out: int
    summary: Sequence[Piece]
    seen: Sequence[Shown]
    seen_left_out: int


def panes(summary: str, removed: Sequence[Text], seen: Sequence[Text]) -> Panes:
    """Compare what was removed with what took its place. Takes at most 100 ms, whatever the sizes are."""
    stand_ins = [each.text for each in seen if each.origin == STAND_IN]
    before = words_of(each.text for each in removed)
    after = words_of([summary, *stand_ins])
    return Panes(
        removed=_shown(removed[:MAX_SHOWN_MESSAGES], after, everywhere=True),
        removed_left_out=max(0, len(removed) - MAX_SHOWN_MESSAGES),
        summary=pieces(summary[:MAX_COMPARED_CHARACTERS], before),
        seen=_shown(seen[:MAX_SHOWN_MESSAGES], before, everywhere=False),
        seen_left_out=max(0, len(seen) - MAX_SHOWN_MESSAGES),
    )


def _shown(messages: Iterable[Text], other: Words, *, everywhere: bool) -> list[Shown]:
    """Messages of a pane, compared as long as there is room."""
    shown: list[Shown] = []
    left = MAX_COMPARED_CHARACTERS
    for message in messages:
        stand_in = message.origin == STAND_IN
        text = message.text[: left if stand_in else MAX_SHOWN_CHARACTERS]
        compared = (everywhere or stand_in) and len(text) <= left
        left -= len(text) if compared else 0
        found = pieces(text, other) if compared else [Piece(text, kept=False)]
        shown.append(Shown(message, found, len(message.text) - len(text), stand_in))
    return shown
