"""Recognises the project instructions that known clients put into user messages, on every wire.

A text counts as project instructions only if three conditions hold. First, a header field or the beginning of
the system prompt identifies the client. Second, a whole text part of a user message has a form that this
client uses. Third, the same message or one next to it also contains text that the user has written. Without
such text, the user has probably pasted the instructions. The module ignores tool results, and messages that
contain tool results as text. ADR 0031 names the sources for the forms.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Final, NamedTuple

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Instruction, Message, SourceMessage
from compaction_proxy.wires.json.slices import find_members, split_elements
from compaction_proxy.wires.json.values import as_list, as_object, as_string, decode_value, encode_json

INSTRUCTIONS: Final = "instructions"
MEMORY: Final = "memory"
ENVIRONMENT: Final = "environment"
# To recognise a client by its system prompt, the proxy reads at most this many characters at the beginning of
# the JSON of the system prompt.
PROMPT_CHARACTERS: Final = 4_096
# A client's system prompt is one of this many first messages.
MAX_PROMPT_MESSAGES: Final = 64
# Maximum number of characters of the `path` of an `Instruction`. A longer path is cut at its end.
MAX_PATH_CHARACTERS: Final = 512


class InstructionForm(NamedTuple):
    """The form in which a client writes one kind of project instructions.

    Attributes:
        kind: The kind of the instructions.
        opening: The beginning of the text.
        closing: The end of the text, apart from white space. It occurs nowhere else in the text. Empty if any
            end is allowed.
        path_pattern: Matches the part of the text that distinguishes instructions of the same kind, such as a
            file path. It becomes the `path` of the `Instruction`. For the kind `ENVIRONMENT`, all matches
            together form the path. For other kinds, only the first match counts.
        is_before_first_answer: Whether the client sends text of this form only before the first reply of the
            model.
        client_reply: The assistant message that the client itself adds after the text; empty if it adds none.
    """

    kind: str
    opening: str
    closing: str
    path_pattern: re.Pattern[str] | None = None
    is_before_first_answer: bool = False
    client_reply: str = ""


class ClientProfile(NamedTuple):
    """Says how to recognise a client that sends project instructions, and in which forms it sends them.

    Attributes:
        user_agent_prefixes: Beginnings of the client's `user-agent`, in lower case.
        header_names: Names of header fields that only this client sends.
        prompt_prefixes: Beginnings of the client's system prompts.
        forms: The forms of the client's instructions.
    """

    user_agent_prefixes: tuple[bytes, ...]
    header_names: tuple[bytes, ...]
    prompt_prefixes: tuple[str, ...]
    forms: tuple[InstructionForm, ...]


_REMINDER: Final = "<system-reminder>"
_REMINDER_END: Final = "</system-reminder>"
_DETAILS: Final = InstructionForm(ENVIRONMENT, "<environment_details>\n", "</environment_details>")

CLIENTS: Final[Mapping[str, ClientProfile]] = {
    "claude-code": ClientProfile(
        user_agent_prefixes=(b"claude-cli/", b"claude-code/"),
        header_names=(b"x-claude-code-session-id",),
        prompt_prefixes=(
            "You are Claude Code, Anthropic's official CLI for Claude",
            "You are a Claude agent, built on Anthropic's Claude Agent SDK",
        ),
        forms=(
            InstructionForm(
                INSTRUCTIONS,
                _REMINDER + "\nAs you answer the user's questions, you can use the following context:\n# ",
                _REMINDER_END,
                re.compile(r"^Contents of (.+?)(?: \([^)\n]*\))?:$", re.MULTILINE),
            ),
            InstructionForm(
                MEMORY,
                _REMINDER + "\nContents of ",
                _REMINDER_END,
                re.compile(r"^Contents of (.+?)(?: \([^)\n]*\))?:$", re.MULTILINE),
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nAvailable agent types for the Agent tool:\n",
                _REMINDER_END,
                re.compile(r"(agent types)"),
                is_before_first_answer=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following skills are available for use with the Skill tool:\n",
                _REMINDER_END,
                re.compile(r"(skills)"),
                is_before_first_answer=True,
            ),
        ),
    ),
    "codex": ClientProfile(
        user_agent_prefixes=(b"codex_", b"codex-", b"codex/"),
        header_names=(b"x-codex-turn-metadata", b"x-codex-window-id", b"x-codex-installation-id"),
        prompt_prefixes=("You are Codex", "You are a coding agent running in the Codex CLI"),
        forms=(
            InstructionForm(
                INSTRUCTIONS,
                "# AGENTS.md instructions",
                "</INSTRUCTIONS>",
                re.compile(r"\A# AGENTS\.md instructions for (.+)"),
            ),
            InstructionForm(
                INSTRUCTIONS, "<user_instructions>", "</user_instructions>", re.compile(r"\A<(user)_")
            ),
            # The first text of this form contains all XML elements, such as `<cwd>`. Later texts contain only
            # the elements that have changed. A text replaces an earlier text with the same elements. So the
            # names of the elements serve as its path. Texts of other forms are told apart by a file's path.
            InstructionForm(
                ENVIRONMENT,
                "<environment_context>",
                "</environment_context>",
                re.compile(r"^  <(\w+)", re.MULTILINE),
            ),
        ),
    ),
    "qwen-code": ClientProfile(
        user_agent_prefixes=(b"qwencode/",),
        header_names=(),
        prompt_prefixes=("You are Qwen Code,",),
        forms=(
            InstructionForm(
                ENVIRONMENT,
                "This is the Qwen Code. We are setting up the context for our chat.\n",
                "",
                is_before_first_answer=True,
                client_reply="Got it. Thanks for the context!",
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThis is the Qwen Code. We are setting up the context for our chat.\n",
                _REMINDER_END,
                re.compile(r"(context for our chat)"),
                is_before_first_answer=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following skills are available for use with the Skill tool.",
                _REMINDER_END,
                re.compile(r"\A<system-reminder>\nThe following (skills)"),
                is_before_first_answer=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following tools are reachable through `tool_search` and `tool_call`.",
                _REMINDER_END,
                re.compile(r"\A<system-reminder>\nThe following (tools)"),
                is_before_first_answer=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe current date is: ",
                _REMINDER_END,
                re.compile(r"\A<system-reminder>\nThe current (date)"),
            ),
        ),
    ),
    "cline": ClientProfile(
        user_agent_prefixes=(b"cline/",),
        header_names=(),
        prompt_prefixes=("You are Cline,",),
        forms=(_DETAILS,),
    ),
    "roo-code": ClientProfile(
        user_agent_prefixes=(b"roocode/",),
        header_names=(),
        prompt_prefixes=("You are Roo,",),
        forms=(_DETAILS,),
    ),
    "aider": ClientProfile(
        user_agent_prefixes=(b"aider/",),
        header_names=(),
        prompt_prefixes=("Act as an expert software developer", "Act as an expert code analyst"),
        forms=(
            InstructionForm(
                INSTRUCTIONS,
                "Here are some READ ONLY files, provided for your reference.",
                "",
                client_reply="Ok, I will use these files as references.",
            ),
            InstructionForm(
                ENVIRONMENT,
                "Here are summaries of some files present in my git repository.",
                "",
                re.compile(r"\AHere are (summaries)"),
                client_reply="Ok, I won't try and edit those files without asking first.",
            ),
        ),
    ),
    "openhands": ClientProfile(
        user_agent_prefixes=(b"openhands/",),
        header_names=(),
        prompt_prefixes=("You are OpenHands agent,",),
        forms=(
            InstructionForm(
                MEMORY,
                "<EXTRA_INFO>\nThe following information has been included based on a keyword match for ",
                "</EXTRA_INFO>",
                re.compile(r'keyword match for "([^"\n]+)"'),
            ),
        ),
    ),
}  # fmt: skip
# Matches the beginning of a text part that contains a tool result.
_TOOL_RESULT_OPENING: Final = re.compile(
    r"\s*(?:<system-reminder>\s*(?:Result of calling|Called) the "
    r"|\[[\w.-]+(?: [^\]\n]*)?\] Result:"
    r"|<(?:user_shell_command|tool_result|tool_response|function_results?|bash-stdout|bash-stderr|"
    r"local-command-stdout)\b)"
)
_TEXT_KINDS: Final = frozenset({"text", "input_text"})
_USER_AGENT_PREFIXES: Final = tuple(
    prefix for client in CLIENTS.values() for prefix in client.user_agent_prefixes
)
_HEADER_NAMES: Final = frozenset(name for client in CLIENTS.values() for name in client.header_names)


def find_client_by_headers(header_map: Mapping[bytes, bytes]) -> str:
    """Returns the name of the client that sends these header fields; empty if the client is not known.

    Args:
        header_map: The first value of each header field, by name in lower case.
    """
    agent = header_map.get(b"user-agent", b"").lower()
    if not agent.startswith(_USER_AGENT_PREFIXES) and header_map.keys().isdisjoint(_HEADER_NAMES):
        return ""
    for name, client in CLIENTS.items():
        if agent.startswith(client.user_agent_prefixes) or not header_map.keys().isdisjoint(
            client.header_names
        ):
            return name
    return ""


def find_client_by_prompt(text: str) -> str:
    """Returns the name of the client that sends this system prompt; empty if the client is unknown."""
    return next((name for name, client in CLIENTS.items() if text.startswith(client.prompt_prefixes)), "")


def find_client_by_messages(messages: Sequence[Message]) -> str:
    """Returns the name of the client that sends these messages; empty if the client is unknown.

    Recognises the client by the text of the first privileged message, among the first
    `MAX_PROMPT_MESSAGES` messages.
    """
    first = islice(messages, MAX_PROMPT_MESSAGES)
    return find_client_by_prompt(next((each.text for each in first if each.is_privileged), ""))


def find_client_by_members(prompt_members: Sequence[str]) -> str:
    """Returns the name of the client whose system prompt a body contains; empty if no known prompt is in it.

    Args:
        prompt_members: The JSON of the members that count as prompt tokens (`RequestBody.prompt_members`).
            The first one is the system prompt, if the body has one.
    """
    beginning = prompt_members[0][:PROMPT_CHARACTERS] if prompt_members else ""
    for name, client in CLIENTS.items():
        for prompt in client.prompt_prefixes:
            position = beginning.find(f'"{prompt}')
            if position >= 0 and (
                not beginning[:position].strip() or re.search(r'"text"\s*:\s*\Z', beginning[:position])
            ):
                return name
    return ""


def find_instruction_form(client: str, text: str) -> InstructionForm | None:
    """Returns the form of this client that the whole text has; None if it has none of the client's forms.

    The text has a form if it begins and ends as the `InstructionForm` says.
    """
    for form in CLIENTS[client].forms if client in CLIENTS else ():
        if text.startswith(form.opening) and (
            not form.closing or (text.rstrip().endswith(form.closing) and text.count(form.closing) == 1)
        ):
            return form
    return None


def starts_like_instructions(text: str, client: str) -> bool:
    """Returns whether a text begins like project instructions of this client (`InstructionForm.opening`)."""
    return text.startswith(tuple(form.opening for form in CLIENTS[client].forms))


def may_hold_form(raw: bytes, client: str) -> bool:
    """Returns whether a message may contain project instructions of the client. Does not parse the message.

    If the result is False, the message certainly contains none.
    """
    if client not in CLIENTS or raw.find(b'"tool_result"') >= 0 or raw.find(b'"user"') < 0:
        return False
    return raw.find(b"\\u003c") >= 0 or any(
        raw.find(form.opening.partition("\n")[0].encode()) >= 0 for form in CLIENTS[client].forms
    )


def split_off_instructions(
    record: Message, client: str, *, is_before_first_answer: bool
) -> list[tuple[bytes, Instruction | None]]:
    """Divides a user message into messages with project instructions and one message with the user's text.

    Returns the bytes of each new message with its `Instruction`, which is None for the user's text. All parts
    that are not project instructions form one message, at the position of the last of these parts. The list
    is empty if the message contains no project instructions.

    Args:
        record: The message.
        client: The name of the client that sends the message.
        is_before_first_answer: Whether no reply of the model precedes the message.
    """
    if record.role != "user" or record.answered_call_ids or not may_hold_form(record.raw, client):
        return []
    try:
        content = as_object(decode_value(record.raw)).get("content")
    except UnreadableBodyError:
        return []
    texts = [content] if isinstance(content, str) else [_read_text(each) for each in as_list(content)]
    if any(_TOOL_RESULT_OPENING.match(each) for each in texts):
        return []
    kinds = [_find_instruction(each, client, is_before_first_answer=is_before_first_answer) for each in texts]
    if not any(kinds):
        return []
    if len(kinds) == 1:
        return [(record.raw, kinds[0])]
    return list(_cut_parts(record.raw, kinds))


def divide_messages(
    before: Sequence[Message], new: Iterable[Message], client: str
) -> Iterator[tuple[Message, Sequence[tuple[bytes, Instruction | None]]]]:
    """Yields each new message, with the result of `split_off_instructions` for it.

    Does not divide a message directly after a tool result, and yields an empty sequence with it.

    Args:
        before: The messages before the new ones.
        new: The new messages.
        client: The name of the client that sends the messages.
    """
    is_first = not any(each.role == "assistant" for each in before)
    last = before[-1] if before else None
    for record in new:
        is_first = is_first and record.role != "assistant"
        yield (
            record,
            split_off_instructions(record, client, is_before_first_answer=is_first)
            if last is None or not last.answered_call_ids
            else (),
        )
        last = record


def drop_instructions(
    messages: Sequence[Message], client: str, parse_message: Callable[[bytes], Message]
) -> tuple[Message, ...]:
    """Returns a conversation without the client's project instructions.

    Args:
        messages: All messages of the conversation.
        client: The name of the client that sends them.
        parse_message: Parses a message of the conversation's wire.
    """
    divided: list[Message] = []
    for record, parts in divide_messages((), messages, client):
        records = [replace(parse_message(raw), instruction=instruction) for raw, instruction in parts]
        source = SourceMessage(record.raw, len(parts)) if len(parts) > 1 else None
        divided += [replace(each, source=source) for each in records] or [record]
    return tuple(each for each in unmark_pasted_instructions(divided) if each.instruction is None)


def _read_text(part: object) -> str:
    fields = as_object(part)
    return as_string(fields.get("text")) if fields.get("type", "text") in _TEXT_KINDS else ""


def _find_instruction(text: str, client: str, *, is_before_first_answer: bool) -> Instruction | None:
    form = find_instruction_form(client, text)
    if form is None or (form.is_before_first_answer and not is_before_first_answer):
        return None
    paths = form.path_pattern.findall(text) if form.path_pattern else []
    path = " ".join(paths) if form.kind == ENVIRONMENT else "".join(paths[:1])
    return Instruction(client, form.kind, path.strip()[:MAX_PATH_CHARACTERS])


def _cut_parts(raw: bytes, kinds: Sequence[Instruction | None]) -> Iterator[tuple[bytes, Instruction | None]]:
    place = find_members(raw)["content"]
    parts = split_elements(raw[place.start : place.stop])
    fields = decode_value(raw)
    if fields.pop("id", None) is not None:  # two messages may not have the same id
        raw = encode_json(fields | {"content": ""})
        place = find_members(raw)["content"]
    user_indices = [k for k, kind in enumerate(kinds) if kind is None]
    for k, kind in enumerate(kinds):
        if kind is None and k != user_indices[-1]:
            continue
        part_bytes = parts[k] if kind else b",".join(parts[j] for j in user_indices)
        yield b"".join((raw[: place.start], b"[", part_bytes, b"]", raw[place.stop :])), kind


def unmark_pasted_instructions(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages, with `instruction` set to None where the user has probably pasted the text.

    Examines together all messages between two replies or tool results. If some of these messages are
    instructions, but none contains text that the user has written, the user has probably pasted the last of
    them. So the `instruction` of this message becomes None. If this message is a part of a divided message of
    the client, the same applies to the other parts. The `instruction` stays if the next message is the reply
    that the client itself adds after such instructions (`InstructionForm.client_reply`).
    """
    unmarked = list(messages)
    start = 0
    for stop in range(len(unmarked) + 1):
        if stop < len(unmarked) and not (
            unmarked[stop].role == "assistant" or unmarked[stop].answered_call_ids
        ):
            continue
        turn = [k for k in range(start, stop) if not unmarked[k].is_privileged]
        reply = unmarked[stop].text if stop < len(unmarked) else ""
        if any(unmarked[k].instruction for k in turn) and not any(_is_user_text(unmarked[k]) for k in turn):
            last = unmarked[turn[-1]]
            for k in turn:
                is_last = k == turn[-1] or (last.source is not None and unmarked[k].source is last.source)
                if is_last and not _has_client_reply(unmarked[k], reply):
                    unmarked[k] = replace(unmarked[k], instruction=None)
        start = stop + 1
    return tuple(unmarked)


def _is_user_text(record: Message) -> bool:
    """Returns whether a message probably contains text that the user has written.

    The result is False if the message is empty, is project instructions, or contains only a
    `<system-reminder>`, which clients add.
    """
    if record.instruction is not None:
        return False
    text = record.text.strip()
    return bool(record.parts) or not (
        not text or (text.startswith(_REMINDER) and text.endswith(_REMINDER_END))
    )


def _has_client_reply(record: Message, reply: str) -> bool:
    """Returns whether `reply` is the text of the assistant message that the client adds after `record`."""
    if record.instruction is None:
        return False
    form = find_instruction_form(record.instruction.client, record.text)
    return form is not None and bool(form.client_reply) and reply.strip() == form.client_reply


def rejoin_divided_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages, with the parts of divided messages replaced by the message that the client sent.

    The parts of a message stay divided if one of them is missing, for example because a compaction has
    removed it.
    """
    if not any(each.source for each in messages):
        return messages
    joined: list[Message] = []
    for _, group in groupby(messages, _get_source_id):
        parts = list(group)
        source = parts[0].source
        if source is not None and len(parts) == source.part_count:
            parts = [replace(parts[0], raw=source.raw, source=None)]
        joined += parts
    return joined


def _get_source_id(record: Message) -> int:
    return id(record.source)
