"""Builds extracts: texts that code, not a model, writes in place of a summary.

An extract states which work was done, what the assistant said, and where the work stopped. It consists of
quotations, so it keeps the language of the messages. From tool results it quotes only short values of known
shapes. It quotes no sentence that is worded as an order, so that it gives the model no instructions.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from compaction_proxy.core.ledger.actions import format_action_items
from compaction_proxy.core.ledger.facts import (
    ObservedFact,
    collect_facts,
    take_head_and_tail,
    to_one_line,
)
from compaction_proxy.core.ledger.frontier import Frontier, is_pleasantry, read_frontier
from compaction_proxy.core.ledger.statements import reads_as_order
from compaction_proxy.core.ledger.values import find_values
from compaction_proxy.core.message import Message
from compaction_proxy.core.sanitize import sanitize_text

# Maximum number of messages that are read at the beginning and at the end of the conversation, and maximum
# characters that are read at each end of one text.
OLDEST_MESSAGES, NEWEST_MESSAGES = 300, 700
TEXT_CHARACTERS = 2_000
# Minimum and maximum characters of a quoted sentence. The quoted sentences are chosen from at most
# `MAX_CANDIDATES` sentences in all, and from at most `MAX_SENTENCES_PER_MESSAGE` of one message.
SHORTEST, LONGEST = 20, 300
MAX_CANDIDATES = 600
MAX_SENTENCES_PER_MESSAGE = 6
# A sentence is not quoted if another quoted sentence contains more than this share of its words.
SAME_WORDS_SHARE = 0.6
# Maximum share of the extract's characters for the section on work done, and for the section on where the
# work stopped. Quoted sentences take at most the share `SAID_SHARE` of the characters that these two sections
# leave.
WORK_SHARE, STATE_SHARE, SAID_SHARE = 0.75, 0.25, 0.85
LINE_CHARACTERS = 160
# Maximum number of arguments that are shown of a call that only reads, and maximum characters of these
# arguments together.
READ_ARGUMENTS, READ_CHARACTERS = 3, 60
# Maximum number of lines in one section of an extract.
MAX_LINES = 40

_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+|(?<=[\u3002\uff01\uff1f])\s*|\n+")
_CODE = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[^\W_]{2,}")
_BULLET = re.compile(r"[-*•]\s+")
_NOISE = re.compile(r"^\s*(?:```|[|<>{}\[\]#$]|\d+[:|]|---)")


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A sentence that may be quoted.

    Attributes:
        text: The sentence as written, on one line.
        message_index: Index of its message.
        turn: Number of user messages up to and including its message.
        words: The words of the sentence in lower case.
        is_at_edge: Whether the sentence is the first or the last of those that may be quoted from its
            message.
    """

    text: str
    message_index: int
    turn: int
    words: frozenset[str]
    is_at_edge: bool


def _list_read_indices(length: int) -> list[int]:
    """Returns the indices of the messages from which sentences may be quoted, out of `length` messages.

    In a long conversation, these are only the oldest and the newest messages.
    """
    if length <= OLDEST_MESSAGES + NEWEST_MESSAGES:
        return list(range(length))
    return [*range(OLDEST_MESSAGES), *range(length - NEWEST_MESSAGES, length)]


def _format_line(text: str, max_characters: int = LINE_CHARACTERS) -> str:
    return sanitize_text(to_one_line(text, max_characters))


def _split_sentences(text: str) -> list[str]:
    """Returns the sentences of a text that may be quoted.

    Code, orders, pleasantries, and sentences that are too short or too long are left out.
    """
    prose = _CODE.sub("\n", take_head_and_tail(text, TEXT_CHARACTERS, TEXT_CHARACTERS))
    sentences = (
        _BULLET.sub("", " ".join(each.split()), count=1)
        for each in _SENTENCE.split(prose)
        if not _NOISE.match(each)
    )
    return [
        each
        for each in sentences
        if SHORTEST <= len(each) <= LONGEST and not reads_as_order(each) and not is_pleasantry(each)
    ]


def _iter_sentences(messages: Sequence[Message], role: str) -> Iterator[_Sentence]:
    turn = 0
    for at in _list_read_indices(len(messages)):
        message = messages[at]
        if message.answered_call_ids:
            continue
        turn += message.role == "user"
        pieces = _split_sentences(message.text) if message.role == role else []
        # Only the first three and the last three sentences of a message may be quoted.
        del pieces[MAX_SENTENCES_PER_MESSAGE // 2 : -(MAX_SENTENCES_PER_MESSAGE // 2)]
        for number, piece in enumerate(pieces):
            words = frozenset(word.casefold() for word in _WORD.findall(piece))
            edge = number in {0, len(pieces) - 1}
            yield _Sentence(_format_line(piece, LONGEST), at, turn, words, edge)


def _rank_sentences(sentences: Sequence[_Sentence], length: int) -> list[_Sentence]:
    """Returns the sentences, the most informative first.

    A sentence is more informative if it has rare words or exact values, if it is at the beginning or the end
    of its message, or if its message is newer.
    """
    known = Counter(word for each in sentences for word in each.words)
    total = len(sentences) + 1

    def score_sentence(each: _Sentence) -> float:
        information = math.fsum(math.log(total / known[word]) for word in each.words) / (4 + len(each.words))
        exact = sum(1 for _ in islice(find_values(each.text), 4))
        return (
            information
            * (1 + 0.15 * exact)
            * (1.15 if each.is_at_edge else 1.0)
            * (1 + 0.5 * each.message_index / length)
        )

    return sorted(sentences, key=lambda each: (-score_sentence(each), each.message_index))


def _choose_sentences(sentences: Sequence[_Sentence], length: int, max_characters: int) -> list[_Sentence]:
    """Returns as many of the most informative sentences as fit, oldest first, without repetitions.

    Together they take at most `max_characters` characters. The sentences of one turn take at most twice an
    equal share of these characters, or `LONGEST` characters if that is more.
    """
    turns = len({each.turn for each in sentences})
    quota = max(LONGEST, 2 * max_characters // max(1, turns))
    spent: Counter[int] = Counter()
    chosen: list[_Sentence] = []
    for each in _rank_sentences(sentences, length)[:MAX_CANDIDATES]:
        size = len(each.text) + 20
        if size > max_characters - spent.total() or spent[each.turn] + size > quota:
            continue
        if any(len(each.words & other.words) > SAME_WORDS_SHARE * len(each.words) for other in chosen):
            continue
        chosen.append(each)
        spent[each.turn] += size
    return sorted(chosen, key=lambda each: each.message_index)


def _list_work(frontier: Frontier, facts: Sequence[ObservedFact], characters: int) -> Iterator[str]:
    """Yields lines about the work done: changes, then other calls, then reads.

    Within each of these parts, newer work comes first.
    """
    writes = [each for each in frontier.actions if each[1].is_write]
    yield from format_action_items(writes, characters)
    written = {value for _, action in writes for _, value in action.arguments}
    paths = [
        each for each in facts if each.kind == "path" and each.operations and not re.search(r"\s", each.text)
    ]
    changed = [each for each in paths if each.operations != ("read",) and each.text not in written]
    for each in sorted(changed, key=lambda path: -path.message_index):
        yield f"- {_format_line(each.text)}: {', '.join(each.operations)}"
    others = [each for each in frontier.actions if not each[1].is_write]
    ran = [each for each in others if each[1].has_failed or not each[1].is_read]
    yield from format_action_items(ran, characters)
    read: dict[str, dict[str, None]] = {}
    for _, action in reversed(others):
        if action.is_read and not action.has_failed and action.arguments:
            asked = " ".join(value for _, value in action.arguments[:READ_ARGUMENTS])
            read.setdefault(action.tool, {}).setdefault(to_one_line(asked, READ_CHARACTERS))
    reads = (
        f"{_format_line(tool)} {', '.join(map(_format_line, targets))}" for tool, targets in read.items()
    )
    if read:
        line = f"- read: {'; '.join(reads)}"
        yield line if len(line) <= LINE_CHARACTERS else line[:LINE_CHARACTERS].rpartition(",")[0]


def _describe_state(
    messages: Sequence[Message], get_message_id: Callable[[int], str], frontier: Frontier
) -> Iterator[str]:
    """Yields lines about the last step, the open work, and the last sentence of the assistant."""
    step = frontier.find_last_step(range(len(messages)))
    for note in [*([step] if step else []), *reversed(frontier.loose_ends)]:
        yield f"- {note.kind}: {sanitize_text(note.text)} ({get_message_id(note.message_index)})"
    recent = range(len(messages) - 1, max(-1, len(messages) - NEWEST_MESSAGES), -1)
    for at in recent:
        if messages[at].role == "assistant" and (sentences := _split_sentences(messages[at].text)):
            yield f"- said last: {_format_line(sentences[-1], LONGEST)} ({get_message_id(at)})"
            return


def _format_section(title: str, lines: Iterator[str], max_characters: int) -> str:
    """Returns a heading and the lines that fit below it, or "" if no line fits."""
    room, kept = max_characters - len(title) - 1, []
    for line in islice(lines, MAX_LINES):
        if len(line) + 1 <= room:
            kept.append(line)
            room -= len(line) + 1
    return "\n".join([title, *kept]) if kept else ""


def build_extractive_summary(
    messages: Sequence[Message], max_characters: int, get_message_id: Callable[[int], str]
) -> str:
    """Builds an extract, which consists of quotations from the messages.

    Returns "" if all messages are empty or `max_characters` is not positive. If no part of the messages can
    be quoted, the extract gives only the number of removed messages for each role.

    Args:
        messages: The messages to replace. If there are very many messages, those in the middle are not
            quoted. Of a very long message, only the beginning and the end are quoted.
        max_characters: Maximum characters of the extract.
        get_message_id: Returns the id of the message at an index. The extract cites messages by these ids.
    """
    if max_characters <= 0 or all(each.is_empty for each in messages):
        return ""
    window = _list_read_indices(len(messages))
    seen = collect_facts(messages, window)
    frontier = read_frontier(messages)
    room = int(WORK_SHARE * max_characters)
    work = _format_section("Done:", _list_work(frontier, seen, room - len("Done:\n")), room)
    state = _format_section(
        "Where it stopped:",
        _describe_state(messages, get_message_id, frontier),
        int(STATE_SHARE * max_characters),
    )
    room = int(SAID_SHARE * (max_characters - len(state) - len(work)))
    quotable = list(_iter_sentences(messages, "assistant")) or list(_iter_sentences(messages, "user"))
    chosen = _choose_sentences(quotable, len(messages), room - len("Said:"))
    lines = (f"- {each.text} ({get_message_id(each.message_index)})" for each in chosen)
    parts = [work, _format_section("Said:", lines, room), state]
    if not any(parts):
        roles = Counter(each.role for each in messages if not each.is_empty)
        counts = ", ".join(f"{count} {_format_line(role)}" for role, count in roles.most_common())
        parts = [f"Removed: {counts} messages."]
    return "\n\n".join(filter(None, parts))[:max_characters]
