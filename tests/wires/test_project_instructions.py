"""Forms of known clients are recognised on every wire where their client sends them, and nowhere else."""

import json
from typing import Any

import pytest

from compaction_proxy.compaction.message_reader import CountingOptions, MessageList, MessageReader
from compaction_proxy.core.message import Instruction, Message, SourceMessage
from compaction_proxy.core.repair import insert_alternating_fillers
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.messages.wire import MESSAGES
from compaction_proxy.wires.project_instructions import (
    CLIENTS,
    find_client_by_headers,
    find_client_by_members,
    find_client_by_prompt,
    rejoin_divided_messages,
    split_off_instructions,
)
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.wire import Wire
from tests.doubles.word_counter import WordCounter

CONTEXT = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# claudeMd\n"
    "Contents of /repo/CLAUDE.md (project instructions, checked into the codebase):\n\nUse tabs.\n"
    "</system-reminder>\n\n"
)
SKILLS = (
    "<system-reminder>\nThe following skills are available for use with the Skill tool:\n\n- init\n"
    "</system-reminder>\n"
)
AGENTS = "# AGENTS.md instructions for /repo\n\n<INSTRUCTIONS>\nUse tabs.\n</INSTRUCTIONS>"
PLACE = "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n</environment_context>"
QWEN = "This is the Qwen Code. We are setting up the context for our chat.\nToday is Monday."


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def body(dialect: Wire, messages: list[Any], **members: Any) -> bytes:
    return json.dumps({"model": "m", dialect.member_names.messages: messages, **members}).encode()


async def listed(
    messages: list[Any], client: str = "", dialect: Wire = CHAT, reading: MessageReader | None = None
) -> MessageList:
    reading = reading or MessageReader({"tiktoken": TokenScheduler(WordCounter())})
    read_body = parse_body(body(dialect, messages), dialect)
    return await reading.read_request(read_body, CountingOptions("m", "tiktoken", dialect), client)


def kinds(found: MessageList) -> list[tuple[str, str] | None]:
    return [each.instruction[1:] if each.instruction else None for each in found.messages]


CLAUDE = ("instructions", "/repo/CLAUDE.md")


@pytest.mark.parametrize(
    ("fields", "client"),
    [
        ({b"user-agent": b"claude-cli/2.1.197 (external, cli)"}, "claude-code"),
        ({b"x-claude-code-session-id": b"1"}, "claude-code"),
        ({b"user-agent": b"codex_cli_rs/0.169.0"}, "codex"),
        ({b"x-codex-window-id": b"1:0"}, "codex"),
        ({b"user-agent": b"QwenCode/0.15.10 (linux; x64)"}, "qwen-code"),
        ({b"user-agent": b"OpenAI/Python claude-cli/2"}, ""),
        ({}, ""),
    ],
)
def test_a_client_is_known_by_its_header_fields(fields: dict[bytes, bytes], client: str) -> None:
    assert find_client_by_headers(fields) == client


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_known_by_how_its_system_prompt_begins(client: str) -> None:
    for prompt in CLIENTS[client].prompt_prefixes:
        assert find_client_by_prompt(f"{prompt} More.") == client
        assert find_client_by_prompt(f"Say: {prompt}") == ""
        assert find_client_by_members([json.dumps(f"{prompt} More.")]) == client
        blocks = [{"type": "text", "text": "billing"}, {"type": "text", "text": f"{prompt} More."}]
        assert find_client_by_members([json.dumps(blocks)]) == client
        assert find_client_by_members([json.dumps([{"name": "read", "description": prompt}])]) == ""
    assert find_client_by_members([]) == ""


def test_parts_of_a_message_with_an_id_do_not_share_it() -> None:
    raw = json.dumps({"type": "message", "id": "msg_1", **user(AGENTS, PLACE)}).encode()
    divided = split_off_instructions(Message(role="user", raw=raw), "codex", is_before_first_answer=True)

    assert [kind.kind if kind else "" for _, kind in divided] == ["instructions", "environment"]
    assert [json.loads(piece) for piece, _ in divided] == [
        {"type": "message", **user(AGENTS)},
        {"type": "message", **user(PLACE)},
    ]


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES])
async def test_instructions_become_messages_of_their_own_and_go_on_as_they_came(dialect: Wire) -> None:
    messages = [{"role": "system", "content": "Help."}, user(SKILLS, "First.", CONTEXT, "Second.")]
    found = await listed(messages, "claude-code", dialect)
    assert kinds(found) == [None, ("environment", "skills"), CLAUDE, None]
    assert [each.text for each in found.unfixed_messages] == ["First.Second."]
    joined = json.loads(b"[" + dialect.join_messages(found.messages[1:]) + b"]")
    assert joined == [messages[1]]


async def test_a_client_that_is_known_by_its_system_prompt_in_the_list_needs_no_header() -> None:
    system = {"role": "system", "content": "You are Qwen Code, an agent."}
    messages = [system, user(QWEN), said("Got it. Thanks for the context!"), user("Fix it.")]
    assert kinds(await listed(messages)) == [None, ("environment", ""), None, None]
    assert kinds(await listed([{**system, "content": "You help."}, *messages[1:]])) == [None] * 4


async def test_parts_that_qwen_code_puts_before_the_words_of_a_user_are_not_the_users() -> None:
    tools = (
        "<system-reminder>\nThe following tools are reachable through `tool_search` and `tool_call`. A list."
    )
    skills = SKILLS.replace("tool:", "tool. Treat them as data:")
    parts = [skills, f"<system-reminder>\n{QWEN}\n</system-reminder>", f"{tools}\n</system-reminder>"]
    date = "<system-reminder>\nThe current date is: Monday.\n</system-reminder>"
    messages = [
        user(*parts, "First."),
        said("Done."),
        user(date, "Second."),
        said("Done."),
        user(parts[0], "x"),
    ]
    found = await listed(messages, "qwen-code")
    assert [each.text for each in found.unfixed_messages if each.role == "user"][:2] == ["First.", "Second."]
    paths = [each.instruction.path for each in found.messages if each.instruction]
    assert paths == ["skills", "context for our chat", "tools", "date"]


async def test_a_form_after_the_first_answer_is_none_where_it_only_opens_a_chat() -> None:
    messages = [
        user("Hello."),
        said("Hi."),
        user(QWEN),
        said("Got it. Thanks for the context!"),
        user("Fix."),
    ]
    assert kinds(await listed(messages, "qwen-code")) == [None] * 5


async def test_blocks_of_codex_are_told_apart_by_what_they_tell() -> None:
    part = "<environment_context>\n  <cwd>/other</cwd>\n</environment_context>"
    messages = [user(AGENTS, PLACE), user("Fix."), said("Done."), user(part), user("More.")]
    found = kinds(await listed(messages, "codex", RESPONSES))
    assert found[:3] == [("instructions", "/repo"), ("environment", "cwd shell"), None]
    assert found[3:] == [None, ("environment", "cwd"), None]


@pytest.mark.parametrize(
    "message",
    [
        user(AGENTS),
        user(f"Look: {AGENTS}", "What is it?"),
        user(f"{AGENTS} What is it?", "Well?"),
        user(f"{AGENTS}\n{AGENTS}", "Well?"),
        user("[read_file for 'a.md'] Result:", AGENTS, "Go on."),
        user("<user_shell_command>cat a.md</user_shell_command>", AGENTS, "Go on."),
        {"role": "user", "content": AGENTS},
        {"role": "user", "content": None},
        {"role": "user", "content": [AGENTS, {"type": "image_url", "image_url": {"url": AGENTS}}]},
        {"role": "assistant", "content": AGENTS},
    ],
)
async def test_what_a_user_pastes_or_a_tool_brings_is_none(message: dict[str, Any]) -> None:
    messages = [user("Hello."), said("Hi."), message, said("That."), user("Fix it.")]
    assert kinds(await listed(messages, "codex")) == [None] * 5


async def test_what_stands_beside_results_or_behind_them_is_none() -> None:
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": CONTEXT}
    texts = user(CONTEXT, "Go on.")["content"]
    called = {"role": "assistant", "content": [use]}
    beside = [user("Hello."), called, {"role": "user", "content": [result, *texts]}]
    assert not any(kinds(await listed(beside, "claude-code", MESSAGES)))
    behind = [
        user("Hello."),
        called,
        {"role": "user", "content": [result]},
        {"role": "user", "content": texts},
    ]
    assert not any(kinds(await listed(behind, "claude-code", MESSAGES)))


async def test_a_reminder_is_no_word_of_a_user() -> None:
    reminder = "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"
    messages = [user("Hello."), said("Hi."), user(CONTEXT, reminder), said("That.")]
    assert not any(kinds(await listed(messages, "claude-code")))
    messages[2] = user(CONTEXT, "Go on.", reminder)
    assert kinds(await listed(messages, "claude-code")) == [None, None, CLAUDE, None, None]


async def test_a_list_that_grows_is_read_as_one_that_comes_at_once() -> None:
    messages = [user(AGENTS, PLACE), user("Fix."), said("Done."), user(PLACE), user("More."), said("Done.")]
    reading = MessageReader({"tiktoken": TokenScheduler(WordCounter())})
    gauge = CountingOptions("m", "tiktoken", CHAT)
    for stop in range(1, len(messages) + 1):
        since = b"%d" % (stop - 1) if stop > 1 else b""
        whole = parse_body(body(CHAT, messages[:stop]), CHAT)
        grown = whole._replace(
            fingerprint=b"%d" % stop,
            previous_fingerprint=since,
            new_pieces=whole.messages[-1 if since else 0 :],
        )
        assert await reading.read_request(grown, gauge, "codex") == await reading.read_request(
            whole, gauge, "codex"
        )


def test_a_divided_message_that_lost_a_part_goes_on_in_parts() -> None:
    raw = json.dumps(user(CONTEXT, "Go on.")).encode()
    record = CHAT.parse_message(raw)
    pieces = split_off_instructions(record, "claude-code", is_before_first_answer=True)
    assert [each for _, each in pieces] == [Instruction("claude-code", *CLAUDE), None]
    source = SourceMessage(raw, 2)
    parts = [Message("user", raw=piece, source=source) for piece, _ in pieces]
    assert [each.raw for each in rejoin_divided_messages(parts)] == [raw]
    assert list(rejoin_divided_messages(parts[:1])) == parts[:1]
    other = Message("user", "x", raw=b"{}")
    assert [each.raw for each in rejoin_divided_messages([other, *parts, other])] == [b"{}", raw, b"{}"]
    assert insert_alternating_fillers(parts) == tuple(parts)


def test_what_is_no_message_is_not_divided() -> None:
    for raw in (b'{"role":"user","content":"<environment_context>', b'["user","<environment_context>"]'):
        assert split_off_instructions(Message("user", raw=raw), "codex", is_before_first_answer=True) == []
    assert (
        split_off_instructions(
            CHAT.parse_message(json.dumps(user(AGENTS)).encode()), "", is_before_first_answer=True
        )
        == []
    )
