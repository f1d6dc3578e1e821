"""A Responses body cut into pieces, its pieces as records, and pieces as an input again."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message, MessageToolCall, iter_units
from compaction_proxy.core.repair import repair_messages
from compaction_proxy.wires.body import RequestBody, parse_body, rewrite_messages
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.responses.wire import RESPONSES

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEY = bytes(range(KEY_BYTES))
PNG = "data:image/png;base64,iVBORw0KGgo="

ASKED = {"role": "user", "content": "do it"}
RULES = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA" * 400}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on it"}]}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "read", "arguments": '{"path":"x"}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin"}
ANSWERED = {"type": "function_call_output", "call_id": "a", "output": "text of x"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "b", "output": "Done"}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
COMPACTED = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA" * 100}


def raw_of(item: Any) -> bytes:
    return json.dumps(item).encode()


def body(items: Any, **members: Any) -> bytes:
    return json.dumps({"model": "gpt-5", **members, "input": items}).encode()


def pieces(*items: Any) -> list[list[Any]]:
    return [json.loads(b"[%b]" % each) for each in parse_body(body(items), RESPONSES).messages]


def record(*items: Any) -> Message:
    return RESPONSES.parse_message(b",".join(map(raw_of, items)))


def records(items: list[Any]) -> list[Message]:
    return [RESPONSES.parse_message(each) for each in parse_body(body(items), RESPONSES).messages]


def reason(raw: bytes) -> str:
    with pytest.raises(UnreadableBodyError) as refused:
        parse_body(raw, RESPONSES)
    return refused.value.reason


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


def test_a_text_for_an_input_is_what_one_user_message_says() -> None:
    cut = parse_body(body('say "hi"'), RESPONSES)

    [message] = [RESPONSES.parse_message(each) for each in cut.messages]
    assert (message.role, message.text) == ("user", 'say "hi"')
    assert rewrite_messages(cut, [message]) == cut.raw  # which is shorter than a list
    assert (
        json.loads(rewrite_messages(cut, [message] * 2))["input"]
        == [{"role": "user", "content": 'say "hi"'}] * 2
    )


def test_instructions_tools_and_format_count_and_the_output_has_a_limit() -> None:
    cut = parse_body(
        body([ASKED], instructions="be", tools=[1], text={"a": 1}, max_output_tokens=9), RESPONSES
    )

    assert (cut.prompt_members, cut.max_output) == (('"be"', "[1]", '{"a": 1}'), 9)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (body([ASKED], previous_response_id="resp_1"), "stateful"),
        (body([ASKED], conversation={"id": "conv_1"}), "stateful"),
        (body([ASKED, {"type": "item_reference", "id": "msg_1"}]), "stateful"),
        (body([ASKED, {"id": "msg_1"}]), "stateful"),
        (body([ASKED], context_management=[{"type": "compaction"}]), "provider-compacts"),
        (body([ASKED, {"type": "compaction_trigger"}]), "provider-compacts"),
        (body([ASKED, 1]), "no-messages"),
        (body([]), "no-messages"),
        (body({}), "no-array"),
        (b'{"messages":[{}]}', "no-messages"),
    ],
)
def test_what_only_the_provider_can_put_together_is_left_as_it_is(raw: bytes, expected: str) -> None:
    assert reason(raw) == expected


def test_members_that_say_nothing_keep_nobody_from_reading() -> None:
    raw = body([ASKED], previous_response_id=None, conversation=None, context_management=[])

    assert parse_body(raw, RESPONSES).messages == (raw_of(ASKED),)


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
        ({"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "low"}]}, 70),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, 1_000),
        ({**ANSWERED, "output": [{"type": "input_image", "file_id": "f", "detail": "low"}]}, 70),
        ({"role": "user", "content": [{"type": "new", "x": "y" * 10_000}]}, 1_000),
        ({"role": "user", "content": [{"type": "new"}]}, 15),
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


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


CREATED = event("response.created", response={"error": None, "tools": [{"type": "function"}]})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (b"", True),
        (b": ping\n\n", True),
        (CREATED, True),
        (CREATED + event("response.queued") + event("response.in_progress") + b"event: resp", True),
        (CREATED + event("response.output_item.added"), False),
        (CREATED + event("error", code="context_length_exceeded"), False),
        (event("response.failed"), False),
        (b"data: x\n\n", False),
        (b"data: [1]\n\n", False),
    ],
)
def test_a_stream_is_held_back_as_long_as_nothing_of_the_answer_has_come(
    seen: bytes,
    expected: bool,  # noqa: FBT001 - a case of the table
) -> None:
    assert RESPONSES.may_hold_back_stream(seen) is expected


TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/:{}[], '), max_size=8)
IDS = st.sampled_from(["a", "b", "c"])
THOUGHTS = st.just(THOUGHT) | st.just({**THOUGHT, "id": "rs_2"})
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXT
)
SPOKEN = st.builds(lambda text: {**SAID, "content": [{"type": "output_text", "text": text}]}, TEXT)
CALLS = st.builds(lambda called: {**CALLED, "call_id": called}, IDS)
CUSTOMS = st.builds(lambda called: {**CUSTOM, "call_id": called}, IDS)
RESULTS = st.builds(lambda called, text: {**ANSWERED, "call_id": called, "output": text}, IDS, TEXT)
DONE = st.builds(lambda called: {**PATCHED, "call_id": called}, IDS)
ITEMS = (
    MESSAGES | THOUGHTS | SPOKEN | CALLS | CUSTOMS | RESULTS | DONE | st.just(SEARCHED) | st.just(COMPACTED)
)
LAYOUTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 1}]
)
REFUSED = st.sampled_from([{"type": "item_reference", "id": "x"}, {"type": "compaction_trigger"}, 1])


def judged(reader: Callable[[bytes], RequestBody], raw: bytes) -> tuple[Any, ...] | str:
    try:
        read_body = reader(raw)
    except UnreadableBodyError as refused:
        return refused.reason
    return read_body.messages_slice, read_body.messages, read_body.model, read_body.max_output


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Bodies as one client might send them after one another."""
    items: Any = draw(st.lists(ITEMS, min_size=1, max_size=4))
    layout, raws = draw(LAYOUTS), list[bytes]()
    members: list[dict[str, Any]] = [{}, {"store": False}, {"previous_response_id": "r"}]
    behind = draw(st.sampled_from(members))
    for _ in range(draw(st.integers(1, 6))):
        fields = {"model": "m", "input": items, **behind}
        raws.append(json.dumps(fields, **layout).encode("utf-8", "replace"))
        if draw(st.integers(0, 9)) == 0:
            items = draw(st.lists(ITEMS | REFUSED, min_size=1, max_size=2) | TEXT)
        elif isinstance(items, list):
            items = [*items, *draw(st.lists(ITEMS, max_size=4))]
    return raws


@UNHURRIED
@given(histories())
def test_a_body_that_has_grown_is_read_as_if_nothing_had_been_read_before(raws: list[bytes]) -> None:
    reader = IncrementalReader(KEY, RESPONSES)
    for raw in raws:
        grown = judged(partial(reader.read, tenant="t", conversation="c"), raw)
        assert grown == judged(partial(parse_body, wire=RESPONSES), raw)


def test_late_pieces_are_cut_out_alone_where_the_list_has_only_grown() -> None:
    reader = IncrementalReader(KEY, RESPONSES)
    first = reader.read(body([ASKED, THOUGHT, CALLED, ANSWERED]), "t", "c")
    grown = reader.read(body([ASKED, THOUGHT, CALLED, ANSWERED, THOUGHT, SAID, ASKED]), "t", "c")
    compacted = reader.read(
        body([ASKED, THOUGHT, CALLED, ANSWERED, THOUGHT, SAID, ASKED, COMPACTED, ASKED]), "t", "c"
    )

    assert (grown.previous_fingerprint, grown.new_pieces) == (
        first.fingerprint,
        (b",".join(map(raw_of, [THOUGHT, SAID])), raw_of(ASKED)),
    )
    assert (compacted.previous_fingerprint, len(compacted.new_pieces)) == (b"", 2)


@UNHURRIED
@given(st.lists(ITEMS, min_size=1, max_size=12), LAYOUTS)
def test_untouched_pieces_are_the_client_s_list_and_its_bytes(
    items: list[Any], layout: dict[str, Any]
) -> None:
    raw = json.dumps({"input": items, "model": "m"}, **layout).encode("utf-8", "replace")
    cut = parse_body(raw, RESPONSES)
    listed = [RESPONSES.parse_message(each) for each in cut.messages]
    written = rewrite_messages(cut, listed)

    assert json.loads(written) == json.loads(raw)
    assert [each.raw for each in listed] == list(cut.messages)
    assert all(
        part in raw
        for each in cut.messages
        for part in RESPONSES.split_message_list(memoryview(b"[%b]" % each))
    )
    assert written[: cut.messages_slice.start] == raw[: cut.messages_slice.start]


def orphans(items: list[Any]) -> list[str]:
    """Ids of results without a call before them, and of reasoning without what came of it."""
    found: list[str] = []
    open_calls: set[tuple[str, str]] = set()
    for index, item in enumerate(items):
        kind = item.get("type", "")
        if kind.endswith("_call"):
            open_calls.add((item["type"], item.get("call_id", "")))
        elif kind.endswith("_output"):
            key = (kind.removesuffix("_output"), item["call_id"])
            found += [] if key in open_calls else [item["call_id"]]
        elif kind == "reasoning" and index + 1 == len(items):
            found.append(item["id"])
    return found


@st.composite
def sessions(draw: st.DrawFn) -> list[Any]:
    """Inputs as clients send them: each call is answered, at once or behind others of its answer."""
    items: list[Any] = []
    for number in range(draw(st.integers(1, 6))):
        items.append({"role": "user", "content": f"turn {number}"})
        for step in range(draw(st.integers(0, 3))):
            items += [THOUGHT] if draw(st.booleans()) else []
            ids = [f"c{number}.{step}.{k}" for k in range(draw(st.integers(1, 3)))]
            calls = [{**CALLED, "call_id": each} for each in ids]
            results = [{**ANSWERED, "call_id": each} for each in ids]
            apart = draw(st.booleans())
            items += (
                [each for pair in zip(calls, results, strict=True) for each in pair]
                if apart
                else calls + results
            )
        items.append(SAID)
    return items


@UNHURRIED
@given(sessions(), st.data())
def test_whatever_units_leave_no_result_is_an_orphan_and_calls_keep_their_reasoning(
    items: list[Any], data: st.DataObject
) -> None:
    listed = records(items)
    kept = [each for each in iter_units(listed) if data.draw(st.booleans())]
    left = json.loads(
        b"[%b]" % RESPONSES.join_messages([each for span in kept for each in listed[span.start : span.stop]])
    )

    assert orphans(left) == []
    before = reasoned(items)
    assert [called for called, thoughts in reasoned(left).items() if thoughts < before[called]] == []


def reasoned(items: list[Any]) -> dict[str, int]:
    """Whether a thought stands before a call, nothing but calls and results between; by the call's id."""
    found: dict[str, int] = {}
    for is_step, together in groupby(items, lambda each: each.get("type") not in {None, "message"}):
        thoughts = 0
        for each in together if is_step else ():
            thoughts = thoughts or int(each["type"] == "reasoning")
            if each["type"] == "function_call":
                found[each["call_id"]] = thoughts
    return found


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
