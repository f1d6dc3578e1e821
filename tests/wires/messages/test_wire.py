"""The Messages wire: what its pieces are, what makes two messages the same, how one is made shorter."""

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import (
    OverloadedError,
    RequestRefusedError,
    UnreadableBodyError,
    UpstreamError,
)
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.wires.body import parse_body, rewrite_messages
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.messages.messages import FAILED_RESULT_NAME, PARSER
from compaction_proxy.wires.messages.wire import MESSAGES

# The machine may be busy.
UNHURRIED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PIXEL = b"\x89PNG not really"
DATA = base64.b64encode(PIXEL).decode()
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
THOUGHT = {"type": "thinking", "thinking": "hm " * 200, "signature": "c2ln"}
REDACTED = {"type": "redacted_thinking", "data": "AAAA"}


def written(value: object) -> bytes:
    return json.dumps(value).encode()


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "read", "input": given}


def result(content: Any, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def sha(data: str | bytes) -> bytes:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).digest()


def body(messages: Any, **members: Any) -> bytes:
    return written({"model": "claude-x", "max_tokens": 64, "messages": messages, **members})


SHAPES: list[tuple[str, Any, Message]] = [
    ("user", "hi", Message("user", "hi")),
    ("system", "be brief", Message("system", "be brief")),
    ("assistant", None, Message("assistant")),
    ("user", [text("a", **MARK), text("b", citations=[1])], Message("user", "ab")),
    ("user", [text("look"), IMAGE], Message("user", "look", (ContentPart("image_url", sha(PIXEL), 4),))),
    (
        "user",
        [{"type": "image", "source": {"type": "url", "url": "https://x/y.png?sig=1"}}, text("look")],
        Message("user", "look", (ContentPart("image_url", sha("https://x/y.png"), 0),)),
    ),
    ("user", [{**PDF, **MARK}], Message("user", "", (ContentPart("file", sha(bytes(3)), 0),))),
    (
        "user",
        [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "AAAA"}}],
        Message("user", "", (ContentPart("file", sha("AAAA"), 0),)),
    ),
    (
        "assistant",
        [THOUGHT, text("So"), use(b=1, a="é"), REDACTED, use("c2")],
        Message(
            "assistant",
            "So",
            calls=(MessageToolCall("c1", "read", '{"b":1,"a":"é"}'), MessageToolCall("c2", "read", "{}")),
        ),
    ),
    (
        "assistant",
        [{"type": "server_tool_use", "id": "s", **MARK}, text("x")],
        Message(
            "assistant",
            "x",
            (ContentPart("server_tool_use", sha('{"id": "s", "type": "server_tool_use"}'), 0),),
        ),
    ),
    ("user", [result("ok")], Message("tool", "ok", answered_call_ids=("c1",))),
    ("user", [result([text("a"), text("b")], **MARK)], Message("tool", "ab", answered_call_ids=("c1",))),
    (
        "user",
        [result(None, is_error=True)],
        Message("tool", "", name=FAILED_RESULT_NAME, answered_call_ids=("c1",)),
    ),
    (
        "user",
        [result([text("a"), IMAGE])],
        Message("tool", "a", (ContentPart("image_url", sha(PIXEL), 1),), answered_call_ids=("c1",)),
    ),
    (
        "user",
        [use()],
        Message("user", "", (ContentPart("tool_use", sha(json.dumps(use(), sort_keys=True)), 0),)),
    ),
    ("user", 5, Message("user", "5")),
]


@pytest.mark.parametrize(("role", "content", "expected"), SHAPES)
def test_a_piece_becomes_a_record(role: str, content: Any, expected: Message) -> None:
    raw = written({"role": role, "content": content})
    record = PARSER.parse_message(raw)

    assert replace(record, raw=b"", digest=b"") == expected
    assert (record.raw, record.digest) == (raw, compute_message_digest(record))
    assert MESSAGES.parse_uncounted(raw, "claude-x").record == replace(record, digest=b"")


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"role"', b'{"content":%b}' % (b"[" * 100_000)])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableBodyError):
        PARSER.parse_message(raw)


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": [text("a"), text("b")]}, {"role": "user", "content": "ab"}),
    ({"role": "user", "content": [text("a"), IMAGE]}, {"role": "user", "content": [text("a"), CHAT_IMAGE]}),
    (
        {"role": "user", "content": [PDF]},
        {"role": "user", "content": [{"type": "file", "file": {"file_data": "data:x;base64,AAAA"}}]},
    ),
    (
        {"role": "assistant", "content": [THOUGHT, text("So"), use(b=1.0, a="é")]},
        {
            "role": "assistant",
            "content": "So",
            "tool_calls": [
                {"id": "c1", "function": {"name": "read", "arguments": '{"a": "\\u00e9", "b": 1}'}}
            ],
        },
    ),
    (
        {"role": "user", "content": [result([text("ok")], **MARK)]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ),
]


@pytest.mark.parametrize(("ours", "chat"), SAME)
def test_the_same_content_is_the_same_message_as_on_the_chat_wire(
    ours: dict[str, Any], chat: dict[str, Any]
) -> None:
    assert PARSER.parse_message(written(ours)).digest == CHAT.parse_message(written(chat)).digest


def test_results_are_pieces_of_their_own_and_their_bytes_are_the_clients() -> None:
    raw = (
        b'{"max_tokens":1,"messages":[{"role":"user","content":"\\u0068i"},'
        b'{"role":"user" , "content": [ {"type":"text" ,"text":"and"},'
        b'{"type":"tool_result","tool_use_id":"a","content":"1.0"},'
        b' {"type":"tool_result", "tool_use_id":"b"},'
        b' {"type":"text","text":"go"} ], "x":1}]}'
    )

    cut = parse_body(raw, MESSAGES)

    assert cut.messages == (
        b'{"role":"user","content":"\\u0068i"}',
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"1.0"}]}',
        b'{"role":"user","content":[{"type":"tool_result", "tool_use_id":"b"}]}',
        b'{"role":"user","content":[{"type":"text" ,"text":"and"},{"type":"text","text":"go"}]}',
    )
    assert (cut.max_output, cut.prompt_members) == (1, ())


@pytest.mark.parametrize(
    "each",
    [
        {"role": "user", "content": 'say "tool_result"'},
        {"role": "user", "content": [result("alone", **MARK)]},
        {"role": "assistant", "content": [text("a"), result("not mine"), text("b")]},
        {"role": "user", "content": [{"type": "new", "x": "tool_result"}, text("compaction")]},
    ],
)
def test_any_other_message_is_a_piece_as_it_came(each: dict[str, Any]) -> None:
    assert MESSAGES.group_into_pieces((written(each),)) == (written(each),)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (
            body([{"role": "user", "content": "x"}], context_management={"edits": [{"type": "compact_1"}]}),
            PC := "provider-compacts",
        ),
        (body([{"role": "user", "content": "x"}], compaction={"type": "summarize"}), PC),
        (body([{"role": "assistant", "content": [{"type": "compaction", "content": "s"}]}]), PC),
        (body([{"role": "user", "content": "x"}], thread={"type": "create"}), "stateful"),
        (body([]), "no-messages"),
        (body([1]), "no-messages"),
        (body("x"), "no-array"),
        (b'{"messages":[{"role":"user","role":"user","content":["tool_result"]}]}', "duplicate-keys"),
    ],
)
def test_a_body_that_is_not_ours_to_compact_is_left_with_a_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        parse_body(raw, MESSAGES)

    assert refused.value.reason == reason


def test_other_edits_by_the_provider_are_no_reason() -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}

    raw = body([{"role": "user", "content": "x"}], context_management=edits, compaction=None, thread=None)

    assert len(parse_body(raw, MESSAGES).messages) == 1


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Message("user", "a"), {"role": "user", "content": "a"}),
        (Message("assistant", "a"), {"role": "assistant", "content": "a"}),
        (Message("system", "a"), {"role": "user", "content": "a"}),
        (Message("tool", "a", answered_call_ids=("c",)), {"role": "user", "content": [result("a", "c")]}),
        (
            Message("tool", "a", name=FAILED_RESULT_NAME, answered_call_ids=("c",)),
            {"role": "user", "content": [result("a", "c", is_error=True)]},
        ),
    ],
)
def test_a_message_of_ours_is_written_as_the_wire_has_it(record: Message, expected: Any) -> None:
    raw = MESSAGES.encode_message(record)

    assert json.loads(raw) == expected
    assert PARSER.parse_message(raw).text == record.text
    assert PARSER.parse_message(raw).answered_call_ids == record.answered_call_ids


def test_a_stand_in_takes_parts_along_without_marks() -> None:
    source = PARSER.parse_message(written({"role": "user", "content": [text("old"), {**IMAGE, **MARK}, PDF]}))

    made = MESSAGES.attach_parts(Message("assistant", "new"), source)

    assert json.loads(made.raw) == {"role": "user", "content": [text("new"), IMAGE, PDF]}
    assert [each.kind for each in made.parts] == ["image_url", "file"]


WORDS = " ".join(map(str, range(400)))


def shorter(role: str, content: Any, share: float = 0.1) -> Any:
    record = PARSER.parse_message(written({"role": role, "content": content}))
    return json.loads(MESSAGES.shorten_message(record, share, "m_1").raw)["content"]


def test_only_text_is_cut_and_thoughts_stay_as_they_are() -> None:
    thought = b'{"type":"thinking", "thinking":"\\u0068m", "signature":"s/\\/=", "n":1.0}'
    content = b'[%b,{"type":"text","text":"%b","citations":[1]}]' % (thought, WORDS.encode())
    raw = b'{"role":"assistant","content":%b,"x":1.00}' % content

    made = MESSAGES.shorten_message(PARSER.parse_message(raw), 0.1, "m_1").raw

    assert thought in made
    assert made.endswith(b',"x":1.00}')
    assert len(made) < len(raw) / 3
    assert json.loads(made)["content"][1].keys() == {"type", "text"}


def test_a_shortened_result_answers_its_call_and_failed_still() -> None:
    made = shorter("user", [result([text(WORDS), IMAGE], is_error=True, **MARK)])

    [cut] = made
    assert {**cut, "content": []} == result([], is_error=True)
    assert [len(cut["content"][0]["text"]) < 400, cut["content"][1]] == [
        True,
        text("[image of m_1 left out]"),
    ]


def test_what_a_call_is_given_stays_an_object_with_its_keys() -> None:
    [call] = shorter("assistant", [use(path="a.py", body=WORDS, n=10**30)])

    assert {**call, "input": {**call["input"], "body": ""}} == use(path="a.py", body="", n=10**30)
    assert len(call["input"]["body"]) < 400


def test_a_call_of_the_providers_goes_with_its_result_or_not_at_all() -> None:
    call = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": WORDS}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"encrypted": WORDS}]}

    assert shorter("assistant", [call, found, text(WORDS)])[:2] == [
        text("[server_tool_use of m_1 left out]"),
        text("[web_search_tool_result of m_1 left out]"),
    ]
    assert shorter("assistant", [call, text(WORDS)])[0] == call


@pytest.mark.parametrize("content", [[text("short", **MARK)], [result("short", **MARK)]])
def test_a_message_that_cannot_be_shorter_loses_its_mark(content: Any) -> None:
    assert b"cache_control" in written(content)
    assert "cache_control" not in json.dumps(shorter("user", content))


def test_a_message_that_cannot_be_shorter_and_has_no_mark_is_itself() -> None:
    record = PARSER.parse_message(written({"role": "user", "content": [text("short")]}))

    assert MESSAGES.shorten_message(record, 0.5, "m_1") is record


@pytest.mark.parametrize(
    ("block", "least", "most"),
    [
        (IMAGE, 100, 10_000),
        (PDF, 100, 1_000),
        ({"type": "document", "source": {"type": "text", "data": "word " * 400}}, 500, 500),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, 500, 2_000),
        ({"type": "document", "source": {"type": "content", "content": [text("w" * 400)]}}, 100, 150),
        (result([IMAGE]), 100, 10_000),
        ({"type": "search_result", "source": "s", "title": "t", "content": [text("w" * 400)]}, 100, 150),
        ({"type": "thinking", "thinking": "w" * 400, "signature": ""}, 100, 100),
        ({"type": "thinking", "thinking": "", "signature": "w" * 400}, 75, 75),
        (use(a="x"), 0, 0),
        (text("x"), 0, 0),
        ("x", 0, 0),
    ],
)
def test_blocks_that_are_no_text_have_a_weight(block: Any, least: int, most: int) -> None:
    raw = written({"role": "assistant" if block not in (IMAGE, PDF) else "user", "content": [block]})

    assert least <= MESSAGES.estimate_nontext_tokens(raw, "claude-haiku-4-5") <= most


@pytest.mark.parametrize(
    ("error", "status_kind"),
    [
        (RequestRefusedError(400, "m", "c"), "invalid_request_error"),
        (RequestRefusedError(401, "m", "c"), "authentication_error"),
        (RequestRefusedError(413, "m", "c"), "request_too_large"),
        (RequestRefusedError(422, "m", "c"), "invalid_request_error"),
        (OverloadedError(1), "overloaded_error"),
        (UpstreamError(502, "m", "c"), "api_error"),
        (UpstreamError(504, "m", "c"), "timeout_error"),
    ],
)
def test_an_error_of_ours_has_the_wires_shape(error: Any, status_kind: str) -> None:
    told = {"type": status_kind, "message": str(error)}

    assert json.loads(MESSAGES.encode_error(error)) == {"type": "error", "error": told, "request_id": None}


def event(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), written({"type": kind, **data}))


START = event("message_start", message={"type": "message", "usage": {"input_tokens": 1}})


@pytest.mark.parametrize(
    ("seen", "opening"),
    [
        (b"", True),
        (START, True),
        (START + event("ping"), True),
        (START + b": comment\n\n" + b"event: cont", True),
        (START + event("content_block_start", index=0), False),
        (START + event("error", error={"type": "overloaded_error"}), False),
        (b"data: [DONE]\n\n", False),
        (b'{"id":"msg_1"', False),
        (b"data: {\n\n", False),
    ],
)
def test_a_stream_may_be_held_back_until_its_first_content(seen: bytes, opening: bool) -> None:  # noqa: FBT001 - parametrised
    assert MESSAGES.may_hold_back_stream(seen) is opening


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
BLOCK = st.one_of(
    st.builds(text, st.text(max_size=600)),
    st.builds(result, st.text(max_size=300) | st.lists(st.builds(text, st.text(max_size=300)), max_size=2)),
    st.builds(lambda given: use(**given), st.dictionaries(st.text(st.characters(codec="ascii")), JSON)),
    st.sampled_from([THOUGHT, REDACTED, IMAGE, PDF, {**IMAGE, **MARK}, text("x", **MARK)]),
    JSON,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(BLOCK, max_size=4) | JSON}
)


@UNHURRIED
@given(MESSAGE, st.floats(0, 1))
def test_a_shortened_message_is_no_longer_has_no_marks_and_keeps_what_is_signed(
    fields: dict[str, Any], share: float
) -> None:
    raw = written(fields)
    record = PARSER.parse_message(raw)
    made = MESSAGES.shorten_message(record, share, "m_1")

    assert len(made.raw) <= len(raw)
    assert (made.role, made.answered_call_ids, made.has_signed_reasoning) == (
        record.role,
        record.answered_call_ids,
        record.has_signed_reasoning,
    )
    assert [each.id for each in made.calls] == [each.id for each in record.calls]
    assert b'"cache_control"' not in made.raw
    for kept in (THOUGHT, REDACTED):
        assert made.raw.count(written(kept)) == raw.count(written(kept))


@UNHURRIED
@given(st.lists(MESSAGE, min_size=1, max_size=5))
def test_pieces_joined_again_mean_what_they_were(messages: list[dict[str, Any]]) -> None:
    cut = parse_body(body(messages), MESSAGES)
    records = [PARSER.parse_message(raw) for raw in cut.messages]

    again = parse_body(rewrite_messages(cut, records), MESSAGES)

    calls = [call for each in records for call in each.calls]
    assert [call for raw in again.messages for call in PARSER.parse_message(raw).calls] == calls
    answers = [each.digest for each in records if each.answered_call_ids]
    assert [
        each.digest for each in map(PARSER.parse_message, again.messages) if each.answered_call_ids
    ] == answers


REMINDER = {"type": "text", "text": "<system-reminder>\nThe list is empty.\n</system-reminder>\n"}


def test_what_a_program_reminds_of_beside_results_is_said_by_no_user() -> None:
    beside = {"role": "user", "content": [result("a"), result("b", "c2"), REMINDER]}
    behind = {"role": "user", "content": [result("a"), REMINDER, text("Go on.")]}
    raws = [written(beside), written(behind)]
    found = [PARSER.parse_message(each) for each in MESSAGES.group_into_pieces(tuple(raws))]

    assert [(each.role, each.answered_call_ids) for each in found] == [
        ("tool", ("c1",)),
        ("tool", ("c2",)),
        ("tool", ("c1",)),
        ("user", ()),
    ]
    assert json.loads(MESSAGES.join_messages(found[:2])) == beside
    late = MESSAGES.encode_message(Message("tool", "none", answered_call_ids=("c3",)))
    kinds = [
        each["type"]
        for each in json.loads(MESSAGES.join_messages([*found[:2], PARSER.parse_message(late)]))["content"]
    ]
    assert kinds == ["tool_result", "tool_result", "tool_result", "text"]
