"""What a summary says of requests, compared with how far they have come.

A row, an entry or a sentence that calls an answered request open is corrected or dropped. So is one that
calls an open request done, or open what a user only told. A line about nothing that is known stays.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from compaction_proxy.core.ledger import cues
from compaction_proxy.core.ledger.frontier import StatementStatus
from compaction_proxy.core.ledger.statements import fold_text, read_statements

# A line is about a request if it holds so much of what the request is about.
LEAST_SHARE = 0.6
# Requests that are compared, the newest, and characters of a line that are.
MAX_REQUESTS, LINE_CHARACTERS = 200, 1_000

_HEADING = re.compile(
    r"\s*+(?:#{1,6}[ \t]++|\*\*|__)(?P<title>[^|]{1,120}?)(?:\*\*|__)?:?\s*\Z|(?P<plain>[^-*•|#]{1,60}):\s*\Z"
)
_ENTRY = re.compile(r"\s*+(?:[-*+•]|\d{1,3}[.)])\s")
_LABELLED = re.compile(
    r"\s*+(?:(?:[-*+•]|\d{1,3}[.)])\s++)?[\[(*_]{0,3}(?P<status>[^:\])\n|]{1,24})[\])*_]{0,3}\s*+[:\u2013\u2014-]\s"
)
_BOX = re.compile(r"\s*+(?:[-*+•]|\d{1,3}[.)])\s++\[(?P<box>[ xX✓✔])\]\s")
# A sentence that calls something open: by its end, or in words that say nothing else.
_ENDING = re.compile(r"(?:→|->|=>|[(\[\u2013\u2014]|\bstatus:)\s*+(?P<status>[^()\[\]→]{1,24})[)\].\s]*\Z")
_STILL = re.compile(
    r"\b(?:(?:is|are|was|were|remains?|stays?|still|yet) (?:\w{1,12} ){0,2}(?:pending|outstanding|unresolved|"
    r"unanswered|unfinished|to be (?:done|answered|handled))|(?:still|remains?|stays?|left) open|"
    r"not (?:yet )?been (?:done|answered|handled|started)|not yet (?:done|answered|handled|started))\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+|(?<=[\u3002\uff01\uff1f])\s*")
# A record stands for good, so what it calls open was so when it was written.
_STATUSES = {
    StatementStatus.OPEN: "open then",
    StatementStatus.ANSWERED: "done",
    StatementStatus.UNKNOWN: "unknown",
    StatementStatus.TOLD: "told by the user",
}
# A cell of a table that tells a state is no longer, in characters.
STATUS_CHARACTERS = 24
EMPTY_SECTION_TEXT = "None"


class _KnownStatement(NamedTuple):
    """What a statement is about, and its state.

    Attributes:
        turn: Number of its user message.
        words: Stems, and exact values.
        state: How far it has come.
        is_settled: Whether its message asks for nothing that is not answered.
    """

    turn: int
    words: frozenset[str]
    state: StatementStatus
    is_settled: bool


def correct_states(text: str, states: Mapping[tuple[int, str], StatementStatus]) -> str:
    """Returns a summary in which no answered request is called open, and no open one done.

    Args:
        text: The summary.
        states: The state of requests by the number of their user message and their text.
    """
    known = list(_list_known(states))
    if not known:
        return text
    lines: list[str] = []
    said: StatementStatus | None = None
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading and not _ENTRY.match(line):
            said = _find_status(heading["title"] or heading["plain"])
            lines.append(line)
            continue
        corrected = _correct_line(line, said, known)
        if corrected is not None:
            lines.append(corrected)
        elif lines and _HEADING.match(lines[-1]):
            lines.append("")  # may yet be followed by an entry that stays
    return "\n".join(_fill_sections(lines)).strip()


def _list_known(states: Mapping[tuple[int, str], StatementStatus]) -> Iterator[_KnownStatement]:
    """The newest requests, and the newest of what was told beside them or alone."""
    told = [each for each in states.items() if each[1] is StatementStatus.TOLD]
    requests = [each for each in states.items() if each[1] is not StatementStatus.TOLD]
    unsettled = {turn for (turn, _), state in requests if state is not StatementStatus.ANSWERED}
    for (turn, text), state in (*requests[-MAX_REQUESTS:], *told[-MAX_REQUESTS:]):
        words = _find_words(text)
        if len(words) > 1:
            yield _KnownStatement(turn, words, state, is_settled=turn not in unsettled)


def _find_words(text: str) -> frozenset[str]:
    """What a text is about: stems, and exact values."""
    found = read_statements(text[:LINE_CHARACTERS])
    return frozenset(word for each in found for word in (*each.words, *(value for _, value in each.values)))


def _find_status(words: str) -> StatementStatus | None:
    plain = fold_text(words)
    if cues.OPEN_STATUS.search(plain):
        return StatementStatus.OPEN
    return StatementStatus.ANSWERED if cues.DONE_STATUS.search(plain) else None


def _find_claim(sentence: str) -> StatementStatus | None:
    """What a sentence says of the state of something; None for nothing."""
    ending = _ENDING.search(sentence)
    if ending and (status := _find_status(ending["status"])):
        return status
    return StatementStatus.OPEN if _STILL.search(fold_text(sentence)) else None


def _find_state(line: str, known: list[_KnownStatement]) -> StatementStatus | None:
    """The state of the statement that a line is about; None where it is about none, or two that differ."""
    about = _find_words(line)
    requests = (each for each in known if each.state is not StatementStatus.TOLD)
    shares = [
        (len(shared) / len(each.words), len(shared), each.state)
        for each in requests
        for shared in [each.words & about]
    ]
    best = max((share[:2] for share in shares), default=(0.0, 0))  # of equal shares that of the most words
    if best[0] >= LEAST_SHARE:
        found = {state for *share, state in shares if tuple(share) == best}
        return found.pop() if len(found) == 1 else None
    return _find_told(about, known)


def _find_told(about: frozenset[str], known: list[_KnownStatement]) -> StatementStatus | None:
    """The state of a message that words repeat: most of them, and most of what it told; None for none."""
    said: dict[int, set[str]] = {}
    for each in known:
        said.setdefault(each.turn, set()).update(each.words)
    repeated = [
        each.is_settled
        for each in known
        if each.state is StatementStatus.TOLD
        and len(each.words & about) >= LEAST_SHARE * len(each.words)
        and len(said[each.turn] & about) >= LEAST_SHARE * len(about)
    ]
    if not repeated:
        return None
    return StatementStatus.TOLD if all(repeated) else StatementStatus.UNKNOWN


def _is_wrong(claimed: StatementStatus | None, line: str, known: list[_KnownStatement]) -> bool:
    """Whether a line claims a state that what it is about does not have."""
    state = _find_state(line, known) if claimed else None
    if state is None or state is StatementStatus.UNKNOWN:
        return False
    return claimed is StatementStatus.OPEN if state is StatementStatus.TOLD else claimed is not state


def _correct_line(line: str, said: StatementStatus | None, known: list[_KnownStatement]) -> str | None:
    """The line as it may stand; None where it has to go."""
    cells = line.strip().strip("|").split("|") if line.lstrip().startswith("|") else []
    if len(cells) > 1:
        return _correct_row(line, cells, known)
    own = _find_label(line)
    if own or _ENTRY.match(line):
        return None if _is_wrong(own or _find_claim(line) or said, line, known) else line
    pieces = _SENTENCE.split(line)
    kept = [each for each in pieces if not _is_wrong(_find_claim(each) or said, each, known)]
    if len(kept) == len(pieces):
        return line
    return " ".join(kept) or None


def _find_label(line: str) -> StatementStatus | None:
    """The state that a box or a word in front of a line tells; None for none."""
    if box := _BOX.match(line):
        return StatementStatus.OPEN if box["box"] == " " else StatementStatus.ANSWERED
    labelled = _LABELLED.match(line)
    return _find_status(labelled["status"]) if labelled else None


def _correct_row(line: str, cells: list[str], known: list[_KnownStatement]) -> str:
    """A row of a table with the state that the request has, where one of its cells tells another."""
    told = [
        k for k, cell in enumerate(cells) if len(cell.strip()) <= STATUS_CHARACTERS and _find_status(cell)
    ]
    if not told:
        return line
    claimed = _find_status(cells[told[-1]])
    others = [cell for k, cell in enumerate(cells) if k != told[-1]]
    subject = next((cell for cell in others if len(_find_words(cell)) > 1), others[0])
    state = _find_state(subject, known)
    if state is None or (claimed is StatementStatus.ANSWERED and state is not StatementStatus.OPEN):
        return line
    cells[told[-1]] = f" {_STATUSES[state]} "
    return f"|{'|'.join(cells)}|"


def _fill_sections(lines: list[str]) -> Iterator[str]:
    """The lines; a section that lost all its entries says that there is nothing."""
    for at, line in enumerate(lines):
        follows = lines[at + 1 : at + 3]
        bare = line == "" and at > 0 and _HEADING.match(lines[at - 1])
        if bare and (not follows or follows[0] == "" or _HEADING.match(follows[0])):
            yield EMPTY_SECTION_TEXT
        elif not bare:
            yield line
