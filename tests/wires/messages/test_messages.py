"""A list written again for the Messages wire: whatever was taken out of it, a provider takes what is left."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message, iter_units
from compaction_proxy.core.repair import CONTINUE_TEXT, repair_messages
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.messages.messages import PARSER, has_thoughts
from compaction_proxy.wires.messages.wire import MESSAGES

# The machine may be busy.
UNHURRIED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MARK = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
MOST_MARKS = 4


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "read", "input": {}}


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "ok", **more}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def records(listed: Sequence[Any]) -> list[Message]:
    return [
        PARSER.parse_message(raw)
        for raw in MESSAGES.group_into_pieces(tuple(json.dumps(each).encode() for each in listed))
    ]


def ours(role: str, said_: str, **more: Any) -> Message:
    return PARSER.parse_message(MESSAGES.encode_message(Message(role, said_, **more)))


def joined(messages: Sequence[Message]) -> Any:
    return json.loads(b"[" + MESSAGES.join_messages(messages) + b"]")


def test_a_message_that_stands_alone_keeps_its_bytes() -> None:
    raws = [b'{"role":"user" , "content":"\\u0068i", "x":1.0}', b'{"content":[], "role":"assistant"}']

    assert MESSAGES.join_messages([PARSER.parse_message(raw) for raw in raws]) == b",".join(raws)


def test_blocks_that_share_a_turn_keep_their_bytes_and_results_stand_first() -> None:
    user = b'{"role":"user","content":[{"text":"\\u0068i" ,"type":"text"}]}'
    answer = b'{"role":"user","content":[{"type":"tool_result" ,"tool_use_id":"a"}]}'
    call = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"n","input":{}}]}'
    begin = b'{"role":"user","content":"go"}'

    made = MESSAGES.join_messages([PARSER.parse_message(raw) for raw in (begin, call, user, answer)])

    merged = (
        b'{"role":"user","content":[{"type":"tool_result" ,"tool_use_id":"a"},'
        b'{"text":"\\u0068i" ,"type":"text"}]}'
    )
    assert made == b",".join((begin, call, merged))


CASES: list[tuple[str, list[Message], Any]] = [
    (
        "strings become blocks and empty ones go",
        records([said("user", "a"), said("user", ""), said("user", [text(" "), text("b")])]),
        [said("user", [text("a"), text("b")])],
    ),
    (
        "one of nothing but blanks stays",
        records([said("user", ""), said("user", "")]),
        [said("user", [text("")])],
    ),
    (
        "thoughts open the answer that a stand-in shares",
        [
            *records([said("user", "a")]),
            ours("assistant", "Summary"),
            *records([said("assistant", [THOUGHT, text("b"), use("c")]), said("user", [result("c")])]),
        ],
        [
            said("user", "a"),
            said("assistant", [THOUGHT, text("Summary"), text("b"), use("c")]),
            said("user", [result("c")]),
        ],
    ),
    (
        "the user begins",
        [ours("assistant", "Summary"), *records([said("user", "b")])],
        [said("user", CONTINUE_TEXT), said("assistant", "Summary"), said("user", "b")],
    ),
    (
        "a beginning of the answer stays last",
        records([said("user", "a"), said("assistant", "{")]),
        [said("user", "a"), said("assistant", "{")],
    ),
    (
        "a stand-in for instructions is the user's",
        [Message("system", "Summary"), *records([said("user", "b")])],
        [said("user", [text("Summary"), text("b")])],
    ),
    (
        "instructions stand where the client has put them",
        records([said("user", "a"), said("system", "s"), said("user", "b"), said("assistant", "c")]),
        [said("user", "a"), said("system", "s"), said("user", "b"), said("assistant", "c")],
    ),
    (
        "instructions without a user before them wait for one",
        records([said("system", "s"), said("user", "a"), said("user", "b"), said("assistant", "c")]),
        [said("user", [text("a"), text("b")]), said("system", "s"), said("assistant", "c")],
    ),
    (
        "instructions do not part a call from its results",
        records(
            [
                said("user", "a"),
                said("assistant", [use("c"), use("d")]),
                said("system", "s"),
                said("user", [result("c"), result("d"), text("go")]),
            ]
        ),
        [
            said("user", "a"),
            said("assistant", [use("c"), use("d")]),
            said("user", [result("c"), result("d"), text("go")]),
            said("system", "s"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("messages", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_turns(messages: list[Message], expected: Any) -> None:
    assert joined(messages) == expected


def test_marks_stay_with_messages_that_stay_and_leave_with_those_that_are_shortened() -> None:
    old, new = (result(each, **MARK) for each in "ab")
    old["content"] = "x" * 2_000
    listed = [said("user", "q"), said("assistant", [use("a")]), said("user", [old])]
    listed += [said("assistant", [use("b")]), said("user", [new, text("go", **MARK)])]
    question, call, first, *rest = records(listed)

    masked = ours("tool", "[left out]", answered_call_ids=first.answered_call_ids)
    capped = MESSAGES.shorten_message(first, 0.1, "m_1")

    for instead in (masked, capped):
        sent = joined([question, call, instead, *rest])
        assert sent[-1] == said("user", [new, text("go", **MARK)])
        assert "cache_control" not in json.dumps(sent[:-1])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A valid list: turns alternate, each call is answered, no more than four marks."""
    listed: list[dict[str, Any]] = []
    marks = draw(st.integers(0, MOST_MARKS))
    called: list[str] = []
    for turn in range(draw(st.integers(1, 8))):
        blocks = [result(each) for each in called]
        blocks += [text(each) for each in draw(st.lists(st.sampled_from(["go", "on"]), max_size=2))]
        blocks = blocks or [text("more")]
        if marks and draw(st.booleans()):
            blocks[-1] |= MARK
            marks -= 1
        plain = len(blocks) == 1 and blocks[0]["type"] == "text" and "cache_control" not in blocks[0]
        listed.append(said("user", blocks[0]["text"] if plain and draw(st.booleans()) else blocks))
        called = [f"c{turn}_{k}" for k in range(draw(st.integers(0, 2)))]
        thought = [THOUGHT] if draw(st.booleans()) else []
        listed.append(said("assistant", [*thought, text("so"), *map(use, called)]))
    return listed if called else listed[: draw(st.sampled_from([len(listed), len(listed) - 1]))]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Message]]:
    """A conversation, and what is left of it once units were removed, replaced or shortened."""
    listed = draw(conversations())
    messages = repair_messages(records(listed))
    kept: list[Message] = []
    for unit in iter_units(messages):
        run = messages[unit.start : unit.stop]
        fate = draw(st.sampled_from(["keep", "keep", "drop", "user", "assistant", "system", "short"]))
        if fate in {"user", "assistant", "system"}:
            kept.append(ours(fate, "stand-in"))
        elif fate != "drop":
            kept += [MESSAGES.shorten_message(each, 0.1, "m_1") if fate == "short" else each for each in run]
    return listed, kept


def _blocks(each: Any) -> list[Any]:
    content = each["content"]
    return content if isinstance(content, list) else [text(content)]


def _marks(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from ([value] if "cache_control" in value else [])
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _marks(each)


@UNHURRIED
@given(rounds())
def test_whatever_is_left_is_a_list_that_the_provider_takes(
    made: tuple[list[dict[str, Any]], list[Message]],
) -> None:
    listed, kept = made
    sent = joined(kept)

    roles = [each["role"] for each in sent]
    assert all(before != after for before, after in pairwise(roles))
    assert roles[:1] in (["user"], [])
    assert len(list(_marks(sent))) <= len(list(_marks(listed))) <= MOST_MARKS
    called: list[str] = []
    for each in sent:
        kinds = [block["type"] for block in _blocks(each)]
        answered = [block["tool_use_id"] for block in _blocks(each) if block["type"] == "tool_result"]
        assert kinds[: len(answered)] == ["tool_result"] * len(answered)
        assert sorted(answered) == sorted(called)
        called = [block["id"] for block in _blocks(each) if block["type"] == "tool_use"]
        assert "thinking" not in kinds or kinds[0] == "thinking"
        assert all(block["text"].strip() for block in _blocks(each) if block["type"] == "text")
    assert json.dumps(sent).count(json.dumps(THOUGHT)) == sum(map(has_thoughts, kept))


@UNHURRIED
@given(conversations(), st.data())
def test_a_body_that_has_grown_is_read_as_one_that_is_new(listed: list[Any], data: st.DataObject) -> None:
    reader = IncrementalReader(bytes(KEY_BYTES), MESSAGES)
    for size in sorted(data.draw(st.sets(st.integers(1, len(listed)), min_size=1))):
        raw = json.dumps({"model": "m", "system": "s", "messages": listed[:size], "max_tokens": 9}).encode()

        grown, fresh = reader.read(raw, "t"), parse_body(raw, MESSAGES)

        assert (
            grown.messages,
            grown.messages_slice,
            grown.model,
            grown.max_output,
            grown.prompt_members,
        ) == (
            fresh.messages,
            fresh.messages_slice,
            fresh.model,
            fresh.max_output,
            fresh.prompt_members,
        )


def test_what_the_provider_compacts_is_left_in_a_body_that_has_grown_too() -> None:
    reader = IncrementalReader(bytes(KEY_BYTES), MESSAGES)
    listed = [said("user", "a")]
    reader.read(json.dumps({"messages": listed, "max_tokens": 9}).encode(), "t")

    listed.append(said("assistant", [{"type": "compaction", "content": "s"}]))

    with pytest.raises(UnreadableBodyError, match="provider-compacts"):
        reader.read(json.dumps({"messages": listed, "max_tokens": 9}).encode(), "t")
