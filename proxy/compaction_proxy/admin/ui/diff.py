"""Compares two texts word by word, to show which parts of the replaced messages a summary has kept.

A summary may mention facts in another order than the messages. A comparison that keeps the order (`difflib`)
would miss most of these facts, and would take quadratic time. This module instead looks up sequences of three
words, in linear time. A word counts as kept if it belongs to a sequence of three words that the other text
contains, and that has enough letters and digits to say something. A distinctive word, such as a path or a
number, counts as kept if the other text contains the word.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Literal

from compaction_proxy.admin.ui.markdown import Block, parse_markdown, parse_plain
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import STAND_IN, VisibleMessage
from compaction_proxy.recall.stems import find_word_root
from compaction_proxy.recall.tokenize import parse_query, split_terms

RUN_WORDS = 3
# Maximum characters of each of two compared texts. Further characters count as not contained in the other
# text. With this limit, a comparison takes at most 100 ms on one processor core.
MAX_COMPARED_CHARACTERS = 100_000
# Minimum number of letters and digits of a sequence of words that is compared.
_RUN_CHARACTERS = 12
# A distinctive word has at least `_DISTINCTIVE_CHARACTERS` letters and digits and matches `_DISTINCTIVE`: it
# contains a digit, a sign such as `/`, or a dot between letters.
_DISTINCTIVE_CHARACTERS = 4
_DISTINCTIVE = re.compile(r"[\d/_\\@:=]|\w\.\w")
# Matches a word, or escapes of a JSON text between words.
_WORD = re.compile(r"(?:\\[nrt\"])+|((?:[^\s\"'`()\[\]{}<>,;|*\\]|\\(?![nrt\"]))+)")
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
        words = [_normalize_word(match[0]) for match in _find_words(text[:remaining])]
        runs.update(
            run for run in _iter_runs(words) if _count_letters_and_digits("".join(run)) >= _RUN_CHARACTERS
        )
        distinctive.update(filter(_is_distinctive, words))
        remaining -= min(len(text), remaining)
    return DiffWords(runs, distinctive)


def split_pieces(text: str, other: DiffWords) -> list[DiffPiece]:
    """Splits `text` into pieces that the indexed text `other` contains, and the pieces between them.

    Compares only the first `MAX_COMPARED_CHARACTERS` characters of `text`. The rest counts as not contained
    in `other`.
    """
    matches = _find_words(text[:MAX_COMPARED_CHARACTERS])
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


def _find_words(text: str) -> list[re.Match[str]]:
    return [match for match in _WORD.finditer(text) if match[1]]


def _iter_runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)


def _count_letters_and_digits(text: str) -> int:
    return sum(map(str.isalnum, text))


def _normalize_word(word: str) -> str:
    """Returns a word in the form that is compared: in lower case, without punctuation at its end."""
    return word.rstrip(_ENDS).lower()


def _is_distinctive(word: str) -> bool:
    return (
        _DISTINCTIVE.search(word) is not None and _count_letters_and_digits(word) >= _DISTINCTIVE_CHARACTERS
    )


# Maximum characters that a page shows of a message that is not a replacement, and maximum number of removed
# messages and of seen messages on the page of a compaction. The page shows how many it leaves out.
MAX_SHOWN_CHARACTERS = 4_000
MAX_SHOWN_MESSAGES = 200
# Roles of messages that contain the output of a tool.
_TOOL_ROLES = frozenset({"tool", "function"})


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message on a page.

    Attributes:
        message: The message.
        blocks: The part of the message's text that the page shows.
        left_out: Number of characters of the text that the page does not show.
    """

    message: RemovedMessage | VisibleMessage
    blocks: Sequence[Block]
    left_out: int = 0


# What a compaction did with messages. `replaced`: a replacement stands in their place. `shortened`: the
# message stayed, with a shorter text. `earlier`: an earlier compaction wrote the message. `kept`: the client
# sent the message, and the compaction left it unchanged. `removed`: nothing stands in their place.
Change = Literal["replaced", "shortened", "earlier", "kept", "removed"]


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A row on the page of a compaction: messages before the compaction, and the message after it.

    Attributes:
        change: What the compaction did.
        before: The messages that the compaction removed or shortened.
        after: The message that the model saw; None if nothing stands in the place of `before`.
    """

    change: Change
    before: Sequence[ShownMessage]
    after: ShownMessage | None


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a compaction did to the messages, in the order in which the model saw them.

    Attributes:
        rows: The rows. In removed messages and in replacements, marked pieces of text are in both.
        removed: Number of messages that the compaction removed or shortened.
        removed_left_out: Number of these messages that no row shows.
        seen: Number of messages that the model saw.
        seen_left_out: Number of these messages that no row shows.
    """

    rows: Sequence[RoundRow]
    removed: int
    removed_left_out: int
    seen: int
    seen_left_out: int


def show_message(message: RemovedMessage | VisibleMessage, limit: int = MAX_SHOWN_CHARACTERS) -> ShownMessage:
    """Prepares a message for a page. The page shows at most `limit` characters of it."""
    text = message.text[:limit]
    return ShownMessage(message, parse_text(text, message.role), len(message.text) - len(text))


def parse_text(text: str, role: str, pieces: Iterable[DiffPiece] = ()) -> tuple[Block, ...]:
    """Parses the text of a message: as code if a tool has written it, else as Markdown.

    `pieces` are those of the text, if it was compared with another one. Shared pieces are marked.
    """
    shared = list(_iter_shared_ranges(pieces))
    return parse_plain(text, shared) if role in _TOOL_ROLES else parse_markdown(text, shared)


def _iter_shared_ranges(pieces: Iterable[DiffPiece]) -> Iterator[tuple[int, int]]:
    start = 0
    for piece in pieces:
        stop = start + len(piece.text)
        if piece.is_shared:
            yield start, stop
        start = stop


def build_round_view(
    summary: str, removed: Sequence[RemovedMessage], seen: Sequence[VisibleMessage]
) -> RoundView:
    """Builds the rows on the page of a compaction.

    The function compares only a part of long texts (`MAX_COMPARED_CHARACTERS`), so that it takes at most
    100 ms.

    Args:
        summary: Text of the summary.
        removed: Messages that the compaction removed or shortened.
        seen: Messages that the model saw after the compaction.
    """
    known = {each.id for each in removed}
    shortened = {each.id for each in seen if each.origin == STAND_IN and each.id in known}
    own = _find_replacement(summary, seen, is_needed=len(shortened) < len(known))
    if own is None and summary:
        own = VisibleMessage("", summary, STAND_IN, "")
        seen = (own, *seen)
    texts = [summary, *(each.text for each in seen if each.origin == STAND_IN)]
    before = _compare_messages(removed[:MAX_SHOWN_MESSAGES], index_words(texts))
    after = _compare_messages(_select_seen(seen, own), index_words(each.text for each in removed))
    originals = {each.message.id: each for each in before}
    gone = [each for each in before if each.message.id not in shortened]
    rows = [_build_row(each, own, gone, originals) for each in after]
    if gone and own is None:
        rows.insert(0, RoundRow("removed", gone, None))
    return RoundView(rows, len(removed), len(removed) - len(before), len(seen), len(seen) - len(after))


def _find_replacement(
    summary: str, seen: Sequence[VisibleMessage], *, is_needed: bool
) -> VisibleMessage | None:
    """Returns the message that this compaction wrote; None if there is none.

    If none contains the summary, returns the last message that any compaction wrote, if `is_needed`.
    """
    written = [each for each in seen if each.origin == STAND_IN and not each.id]
    found = [each for each in written if summary and summary in each.text]
    return next(reversed(found or (written if is_needed else [])), None)


def _select_seen(seen: Sequence[VisibleMessage], own: VisibleMessage | None) -> Sequence[VisibleMessage]:
    """Returns at most `MAX_SHOWN_MESSAGES` messages, among them the replacement."""
    place = next((index for index, each in enumerate(seen) if each is own), 0)
    first = 0 if place < MAX_SHOWN_MESSAGES else place
    return seen[first : first + MAX_SHOWN_MESSAGES]


def _build_row(
    after: ShownMessage,
    own: VisibleMessage | None,
    gone: Sequence[ShownMessage],
    originals: Mapping[str, ShownMessage],
) -> RoundRow:
    message = after.message
    if message is own:
        return RoundRow("replaced", gone, after)
    if isinstance(message, VisibleMessage) and message.origin == STAND_IN:
        original = originals.get(message.id)
        return RoundRow("shortened", [original], after) if original else RoundRow("earlier", (), after)
    return RoundRow("kept", (), after)


def _compare_messages(
    messages: Iterable[RemovedMessage | VisibleMessage], other: DiffWords
) -> list[ShownMessage]:
    """Prepares messages for a page, and compares them with the indexed text `other`.

    Compares only removed messages and replacements. Other messages are the client's own, which the compaction
    kept unchanged. Compares at most `MAX_COMPARED_CHARACTERS` characters of all messages together.
    """
    shown: list[ShownMessage] = []
    remaining = MAX_COMPARED_CHARACTERS
    for message in messages:
        stand_in = isinstance(message, VisibleMessage) and message.origin == STAND_IN
        text = message.text[: remaining if stand_in else MAX_SHOWN_CHARACTERS]
        compared = (stand_in or isinstance(message, RemovedMessage)) and len(text) <= remaining
        remaining -= len(text) if compared else 0
        pieces = split_pieces(text, other) if compared else ()
        shown.append(
            ShownMessage(message, parse_text(text, message.role, pieces), len(message.text) - len(text))
        )
    return shown


# Matches what joins the words of one name, such as a path.
_JOINT = re.compile(r"(?:[^\w\s]|_){1,2}")
_TEXT_RUN = re.compile(r"\d{1,3}(?:,\d{3})+|[^\W_]+")


def find_missing_words(query: str, texts: Iterable[str]) -> list[str]:
    """Returns the words of a query of which no text contains a form."""
    found = {find_word_root(term.text) for text in texts for term in split_terms(text)}
    return [each for each in parse_query(query).words if find_word_root(each) not in found]


def highlight_query(text: str, query: str) -> list[DiffPiece]:
    """Splits a text into what matches a query, and the rest.

    As in a search, the words of the query match other forms of these words, and stop words match only if the
    query has no other words. Words with `*` match what begins like them, and phrases match as they are.
    """
    parsed = parse_query(query)
    roots = set(map(find_word_root, parsed.words))
    ranges: list[tuple[int, int]] = []
    for start, terms in groupby(split_terms(text), key=lambda term: term.start):
        found = [term.text for term in terms]
        if any(each.startswith(parsed.prefixes) or find_word_root(each) in roots for each in found):
            # A term of two characters can be a part of a text without spaces between words.
            run, characters = _TEXT_RUN.match(text, start), max(map(len, found))
            ranges.append((start, run.end() if run and characters > 2 else start + characters))
    for phrase in parsed.phrases:
        pattern = r"\s+".join(map(re.escape, phrase.split()))
        ranges += [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        before, pos = merged[-1] if merged else (0, -1)
        if start <= pos or (merged and _JOINT.fullmatch(text, pos, start)):
            merged[-1] = (before, max(pos, stop))
        else:
            merged.append((start, stop))
    edges = [0, *chain.from_iterable(merged), len(text)]
    pieces = [DiffPiece(text[slice(*pair)], bool(n % 2)) for n, pair in enumerate(pairwise(edges))]
    return [each for each in pieces if each.text]
