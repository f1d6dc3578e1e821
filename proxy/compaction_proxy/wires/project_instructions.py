"""The forms in which known agents put instructions of a project into user messages, on every wire.

A text is recognised only where three things hold. The client is known by something else than the form: a
header field, or how its system prompt begins. A whole text part of a user message has the exact form. And a
user says something else in the same turn: what stands alone was pasted. Text inside a tool's result is never
looked at, and neither is a message that carries results of tools as text. ADR 0031 has the sources.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Instruction, Message, SourceMessage
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.shorten import encode_json
from compaction_proxy.wires.json.slices import find_members, split_elements

INSTRUCTIONS: Final = "instructions"
MEMORY: Final = "memory"
ENVIRONMENT: Final = "environment"
# So much of the members that become prompt is searched for the beginning of a system prompt, in characters.
PROMPT_CHARACTERS: Final = 4_096
MAX_PATH_CHARACTERS: Final = 512


class InstructionForm(NamedTuple):
    """How a client writes one kind of instructions.

    Attributes:
        kind: What they are.
        opening: How the text begins.
        closing: How it ends, white space aside, and what stands nowhere else in it; empty: as it likes.
        path: Finds what tells two of the kind apart: the groups that match, joined.
        is_first: Whether it stands only before the first answer.
        reply: What the client has the assistant answer to it; empty: the user's words follow it.
    """

    kind: str
    opening: str
    closing: str
    path: re.Pattern[str] | None = None
    is_first: bool = False
    reply: str = ""


class ClientProfile(NamedTuple):
    """A client that sends such text.

    Attributes:
        agents: How its `user-agent` begins, in lower case.
        fields: Header fields that only it sends.
        prompts: How its system prompt begins.
        forms: Its forms.
    """

    agents: tuple[bytes, ...]
    fields: tuple[bytes, ...]
    prompts: tuple[str, ...]
    forms: tuple[InstructionForm, ...]


_REMINDER: Final = "<system-reminder>"
_REMINDER_END: Final = "</system-reminder>"
_DETAILS: Final = InstructionForm(ENVIRONMENT, "<environment_details>\n", "</environment_details>")

CLIENTS: Final[Mapping[str, ClientProfile]] = {
    "claude-code": ClientProfile(
        agents=(b"claude-cli/", b"claude-code/"),
        fields=(b"x-claude-code-session-id",),
        prompts=(
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
                is_first=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following skills are available for use with the Skill tool:\n",
                _REMINDER_END,
                re.compile(r"(skills)"),
                is_first=True,
            ),
        ),
    ),
    "codex": ClientProfile(
        agents=(b"codex_", b"codex-", b"codex/"),
        fields=(b"x-codex-turn-metadata", b"x-codex-window-id", b"x-codex-installation-id"),
        prompts=("You are Codex", "You are a coding agent running in the Codex CLI"),
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
            # What has changed alone comes as such a block, too: it replaces one that tells the same.
            InstructionForm(
                ENVIRONMENT,
                "<environment_context>",
                "</environment_context>",
                re.compile(r"^  <(\w+)", re.MULTILINE),
            ),
        ),
    ),
    "qwen-code": ClientProfile(
        agents=(b"qwencode/",),
        fields=(),
        prompts=("You are Qwen Code,",),
        forms=(
            InstructionForm(
                ENVIRONMENT,
                "This is the Qwen Code. We are setting up the context for our chat.\n",
                "",
                is_first=True,
                reply="Got it. Thanks for the context!",
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThis is the Qwen Code. We are setting up the context for our chat.\n",
                _REMINDER_END,
                re.compile(r"(context for our chat)"),
                is_first=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following skills are available for use with the Skill tool.",
                _REMINDER_END,
                re.compile(r"\A<system-reminder>\nThe following (skills)"),
                is_first=True,
            ),
            InstructionForm(
                ENVIRONMENT,
                _REMINDER + "\nThe following tools are reachable through `tool_search` and `tool_call`.",
                _REMINDER_END,
                re.compile(r"\A<system-reminder>\nThe following (tools)"),
                is_first=True,
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
        agents=(b"cline/",),
        fields=(),
        prompts=("You are Cline,",),
        forms=(_DETAILS,),
    ),
    "roo-code": ClientProfile(
        agents=(b"roocode/",),
        fields=(),
        prompts=("You are Roo,",),
        forms=(_DETAILS,),
    ),
    "aider": ClientProfile(
        agents=(b"aider/",),
        fields=(),
        prompts=("Act as an expert software developer", "Act as an expert code analyst"),
        forms=(
            InstructionForm(
                INSTRUCTIONS,
                "Here are some READ ONLY files, provided for your reference.",
                "",
                reply="Ok, I will use these files as references.",
            ),
            InstructionForm(
                ENVIRONMENT,
                "Here are summaries of some files present in my git repository.",
                "",
                re.compile(r"\AHere are (summaries)"),
                reply="Ok, I won't try and edit those files without asking first.",
            ),
        ),
    ),
    "openhands": ClientProfile(
        agents=(b"openhands/",),
        fields=(),
        prompts=("You are OpenHands agent,",),
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
# How parts begin that carry results of tools as text.
_RESULT: Final = re.compile(
    r"\s*(?:<system-reminder>\s*(?:Result of calling|Called) the "
    r"|\[[\w.-]+(?: [^\]\n]*)?\] Result:"
    r"|<(?:user_shell_command|tool_result|tool_response|function_results?|bash-stdout|bash-stderr|"
    r"local-command-stdout)\b)"
)
_TEXTS: Final = frozenset({"text", "input_text"})


def find_client(fields: Mapping[bytes, bytes]) -> str:
    """Returns the name of the client that sends these header fields; empty where it is none of ours.

    Args:
        fields: The first value of each, names in lower case.
    """
    agent = fields.get(b"user-agent", b"").lower()
    for name, client in CLIENTS.items():
        if agent.startswith(client.agents) or not fields.keys().isdisjoint(client.fields):
            return name
    return ""


def find_client_by_prompt(text: str) -> str:
    """Returns the name of the client whose system prompt begins as this text; empty: none does."""
    return next((name for name, client in CLIENTS.items() if text.startswith(client.prompts)), "")


def find_client_by_messages(messages: Sequence[Message]) -> str:
    """Returns the name of the client whose system prompt opens a list; empty where none is known."""
    first = next((each for each in messages if each.is_privileged), None)
    return find_client_by_prompt(first.text) if first is not None else ""


def find_client_by_members(prompt_members: Sequence[str]) -> str:
    """Returns the same by the JSON of a body's members: the first is the system prompt, if there is one."""
    beginning = prompt_members[0][:PROMPT_CHARACTERS] if prompt_members else ""
    for name, client in CLIENTS.items():
        for prompt in client.prompts:
            at = beginning.find(f'"{prompt}')
            if at >= 0 and (not beginning[:at].strip() or re.search(r'"text"\s*:\s*\Z', beginning[:at])):
                return name
    return ""


def find_form(client: str, text: str) -> InstructionForm | None:
    """Returns the form of a client that a whole text has; None: it has none."""
    for form in CLIENTS[client].forms if client in CLIENTS else ():
        if text.startswith(form.opening) and (
            not form.closing or (text.rstrip().endswith(form.closing) and text.count(form.closing) == 1)
        ):
            return form
    return None


def starts_with_form(text: str, client: str) -> bool:
    """Whether a text begins in one of a client's forms."""
    return text.startswith(tuple(form.opening for form in CLIENTS[client].forms))


def may_hold_form(raw: bytes, client: str) -> bool:
    """Whether the bytes of a message may hold one of a client's forms; cheap."""
    if client not in CLIENTS or b'"tool_result"' in raw or b'"user"' not in raw:
        return False
    return b"\\u003c" in raw or any(
        form.opening.partition("\n")[0].encode() in raw for form in CLIENTS[client].forms
    )


def divide_message(record: Message, client: str, *, is_first: bool) -> list[tuple[bytes, Instruction | None]]:
    """Divides a user message into its instructions and what the user says.

    Returns bytes of messages, each with what it is; the user's parts stay together, at the place of the last
    of them. Empty where the message holds no instructions.

    Args:
        record: The message.
        client: The name of the client that sends it.
        is_first: Whether no answer stands before it.
    """
    if record.role != "user" or record.answers or not may_hold_form(record.raw, client):
        return []
    content = _read_content(record.raw)
    if isinstance(content, str):
        found = _find_instruction(content, client, is_first=is_first)
        return [(record.raw, found)] if found else []
    texts = [_read_text(each) for each in content]
    if any(_RESULT.match(each) for each in texts):
        return []
    kinds = [_find_instruction(each, client, is_first=is_first) for each in texts]
    if not any(kinds):
        return []
    if len(kinds) == 1:
        return [(record.raw, kinds[0])]
    return list(_cut_parts(record.raw, kinds))


def divide_each(
    before: Sequence[Message], new: Iterable[Message], client: str
) -> Iterator[tuple[Message, Sequence[tuple[bytes, Instruction | None]]]]:
    """Yields each new message of a list with what `divide_message` makes of it.

    Args:
        before: The messages in front of them.
        new: The messages.
        client: The name of the client that sends them.
    """
    is_first = not any(each.role == "assistant" for each in before)
    last = before[-1] if before else None
    for record in new:
        is_first = is_first and record.role != "assistant"
        yield (
            record,
            divide_message(record, client, is_first=is_first) if last is None or not last.answers else (),
        )
        last = record


def drop_instructions(
    messages: Sequence[Message], client: str, parse_message: Callable[[bytes], Message]
) -> tuple[Message, ...]:
    """Returns a whole list without a client's instructions.

    Args:
        messages: The list.
        client: The name of the client that sends it.
        parse_message: Reads a message of its wire.
    """
    made: list[Message] = []
    for record, parts in divide_each((), messages, client):
        records = [replace(parse_message(raw), instruction=instruction) for raw, instruction in parts]
        source = SourceMessage(record.raw, len(parts)) if len(parts) > 1 else None
        made += [replace(each, source=source) for each in records] or [record]
    return tuple(each for each in unmark_pasted(made) if each.instruction is None)


def _read_content(raw: bytes) -> str | list[Any]:
    """The content of a message; empty where it is none that can be divided."""
    try:
        fields = large.decode_value(raw)
    except UnreadableBodyError:
        return ""
    content = fields.get("content") if isinstance(fields, dict) else ""
    return content if isinstance(content, str | list) else ""


def _read_text(part: object) -> str:
    """The text of a part; empty where it is no text."""
    if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXTS:
        return ""
    text = part.get("text")
    return text if isinstance(text, str) else ""


def _find_instruction(text: str, client: str, *, is_first: bool) -> Instruction | None:
    form = find_form(client, text)
    if form is None or (form.is_first and not is_first):
        return None
    named = form.path.findall(text) if form.path else []
    path = " ".join(named) if form.kind == ENVIRONMENT else "".join(named[:1])
    return Instruction(client, form.kind, path.strip()[:MAX_PATH_CHARACTERS])


def _cut_parts(raw: bytes, kinds: Sequence[Instruction | None]) -> Iterator[tuple[bytes, Instruction | None]]:
    place = find_members(raw)["content"]
    parts = split_elements(raw[place.start : place.stop])
    fields = large.decode_value(raw)
    if fields.pop("id", None) is not None:  # an id names one message only
        raw = encode_json(fields | {"content": ""})
        place = find_members(raw)["content"]
    own = [k for k, kind in enumerate(kinds) if kind is None]
    for k, kind in enumerate(kinds):
        if kind is None and k != own[-1]:
            continue
        held = parts[k] if kind else b",".join(parts[j] for j in own)
        yield b"".join((raw[: place.start], b"[", held, b"]", raw[place.stop :])), kind


def unmark_pasted(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the list without what was pasted: the last message of a turn that holds no words of a user.

    A turn is what stands between two answers. What a client has answered itself is left as it is.
    """
    made = list(messages)
    start = 0
    for stop in range(len(made) + 1):
        if stop < len(made) and not (made[stop].role == "assistant" or made[stop].answers):
            continue
        turn = [k for k in range(start, stop) if not made[k].is_privileged]
        reply = made[stop].text if stop < len(made) else ""
        if any(made[k].instruction for k in turn) and not any(_is_user_text(made[k]) for k in turn):
            last = made[turn[-1]]
            for k in turn:
                is_last = k == turn[-1] or (last.source is not None and made[k].source is last.source)
                if is_last and not _has_client_reply(made[k], reply):
                    made[k] = replace(made[k], instruction=None)
        start = stop + 1
    return tuple(made)


def _is_user_text(record: Message) -> bool:
    """Whether a user says it, as far as can be told."""
    if record.instruction is not None:
        return False
    text = record.text.strip()
    return bool(record.parts) or not (
        not text or (text.startswith(_REMINDER) and text.endswith(_REMINDER_END))
    )


def _has_client_reply(record: Message, reply: str) -> bool:
    """Whether a client has answered a message itself."""
    if record.instruction is None:
        return False
    form = find_form(record.instruction.client, record.text)
    return form is not None and bool(form.reply) and reply.strip() == form.reply


def join_sources(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the list with messages that were divided, and are there in all their parts, as they came."""
    if not any(each.source for each in messages):
        return messages
    made: list[Message] = []
    at = 0
    while at < len(messages):
        source = messages[at].source
        if source is None:
            made.append(messages[at])
            at += 1
            continue
        run = 1
        while at + run < len(messages) and messages[at + run].source is source:
            run += 1
        if run == source.parts:
            made.append(replace(messages[at], raw=source.raw, source=None))
        else:
            made += messages[at : at + run]
        at += run
    return made
