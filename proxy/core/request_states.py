"""What a summary says of requests, compared with how far they have come.

A row or an entry that calls an answered request open is corrected or dropped, and so is one that calls an
open request done. Where a line is about no request that is known, it stays as it is.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from proxy.core import cues
from proxy.core.frontier import State
from proxy.core.statements import folded, statements

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
NOTHING = "None"


class _Known(NamedTuple):
    """What a request is about, and its state."""

    words: frozenset[str]
    state: State


def correct_states(text: str, states: Mapping[tuple[int, str], State]) -> str:
    """Returns a summary in which no answered request is called open, and no open one done.

    Args:
        text: The summary.
        states: The state of requests by the number of their user message and their text.
    """
    known = list(_known(states))
    if not known:
        return text
    lines: list[str] = []
    said: State | None = None
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading and not _ENTRY.match(line):
            said = _find_status(heading["title"] or heading["plain"])
            lines.append(line)
            continue
        corrected = _correct(line, said, known)
        if corrected is not None:
            lines.append(corrected)
        elif lines and _HEADING.match(lines[-1]):
            lines.append("")  # may yet be followed by an entry that stays
    return "\n".join(_filled(lines)).strip()


def _known(states: Mapping[tuple[int, str], State]) -> Iterator[_Known]:
    for (_, text), state in list(states.items())[-MAX_REQUESTS:]:
        words = _words(text)
        if len(words) > 1:
            yield _Known(words, state)


def _words(text: str) -> frozenset[str]:
    """What a text is about: stems, and exact values."""
    found = statements(text[:LINE_CHARACTERS])
    return frozenset(word for each in found for word in (*each.words, *(value for _, value in each.values)))


def _find_status(words: str) -> State | None:
    plain = folded(words)
    if cues.OPEN_STATUS.search(plain):
        return State.OPEN
    return State.ANSWERED if cues.DONE_STATUS.search(plain) else None


def _find_state(line: str, known: list[_Known]) -> State | None:
    """The state of the request that a line is about; None where it is about none, or two that differ."""
    about = _words(line)
    shares = [(len(each.words & about) / len(each.words), each.state) for each in known]
    best = max((share for share, _ in shares), default=0.0)
    if best < LEAST_SHARE:
        return None
    found = {state for share, state in shares if share == best}
    return found.pop() if len(found) == 1 else None


def _correct(line: str, said: State | None, known: list[_Known]) -> str | None:
    """The line as it may stand; None where it has to go."""
    cells = line.strip().strip("|").split("|") if line.lstrip().startswith("|") else []
    if len(cells) > 1:
        return _correct_row(line, cells, known)
    labelled = _LABELLED.match(line)
    own = _find_status(labelled["status"]) if labelled else None
    claimed = own or (said if _ENTRY.match(line) else None)
    if claimed is None:
        return line
    state = _find_state(line, known)
    return None if state is not None and state is not State.UNKNOWN and state is not claimed else line


def _correct_row(line: str, cells: list[str], known: list[_Known]) -> str:
    """A row of a table with the state that the request has, where its last cell tells another."""
    claimed = _find_status(cells[-1])
    state = _find_state(cells[0], known) if claimed else None
    if state is None or state is State.UNKNOWN or state is claimed:
        return line
    told = "done" if state is State.ANSWERED else "open"
    return f"|{'|'.join(cells[:-1])}| {told} |"


def _filled(lines: list[str]) -> Iterator[str]:
    """The lines; a section that lost all its entries says that there is nothing."""
    for at, line in enumerate(lines):
        follows = lines[at + 1 : at + 3]
        bare = line == "" and at > 0 and _HEADING.match(lines[at - 1])
        if bare and (not follows or follows[0] == "" or _HEADING.match(follows[0])):
            yield NOTHING
        elif not bare:
            yield line
