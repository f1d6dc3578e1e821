"""The items of a Responses input as pieces and messages, messages as items again, and what gets shorter."""

import json
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.repair import repair_messages
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.responses.wire import RESPONSES
from tests.helpers.wires.responses_items import (
    ANSWERED,
    ASKED,
    CALLED,
    COMPACTED,
    CUSTOM,
    PATCHED,
    PNG,
    RULES,
    SAID,
    SEARCHED,
    THOUGHT,
    pieces,
    raw_of,
    record,
    records,
)


def test_an_answer_is_one_piece_and_each_result_and_question_is_one() -> None:
    assert pieces(RULES, ASKED, THOUGHT, SAID, CALLED, CUSTOM, ANSWERED, PATCHED, SEARCHED, SAID, ASKED) == [
        [RULES],
        [ASKED],
        [THOUGHT, SAID, CALLED, CUSTOM],
        [ANSWERED],
        [PATCHED],
        [SEARCHED, SAID],
        [ASKED],
    ]


def test_settings_among_the_items_stand_by_themselves_and_instruct() -> None:
    tools = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}

    assert pieces(SAID, tools, SAID) == [[SAID], [tools], [SAID]]
    assert record(tools).is_privileged


def test_what_a_provider_has_compacted_is_one_privileged_piece_with_all_before_it() -> None:
    listed = [ASKED, COMPACTED, ASKED, CALLED, ANSWERED, {**COMPACTED, "type": "context_compaction"}, ASKED]

    assert pieces(*listed) == [listed[:6], [ASKED]]
    assert record(*listed[:6]).is_privileged
    assert records(listed)[0].raw == b",".join(map(raw_of, listed[:6]))


def test_an_answer_has_text_calls_and_parts_and_its_reasoning_only_signs_it() -> None:
    made = record(THOUGHT, SAID, SEARCHED, SAID, CALLED, CUSTOM)

    assert replace(made, parts=(), raw=b"", digest=b"") == Message(
        "assistant",
        "on it\n\non it",
        calls=(MessageToolCall("a", "read", '{"path":"x"}'), MessageToolCall("b", "patch", "*** Begin")),
        has_signed_reasoning=True,
    )
    assert [(part.kind, part.text_offset) for part in made.parts] == [("web_search_call", 5)]
    assert made.digest == record(SAID, {**SEARCHED, "id": "ws_2"}, SAID, CALLED, CUSTOM).digest


SHELL: list[dict[str, Any]] = [
    {"type": "local_shell_call", "id": "ls_1", "call_id": "a", "action": {"command": ["ls"]}},
    {"type": "shell_call", "call_id": "b", "action": {"commands": ["ls"]}},
    {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "x"}},
]


def test_the_calls_of_built_in_tools_are_calls() -> None:
    assert record(*SHELL).calls == (
        MessageToolCall("a", "local_shell", '{"command": ["ls"]}'),
        MessageToolCall("b", "shell", '{"commands": ["ls"]}'),
        MessageToolCall("c", "apply_patch", '{"type": "delete_file", "path": "x"}'),
    )


ANSWERS: list[tuple[dict[str, Any], Message]] = [
    (ANSWERED, Message("tool", "text of x", answered_call_ids=("a",))),
    (
        {**ANSWERED, "output": [{"type": "input_text", "text": "x"}]},
        Message("tool", "x", answered_call_ids=("a",)),
    ),
    (PATCHED, Message("tool", "Done", name="custom_tool_call_output", answered_call_ids=("b",))),
    (
        {"type": "local_shell_call_output", "id": "a", "call_id": "a", "output": "x"},
        Message("tool", "x", name="local_shell_call_output", answered_call_ids=("a",)),
    ),
    (
        {
            "type": "shell_call_output",
            "call_id": "a",
            "output": [{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}}],
        },
        Message("tool", "x", name="shell_call_output:2", answered_call_ids=("a",)),
    ),
    (
        {
            "type": "shell_call_output",
            "call_id": "a",
            "output": [{"stdout": "x", "stderr": "", "outcome": {"type": "timeout"}}],
        },
        Message("tool", "x", name="shell_call_output:timeout", answered_call_ids=("a",)),
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "a", "status": "failed", "output": "x"},
        Message("tool", "x", name="apply_patch_call_output:failed", answered_call_ids=("a",)),
    ),
]


@pytest.mark.parametrize(("item", "expected"), ANSWERS)
def test_an_answer_to_a_call_is_read(item: dict[str, Any], expected: Message) -> None:
    assert replace(record(item), raw=b"", digest=b"") == expected


@pytest.mark.parametrize("item", [item for item, _ in ANSWERS if isinstance(item["output"], str)])
def test_a_masked_answer_is_of_the_kind_that_it_was(item: dict[str, Any]) -> None:
    masked = replace(record(item), text="[masked]", raw=b"")

    assert json.loads(RESPONSES.encode_message(masked)) == {**item, "output": "[masked]"}
    assert RESPONSES.join_messages([masked]) == RESPONSES.encode_message(masked)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("user", "a \ud800"), {"role": "user", "content": "a \ud800"}),
        (Message("developer", "a"), {"role": "developer", "content": "a"}),
        (
            Message("assistant", "a"),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        ),
    ],
)
def test_a_message_of_ours_is_written_and_read_as_it_is(message: Message, expected: dict[str, Any]) -> None:
    raw = RESPONSES.encode_message(message)

    assert json.loads(raw) == expected
    assert replace(RESPONSES.parse_message(raw), raw=b"", digest=b"") == message


def test_a_call_without_an_answer_gets_one_of_its_own_kind() -> None:
    listed = repair_messages(records([ASKED, CALLED, {**CUSTOM, "call_id": "p"}, *SHELL[1:], ASKED]))

    assert [each.get("type") for each in json.loads(b"[%b]" % RESPONSES.join_messages(listed))] == [
        None,
        "function_call",
        "custom_tool_call",
        "shell_call",
        "apply_patch_call",
        "function_call_output",
        "custom_tool_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        None,
    ]


CHAT_SAYS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([ASKED], {"role": "user", "content": "do it"}),
    ([RULES], {"role": "developer", "content": "rules"}),
    ([THOUGHT, SAID], {"role": "assistant", "content": "on it"}),
    (
        [THOUGHT, SAID, CALLED],
        {
            "role": "assistant",
            "content": "on it",
            "tool_calls": [{"id": "a", "function": {"name": "read", "arguments": '{ "path": "x" }'}}],
        },
    ),
    ([ANSWERED], {"role": "tool", "tool_call_id": "a", "content": "text of x"}),
    (
        [{**SAID, "content": [{"type": "refusal", "refusal": "no"}]}],
        {"role": "assistant", "content": None, "refusal": "no"},
    ),
    (
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": PNG, "detail": "low"},
                    {"type": "input_file", "file_data": PNG, "filename": "x"},
                    {"type": "input_file", "file_id": "f"},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
                ],
            }
        ],
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": PNG}},
                {"type": "file", "file": {"file_data": PNG}},
                {"type": "file", "file": {"file_id": "f"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
            ],
        },
    ),
]


@pytest.mark.parametrize(("items", "chat"), CHAT_SAYS)
def test_the_same_content_has_the_digest_that_it_has_in_chat(
    items: list[dict[str, Any]], chat: dict[str, Any]
) -> None:
    assert record(*items).digest == CHAT.parse_message(raw_of(chat)).digest


LONG = "word " * 400


def test_text_and_arguments_get_shorter_and_nothing_sealed_changes() -> None:
    said = {**SAID, "content": [{"type": "output_text", "text": LONG, "annotations": [{"start_index": 9}]}]}
    called = {**CALLED, "arguments": json.dumps({"path": "x", "text": LONG})}
    whole = record(THOUGHT, said, SEARCHED, called, {**CUSTOM, "input": LONG})
    short = RESPONSES.shorten_message(whole, 0.2, "m_1")
    thought, spoke, searched, *_ = json.loads(b"[%b]" % short.raw)

    assert (thought, searched) == (THOUGHT, SEARCHED)
    assert raw_of(THOUGHT) in short.raw
    assert spoke["content"][0]["annotations"] == []
    assert len(short.raw) - len(raw_of(THOUGHT)) < 0.4 * (len(whole.raw) - len(raw_of(THOUGHT)))
    assert "of m_1 left out" in short.text
    assert (short.has_signed_reasoning, [call.name for call in short.calls]) == (True, ["read", "patch"])
    assert json.loads(short.calls[0].arguments)["path"] == "x"


def test_an_image_of_a_user_or_a_tool_becomes_a_note() -> None:
    parts = [{"type": "input_text", "text": LONG}, {"type": "input_image", "image_url": PNG + "A" * 400}]
    notes = ["[input_image of m_1 left out]"]
    for whole in (record({**ASKED, "content": parts}), record({**ANSWERED, "output": parts})):
        short = RESPONSES.shorten_message(whole, 0.1, "m_1")
        assert (short.role, short.answered_call_ids, short.parts) == (whole.role, whole.answered_call_ids, ())
        assert short.text.endswith(notes[0])


def test_what_cannot_get_shorter_stays_what_it_is() -> None:
    short = RESPONSES.parse_message(b'{"role":"user","content":"do"}')
    for whole in (short, record(COMPACTED), record(RULES), record(THOUGHT), record(SEARCHED)):
        assert RESPONSES.shorten_message(whole, 0.0, "m_1") is whole


def test_what_shells_have_written_gets_shorter() -> None:
    ended: dict[str, Any] = {"outcome": {"type": "exit", "exit_code": 1}}
    item = {
        "type": "shell_call_output",
        "call_id": "a",
        "output": [{"stdout": LONG, "stderr": LONG, **ended}],
    }
    [short] = json.loads(b"[%b]" % RESPONSES.shorten_message(record(item), 0.1, "m_1").raw)

    assert {**short["output"][0], "stdout": "", "stderr": ""} == {"stdout": "", "stderr": "", **ended}
    assert len(short["output"][0]["stderr"]) < 0.3 * len(LONG)


def test_images_are_carried_by_a_message_of_the_user() -> None:
    image = {"type": "input_image", "image_url": PNG}
    source = record({"role": "user", "content": [{"type": "input_text", "text": "see"}, image]})
    made = RESPONSES.attach_parts(Message("user", "summary"), source)

    assert json.loads(made.raw) == {
        "role": "user",
        "content": [{"type": "input_text", "text": "summary"}, image],
    }
    assert RESPONSES.attach_parts(Message("assistant", "x"), record(ASKED)).text == "x"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (ASKED, 0),
        (CALLED, 0),
        (THOUGHT, 300),
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 40}]}, 10),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 40}]}, 10),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "思" * 40}]}, 30),
        ({"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "low"}]}, 70),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, 1_000),
        ({**ANSWERED, "output": [{"type": "input_image", "file_id": "f", "detail": "low"}]}, 70),
        ({"role": "user", "content": [{"type": "new", "x": "y" * 10_000}]}, 1_000),
        ({"role": "user", "content": [{"type": "new"}]}, 14),
        ({"type": "mcp_call", "output": "x" * 4_000}, 1_008),
    ],
)
def test_what_is_no_text_weighs_what_its_kind_weighs(item: dict[str, Any], expected: int) -> None:
    weighed = RESPONSES.parse_uncounted(raw_of(item), "gpt-5")

    assert (weighed.nontext_tokens, weighed.digest) == (expected, record(item).digest)
    assert RESPONSES.estimate_nontext_tokens(raw_of(item), "gpt-5") == expected


def test_of_a_compacted_beginning_counts_what_the_model_reads() -> None:
    retained = b",".join(map(raw_of, [{"role": "user", "content": LONG}, COMPACTED]))
    uncleared = b",".join(map(raw_of, [{"role": "user", "content": LONG}, CALLED, ANSWERED, COMPACTED]))
    alone = RESPONSES.estimate_nontext_tokens(raw_of(COMPACTED), "gpt-5")

    assert RESPONSES.estimate_nontext_tokens(retained, "gpt-5") == alone + len(LONG) // 4
    assert RESPONSES.estimate_nontext_tokens(uncleared, "gpt-5") == alone


@pytest.mark.parametrize(
    "begins", ["<environment_context>\n<cwd>/</cwd>", "# AGENTS.md instructions for /\n"]
)
def test_what_begins_as_codex_writes_of_a_project_is_the_users_by_itself(
    begins: str,
) -> None:
    content = [{"type": "input_text", "text": begins}]
    record = RESPONSES.parse_message(
        json.dumps({"type": "message", "role": "user", "content": content}).encode()
    )
    assert (record.role, record.is_fixed, record.text) == ("user", False, begins)
