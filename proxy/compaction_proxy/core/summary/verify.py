"""Verifies a summary against its sources without calling a model again.

Sentences are dropped if they contain exact values that the sources do not contain, or orders that no user
gave. A changed value does more harm than a missing one, and only a user may make rules. If the summary lost
values that later work needs, a list of these values is appended.

What the summary says about the state of requests is corrected, too. It is wrong if an answered request is
called open, if an open request is called done, or if something is called open that the user mentioned without
asking for it. In a table row, the correct state replaces the wrong one. A wrong list entry or sentence is
dropped. A line in which no request or other statement of the user is recognised stays as it is.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.ledger.actions import Action, format_action_items
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.ledger.cues import has_cue
from compaction_proxy.core.ledger.facts import ObservedFact, collect_facts
from compaction_proxy.core.ledger.frontier import StatementStatus, read_frontier
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.ledger.statements import (
    collect_subject_words,
    fold_text,
    is_backed_by_user,
    read_statements,
    reads_as_order,
)
from compaction_proxy.core.ledger.values import ExactValue, find_values
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.answer import EMPTY_SECTION_TEXT

# If sentences were dropped, the summary counts as unfaithful if fewer than `MIN_CHARACTERS` characters are
# left, or less than `MIN_SHARE` of its original characters. A repeated list entry is dropped only if it has
# at least `MIN_CHARACTERS` characters.
MIN_CHARACTERS = 40
MIN_SHARE = 1 / 3
# The language of a summary is detected only if it has at least this many words. In writing systems without
# spaces, two characters count as a word.
MIN_WORDS = 12
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]{2}")
# Critical values are values that a summary must not lose. Each has a weight. Lost ones are appended only if
# the critical values in the summary have less than this share of the weight of all critical values.
MIN_RECALL = 0.9
# Maximum size of the list of appended values, as a share of the summary's length and in characters. The lower
# of the two limits applies. `ADDED_VALUE_CHARACTERS` is the maximum number of characters of one value.
ADDED_SHARE = 0.2
ADDED_CHARACTERS = 600
ADDED_VALUE_CHARACTERS = 120
ADDED_VALUES_HEADING = "Additional exact values:"
# The calls that are appended to a summary may take up to this share of its allowed characters, even if a long
# summary leaves less room.
CALLS_SHARE = 0.5
ADDED_CALLS_HEADING = "Calls that changed something, and how they ended:"
# `NEWEST_MESSAGES` is the number of newest messages whose identifiers are critical values, which a summary
# must not lose. `MAX_CRITICAL_VALUES` is the maximum number of critical values. The weights are those of a
# thing that a call changed, of the name of the last error, and of a recent identifier. The greater the weight
# of a value, the more harm its loss does.
NEWEST_MESSAGES = 6
MAX_CRITICAL_VALUES = 32
CHANGED_WEIGHT, ERROR_WEIGHT, RECENT_WEIGHT = 3, 3, 2
# A sentence is searched for values in pieces of at most this many characters. A longer text is hardly ever a
# real sentence.
PIECE_CHARACTERS = 4_000
# A number with at least this many digits counts as copied from the sources. The summary model may have
# counted or rounded to get a shorter one.
MIN_COPIED_DIGITS = 5
# A code of fewer characters than this, such as "n-1", does not count as copied from the sources, because it
# is more likely an expression.
MIN_CODE_CHARACTERS = 5

_ENTRY = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)])?\s*(?:\[[ xX]\]\s*)?")
_BULLET = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)])\s")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+|(?<=[\u3002\uff01\uff1f])\s*")
_HEADING = re.compile(r"\s*#{1,6} |\s*\|[\s|:-]+\|?\s*$")
_TOKEN = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d[\d.,'\u2019\u00a0\u202f ]*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ERROR_NAME = re.compile(
    r"\b[A-Z]\w{0,60}(?:Error|Exception|Failure)\b|\b[A-Z]{1,4}\d{3,6}\b|\bexit code \d+"
)
_PATH_LIKE = re.compile(r"[~./]|[^/]*(?:/[^/]+)*\.\w{1,8}$")
_TECHNICAL_TERM = re.compile(
    r"(?:utf|sha|iso|base|aes|md|https?|python|ipv|es|x|u?int|float|[uif]|p|h|q|v|node|web|oauth|gpt|c)-?\d{1,4}|"
    r"\d+-[a-z]+|\d{4}-\d\d.*",
    re.IGNORECASE,
)
_COPIED_KINDS = frozenset({"url", "email", "id", "money", "commit", "address", "host", "branch", "port"})
_RECENT_KINDS = frozenset({"url", "email", "id", "code", "commit", "branch", "money", "port"})

# A line counts as being about a request if it contains at least this share of the request's words and values.
LEAST_SHARE = 0.6
# A line is compared with at most this many of the newest requests, and with as many of the newest statements
# that ask for nothing. The second number is the maximum number of characters that are read of a line.
MAX_REQUESTS, LINE_CHARACTERS = 200, 1_000

_TITLE = re.compile(
    r"\s*+(?:#{1,6}[ \t]++|\*\*|__)(?P<title>[^|]{1,120}?)(?:\*\*|__)?:?\s*\Z|(?P<plain>[^-*•|#]{1,60}):\s*\Z"
)
_LABELLED = re.compile(
    r"\s*+(?:(?:[-*+•]|\d{1,3}[.)])\s++)?[\[(*_]{0,3}(?P<status>[^:\])\n|]{1,24})[\])*_]{0,3}\s*+[:\u2013\u2014-]\s"
)
_CHECKBOX = re.compile(r"\s*+(?:[-*+•]|\d{1,3}[.)])\s++\[(?P<box>[ xX✓✔])\]\s")
# These patterns find sentences that name a state at their end, or that call something open in unambiguous
# words.
_STATUS_AT_END = re.compile(
    r"(?:→|->|=>|[(\[\u2013\u2014]|\bstatus:)\s*+(?P<status>[^()\[\]→]{1,24})[)\].\s]*\Z"
)
_OPEN_CLAIM = re.compile(
    r"\b(?:(?:is|are|was|were|remains?|stays?|still|yet) (?:\w{1,12} ){0,2}(?:pending|outstanding|unresolved|"
    r"unanswered|unfinished|to be (?:done|answered|handled))|(?:still|remains?|stays?|left) open|"
    r"not (?:yet )?been (?:done|answered|handled|started)|not yet (?:done|answered|handled|started))\b"
)
# The words for each state in a corrected table row. A record never changes, so it can say only that a request
# was open when the record was written.
_STATUS_TEXTS = {
    StatementStatus.OPEN: "open then",
    StatementStatus.ANSWERED: "done",
    StatementStatus.UNKNOWN: "unknown",
    StatementStatus.TOLD: "told by the user",
}
# Maximum characters of a table cell that names a state.
STATUS_CHARACTERS = 24


@dataclass(frozen=True)
class _SummarySources:
    """The texts from which a summary may take its values.

    Attributes:
        parts: The texts, case-folded. Words and numbers are searched for in each text separately, so that no
            single search blocks other work of the proxy for long.
    """

    parts: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """All texts, joined by line ends."""
        return "\n".join(self.parts)

    @cached_property
    def tokens(self) -> frozenset[str]:
        """The words in the texts, where a word is a sequence of letters and digits."""
        return frozenset({token for part in self.parts for token in _TOKEN.findall(part)})

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The numbers in the texts, as bare digits without separators."""
        return frozenset({_keep_digits(number) for part in self.parts for number in _NUMBER.findall(part)})

    def contains_value(self, value: ExactValue) -> bool:
        """Returns whether the texts contain a value.

        The form of the value may differ, such as in the separators of a number or in the beginning of a path.
        """
        if value.kind in {"money", "number", "port"}:
            return _keep_digits(value.text) in self.numbers or value.text in self.text
        folded = value.text.casefold()
        if value.kind == "commit":
            return folded in self.text
        if self.tokens.issuperset(_TOKEN.findall(folded)) and folded in self.text:
            return True
        if value.kind == "version":
            return folded.removeprefix("v") in self.text
        # A summary may write an absolute path where the texts have a path relative to the working directory.
        # So the last two parts of an absolute path are enough.
        parts = list(filter(None, folded.split("/"))) if folded.startswith("/") else []
        return value.kind == "path" and len(parts) > 2 and "/".join(parts[-2:]) in self.text


def _keep_digits(number: str) -> str:
    return re.sub(r"\D", "", number)


def _unescape_json(arguments: str) -> str:
    """Returns JSON text in which the escapes of strings are replaced by the characters that they represent.

    The text need not be valid JSON.
    """
    return _ESCAPE.sub(
        lambda found: chr(int(found[1], 16)) if found[1] else {"n": "\n", "t": "\t"}.get(found[2], found[2]),
        arguments,
    )


def _iter_texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield from (message.text, message.refusal, message.name)
        for call in message.calls:
            yield from (call.name, call.id, call.arguments, _unescape_json(call.arguments))


def _is_copied_value(value: ExactValue) -> bool:
    """Returns whether a correct summary can contain the value only as a copy from the sources."""
    if value.kind == "path":
        return bool(_PATH_LIKE.match(value.text)) and len(value.text) > 3 and not value.text[0].isupper()
    if value.kind == "code":
        made = sum(map(str.isdigit, value.text)) >= 2 or "_" in value.text or "-" in value.text
        return made and len(value.text) >= MIN_CODE_CHARACTERS and not _TECHNICAL_TERM.fullmatch(value.text)
    if value.kind == "version":  # two numbers, as in "2.1", may be the number of a section
        return value.text.startswith("v") or value.text.count(".") > 1
    return value.kind in _COPIED_KINDS or (
        value.kind == "number" and len(_keep_digits(value.text)) >= MIN_COPIED_DIGITS
    )


def _has_invented_value(piece: str, sources: _SummarySources) -> bool:
    return any(
        _is_copied_value(value) and not sources.contains_value(value)
        for start in range(0, len(piece), PIECE_CHARACTERS)
        for value in find_values(piece[start : start + PIECE_CHARACTERS])
    )


def _drop_unfounded_sentences(text: str, sources: _SummarySources, user_texts: Sequence[str]) -> str:
    """Returns the text without sentences with values that the sources lack, or orders that no user gave.

    A heading counts as one sentence, and so does a table row.
    """
    lines = []
    for line in text.splitlines():
        start = _ENTRY.match(line)
        opening = start[0] if start else ""
        body = line[len(opening) :]
        pieces = [body] if body.startswith("|") else [each for each in _SENTENCE.split(body) if each]
        if _HEADING.match(line):
            pieces = [line.lstrip("# \t")]
        sound = [
            each
            for each in pieces
            if not _has_invented_value(each, sources)
            and (not reads_as_order(each) or is_backed_by_user(each, user_texts))
        ]
        if len(sound) == len(pieces):  # also true for an empty line
            lines.append(line)
        elif sound:
            lines.append(opening + " ".join(sound))
    return "\n".join(lines).strip()


def _drop_repeated_entries(text: str) -> str:
    """Returns the text without repeated list entries of at least `MIN_CHARACTERS` characters.

    If the only entry of a section is dropped, the text "None" is written instead.
    """
    known: set[str] = set()
    lines, result = text.splitlines(), list[str]()
    for line, follower in zip_longest(lines, lines[1:]):
        if line not in known or len(line) < MIN_CHARACTERS or not _BULLET.match(line):
            result.append(line)
        elif result[-1].startswith("#") and not follower:
            result.append(EMPTY_SECTION_TEXT)
        known.add(line)
    return "\n".join(result)


def _list_prose_lines(text: str) -> list[str]:
    """Returns the lines of a text that are neither headings nor separator rows of tables."""
    return [line for line in text.splitlines() if not _HEADING.match(line)]


def _list_critical_values(messages: Sequence[Message], writes: Sequence[Action]) -> list[tuple[int, str]]:
    """Returns the critical values of the messages, which a summary must not lose, each with its weight.

    They are changed paths, recent identifiers, the name of the last error, and the targets of calls that
    changed something. At most `MAX_CRITICAL_VALUES` are returned.
    """
    seen = collect_facts(messages, range(len(messages)))
    found = [(weight, each.text) for each in seen if (weight := _weigh_fact(each, len(messages)))]
    errors = [each.text for each in seen if each.kind in {"error", "exit"}]
    if errors and (name := _ERROR_NAME.search(errors[-1])):
        found.append((ERROR_WEIGHT, name[0]))
    known = {value for _, value in found}
    targets = dict.fromkeys(each.target[1] for each in writes if not each.has_failed)
    found += [
        (CHANGED_WEIGHT, value) for value in targets if value not in known and not re.search(r"\s", value)
    ]
    short = [each for each in found if each[1] and len(each[1]) <= ADDED_VALUE_CHARACTERS]
    return short[-MAX_CRITICAL_VALUES:]


def _weigh_fact(fact: ObservedFact, length: int) -> int:
    if re.search(r"\s", fact.text):
        return 0
    if fact.kind == "path" and set(fact.operations) - {"read"}:
        return CHANGED_WEIGHT
    recent = fact.kind in _RECENT_KINDS and fact.message_index >= length - NEWEST_MESSAGES
    return RECENT_WEIGHT if recent and _is_copied_value(ExactValue(fact.kind, fact.text, 0)) else 0


def _append_missing_values(text: str, messages: Sequence[Message], characters: int) -> str:
    """Returns the text, followed by calls that changed something and then by critical values.

    Only calls and values that the text lacks are appended, and values only if the text lacks too many of them
    (`MIN_RECALL`). `characters` is the allowed size of the text with the appended calls.
    """
    writes = [each for each in read_frontier(messages).actions if each[1].is_write]
    whole = _append_missing_calls(text, writes, max(characters - len(text), int(CALLS_SHARE * characters)))
    critical = _list_critical_values(messages, [each for _, each in writes])
    folded = whole.casefold()
    missing = [each for each in critical if each[1].rpartition("/")[2].casefold() not in folded]
    lost = sum(weight for weight, _ in missing)
    if not missing or lost <= (1 - MIN_RECALL) * sum(weight for weight, _ in critical):
        return whole
    room = int(min(ADDED_CHARACTERS, ADDED_SHARE * len(text))) - len(ADDED_VALUES_HEADING) - 2
    added = ""
    for _, _, value in sorted((-weight, -at, value) for at, (weight, value) in enumerate(missing)):
        if len(added) + len(value) + 3 <= room:
            added += f"\n- {value}"
    return f"{whole}\n\n{ADDED_VALUES_HEADING}{added}" if added else whole


def _append_missing_calls(text: str, writes: Sequence[tuple[int, Action]], room: int) -> str:
    """Returns the text with calls that changed something appended, as far as there is room.

    A call is appended only if at least one word of its description is missing in the text. `room` is the
    maximum number of appended characters.
    """
    known_words = frozenset(_TOKEN.findall(text.casefold()))
    room -= len(ADDED_CALLS_HEADING) + 2
    added = ""
    for line in format_action_items(writes, room):
        if not known_words.issuperset(_TOKEN.findall(line.casefold())) and len(added) + len(line) + 1 <= room:
            added += f"\n{line}"
    return f"{text}\n\n{ADDED_CALLS_HEADING}{added}" if added else text


def verify_summary(
    text: str,
    *,
    sources: Sequence[Message],
    earlier_summaries: Sequence[str],
    language: str,
    states: Mapping[tuple[int, str], StatementStatus] = MappingProxyType({}),
    max_characters: int = 0,
) -> str:
    """Returns the summary, corrected with the messages that it replaces.

    Sentences with values or instructions that do not occur in the messages are removed. Wrong states of
    requests are corrected, and repeated entries are removed. Important values that the summary left out are
    appended, and so are the tool calls that changed something.

    Args:
        text: A summary that `core.summary.answer.validate_summary` has accepted.
        sources: The messages that the summary replaces.
        earlier_summaries: Earlier summaries that the summary model has read.
        language: English name of the language that the prompt asked for; empty if it is unknown.
        states: The state of each statement of the conversation (`core.ledger.frontier`).
        max_characters: Size that the summary should have at most, in characters. The appended tool calls may
            take the rest of this size. If the rest is less than half of this size, they may take half of this
            size, so the result may be longer. With 0, no calls are appended.

    Raises:
        SummaryError: If the summary is certainly in another language (reason `language`), or if too little of
            the summary is left (reason `unfaithful`).
    """
    prose_lines = _list_prose_lines(text)
    prose = "\n".join(prose_lines)
    has_enough_words = len(UNSPACED.sub(" x ", prose).split()) >= MIN_WORDS
    if language and has_enough_words and detect_language([prose]) not in {"", language}:
        raise SummaryError("language")
    known_texts = _SummarySources(
        tuple([each.casefold() for each in (*_iter_texts(sources), *earlier_summaries)])
    )
    user_texts = [sources[index].text for index in find_user_messages(sources)]
    sound_text = _drop_unfounded_sentences(text, known_texts, user_texts)
    before, after = (
        sum(len(line.strip()) for line in lines) for lines in (prose_lines, _list_prose_lines(sound_text))
    )
    if sound_text != text.strip() and after < max(MIN_CHARACTERS, MIN_SHARE * before):
        raise SummaryError("unfaithful")
    return _append_missing_values(
        _drop_repeated_entries(correct_states(sound_text, states)), sources, max_characters
    )


class _KnownStatement(NamedTuple):
    """The words and the state of a user statement, with which lines of a summary are compared.

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
    """Returns the summary with wrong states of requests corrected.

    A wrong state in a table row is replaced. A list entry or sentence with a wrong state is dropped.

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
        heading = _TITLE.match(line)
        if heading and not _BULLET.match(line):
            section_state = _find_status(heading["title"] or heading["plain"])
            lines.append(line)
            continue
        corrected = _correct_line(line, section_state, known)
        if corrected is not None:
            lines.append(corrected)
        elif lines and _TITLE.match(lines[-1]):
            # This empty line marks a section that lost an entry. `_fill_sections` writes "None" in its place
            # if no other entry of the section stays.
            lines.append("")
    return "\n".join(_fill_sections(lines)).strip()


def _list_known(states: Mapping[tuple[int, str], StatementStatus]) -> Iterator[_KnownStatement]:
    """Yields the newest requests, and the newest statements that ask for nothing, with their words.

    Statements of fewer than two words are left out.
    """
    statements = [each for each in states.items() if each[1] is StatementStatus.TOLD]
    requests = [each for each in states.items() if each[1] is not StatementStatus.TOLD]
    unsettled = {turn for (turn, _), state in requests if state is not StatementStatus.ANSWERED}
    for (turn, text), state in (*requests[-MAX_REQUESTS:], *statements[-MAX_REQUESTS:]):
        words = _collect_line_words(text)
        if len(words) > 1:
            yield _KnownStatement(turn, words, state, is_settled=turn not in unsettled)


def _collect_line_words(text: str) -> frozenset[str]:
    """Returns the stems of the words of a text and its exact values, which show what it is about."""
    return collect_subject_words(read_statements(text[:LINE_CHARACTERS]))


def _find_status(words: str) -> StatementStatus | None:
    plain = fold_text(words)
    if has_cue(plain, "open_status"):
        return StatementStatus.OPEN
    return StatementStatus.ANSWERED if has_cue(plain, "done_status") else None


def _find_claimed_status(sentence: str) -> StatementStatus | None:
    """Returns the state (open or answered) that a sentence claims for its subject.

    Returns None if the sentence claims neither.
    """
    ending = _STATUS_AT_END.search(sentence)
    if ending and (status := _find_status(ending["status"])):
        return status
    return StatementStatus.OPEN if _OPEN_CLAIM.search(fold_text(sentence)) else None


def _find_state(line: str, known: list[_KnownStatement]) -> StatementStatus | None:
    """Returns the state of the statement that a line is about.

    Returns None if the line is about no statement, or if it fits several statements with different states
    equally well.
    """
    about = _collect_line_words(line)
    requests = (each for each in known if each.state is not StatementStatus.TOLD)
    states_by_share: defaultdict[tuple[float, int], set[StatementStatus]] = defaultdict(set)
    for each in requests:
        shared = len(each.words & about)
        states_by_share[shared / len(each.words), shared].add(each.state)
    best = max(states_by_share, default=(0.0, 0))  # of equal shares, the one with more words
    if best[0] >= LEAST_SHARE:
        states = states_by_share[best]
        return states.pop() if len(states) == 1 else None
    return _find_statement_state(about, known)


def _find_statement_state(about: frozenset[str], known: list[_KnownStatement]) -> StatementStatus | None:
    """Returns the state of the statement that a line repeats, among statements that ask for nothing.

    Most words of the statement must be in the line, and most words of the line must be in the statement's
    message. Returns None if the line repeats no such statement. Returns `UNKNOWN` if the message also
    contains a request that is not answered, because the line may be about this request.
    """
    words_by_turn: defaultdict[int, set[str]] = defaultdict(set)
    for each in known:
        words_by_turn[each.turn] |= each.words
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
    """Returns whether the state that a line claims contradicts the known state of its statement."""
    state = _find_state(line, known) if claimed else None
    if state is None or state is StatementStatus.UNKNOWN:
        return False
    return claimed is StatementStatus.OPEN if state is StatementStatus.TOLD else claimed is not state


def _correct_line(
    line: str, section_status: StatementStatus | None, known: list[_KnownStatement]
) -> str | None:
    """Returns the line without wrong states of requests, or None if nothing of the line is left.

    Args:
        line: A line of the summary.
        section_status: The state that the heading above the line names; None if the heading names none.
        known: The statements whose state is known.
    """
    cells = line.strip().strip("|").split("|") if line.lstrip().startswith("|") else []
    if len(cells) > 1:
        return _correct_row(line, cells, known)
    label = None
    if box := _CHECKBOX.match(line):
        label = StatementStatus.OPEN if box["box"] == " " else StatementStatus.ANSWERED
    elif labelled := _LABELLED.match(line):
        label = _find_status(labelled["status"])
    if label or _BULLET.match(line):
        claimed = label or _find_claimed_status(line) or section_status
        return None if _claims_wrong_state(claimed, line, known) else line
    pieces = _SENTENCE.split(line)
    correct = [
        each
        for each in pieces
        if not _claims_wrong_state(_find_claimed_status(each) or section_status, each, known)
    ]
    if len(correct) == len(pieces):
        return line
    return " ".join(correct) or None


def _correct_row(line: str, cells: list[str], known: list[_KnownStatement]) -> str:
    """Returns a table row in which the correct state replaces a wrong state of a request."""
    status_cells = [
        k for k, cell in enumerate(cells) if len(cell.strip()) <= STATUS_CHARACTERS and _find_status(cell)
    ]
    if not status_cells:
        return line
    claimed = _find_status(cells[status_cells[-1]])
    others = [cell for k, cell in enumerate(cells) if k != status_cells[-1]]
    subject = next((cell for cell in others if len(_collect_line_words(cell)) > 1), others[0])
    state = _find_state(subject, known)
    if state is None or (claimed is StatementStatus.ANSWERED and state is not StatementStatus.OPEN):
        return line
    cells[status_cells[-1]] = f" {_STATUS_TEXTS[state]} "
    return f"|{'|'.join(cells)}|"


def _fill_sections(lines: list[str]) -> Iterator[str]:
    """Yields the lines, and the text "None" in each section that lost all its entries."""
    for at, line in enumerate(lines):
        follows = lines[at + 1 : at + 3]
        bare = line == "" and at > 0 and _TITLE.match(lines[at - 1])
        if bare and (not follows or follows[0] == "" or _TITLE.match(follows[0])):
            yield EMPTY_SECTION_TEXT
        elif not bare:
            yield line
