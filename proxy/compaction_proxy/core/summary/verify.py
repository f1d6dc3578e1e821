"""Verifies a summary against its sources without asking a model again.

Sentences are dropped if they contain exact values that the sources do not contain, or orders that no user
gave: a changed value does more harm than a missing one, and only a user may make rules. Values that later
work needs and that the summary lost are appended in a list without other words.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from types import MappingProxyType

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.ledger.actions import Action, format_action_items
from compaction_proxy.core.ledger.facts import ObservedFact, collect_facts
from compaction_proxy.core.ledger.frontier import StatementStatus, read_frontier
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.ledger.values import ExactValue, find_values
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.injection import is_backed_by_user, reads_as_order
from compaction_proxy.core.summary.request_states import EMPTY_SECTION_TEXT, correct_states

# A summary is unfaithful if sentences are dropped and fewer than `MIN_CHARACTERS` characters are left, or
# less than `MIN_SHARE` of its characters. A repeated line is dropped only if it has at least
# `MIN_CHARACTERS` characters.
MIN_CHARACTERS = 40
MIN_SHARE = 1 / 3
# The language of a summary is detected only if it has at least this many words. In writing systems without
# spaces, two characters count as a word.
MIN_WORDS = 12
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]{2}")
# Lost values are appended only if the summary contains less than this share of the critical values by weight.
MIN_RECALL = 0.9
# Maximum size of the list of appended values, as a share of the summary's length and in characters, and
# maximum characters of one value.
ADDED_SHARE = 0.2
ADDED_CHARACTERS = 600
ADDED_VALUE_CHARACTERS = 120
ADDED_VALUES_HEADING = "Additional exact values:"
# Even after a long summary, appended calls may take up to this share of the allowed characters.
CALLS_SHARE = 0.5
ADDED_CALLS_HEADING = "Calls that changed something, and how they ended:"
# Critical values are values that a summary must not lose. `NEWEST_MESSAGES` is the number of newest messages
# whose identifiers are critical, and `MAX_CRITICAL_VALUES` is the maximum number of critical values. The loss
# of a value is worse the greater its weight is.
NEWEST_MESSAGES = 6
MAX_CRITICAL_VALUES = 32
CHANGED_WEIGHT, ERROR_WEIGHT, RECENT_WEIGHT = 3, 3, 2
# Maximum characters of a text that is searched for values at once. A longer text is no single sentence. It is
# searched in pieces of this size.
PIECE_CHARACTERS = 4_000
# A number with at least this many digits was copied, not counted or rounded.
MIN_COPIED_DIGITS = 5
# Minimum characters of a code. A shorter one, such as "n-1", is more likely an expression.
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


@dataclass(frozen=True)
class _SummarySources:
    """The texts from which a summary may take its values.

    Attributes:
        parts: The texts, case-folded. They are searched one by one, so that no single search blocks other
            work of the proxy for long.
    """

    parts: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """All texts as one."""
        return "\n".join(self.parts)

    @cached_property
    def tokens(self) -> frozenset[str]:
        """The runs of letters and digits in the texts."""
        return frozenset({token for part in self.parts for token in _TOKEN.findall(part)})

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The numbers in the texts, as bare digits without separators."""
        return frozenset({_keep_digits(number) for part in self.parts for number in _NUMBER.findall(part)})

    def contains_value(self, value: ExactValue) -> bool:
        """Returns whether the texts contain a value, perhaps in another form, such as without separators."""
        if value.kind in {"money", "number", "port"}:
            return _keep_digits(value.text) in self.numbers or value.text in self.text
        folded = value.text.casefold()
        if value.kind == "commit":
            return folded in self.text
        if self.tokens.issuperset(_TOKEN.findall(folded)) and folded in self.text:
            return True
        if value.kind == "version":
            return folded.removeprefix("v") in self.text
        return value.kind == "path" and folded.startswith("/") and self._contains_path_end(folded)

    def _contains_path_end(self, path: str) -> bool:
        """Returns whether the texts contain the last two parts of a path with at least three parts.

        The texts need not contain the whole path, because they may name its beginning, the working directory,
        in another place.
        """
        parts = [part for part in path.split("/") if part]
        return len(parts) > 2 and "/".join(parts[-2:]) in self.text


def _keep_digits(number: str) -> str:
    return re.sub(r"\D", "", number)


def _unescape_json(arguments: str) -> str:
    """Returns JSON text with the escapes of its strings resolved. The text need not be valid JSON."""
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
    """Returns whether a value is of a kind that a correct summary can only have copied from the sources."""
    if value.kind == "path":
        return bool(_PATH_LIKE.match(value.text)) and len(value.text) > 3 and not value.text[0].isupper()
    if value.kind == "code":
        made = sum(map(str.isdigit, value.text)) >= 2 or "_" in value.text or "-" in value.text
        return made and len(value.text) >= MIN_CODE_CHARACTERS and not _TECHNICAL_TERM.fullmatch(value.text)
    if value.kind == "version":  # a number of two parts may belong to a section
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


def _split_line(line: str) -> tuple[str, list[str]]:
    """Returns the bullet or number that opens a line, and its sentences. A table row is one sentence."""
    start = _ENTRY.match(line)
    opening = start[0] if start else ""
    body = line[len(opening) :]
    return opening, [body] if body.startswith("|") else [each for each in _SENTENCE.split(body) if each]


def _drop_unfounded_sentences(text: str, sources: _SummarySources, user_texts: Sequence[str]) -> str:
    """Returns the text without sentences that contain invented values or orders that no user gave."""
    lines = []
    for line in text.splitlines():
        opening, pieces = _split_line(line)
        if _HEADING.match(line):
            pieces = [line.lstrip("# \t")]
        sound = [each for each in pieces if not _has_invented_value(each, sources)]
        sound = [each for each in sound if not reads_as_order(each) or is_backed_by_user(each, user_texts)]
        if len(sound) == len(pieces):  # also true for an empty line
            lines.append(line)
        elif sound:
            lines.append(opening + " ".join(sound))
    return "\n".join(lines).strip()


def _drop_repeated_entries(text: str) -> str:
    """Returns the text without repeated list entries. A section that loses its only entry says "None"."""
    known: set[str] = set()
    lines, result = text.splitlines(), list[str]()
    for line, follower in zip_longest(lines, lines[1:]):
        if line not in known or len(line) < MIN_CHARACTERS or not _BULLET.match(line):
            result.append(line)
        elif result[-1].startswith("#") and not follower:
            result.append(EMPTY_SECTION_TEXT)
        known.add(line)
    return "\n".join(result)


def _count_prose_characters(text: str) -> int:
    """Returns the number of characters of a text without its headings and the rulers of its tables."""
    return sum(len(line.strip()) for line in text.splitlines() if not _HEADING.match(line))


def _list_critical_values(messages: Sequence[Message], writes: Sequence[Action]) -> list[tuple[int, str]]:
    """Returns the values that must not be lost, each with its weight, the newest last."""
    seen = collect_facts(messages, range(len(messages)))
    errors = [each for each in seen if each.kind in {"error", "exit"}]
    last = _ERROR_NAME.findall(errors[-1].text)[:1] if errors else []
    found = [(weight, each.text) for each in seen if (weight := _weigh_fact(each, len(messages)))]
    found += [(ERROR_WEIGHT, name) for name in last]
    known = {value for _, value in found}
    targets = dict.fromkeys(
        each.target[1] for each in writes if not (each.has_failed or re.search(r"\s", each.target[1]))
    )
    found += [(CHANGED_WEIGHT, value) for value in targets if value not in known]
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
    """Returns the text with missing calls that changed something appended, then missing critical values.

    `characters` is the allowed size of the result.
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

    A call is appended only if the text lacks at least one word of the call's description. `room` is the
    maximum number of appended characters.
    """
    known_words = frozenset(_TOKEN.findall(text.casefold()))
    room -= len(ADDED_CALLS_HEADING) + 2
    added = ""
    for line in format_action_items(writes, room):
        if not known_words.issuperset(_TOKEN.findall(line.casefold())) and len(added) + len(line) + 1 <= room:
            added += f"\n{line}"
    return f"{text}\n\n{ADDED_CALLS_HEADING}{added}" if added else text


def _drop_headings(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not _HEADING.match(line))


def verify_summary(
    text: str,
    *,
    sources: Sequence[Message],
    earlier_summaries: Sequence[str],
    language: str,
    states: Mapping[tuple[int, str], StatementStatus] = MappingProxyType({}),
    max_characters: int = 0,
) -> str:
    """Returns the summary without invented values and orders, and with the critical values that it lost.

    Wrong states of requests are corrected, too, and repeated entries are dropped.

    Args:
        text: A summary that `core.summary.answer.validate_summary` has accepted.
        sources: The messages that it summarises.
        earlier_summaries: Earlier summaries that the model was shown.
        language: English name of the language that the prompt asked for; empty if it is unknown.
        states: The state of each statement of the conversation (`core.ledger.frontier`).
        max_characters: Allowed size of the result in characters; 0 appends no calls. Calls that changed
            something are appended in the room that the summary leaves, or in half of this size if that is
            more.

    Raises:
        SummaryError: With the reason `language` if the summary is certainly in another language, or
            `unfaithful` if too little of it is left.
    """
    prose = _drop_headings(text)
    words = len(UNSPACED.sub(" x ", prose).split())
    written = detect_language([prose]) if words >= MIN_WORDS else ""
    if language and written and written != language:
        raise SummaryError("language")
    known_texts = _SummarySources(
        tuple([each.casefold() for each in (*_iter_texts(sources), *earlier_summaries)])
    )
    user_texts = [each.text for each in sources if each.role == "user" and not each.answered_call_ids]
    sound_text = _drop_unfounded_sentences(text, known_texts, user_texts)
    if sound_text != text.strip() and _count_prose_characters(sound_text) < max(
        MIN_CHARACTERS, MIN_SHARE * _count_prose_characters(text)
    ):
        raise SummaryError("unfaithful")
    return _append_missing_values(
        _drop_repeated_entries(correct_states(sound_text, states)), sources, max_characters
    )
