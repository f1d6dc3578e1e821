"""Finds facts of a conversation without a model: paths, commands, errors and exact values such as amounts.

Text from tools and from the assistant may be hostile. So only short values of known shapes are quoted from
it, without control characters and invisible characters. The only sentence that is ever quoted is one line of
an error.

Exact values get names: in JSON from the keys, in other text from the words before a value. A value must be a
whole piece of text between separators. A part of a longer piece, such as the hour of a time stamp or the
number in a field's name, is useless to a reader and is left out.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from compaction_proxy.core.json_bounds import parse_json_container
from compaction_proxy.core.ledger.client_forms import is_client_result
from compaction_proxy.core.ledger.cues import STOP_WORDS
from compaction_proxy.core.ledger.values import ExactValue, find_values
from compaction_proxy.core.message import Message, MessageToolCall

# Number of characters that are read at the beginning, and at the end, of one text.
HEAD_CHARACTERS, TAIL_CHARACTERS = 24 * 1024, 8 * 1024
# Maximum characters that are read of a line. People do not write longer lines by hand.
LINE_CHARACTERS = 2_000
# Maximum characters quoted of a line that reports an error, of a shell command, and of any other value.
ERROR_CHARACTERS, COMMAND_CHARACTERS, VALUE_CHARACTERS = 120, 100, 160
# Maximum characters quoted of a value's name.
NAME_CHARACTERS = 48
# Maximum number of values, and of errors, that are taken from one message.
MAX_VALUES_PER_MESSAGE, MAX_ERRORS_PER_MESSAGE = 40, 3

_HIDDEN_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\U000e0000-\U000e0fff]+"
)

_OBSERVED_KINDS = frozenset(
    {"url", "email", "id", "money", "version", "code", "date", "commit", "branch", "port", "address", "host"}
)

_ERROR = re.compile(
    r"\b(?:(?:[a-z_]\w{0,30}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception|Failure|Warning)(?=:|\s*$)|Traceback\b|"
    r"(?<!\w)[Ee]rror(?=:|\[| [A-Z]+\d)|ERROR\b|"
    r"FAILED?\b|[Ff]atal[: ]|panic(?:ked)?[: ]|command not found|No such file|Permission denied|"
    r"[Cc]annot find)"
)
# Every line that `_ERROR` matches contains one of these strings, and hardly any other line does. So lines
# without them are skipped without the slower search for `_ERROR`.
_ERROR_SIGNS = (
    "Error", "Exception", "Failure", "Warning", "Traceback", "error", "ERROR", "FAIL", "atal", "panic",
    "command not found", "No such file", "Permission denied", "annot find",
)  # fmt: skip
_EXIT = re.compile(
    r"\b(?:exit(?:ed with)?(?: code| status)?|return ?code|exitCode)\"?[:= ]{1,3}(-?\d{1,3})\b", re.IGNORECASE
)

_PATH_KEY = re.compile(
    r'"(?:file_?path|path|file|filename|target_file|old_path|new_path|notebook_path|file_name|'
    r'(?P<other>uri|source|destination|target))"\s*:\s*"((?:[^"\\]|\\.){1,400})"',
    re.IGNORECASE,
)
# The value of a key such as `source` is not always a path. It counts as a path only if it matches this
# pattern.
_PATH_LIKE = re.compile(r"[~.]|.*[/\\]|[^.\s]{1,200}\.\w{1,8}\Z")
_COMMAND_KEY = re.compile(
    r'"(?:command|cmd|script|shell|code|bash_command)"\s*:\s*(?:\[[^\]"]*)?"((?:[^"\\]|\\.){1,2000})',
    re.IGNORECASE,
)
_SUBCOMMAND = re.compile(
    r'"(?:command|action|operation|type)"\s*:\s*"(view|create|str_replace|insert|write|read|delete|edit)"'
)
_PATCH_HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File: ([^\\\n\"]{1,200})")
_TOOL_OPERATIONS = (
    ("deleted", re.compile(r"delete|remove|unlink|trash|^rm$")),
    ("modified", re.compile(r"edit|patch|replace|update|modify|append|insert|rename|move|apply|^mv$|sed")),
    ("created", re.compile(r"create|write|save|touch|mkdir|new_?file|copy|^cp$")),
    (
        "read",
        re.compile(
            r"read|view|open|cat|show|get|load|grep|search|glob|list|find|^ls$|head|tail|sort|diff|wc"
        ),
    ),
)
_TARGET = r"([\w~./@+-]{2,160})"
_SHELL_OPERATIONS = (
    (
        "modified",
        re.compile(rf"(?<![>&\d=-])>>?\s*{_TARGET}|\b(?:sed\s+-i\S*\s+\S{{1,200}}|tee(?: -a)?)\s+{_TARGET}"),
    ),
    ("deleted", re.compile(rf"\brm\s+(?:-\w+\s+)*{_TARGET}")),
    ("created", re.compile(rf"\b(?:touch|mkdir(?: -p)?)\s+{_TARGET}")),
    ("read", re.compile(rf"\b(?:cat|less|head|tail)\s+(?:-\w+\s+(?:\d+\s+)?)*{_TARGET}")),
)


# Number of characters before a value that are searched for its name.
NAME_SEARCH_CHARACTERS = 60
# Maximum number of strings that are read from one JSON text, maximum nesting level at which they are read,
# and maximum characters that are read of one string.
MAX_LEAVES, MAX_DEPTH, LEAF_CHARACTERS = 4_000, 12, 2_000
# A code, an amount of money, a version or a commit that no word of the text names is quoted only if the text
# has at most this many characters.
SHORT_TEXT_CHARACTERS = 200
# Minimum characters of a code, of a complete date, and of a word that names a value. The last number is the
# maximum number of words in a name that is taken from the end of a label.
MIN_CODE_CHARACTERS, MIN_DATE_CHARACTERS, MIN_WORD_CHARACTERS, MAX_LABEL_WORDS = 5, 8, 3, 4
# Maximum number of meaningless words, such as "of", between a name and its value.
MAX_SKIPPED_WORDS = 2

_GENERIC_KEYS = frozenset(
    {"id", "name", "key", "code", "value", "number", "amount", "date", "type", "status", "price", "total"}
    | {"created_at", "updated_at", "time", "url", "version", "email", "title", "label", "text", "data"}
)
_ID_KEY = re.compile(r"(?:^|_)(?:id|ids|number|no|key|code|uuid)$|[a-z]Id$|^name$", re.IGNORECASE)
# Matches a sequence of characters between two separators. Characters of `_SURROUNDING_CHARACTERS` at the
# start or end of the sequence are no part of a value.
_VALUE_TOKEN = re.compile(r"[\w.@/\\~+&%-]+")
_SURROUNDING_CHARACTERS = ".,;:!?-+~%&"
_VALUE_LABEL = re.compile(r"([^\W\d_][\w /-]{0,38}?)[\"'`*_)\]]{0,4}[ \t]{0,2}[:=：][ \t\"'`*(\[$#<]{0,6}\Z")  # noqa: RUF001 - a wide colon
_WORDS = re.compile(r"[^\W\d_]+")
# Characters that may separate a word from the value that it names.
_OPENING_CHARACTERS = " (\"'`*[#$<"
_TECHNICAL_TERM = re.compile(
    r"\d+-[a-z]+|(?:utf|sha|iso|base|aes|md|u?int|float|win|x)-?\d{1,4}", re.IGNORECASE
)
# Colours, and attributes in program code that look like host names, are no useful values and are left out.
_COLOUR = re.compile(r"[0-9a-f]{3}(?:[0-9a-f]{3})?(?:[0-9a-f]{2})?", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"(?:self|this|cls|super|args|opts?|config|module|req|res|ctx)\.")
_COMMIT_SIZES = frozenset({7, 40})
_COMMIT_WORDS = frozenset({"commit", "sha", "revision", "rev", "head"})
_KEY_FOLLOWS = re.compile(r"[\"']?\s{0,2}:\s")
# Kinds of values that are clear without a name. The word before such a value is not used as its name.
_UNNAMED_KINDS = frozenset({"url", "email", "host", "branch", "port", "address"})
# In text that is not JSON, a later value of these kinds replaces the earlier value with the same name. Values
# of other kinds, such as codes, are all kept.
_REPLACING_KINDS = frozenset({"money", "version", "date", "port", "host", "address", "branch", "commit"})


class MessageFact(NamedTuple):
    """A fact that one message shows.

    Attributes:
        kind: `path`, `error`, `exit`, `command`, or the kind of a value.
        text: One short line.
        operation: For a path, what the call does with it, such as `read` or `modified`; else "".
        name: For a value, its name in the message, such as `reservation_id`; "" if it has none.
        owner_key: For a value, a key made of its name and of the object that it belongs to, such as an order.
            A newer value with the same key replaces this value. "" if the key is unknown.
    """

    kind: str
    text: str
    operation: str = ""
    name: str = ""
    owner_key: str = ""


_OPERATION_ORDER = ("read", "created", "modified", "deleted")


@dataclass(frozen=True, slots=True)
class ObservedFact:
    """A fact observed in messages of tools and of the assistant.

    Attributes:
        kind: `path`, `error`, `exit`, `command`, or the kind of a value.
        text: One short line.
        message_index: Index of the newest message that shows the fact.
        operations: For a path, what was done with it: `read`, `created`, `modified`, `deleted`, in that
            order.
        name: For a value, its name in the message; "" if it has none.
    """

    kind: str
    text: str
    message_index: int
    operations: tuple[str, ...] = ()
    name: str = ""


def take_head_and_tail(text: str, head: int = HEAD_CHARACTERS, tail: int = TAIL_CHARACTERS) -> str:
    """Returns the text, or its first `head` and last `tail` characters if it is longer than both together.

    A line break separates the two parts.
    """
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def to_one_line(text: str, max_characters: int) -> str:
    """Returns the beginning of a text as one line of at most `max_characters` characters.

    Hidden characters become spaces. A space is put into character pairs with which the control tokens of chat
    templates begin or end, such as `<|`.
    """
    seen = _HIDDEN_CHARACTERS.sub(" ", text[: 2 * max_characters]).replace("<|", "< |").replace("|>", "| >")
    return " ".join(seen.split())[:max_characters]


def _iter_shell_paths(command: str) -> Iterator[tuple[str, str]]:
    for deed, pattern in _SHELL_OPERATIONS:
        for found in pattern.finditer(command):
            path = next(filter(None, found.groups()))
            if not path.startswith(("/dev/", "-")):
                yield deed, path


def _iter_call_paths(call: MessageToolCall, arguments: str) -> Iterator[tuple[str, str]]:
    sub = _SUBCOMMAND.search(arguments)
    name = sub.group(1) if sub else call.name.lower()
    deed = next((deed for deed, pattern in _TOOL_OPERATIONS if pattern.search(name)), None)
    for found in _PATH_KEY.finditer(arguments):
        if deed and (not found["other"] or _PATH_LIKE.match(found[2])):
            yield deed, found[2]
    for verb, path in _PATCH_HEADER.findall(arguments):
        yield {"Add": "created", "Update": "modified", "Delete": "deleted"}[verb], path


def _iter_call_facts(call: MessageToolCall) -> Iterator[MessageFact]:
    """Yields the paths and commands in the arguments of a call."""
    yield from (MessageFact("path", path, deed) for deed, path in _iter_call_paths(call, call.arguments))
    for found in _COMMAND_KEY.finditer(call.arguments):
        command = found.group(1).replace("\\n", "\n").replace('\\"', '"')
        if _SUBCOMMAND.match(f'"command":"{command}"'):
            continue
        yield MessageFact("command", command.strip().partition("\n")[0][:COMMAND_CHARACTERS])
        yield from (MessageFact("path", path, deed) for deed, path in _iter_shell_paths(command))


def find_error(text: str) -> str:
    """Returns the first line that reports an error, or "" if there is none.

    The result begins with the word that shows the error. The words before it in the line are left out.
    """
    found = next((each for each in _iter_errors(text) if each.kind == "error"), None)
    return found.text if found else ""


def _iter_errors(text: str) -> Iterator[MessageFact]:
    signs = [sign for sign in _ERROR_SIGNS if sign in text]
    shown = 0
    for line in text.splitlines() if signs else ():
        if not any(sign in line for sign in signs):
            continue
        if found := _ERROR.search(line, 0, LINE_CHARACTERS):
            yield MessageFact("error", to_one_line(line[found.start() :], ERROR_CHARACTERS))
            shown += 1
        if shown == MAX_ERRORS_PER_MESSAGE:
            break
    lower = text.lower()
    may_exit = not text.isascii() or "exit" in lower or "return" in lower
    if may_exit and (code := _EXIT.search(text)) and code.group(1) != "0":
        yield MessageFact("exit", f"exit code {code.group(1)}")


def find_named_values(text: str, kinds: frozenset[str]) -> Iterator[MessageFact]:
    """Yields the values of these kinds in a text, in order, each with its name if it has one.

    The caller must limit the length of the text.
    """
    parsed = parse_json_container(text)
    if parsed is None:
        yield from _find_text_values(text, kinds)
        return
    for name, thing, leaf in islice(_iter_named_leaves(parsed), MAX_LEAVES):
        for value in find_values(leaf[:LEAF_CHARACTERS]):
            if value.kind not in kinds:
                continue
            if len(value.text) == len(leaf):
                yield MessageFact(value.kind, value.text, name=name, owner_key=thing)
            elif _is_whole(leaf, value):
                yield MessageFact(
                    value.kind,
                    value.text,
                    name=_find_label(leaf, value) or _find_naming_word(leaf, value) or name,
                )


def _iter_named_leaves(json_value: object) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the key (`MessageFact.owner_key`) and the text of each string in a JSON value.

    Strings that are nested more than `MAX_DEPTH` levels deep are left out.
    """
    rest: list[tuple[object, str, str, int]] = [(json_value, "", "", 0)]
    while rest:
        value, key, thing, depth = rest.pop()
        if isinstance(value, str):
            yield key, thing, value
        elif depth < MAX_DEPTH and isinstance(value, Mapping):
            own = _find_own_id(value)
            inner = [
                (
                    each,
                    _name_leaf(name, key, own),
                    f"{own or thing}\n{name}" if own or thing else "",
                    depth + 1,
                )
                if not isinstance(each, Mapping | list)
                else (each, _name_inner_object(name, key), own or thing, depth + 1)
                for name, each in value.items()
                if isinstance(name, str)
            ]
            rest.extend(reversed(inner))
        elif depth < MAX_DEPTH and isinstance(value, list):
            rest.extend((each, key, thing, depth + 1) for each in reversed(value))


def _find_own_id(value: Mapping[object, object]) -> str:
    """Returns the value of the first key that identifies a JSON object, or "" if no key does."""
    found = (each for key, each in value.items() if isinstance(key, str) and _ID_KEY.search(key))
    return next(
        (
            str(each)
            for each in found
            if isinstance(each, str | int) and not isinstance(each, bool) and str(each)
        ),
        "",
    )


def _name_leaf(name: str, parent: str, own_id: str) -> str:
    """Returns the name of a value in a JSON object.

    The name is the key of the value. A generic key, such as "status", is not enough by itself. The name then
    also contains the parent's name, as in "order.id", or the id of the object, as in "A17 status".
    """
    if name.lower() not in _GENERIC_KEYS:
        return name
    if name.lower() in {"id", "name", "key", "code", "number"} or not own_id:
        return f"{parent}.{name}" if parent else name
    return f"{own_id} {name}"


def _name_inner_object(name: str, parent: str) -> str:
    """Returns the name of an inner JSON object or list: its key.

    A key that contains digits is no real name. The name of the parent is then returned, unless it is empty.
    """
    return parent if any(map(str.isdigit, name)) and parent else name


def _find_text_values(text: str, kinds: frozenset[str]) -> Iterator[MessageFact]:
    is_short = len(text) <= SHORT_TEXT_CHARACTERS
    for value in find_values(text):
        if value.kind not in kinds or not _is_whole(text, value):
            continue
        label = _find_label(text, value)
        name = label or _find_naming_word(text, value)
        if not _is_informative(value, label=label, name=name, is_short=is_short):
            continue
        thing = f"\n{name}" if name and value.kind in _REPLACING_KINDS else ""
        yield MessageFact(value.kind, value.text, name=name, owner_key=thing)


def _is_informative(value: ExactValue, *, label: str, name: str, is_short: bool) -> bool:
    """Returns whether a value in text that is not JSON is kept, because it is useful to a reader.

    Most kinds of values are useful only with a label (`label`) or another name (`name`), or in a short text
    (`is_short`).
    """
    text = value.text
    if value.kind == "host":
        return not _ATTRIBUTE.match(text) and (bool(label) or text != "localhost")
    if value.kind == "code":
        is_loud = text.isupper() or "-" in text or "_" in text
        return _is_identifier(text) and bool(label or ((is_short or name) and is_loud))
    if value.kind == "date":
        return bool(label or (name and text[-2:].isdigit() and len(text) >= MIN_DATE_CHARACTERS))
    if value.kind == "commit":
        return bool(label) or is_short or len(text) in _COMMIT_SIZES or name.lower() in _COMMIT_WORDS
    if value.kind in {"money", "version"}:
        return bool(name) or is_short
    return value.kind != "email" or not text.rpartition(".")[2].isdigit()


def _is_identifier(code: str) -> bool:
    """Returns whether a code looks like an identifier and not like a technical term such as "utf-8"."""
    digits = sum(map(str.isdigit, code))
    return digits > 1 and len(code) >= MIN_CODE_CHARACTERS and not _TECHNICAL_TERM.fullmatch(code)


def _is_whole(text: str, value: ExactValue) -> bool:
    """Returns whether a value is a whole piece of text, and neither a colour nor the key of a field.

    A whole piece is not part of a longer word, number, path or address.
    """
    start, stop = value.start, value.start + len(value.text)
    before = text[max(0, start - NAME_SEARCH_CHARACTERS) : start]
    after = text[stop : stop + NAME_SEARCH_CHARACTERS]
    left = next((k for k in range(len(before), 0, -1) if not _VALUE_TOKEN.match(before[k - 1])), 0)
    right = _VALUE_TOKEN.match(after)
    around = before[left:].strip(_SURROUNDING_CHARACTERS) + (
        right.group().strip(_SURROUNDING_CHARACTERS) if right else ""
    )
    if around:
        return False
    if before.endswith("#") and _COLOUR.fullmatch(value.text) and not value.text.isdigit():
        return False
    return not (before[-1:] in {'"', "'"} and _KEY_FOLLOWS.match(after))


def _find_label(text: str, value: ExactValue) -> str:
    """Returns the label in front of a value, such as "Total" in "Total: 5", or "" if there is none."""
    line = text[max(0, value.start - NAME_SEARCH_CHARACTERS) : value.start].rpartition("\n")[2]
    label = _VALUE_LABEL.search(line)
    return " ".join(label.group(1).split()[-MAX_LABEL_WORDS:]) if label else ""


def _find_naming_word(text: str, value: ExactValue) -> str:
    """Returns the nearest meaningful word before a value; "" if there is none or the kind needs no name.

    A word is meaningful if it has at least `MIN_WORD_CHARACTERS` letters and is no stop word.
    """
    if value.kind in _UNNAMED_KINDS:
        return ""
    line = (
        text[max(0, value.start - NAME_SEARCH_CHARACTERS) : value.start]
        .rpartition("\n")[2]
        .rstrip(_OPENING_CHARACTERS)
    )
    for word in reversed(_WORDS.findall(line)[-MAX_SKIPPED_WORDS - 1 :]):
        if not line.endswith(word):
            return ""
        if len(word) >= MIN_WORD_CHARACTERS and word.lower() not in STOP_WORDS:
            return str(word)
        line = line.removesuffix(word).rstrip(_OPENING_CHARACTERS)
    return ""


def list_message_facts(message: Message) -> tuple[MessageFact, ...]:
    """Returns the facts that one message shows, in order."""
    text = take_head_and_tail(message.text)
    found = [
        each
        for call in message.calls
        for each in _iter_call_facts(replace(call, arguments=take_head_and_tail(call.arguments)))
    ]
    if message.answered_call_ids or message.role in {"tool", "function"} or is_client_result(message):
        found += _iter_errors(text)
    lines = "\n".join(line[:LINE_CHARACTERS] for line in text.splitlines())
    exact = (value for value in find_named_values(lines, _OBSERVED_KINDS) if len(value.text) > 2)
    found += [
        value._replace(name=to_one_line(value.name, NAME_CHARACTERS))
        for value in islice(exact, MAX_VALUES_PER_MESSAGE)
    ]
    limits = {"error": ERROR_CHARACTERS, "command": COMMAND_CHARACTERS}
    return tuple(
        each._replace(text=to_one_line(each.text, limits.get(each.kind, VALUE_CHARACTERS))) for each in found
    )


def collect_facts(
    messages: Sequence[Message],
    covered: Collection[int],
    fact_reader: Callable[[Message], tuple[MessageFact, ...]] = list_message_facts,
) -> tuple[ObservedFact, ...]:
    """Returns the facts in messages of tools and of the assistant, each once, newest last.

    If messages give several values to the same name of the same object, only the newest value is returned.

    Args:
        messages: The messages of a request.
        covered: Indices of the messages to read. Privileged messages, and user messages without results, are
            skipped.
        fact_reader: Returns the facts of a message: `list_message_facts` or a cache of it.
    """
    found: dict[tuple[str, str], ObservedFact] = {}
    # For each fact, the values of `MessageFact.owner_key` in all messages that show it. A newer value with
    # the same key removes an older value only if the older value has no other key.
    owner_keys: dict[tuple[str, str], set[str]] = {}
    newest: dict[str, tuple[int, tuple[str, str]]] = {}
    for at in sorted(covered):
        message = messages[at]
        is_said = message.role == "user" and not (message.answered_call_ids or is_client_result(message))
        if message.is_privileged or is_said:
            continue
        for kind, text, deed, name, thing in fact_reader(message):
            key = kind, text
            if thing:
                before, old = newest.get(thing, (at, key))
                if before < at and old != key and old in found and owner_keys[old] == {thing}:
                    del found[old], owner_keys[old]
                newest[thing] = at, key
            seen = found.pop(key, None) or ObservedFact(kind, text, at)
            deeds = tuple(each for each in _OPERATION_ORDER if each in {*seen.operations, deed})
            found[key] = ObservedFact(kind, text, at, deeds, seen.name or name)
            owner_keys.setdefault(key, set()).add(thing)
    return tuple(each for each in found.values() if each.text)
