"""Compares two texts word by word, to show which parts of the replaced messages a summary has kept.

A summary may mention facts in another order than the messages. A comparison that keeps the order (`difflib`)
would miss most of these facts, and would take quadratic time. This module instead looks up sequences of three
words, in linear time. A word counts as kept if it belongs to a sequence of three words that the other text
contains. A distinctive word, such as a path or a number, counts as kept if the other text contains the word.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import STAND_IN, VisibleMessage

RUN_WORDS = 3
# Maximum characters of each of two compared texts. Further characters count as not contained in the other
# text. With this limit, a comparison takes at most 100 ms on one processor core.
MAX_COMPARED_CHARACTERS = 100_000
# A distinctive word has at least `_DISTINCTIVE_CHARACTERS` characters and matches `_DISTINCTIVE`: it contains
# a digit, a sign such as `/`, or a dot between letters.
_DISTINCTIVE_CHARACTERS = 4
_DISTINCTIVE = re.compile(r"[\d/_\\@:=]|\w\.\w")
_WORD = re.compile(r"[^\s\"'`()\[\]{}<>,;|*]+")
_ENDS = ".:!?-#="


@dataclass(frozen=True, slots=True)
class DiffPiece:
    """A piece of a text that was compared with another text.

    `is_shared` says whether the piece counts as contained in the other text.
    """

    text: str
    is_shared: bool


@dataclass(frozen=True, slots=True)
class DiffWords:
    """Index of the words of a text, with which other texts are compared.

    Attributes:
        runs: All sequences of `RUN_WORDS` successive words.
        distinctive: All distinctive words, such as paths and numbers.
    """

    runs: AbstractSet[tuple[str, ...]]
    distinctive: AbstractSet[str]


def index_words(texts: Iterable[str]) -> DiffWords:
    """Builds one index of the words of several texts.

    Indexes at most `MAX_COMPARED_CHARACTERS` characters of all texts together, and ignores the rest.
    """
    runs: set[tuple[str, ...]] = set()
    distinctive: set[str] = set()
    remaining = MAX_COMPARED_CHARACTERS
    for text in texts:
        words = [_normalize_word(match[0]) for match in _WORD.finditer(text[:remaining])]
        runs.update(_iter_runs(words))
        distinctive.update(filter(_is_distinctive, words))
        remaining -= min(len(text), remaining)
    return DiffWords(runs, distinctive)


def split_pieces(text: str, other: DiffWords) -> list[DiffPiece]:
    """Splits `text` into pieces that the indexed text `other` contains, and the pieces between them.

    Compares only the first `MAX_COMPARED_CHARACTERS` characters of `text`. The rest counts as not contained
    in `other`.
    """
    matches = list(_WORD.finditer(text[:MAX_COMPARED_CHARACTERS]))
    kept = _find_kept([_normalize_word(match[0]) for match in matches], other)
    found: list[DiffPiece] = []
    pos = 0
    for is_kept, group in groupby(zip(matches, kept, strict=True), key=lambda pair: pair[1]):
        if is_kept:
            run = [match for match, _ in group]
            start, stop = run[0].start(), run[-1].end()
            found += [
                DiffPiece(text[pos:start], is_shared=False),
                DiffPiece(text[start:stop], is_shared=True),
            ]
            pos = stop
    return [piece for piece in (*found, DiffPiece(text[pos:], is_shared=False)) if piece.text]


def _find_kept(words: list[str], other: DiffWords) -> list[bool]:
    kept = [word in other.distinctive for word in words]
    for index, run in enumerate(_iter_runs(words)):
        if run in other.runs:
            kept[index : index + RUN_WORDS] = [True] * RUN_WORDS
    return kept


def _iter_runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)


def _normalize_word(word: str) -> str:
    """Returns a word in the form that is compared: in lower case, without punctuation at its end."""
    return word.rstrip(_ENDS).lower()


def _is_distinctive(word: str) -> bool:
    return len(word) >= _DISTINCTIVE_CHARACTERS and _DISTINCTIVE.search(word) is not None


# Maximum characters that a pane shows of a message that is not a replacement, and maximum number of messages
# in a pane. The page shows how many characters and messages a pane leaves out.
MAX_SHOWN_CHARACTERS = 4_000
MAX_SHOWN_MESSAGES = 200


@dataclass(frozen=True, slots=True)
class PaneMessage:
    """A message in one of the panes on the page of a compaction.

    Attributes:
        message: The message.
        pieces: The part of the message's text that the pane shows, split into pieces.
        left_out: Number of characters of the text that the pane does not show.
        stand_in: Whether the message is a replacement that a compaction made.
    """

    message: RemovedMessage | VisibleMessage
    pieces: Sequence[DiffPiece]
    left_out: int
    stand_in: bool


@dataclass(frozen=True, slots=True)
class RoundPanes:
    """Content of the three panes on the page of a compaction.

    Attributes:
        removed: Messages that the compaction removed. `DiffPiece.is_shared` says whether the summary or a
            replacement contains the piece.
        removed_left_out: Number of removed messages that the pane does not show.
        summary: Text of the summary, split into pieces. `is_shared` says whether the removed messages contain
            the piece.
        seen: Messages that the model saw after the compaction. In a replacement, `is_shared` says whether the
            removed messages contain the piece. In any other message, `is_shared` is False.
        seen_left_out: Number of messages that the model saw but that the pane does not show.
    """

    removed: Sequence[PaneMessage]
    removed_left_out: int
    summary: Sequence[DiffPiece]
    seen: Sequence[PaneMessage]
    seen_left_out: int


def build_panes(
    summary: str, removed: Sequence[RemovedMessage], seen: Sequence[VisibleMessage]
) -> RoundPanes:
    """Builds the panes on the page of a compaction.

    The function compares only a part of long texts (`MAX_COMPARED_CHARACTERS`), so that it takes at most
    100 ms.

    Args:
        summary: Text of the summary.
        removed: Messages that the compaction removed.
        seen: Messages that the model saw after the compaction.
    """
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
    """Builds the messages of a pane, and compares them with the indexed text `other`.

    Compares only removed messages and replacements. Other messages are the client's own, which the compaction
    kept unchanged. Compares at most `MAX_COMPARED_CHARACTERS` characters of all messages together.
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
