"""Determines what tool calls did: their main arguments, whether they change anything, and how they ended.

An argument that is a shell command, an HTTP method or SQL shows whether a call changes something. If no
argument shows it, the verb in the tool's name decides.

Arguments and results come from models and tools and may be hostile. So this module quotes only short argument
values, and only the part of a result that shows how the call ended. Each quotation is one line without hidden
characters.
"""

# ruff: noqa: SIM905 - a long list of words is easier to maintain as one text

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal, NamedTuple

from compaction_proxy.core.json_bounds import MAX_CHARACTERS, parse_json_container
from compaction_proxy.core.ledger.edits import FileEdit, find_patches
from compaction_proxy.core.ledger.facts import (
    COMMAND_CHARACTERS,
    ERROR_CHARACTERS,
    find_error,
    take_head_and_tail,
    to_one_line,
)
from compaction_proxy.core.ledger.statements import reads_as_order
from compaction_proxy.core.message import MessageToolCall
from compaction_proxy.core.sanitize import remove_invisible, sanitize_text

# Maximum number of argument values quoted from one call, and maximum characters of each value. A value
# without spaces may have twice as many characters.
MAX_ARGUMENTS, ARGUMENT_CHARACTERS = 40, 60
# Maximum characters of a line about the calls of one tool with one target. The line always describes at least
# one call, even if this call alone exceeds the limit.
LINE_CHARACTERS = 320
# Only this many characters at the beginning of a tool name, and of a shell command, are searched for the
# effect of a call.
MAX_NAME_CHARACTERS, SHELL_CHARACTERS = 60, 2_000
# Minimum characters of an edited line that is quoted, and the lowest HTTP status code of an error.
MIN_LINE_CHARACTERS, FIRST_HTTP_ERROR = 3, 400
# Maximum number of new names that are quoted from an edit, and maximum characters of them together.
MAX_NEW_NAMES, NEW_NAMES_CHARACTERS = 8, 120
# Number of characters that each further call adds to a line, besides its arguments and its outcome.
SEPARATOR_CHARACTERS = len(";  → ")
# Values inside an argument that are nested more levels deep than this are not read.
MAX_DEPTH = 6
# Characters at the beginning and at the end of a result that are searched for an exit code or a failure.
HEAD_CHARACTERS, TAIL_CHARACTERS = 400, 1_500
# An exception in a result of at most this many characters means that the call failed. In a longer result, the
# exception may be part of a file that the call shows.
SHORT_CHARACTERS = 600
# Maximum characters quoted from the result of a successful call.
RESULT_CHARACTERS = 60

DONE = "done"
# Results that report only that there is no value.
_NO_VALUES = frozenset({"None", "null", "undefined"})
NO_RESULT = "no result"

_WRITE_VERBS = frozenset(
    "accept activate add adjust append apply approve archive assign authorize begin block book buy call "
    "cancel change charge clear close comment commit confirm contact copy cp create decline delete "
    "deploy deposit disable downgrade drop edit email enable end exchange fill follow forward fund "
    "grant insert install invite issue kill like lock log make mark mention merge message mkdir modify "
    "move mv notify open order overwrite park pause pay place post press publish purchase push put "
    "redeem refund register reject release remove rename replace reply report request reschedule "
    "reserve reset resolve restart restore resume retweet return revert revoke rm rmdir save schedule "
    "sell send set share ship sign sort start stop store str submit subscribe swap tag terminate toggle "
    "touch transfer tweet undo unfollow uninstall unlock unsubscribe update upgrade upload withdraw "
    "write".split()
)
_READ_VERBS = frozenset(
    "analyze ask authenticate browse calculate cat cd check compare compute convert count describe diff "
    "display download du echo estimate explain fetch find get glob grep head inspect list load login "
    "look lookup ls measure navigate peek ping preview pwd query read retrieve scan search see select "
    "show stat status summarize tail think tree verify view wait wc".split()
)
# A call with one of these verbs and an argument `path` only reads. For example, `open` then opens a file.
_FILE_READ_VERBS = frozenset({"open", "log", "sort"})
_NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SUBCOMMANDS = frozenset({"command", "action", "operation", "type", "mode"})
_METHOD_KEYS = frozenset({"method", "http_method"})
_SHELL_KEYS = frozenset({"command", "cmd", "script", "shell", "bash_command", "code"})
_SQL_KEYS = frozenset({"sql", "query", "statement"})
_SQL_WRITE = re.compile(
    r"\s*(?:insert|update|delete|create|alter|drop|merge|truncate|replace|grant|revoke)\b", re.IGNORECASE
)
_SQL_READ = re.compile(r"\s*(?:select|with|explain|show)\b", re.IGNORECASE)
_METHOD_WRITES = frozenset({"post", "put", "patch", "delete"})
_METHOD_READS = frozenset({"get", "head", "options"})
_SHELL_TOOL = re.compile(r"bash|shell|terminal|command|exec|^run|^sh$|^cmd$|console", re.IGNORECASE)
_SHELL_WRITE = re.compile(
    r"(?:^|[;&|(\n]|\bsudo|\bxargs)\s*(?:rm|mv|cp|mkdir|rmdir|touch|ln|tee|dd|chmod|chown|kill|pkill|patch|truncate|"
    r"sed\s+-i|perl\s+-\w*i|git\s+(?:-\S+\s+\S+\s+)?(?:add|commit|push|merge|rebase|reset|checkout|switch|"
    r"restore|revert|cherry-pick|tag|stash|apply|am|rm|mv|pull|clone|init)|"
    r"gh\s+\w+\s+(?:create|merge|close|edit|comment|delete)|"
    r"(?:npm|pnpm|yarn|pip3?|uv|cargo|apt(?:-get)?|brew|gem|go|poetry|conda)\s+(?:pip\s+)?"
    r"(?:install|i|add|remove|uninstall|publish|update|upgrade|get|ci)|"
    r"(?:kubectl|helm|terraform|docker(?:\s+compose)?|systemctl)\s+(?:apply|delete|create|install|upgrade|"
    r"destroy|run|up|down|start|stop|restart|push|rm|kill|enable|disable|scale|rollout|edit|patch)|"
    r"(?:npm|pnpm|yarn)\s+run\s+(?:publish|release|deploy|version)|"
    r"edit|create|insert|append|apply_patch|submit|"
    r"curl\b[^;&|\n]{0,300}?(?:-X\s*|--request[ =])(?:POST|PUT|PATCH|DELETE))\b"
    r"|(?<![>&\d=-])>>?\s*(?!&|/dev/)[\w~./\"'$-]"
)
_SHELL_READ = re.compile(
    r"\s*(?:(?:cat|less|head|tail|ls|grep|egrep|rg|find|fd|wc|pwd|cd|export|set|source|echo|which|type|file|stat|"
    r"du|df|tree|env|sed\s+-n|awk|sort|uniq|cut|tr|diff|date|whoami|ps|true|goto|open|scroll_\w+|search_\w+|"
    r"find_file|git\s+(?:-\S+\s+\S+\s+)?(?:status|log|diff|show|branch|blame|ls-files|grep|remote|rev-parse))\b|"
    r"\d?>|Q?\s*\Z)"
)
# These patterns find quoted words of a shell command, and the operators between commands.
_SHELL_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.){0,2000}+\"|'[^']{0,2000}+'")
_SHELL_SEPARATOR = re.compile(r"&&|\|\||[;|\n]")
# This pattern finds commands that run their quoted argument, such as `bash -c`. Only in such commands does a
# quoted word count as a command.
_SHELL_RUNS_QUOTED = re.compile(r"(?:^|\s)(?:-l?c|ssh|eval)\s")
_EXIT = re.compile(
    r"\b(?:exit(?:ed with)?(?: code| status)?|return ?code|exitCode)\"?[:= ]{1,3}(-?\d{1,3})\b", re.IGNORECASE
)
_FAILED_TEST = re.compile(
    r"^[^\n]{0,20}\b(?:FAILED|FAIL:?|✗|✕|not ok|--- FAIL:)[ \t]+(?=\S{0,200}[\w./])[^\n]{1,120}", re.MULTILINE
)
_TEST_COUNTS = re.compile(
    r"\b\d{1,6} (?:failed|failing|failures?|passed|passing|errors?)\b[^\n]{0,60}|\btest result: [^\n]{1,60}|"
    r"^OK \([^\n]{1,40}\)|^FAILED \([^\n]{1,40}\)", re.MULTILINE
)  # fmt: skip
_SOME_FAILED = re.compile(r"\b[1-9]\d* (?:failed|failing|failures?|errors?)\b|FAILED|test result: FAIL")
_EXCEPTION_LINE = re.compile(
    r"^[ \t]*[A-Za-z_][\w.]{0,80}(?:Error|Exception)(?::[^\n]{0,160}|[ \t]*$)", re.MULTILINE
)
_STARTS_WITH_ERROR = re.compile(
    r"\W{0,3}(?:tool |api |an )?(?:errors?\b|failed\b|failure\b|exception\b|traceback\b|fatal\b|invalid\b|"
    r"denied\b|unable to\b|cannot\b|could not\b|[\w./]{1,60}(?:error|exception)\b|no replacement was|"
    r"command not found|wrong\b)", re.IGNORECASE
)  # fmt: skip
_ERROR_KEYS = ("error", "errors", "exception", "error_message")
_STATUS_KEYS = ("status", "result", "state", "outcome")
_FAILURE_STATUSES = frozenset(
    {"error", "failed", "failure", "fail", "denied", "rejected", "invalid", "unsuccessful"}
)
_REFERENCE_KEYS = ("id", "status", "order_id", "ticket_id", "booking_id", "reservation_id", "confirmation")
_ID = re.compile(r"(?=\D{0,40}\d)[\w.-]{2,40}")
# These arguments are shown without their names, because their values are paths and a path needs no name.
_PATH_KEYS = frozenset({"path", "file", "file_path", "filepath", "filename", "file_name", "target_file"})
_OLD_KEY = re.compile(r"old(?:_?(?:str|string|text|content|code))?\Z", re.IGNORECASE)
_NEW_KEY = re.compile(r"new(?:_?(?:str|string|text|content|code))?\Z", re.IGNORECASE)
# These patterns find names in program code: words, names of at least two words, and names where they are
# defined.
_WORD = re.compile(r"[A-Za-z_$][\w$]*(?:\.[A-Za-z_]\w*)*")
_COMPOUND = re.compile(r"[A-Za-z0-9][_.][A-Za-z]|[a-z][A-Z]")
_DEFINITION = re.compile(
    r"\b(?:def|class|func|function|fn|struct|enum|interface|trait|type|const|let|var|val)\s+([A-Za-z_$][\w$]{2,60})"
)
_CONTENT_KEYS = frozenset(
    {
        "content",
        "contents",
        "file_text",
        "text",
        "body",
        "input",
        "patch",
        "diff",
        "code",
        "thought",
        "reason",
    }
)


# The effect of a call: `write` if it changes something, `read` if it only reads, else `unknown`.
ActionEffect = Literal["write", "read", "unknown"]


@dataclass(frozen=True, slots=True)
class Action:
    """One tool call and how it ended.

    Attributes:
        tool: The tool's name.
        arguments: The arguments that describe the call, as pairs of name and short value. Repeated values and
            long contents, such as the text of a file, are left out.
        outcome: One line: `done`, a short result, the error, `failed`, or `no result`.
        effect: Whether the call changes something (`write`) or certainly only reads (`read`); else `unknown`.
        has_failed: Whether the call ended with an error.
        has_result: Whether the conversation contains a result of the call.
    """

    tool: str
    arguments: tuple[tuple[str, str], ...]
    outcome: str
    effect: ActionEffect
    has_failed: bool
    has_result: bool = True

    @property
    def is_write(self) -> bool:
        """Whether the call changes something."""
        return self.effect == "write"

    @property
    def is_read(self) -> bool:
        """Whether the call certainly only reads."""
        return self.effect == "read"

    @property
    def target(self) -> tuple[str, str]:
        """The tool's name, and the first argument value or "".

        Calls with equal targets are described together in one line.
        """
        return self.tool, self.arguments[0][1] if self.arguments else ""


def read_action(call: MessageToolCall, result: str | None) -> Action:
    """Returns what a tool call did, according to its arguments and its result.

    Args:
        call: The call.
        result: The text of its result. None means that the call has no result.
    """
    parsed = parse_json_container(call.arguments)
    arguments = parsed if isinstance(parsed, dict) else {}
    command = _find_command(call, arguments)
    effect = _classify_command(command) if command else _classify_call(call, arguments)
    outcome, has_failed = NO_RESULT, False
    if result is not None:
        text = remove_invisible(take_head_and_tail(result)).strip()
        outcome, has_failed = _read_result(text, command, effect)
    if reads_as_order(outcome):
        outcome = "failed" if has_failed else DONE
    if command:
        first_line = remove_invisible(command[:MAX_CHARACTERS]).strip().partition("\n")[0]
        line = to_one_line(first_line, COMMAND_CHARACTERS)
        shown = [] if reads_as_order(line) else [("", line)]
    elif arguments:
        shown = list(islice(_iter_quotable_arguments(arguments), MAX_ARGUMENTS))
    else:
        text = _shorten_value(call.arguments)
        shown = [] if text in {"", "{}", "[]"} else [("", text)]
        shown = list(islice(_iter_patch_arguments(call.arguments), MAX_ARGUMENTS)) or shown
    tool = to_one_line(call.name, ARGUMENT_CHARACTERS)
    return Action(tool, tuple(shown), outcome, effect, has_failed, result is not None)


def split_tool_name(name: str) -> list[str]:
    """Returns the words of a tool name in lower case."""
    return [word.lower() for word in _NAME_WORD.findall(name)]


def _find_command(call: MessageToolCall, arguments: Mapping[str, object]) -> str:
    """Returns the shell command that a call runs, or "" if it runs none."""
    for key, value in arguments.items():
        if key.lower() not in _SHELL_KEYS:
            continue
        if isinstance(value, list):
            return " ".join(str(each) for each in value[:40] if isinstance(each, str))
        if isinstance(value, str) and ("path" not in arguments or _SHELL_TOOL.search(call.name)):
            return value
    return ""


def _classify_command(command: str) -> ActionEffect:
    """Returns the effect of a shell command.

    The effect is `read` only if every command in it, such as on both sides of a pipe, only reads.
    """
    head = command[:SHELL_CHARACTERS]
    plain = head if _SHELL_RUNS_QUOTED.search(head) else _SHELL_QUOTED.sub("Q", head)
    if _SHELL_WRITE.search(plain):
        return "write"
    return "read" if all(map(_SHELL_READ.match, _SHELL_SEPARATOR.split(plain))) else "unknown"


def _classify_call(call: MessageToolCall, arguments: Mapping[str, object]) -> ActionEffect:
    """Returns the effect of a call.

    The effect is that of the first argument that shows one. If no argument shows an effect, it is that of
    the first verb in the tool's name.
    """
    for key, value in arguments.items():
        if isinstance(value, str) and (effect := _classify_argument(key.lower(), value)) != "unknown":
            return effect
    for word in split_tool_name(call.name[:MAX_NAME_CHARACTERS]):
        if word in _READ_VERBS or (word in _FILE_READ_VERBS and "path" in arguments):
            return "read"
        if word in _WRITE_VERBS:
            return "write"
    return "unknown"


def _classify_argument(key: str, value: str) -> ActionEffect:
    """Returns the effect that an argument shows if it is a subcommand, an HTTP method or SQL.

    Returns `unknown` for any other argument.
    """
    verb = next(iter(split_tool_name(value[:MAX_NAME_CHARACTERS])), "")
    reads = (key in _SUBCOMMANDS and verb in _READ_VERBS) or (key in _METHOD_KEYS and verb in _METHOD_READS)
    writes = (key in _SUBCOMMANDS and verb in _WRITE_VERBS) or (
        key in _METHOD_KEYS and verb in _METHOD_WRITES
    )
    if writes or (key in _SQL_KEYS and _SQL_WRITE.match(value)):
        return "write"
    return "read" if reads or (key in _SQL_KEYS and _SQL_READ.match(value)) else "unknown"


def _list_values(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields the leaf values of an argument as text, each with the name of the top-level argument.

    Values that are nested more than `MAX_DEPTH` levels deep are left out.
    """
    if isinstance(value, Mapping | list):
        children = value.values() if isinstance(value, Mapping) else value
        for inner in children if depth < MAX_DEPTH else ():
            yield from _list_values(name, inner, depth + 1)
    elif isinstance(value, str):
        yield name, value
    elif value is not None:
        yield name, json.dumps(value)


def _shorten_value(value: str) -> str:
    """Returns a value as one short line for quotation, or "" if it is worded as an order."""
    value = remove_invisible(value[:MAX_CHARACTERS])
    text = to_one_line(value, ARGUMENT_CHARACTERS + 1)
    if len(value) > ARGUMENT_CHARACTERS and " " not in value.strip() and "\n" not in value.strip():
        return to_one_line(value, 2 * ARGUMENT_CHARACTERS)
    if len(text) > ARGUMENT_CHARACTERS:
        text = text[: ARGUMENT_CHARACTERS - 1].rstrip() + "…"
    return "" if " " in text and reads_as_order(text) else text


def _iter_quotable_arguments(arguments: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields names and short values of the arguments that describe a call.

    Long contents, such as the text of a file, are left out. If the call edits files, the last items describe
    the changes.
    """
    known: set[str] = set()
    for key, value in arguments.items():
        if _OLD_KEY.match(key) or _NEW_KEY.match(key) or key.lower() in _CONTENT_KEYS:
            continue
        label = "" if " " in key else to_one_line(key, MAX_NAME_CHARACTERS)
        for name, leaf in _list_values(label, value):
            text = _shorten_value(leaf)
            if text and (text not in known or not isinstance(value, dict | list)):
                known.add(text)
                yield name, text
    old, new = (
        next((v for k, v in arguments.items() if pattern.match(k) and isinstance(v, str)), "")
        for pattern in (_OLD_KEY, _NEW_KEY)
    )
    yield from _iter_changes(FileEdit("", old[:MAX_CHARACTERS], new[:MAX_CHARACTERS]))
    if _PATH_KEYS & arguments.keys():
        contents = (arguments.get(key) for key in ("content", "contents", "file_text"))
        content = next((each for each in contents if isinstance(each, str)), "")
        if names := _list_new_names(FileEdit("", "", content[:MAX_CHARACTERS])):
            yield "names", " ".join(names)
    for value in arguments.values():
        yield from _iter_patch_arguments(value if isinstance(value, str) else "")


def _iter_patch_arguments(patch: str) -> Iterator[tuple[str, str]]:
    """Yields the path of each file that a patch edits, and what it changes there."""
    for edit in find_patches(patch[:MAX_CHARACTERS]):
        yield "path", _shorten_value(edit.path)
        yield from _iter_changes(edit)


def _iter_changes(edit: FileEdit) -> Iterator[tuple[str, str]]:
    """Yields what an edit changes: its first changed line without a name, and names that are new in it."""
    if line := _find_changed_line(edit):
        yield "", line
    names = [each for each in _list_new_names(edit) if each not in line]
    if names:
        yield "names", " ".join(names)


def _list_new_names(edit: FileEdit) -> list[str]:
    """Returns names of the program that only the new lines contain.

    These are names that the new lines define, and then other names of at least two words, such as
    `user_id`, `userId` and `user.id`.
    """
    known = frozenset(_WORD.findall(edit.old))
    found = [*_DEFINITION.findall(edit.new), *filter(_COMPOUND.search, _WORD.findall(edit.new))]
    names: list[str] = []
    for name in dict.fromkeys(found):
        if name not in known and sum(map(len, names)) + len(names) + len(name) <= NEW_NAMES_CHARACTERS:
            names.append(name)
    return names[:MAX_NEW_NAMES]


def _find_changed_line(edit: FileEdit) -> str:
    """Returns the first line that an edit adds. If it adds none, returns the first line that it removes.

    Lines of fewer than `MIN_LINE_CHARACTERS` characters are skipped. Returns "" if the call changes no line.
    """
    for sign, text, other_text in (("+", edit.new, edit.old), ("-", edit.old, edit.new)):
        known = frozenset(line.strip() for line in other_text.splitlines())
        for line in map(str.strip, text.splitlines()):
            if len(line) >= MIN_LINE_CHARACTERS and line not in known:
                return _shorten_value(f"{sign} {line}")
    return ""


def _read_result(text: str, command: str, effect: ActionEffect) -> tuple[str, bool]:
    """Returns the outcome of a call as one short line, and whether the call failed."""
    parsed = None if command and effect == "read" else parse_json_container(text)
    if isinstance(parsed, dict):
        failure = _find_json_failure(parsed)
        keys = () if effect == "read" else _REFERENCE_KEYS
        detail = next(((key, parsed[key]) for key in keys if isinstance(parsed.get(key), str | int)), None)
        success = to_one_line(f"{DONE}, {detail[0]} {detail[1]}", RESULT_CHARACTERS) if detail else DONE
    else:
        failure = _find_failure(text, command, effect)
        counts = _TEST_COUNTS.findall(text[-TAIL_CHARACTERS:]) if command else []
        is_value = 0 < len(text) <= RESULT_CHARACTERS // 2 and " " not in text and text not in _NO_VALUES
        success = (
            to_one_line(counts[-1] if counts else text, RESULT_CHARACTERS) if counts or is_value else DONE
        )
    return (to_one_line(failure, ERROR_CHARACTERS), True) if failure else (success, False)


def _find_failure(text: str, command: str, effect: ActionEffect) -> str:
    """Returns what a result in plain text says about a failure, or "" if it reports none."""
    head, tail = text[:HEAD_CHARACTERS], text[-TAIL_CHARACTERS:]
    found = _EXIT.search(tail) or _EXIT.search(head)
    number = found.group(1) if found else "0"
    # Exit code 1 of a call that only reads is no failure: search programs return it if they find nothing.
    code = f"exit code {number}" if number != "0" and not (number == "1" and effect == "read") else ""
    if command and (code or effect != "read") and (test := _find_failed_test(tail)):
        return f"{code}; {test}" if code else test
    if code:
        return "; ".join(filter(None, [code, find_error(tail)]))
    if (
        "Traceback" in text
        and (command or len(text) <= SHORT_CHARACTERS)
        and (raised := _find_exception_line(tail))
    ):
        return raised
    if _STARTS_WITH_ERROR.match(head) and not (effect == "read" and len(text) > TAIL_CHARACTERS):
        first = head.partition("\n")[0].rstrip()
        return " ".join(head.split()) if first.endswith(":") else first
    return _find_exception_line(text) if effect != "read" and len(text) <= SHORT_CHARACTERS else ""


def _find_failed_test(tail: str) -> str:
    """Returns the line of the first failed test. Without such a line, returns the counts of the test run.

    Returns "" if no test failed.
    """
    counts, failed = _TEST_COUNTS.findall(tail), _FAILED_TEST.search(tail)
    if counts and failed:
        return failed.group().strip()
    return str(counts[-1]) if counts and _SOME_FAILED.search(counts[-1]) else ""


def _find_exception_line(text: str) -> str:
    """Returns the last line that begins with the name of an exception, or "" if there is none."""
    found = [each.group() for each in _EXCEPTION_LINE.finditer(text)]
    return to_one_line(found[-1], ERROR_CHARACTERS) if found else ""


def _find_json_failure(fields: Mapping[str, object]) -> str:
    """Returns what a JSON result says about a failure, or "" if it reports none."""
    for key in _ERROR_KEYS:
        if value := fields.get(key):
            message = value.get("message") if isinstance(value, Mapping) else value
            return f"error: {message}" if isinstance(message, str) else "error"
    if fields.get("success") is False or fields.get("ok") is False:
        return f"failed: {fields['message']}" if isinstance(fields.get("message"), str) else "failed"
    for key in _STATUS_KEYS:
        if str(fields.get(key, "")).lower() in _FAILURE_STATUSES:
            return f"{key} {fields[key]}"
    code = fields.get("status_code", 0)
    if isinstance(code, int) and code >= FIRST_HTTP_ERROR:
        return f"status code {code}"
    return f"exit code {fields['exit_code']}" if fields.get("exit_code") not in (None, 0) else ""


class ProgressNote(NamedTuple):
    """A note on work done, on the outcome of a request or on open work. A note is data, never an instruction.

    Attributes:
        kind: `failed`, `asked back` and `to do` are open work (`core.ledger.frontier.Frontier`). `done` is
            for calls that changed something, and `tried` for calls that should have changed something and
            failed. `last step` is for the last call, `answered` for requests with their outcome, and `ran`
            for other calls, such as a test run.
        text: One line without hidden characters.
        message_index: Index of the message that the note is about.
        short_text: A shorter text, which is used if `text` does not fit; "" if there is none.
    """

    kind: str
    text: str
    message_index: int
    short_text: str = ""


def describe_action_groups(
    actions: Sequence[tuple[int, Action]], max_characters: int = LINE_CHARACTERS
) -> Iterator[ProgressNote]:
    """Yields one note for the calls of each tool and target: `tried` if all of them failed, else `done`.

    Notes of kind `done` come first. Within each kind, notes on newer calls come first. The text of a note
    begins with the tool and the arguments that all the calls share. Then come the other arguments and the
    outcome of each call, the newest call last. The short text is the tool, the target and the outcome of the
    newest call.

    Args:
        actions: The calls, each with the index of its message.
        max_characters: Maximum characters of a text. A text describes at least one call, even if this call
            alone exceeds the limit.
    """
    for group in _group_calls(actions):
        calls = [action for _, action in group]
        kind = "tried" if all(each.has_failed for each in calls) else "done"
        text = _describe_group(calls, max_characters)
        yield ProgressNote(kind, text, group[-1][0], describe_action(calls[-1]))


def format_action_items(actions: Sequence[tuple[int, Action]], max_characters: int) -> Iterator[str]:
    """Yields one list item for the calls of each tool and target, in the order of `describe_action_groups`.

    An item has one of three forms. The long form describes as many of the calls as fit. The middle form
    describes only the newest call, with those of its argument values that contain a digit, such as ids. The
    short form has only the tool, the target and the outcome of the newest call. The first form that fits is
    used. The short form is used even if it does not fit, so the last items may exceed the room.

    Args:
        actions: The calls, each with the index of its message.
        max_characters: Room for all items, in characters. Each item leaves up to half of the remaining room
            to the short forms of the later items.
    """
    groups = [[action for _, action in group] for group in _group_calls(actions)]
    briefs = [f"- {sanitize_text(describe_action(calls[-1]))}" for calls in groups]
    rest = sum(len(brief) + 1 for brief in briefs)
    for calls, brief in zip(groups, briefs, strict=True):
        rest -= len(brief) + 1
        most = max_characters - min(rest, max(0, max_characters) // 2) - 1
        ids = [value for _, value in calls[-1].arguments[1:] if _ID.fullmatch(value)]
        texts = (_describe_group(calls, most - len("- ")), describe_action(calls[-1], ids))
        lines = (f"- {sanitize_text(text)}" for text in texts)
        line = next((each for each in lines if len(each) <= most), brief)
        max_characters -= len(line) + 1
        yield line


def _group_calls(actions: Sequence[tuple[int, Action]]) -> list[list[tuple[int, Action]]]:
    """Returns the calls grouped by target.

    Groups with at least one successful call come first, then groups whose calls all failed. Each of these two
    parts is sorted from the newest group to the oldest.
    """
    groups: dict[tuple[str, str], list[tuple[int, Action]]] = {}
    for at, action in actions:
        groups.setdefault(action.target, []).append((at, action))
    newest_first = sorted(groups.values(), key=lambda group: -group[-1][0])
    return sorted(newest_first, key=lambda group: all(each.has_failed for _, each in group))


def describe_action(action: Action, values: Iterable[str] = ()) -> str:
    """Returns a call as one line: its tool, its target, the argument values in `values`, and its outcome."""
    return " ".join(filter(None, [*action.target, *dict.fromkeys(values), "→", action.outcome]))


def _describe_group(group: Sequence[Action], max_characters: int) -> str:
    arguments: list[defaultdict[str, list[str]]] = []
    for action in group:
        named: defaultdict[str, list[str]] = defaultdict(list)
        for name, value in action.arguments:
            named[name].append(value)
        arguments.append(named)
    shared = {
        name: values
        for name, values in arguments[0].items()
        if all(each.get(name) == values for each in arguments)
    }
    start = " ".join(filter(None, [group[0].tool, _describe_arguments(shared)]))
    runs: dict[tuple[str, str], bool] = {}
    for action, each in zip(group, arguments, strict=True):
        own = _describe_arguments({name: values for name, values in each.items() if name not in shared})
        runs.pop((own, action.outcome), None)
        runs[own, action.outcome] = action.has_failed
    room, quoted = max_characters - len(start), set[tuple[str, str]]()
    newest_first = list(runs)[::-1]
    for run in sorted(newest_first, key=runs.__getitem__):
        size = sum(map(len, run)) + SEPARATOR_CHARACTERS
        if not quoted or size <= room:
            quoted.add(run)
            room -= size
    # If neighbouring calls have the same outcome, it is written once, after the last of these calls.
    groups = groupby((run for run in runs if run in quoted), key=lambda run: run[1])
    parts = []
    for outcome, members in groups:
        *others, last = [own for own, _ in members]
        parts += [*filter(None, others), " ".join(filter(None, [last, f"→ {outcome}"]))]
    text = "; ".join(parts)
    return f"{start}{' ' if text.startswith('→') else ': '}{text}"


def describe_argument(name: str, *values: str) -> str:
    """Returns an argument as text: its name and its values, or only its values if they are paths."""
    return " ".join(filter(None, ["" if name.lower() in _PATH_KEYS else name, *values]))


def _describe_arguments(named: Mapping[str, Sequence[str]]) -> str:
    """Returns arguments as text: each name once, followed by its values. Names of paths are left out."""
    return ", ".join(describe_argument(name, *values) for name, values in named.items())
