"""Corrects what a summary says about the state of requests.

A wrong table row is corrected, and a wrong list entry or sentence is dropped. It is wrong if it calls an
answered request open, calls an open request done, or calls something open that the user has only stated and
not asked for. A line that is about no known statement stays.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from compaction_proxy.core.ledger import cues
from compaction_proxy.core.ledger.frontier import StatementStatus
from compaction_proxy.core.ledger.statements import fold_text, read_statements

# A line is about a request if it contains at least this share of the request's words and values.
LEAST_SHARE = 0.6
# Maximum number of requests with which a line is compared (the newest), and of characters read of a line.
MAX_REQUESTS, LINE_CHARACTERS = 200, 1_000

_HEADING = re.compile(
    r"\s*+(?:#{1,6}[ \t]++|\*\*|__)(?P<title>[^|]{1,120}?)(?:\*\*|__)?:?\s*\Z|(?P<plain>[^-*•|#]{1,60}):\s*\Z"
)
_ENTRY = re.compile(r"\s*+(?:[-*+•]|\d{1,3}[.)])\s")
_LABELLED = re.compile(
    r"\s*+(?:(?:[-*+•]|\d{1,3}[.)])\s++)?[\[(*_]{0,3}(?P<status>[^:\])\n|]{1,24})[\])*_]{0,3}\s*+[:\u2013\u2014-]\s"
)
_CHECKBOX = re.compile(r"\s*+(?:[-*+•]|\d{1,3}[.)])\s++\[(?P<box>[ xX✓✔])\]\s")
# Sentences that name a state at their end, or that call something open in unambiguous words.
_STATUS_AT_END = re.compile(
    r"(?:→|->|=>|[(\[\u2013\u2014]|\bstatus:)\s*+(?P<status>[^()\[\]→]{1,24})[)\].\s]*\Z"
)
_OPEN_CLAIM = re.compile(
    r"\b(?:(?:is|are|was|were|remains?|stays?|still|yet) (?:\w{1,12} ){0,2}(?:pending|outstanding|unresolved|"
    r"unanswered|unfinished|to be (?:done|answered|handled))|(?:still|remains?|stays?|left) open|"
    r"not (?:yet )?been (?:done|answered|handled|started)|not yet (?:done|answered|handled|started))\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+|(?<=[\u3002\uff01\uff1f])\s*")
# The words that a corrected table row uses for each state. A record never changes, so an open request was
# open when the record was written, and may be answered since.
_STATUS_TEXTS = {
    StatementStatus.OPEN: "open then",
    StatementStatus.ANSWERED: "done",
    StatementStatus.UNKNOWN: "unknown",
    StatementStatus.TOLD: "told by the user",
}
# Maximum characters of a table cell that states a status.
STATUS_CHARACTERS = 24
EMPTY_SECTION_TEXT = "None"


class _KnownStatement(NamedTuple):
    """The words and the state of a user statement.

    Attributes:
        turn: Number of its user message.
        words: The stems of its words, and its exact values.
        state: The state of the statement.
        is_settled: Whether every request in its user message is answered.
    """

    turn: int
    words: frozenset[str]
    state: StatementStatus
    is_settled: bool


def correct_states(text: str, states: Mapping[tuple[int, str], StatementStatus]) -> str:
    """Returns the summary with wrong states of requests corrected, or the lines that state them dropped.

    Args:
        text: The summary.
        states: The state of each statement, by the number of its user message and its text.
    """
    known = list(_list_known(states))
    if not known:
        return text
    lines: list[str] = []
    section_state: StatementStatus | None = None
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading and not _ENTRY.match(line):
            section_state = _find_status(heading["title"] or heading["plain"])
            lines.append(line)
            continue
        corrected = _correct_line(line, section_state, known)
        if corrected is not None:
            lines.append(corrected)
        elif lines and _HEADING.match(lines[-1]):
            # The empty line becomes "None" if no other entry of the section stays.
            lines.append("")
    return "\n".join(_fill_sections(lines)).strip()


def _list_known(states: Mapping[tuple[int, str], StatementStatus]) -> Iterator[_KnownStatement]:
    """Yields the newest requests and the newest statements that ask for nothing."""
    statements = [each for each in states.items() if each[1] is StatementStatus.TOLD]
    requests = [each for each in states.items() if each[1] is not StatementStatus.TOLD]
    unsettled = {turn for (turn, _), state in requests if state is not StatementStatus.ANSWERED}
    for (turn, text), state in (*requests[-MAX_REQUESTS:], *statements[-MAX_REQUESTS:]):
        words = _collect_subject_words(text)
        if len(words) > 1:
            yield _KnownStatement(turn, words, state, is_settled=turn not in unsettled)


def _collect_subject_words(text: str) -> frozenset[str]:
    """Returns what a text is about: the stems of its words, and its exact values."""
    found = read_statements(text[:LINE_CHARACTERS])
    return frozenset(word for each in found for word in (*each.words, *(value for _, value in each.values)))


def _find_status(words: str) -> StatementStatus | None:
    plain = fold_text(words)
    if cues.OPEN_STATUS.search(plain):
        return StatementStatus.OPEN
    return StatementStatus.ANSWERED if cues.DONE_STATUS.search(plain) else None


def _find_claimed_status(sentence: str) -> StatementStatus | None:
    """Returns the state (open or answered) that a sentence claims for its subject; None if it claims none."""
    ending = _STATUS_AT_END.search(sentence)
    if ending and (status := _find_status(ending["status"])):
        return status
    return StatementStatus.OPEN if _OPEN_CLAIM.search(fold_text(sentence)) else None


def _find_state(line: str, known: list[_KnownStatement]) -> StatementStatus | None:
    """Returns the state of the statement that a line is about.

    Returns None if the line is about no statement, or equally about statements in different states.
    """
    about = _collect_subject_words(line)
    requests = (each for each in known if each.state is not StatementStatus.TOLD)
    shares = [
        (len(shared) / len(each.words), len(shared), each.state)
        for each in requests
        for shared in [each.words & about]
    ]
    best = max((share[:2] for share in shares), default=(0.0, 0))  # among equal shares, most shared words win
    if best[0] >= LEAST_SHARE:
        states = {state for *share, state in shares if tuple(share) == best}
        return states.pop() if len(states) == 1 else None
    return _find_told_state(about, known)


def _find_told_state(about: frozenset[str], known: list[_KnownStatement]) -> StatementStatus | None:
    """Returns the state of the statement that a line repeats, among statements that ask for nothing.

    Most words of the statement must be in the line, and most words of the line must be in the statement's
    message. Returns None if there is no such statement. Returns `UNKNOWN` if the message of the statement
    also contains a request that is not answered, because the line may be about this request.
    """
    words_by_turn: dict[int, set[str]] = {}
    for each in known:
        words_by_turn.setdefault(each.turn, set()).update(each.words)
    repeated = [
        each.is_settled
        for each in known
        if each.state is StatementStatus.TOLD
        and len(each.words & about) >= LEAST_SHARE * len(each.words)
        and len(words_by_turn[each.turn] & about) >= LEAST_SHARE * len(about)
    ]
    if not repeated:
        return None
    return StatementStatus.TOLD if all(repeated) else StatementStatus.UNKNOWN


def _claims_wrong_state(claimed: StatementStatus | None, line: str, known: list[_KnownStatement]) -> bool:
    """Returns whether a line claims a state that contradicts the known state of its statement."""
    state = _find_state(line, known) if claimed else None
    if state is None or state is StatementStatus.UNKNOWN:
        return False
    return claimed is StatementStatus.OPEN if state is StatementStatus.TOLD else claimed is not state


def _correct_line(
    line: str, section_status: StatementStatus | None, known: list[_KnownStatement]
) -> str | None:
    """Returns the line corrected, or None if it must be dropped.

    Args:
        line: A line of the summary.
        section_status: The state that the heading of the line's section names; None if it names none.
        known: The statements whose state is known.
    """
    cells = line.strip().strip("|").split("|") if line.lstrip().startswith("|") else []
    if len(cells) > 1:
        return _correct_row(line, cells, known)
    label = _find_label_status(line)
    if label or _ENTRY.match(line):
        return (
            None
            if _claims_wrong_state(label or _find_claimed_status(line) or section_status, line, known)
            else line
        )
    pieces = _SENTENCE.split(line)
    correct = [
        each
        for each in pieces
        if not _claims_wrong_state(_find_claimed_status(each) or section_status, each, known)
    ]
    if len(correct) == len(pieces):
        return line
    return " ".join(correct) or None


def _find_label_status(line: str) -> StatementStatus | None:
    """Returns the state that a checkbox or a word at the beginning of a line states, or None."""
    if box := _CHECKBOX.match(line):
        return StatementStatus.OPEN if box["box"] == " " else StatementStatus.ANSWERED
    labelled = _LABELLED.match(line)
    return _find_status(labelled["status"]) if labelled else None


def _correct_row(line: str, cells: list[str], known: list[_KnownStatement]) -> str:
    """Returns a table row in which a wrong state of a request is replaced by the correct one."""
    status_cells = [
        k for k, cell in enumerate(cells) if len(cell.strip()) <= STATUS_CHARACTERS and _find_status(cell)
    ]
    if not status_cells:
        return line
    claimed = _find_status(cells[status_cells[-1]])
    others = [cell for k, cell in enumerate(cells) if k != status_cells[-1]]
    subject = next((cell for cell in others if len(_collect_subject_words(cell)) > 1), others[0])
    state = _find_state(subject, known)
    if state is None or (claimed is StatementStatus.ANSWERED and state is not StatementStatus.OPEN):
        return line
    cells[status_cells[-1]] = f" {_STATUS_TEXTS[state]} "
    return f"|{'|'.join(cells)}|"


def _fill_sections(lines: list[str]) -> Iterator[str]:
    """Yields the lines, with the text "None" in each section that lost all its entries."""
    for at, line in enumerate(lines):
        follows = lines[at + 1 : at + 3]
        bare = line == "" and at > 0 and _HEADING.match(lines[at - 1])
        if bare and (not follows or follows[0] == "" or _HEADING.match(follows[0])):
            yield EMPTY_SECTION_TEXT
        elif not bare:
            yield line
