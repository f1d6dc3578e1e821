"""Whatever a reader remembers, it says of a body what reading it from its first byte says."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires import incremental_reader as chat_reader
from compaction_proxy.wires.body import RequestBody, parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEY = bytes(range(KEY_BYTES))

Judgement = tuple[Any, ...] | str

TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/:{}[], '), max_size=8)
VALUE = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | TEXT | st.lists(TEXT, max_size=2)
MESSAGE: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": VALUE},
    optional={"name": TEXT, "messages": st.just([{}])},
)
MEMBERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXT,
        "max_tokens": st.integers(-1, 10**20),
        "tools": st.lists(VALUE, max_size=2),
        "stop": VALUE,
        "metadata": st.dictionaries(TEXT, VALUE, max_size=2),
    },
)


def said(body: RequestBody) -> Judgement:
    """Everything that is said of a body, but for how it is known again."""
    return body.raw, body.messages_slice, body.messages, body.model, body.max_output, body.prompt_members


def judged(reader: Callable[[bytes], RequestBody], raw: bytes) -> Judgement:
    try:
        return said(reader(raw))
    except UnreadableBodyError as refused:
        return refused.reason


def written(
    messages: list[Any], before: dict[str, Any], behind: dict[str, Any], layout: dict[str, Any]
) -> bytes:
    fields = {**before, "messages": messages, **behind}
    return json.dumps(fields, **layout).encode("utf-8", "replace")


LAYOUT: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"ensure_ascii": False},
        {"indent": 1},
        {"separators": (" , ", ": "), "ensure_ascii": False},
    ]
)
SCRAP = st.sampled_from(
    [b",", b"]", b"}", b"{}", b'"', b"\x0b", b" ", b"\xff", b"1,", b',"model":"x"', b'"\\ud800"']
)


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Bodies as one client might send them after one another: grown, edited, cut, spaced anew, damaged."""
    messages: list[Any] = draw(st.lists(MESSAGE, min_size=1, max_size=4))
    before, behind, layout = draw(MEMBERS), draw(MEMBERS), draw(LAYOUT)
    raws = [written(messages, before, behind, layout)]
    for _ in range(draw(st.integers(1, 5))):
        step = draw(
            st.sampled_from(["grow", "grow", "grow", "again", "edit", "cut", "space", "members", "damage"])
        )
        if step == "grow":
            messages = [*messages, *draw(st.lists(MESSAGE | st.just(1), min_size=1, max_size=2))]
        elif step == "edit":
            messages = [*messages]
            messages[draw(st.integers(0, len(messages) - 1))] = draw(MESSAGE)
        elif step == "cut":
            messages = messages[: draw(st.integers(0, len(messages)))] or messages
        elif step == "space":
            layout = draw(LAYOUT)
        elif step == "members":
            behind = draw(MEMBERS)
        raw = written(messages, before, behind, layout)
        if step == "damage":
            at = draw(st.integers(0, len(raw)) | st.integers(max(0, len(raw) - 12), len(raw)))
            raw = raw[:at] + draw(SCRAP) + raw[at + draw(st.integers(0, 2)) :]
        raws.append(raw)
    return raws


@UNHURRIED
@given(histories())
def test_a_body_is_read_as_if_nothing_had_been_read_before(raws: list[bytes]) -> None:
    reader = IncrementalReader(KEY, CHAT)
    for raw in raws:
        assert judged(lambda raw: reader.read(raw, "t", "c"), raw) == judged(
            partial(parse_body, wire=CHAT), raw
        )


async def all_judged_beside(raws: list[bytes]) -> list[Judgement]:
    reader = IncrementalReader(KEY, CHAT)
    judgements: list[Judgement] = []
    for raw in raws:
        try:
            judgements.append(said(await reader.read_without_blocking(raw, "t", "c")))
        except UnreadableBodyError as refused:
            judgements.append(refused.reason)
    return judgements


@pytest.mark.parametrize("grown", [0, chat_reader.MAX_INLINE_GROWN_BYTES], ids=["large", "middling"])
@given(histories())
@settings(UNHURRIED, max_examples=30)
def test_a_large_body_is_read_as_a_little_one(grown: int, raws: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_reader, "MAX_INLINE_BYTES", 0)
        patch.setattr(chat_reader, "MAX_INLINE_GROWN_BYTES", grown)
        judgements = asyncio.run(all_judged_beside(raws))
    assert judgements == [judged(partial(parse_body, wire=CHAT), raw) for raw in raws]


@UNHURRIED
@given(st.lists(MESSAGE, min_size=2, max_size=5), MEMBERS, LAYOUT, st.data())
def test_of_a_list_that_has_grown_only_the_late_messages_are_cut_out(
    messages: list[Any], behind: dict[str, Any], layout: dict[str, Any], data: st.DataObject
) -> None:
    known = data.draw(st.integers(1, len(messages)))
    reader = IncrementalReader(KEY, CHAT)
    first = reader.read(written(messages[:known], {}, behind, layout), "t", "c")
    raw = written(messages, {}, behind, layout)
    body = reader.read(raw, "t", "c")
    assert (body.previous_fingerprint, body.new_pieces) == (
        first.fingerprint,
        parse_body(raw, CHAT).new_pieces[known:],
    )
    assert (body.fingerprint == first.fingerprint) is (known == len(messages))


def talk(turns: int, **members: Any) -> bytes:
    messages = [{"role": "user", "content": f"turn {turn} " + "words " * 50} for turn in range(turns)]
    return json.dumps({"messages": messages, **members}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "behind",
    [
        b'],"messages":[{}]}',
        b'],"model":"x","model":"x"}',
        b'],"before":1}',
        b'],"b\\u0065fore":1}',
        b",]}",
        b",1]}",
        b"]",
        b"]}}",
        b"",
        b"\x0b]}",
        b'],"x":"\xff"}',
        b'],"x":NaN}',
        b'],"x":%b}' % (b"[" * 100_000),
        b',{"a":%b1%b}]}' % (b'{"a":' * 5_000, b"}" * 5_000),
        b"," + b"{}," * 100_000 + b"{}]}",
        b" " * 1_000 + b"]}",
    ],
)
def test_what_stands_behind_a_known_beginning_is_judged_as_strictly(behind: bytes) -> None:
    raw = b'{"before":1,' + talk(3)[1:]
    start = raw.removesuffix(b"]}")
    reader = IncrementalReader(KEY, CHAT)
    assert reader.read(raw, "t").fingerprint
    assert judged(lambda raw: reader.read(raw, "t"), start + behind) == judged(
        partial(parse_body, wire=CHAT), start + behind
    )


def test_tenants_know_nothing_of_one_another() -> None:
    reader = IncrementalReader(KEY, CHAT)
    bodies = [reader.read(talk(3), "a"), reader.read(talk(4), "b"), reader.read(talk(3), "b")]
    assert [body.previous_fingerprint for body in bodies] == [b"", b"", b""]
    assert len({body.fingerprint for body in bodies}) == 3


def test_conversations_that_begin_alike_are_told_apart() -> None:
    reader = IncrementalReader(KEY, CHAT)
    grown = [talk(2)[:-2] + b',{"role":"user","content":"branch %d"}]}' % branch for branch in range(9)]
    marks = [reader.read(raw, "t").fingerprint for raw in grown]
    further = [reader.read(raw[:-2] + b',{"role":"assistant","content":"so"}]}', "t") for raw in grown]
    assert [body.previous_fingerprint for body in further] == marks
    assert [len(body.new_pieces) for body in further] == [1] * 9


def test_an_edit_that_leaves_the_length_and_the_end_as_they_were_is_noticed() -> None:
    reader = IncrementalReader(KEY, CHAT)
    reader.read(talk(3), "t")
    edited = talk(4).replace(b"turn 1 words", b"turn 1 swore")
    assert reader.read(edited, "t").previous_fingerprint == b""


def test_the_last_message_may_be_asked_anew() -> None:
    reader = IncrementalReader(KEY, CHAT)
    marks = [reader.read(talk(turns), "t").fingerprint for turns in (3, 4, 5)]
    again = reader.read(talk(4)[:-2] + b',{"role":"user","content":"rather this"}]}', "t")
    assert again.previous_fingerprint == marks[1]


def test_memory_is_bounded_by_the_number_of_beginnings() -> None:
    reader = IncrementalReader(KEY, CHAT, max_beginnings=4)
    for conversation in range(9):
        reader.read(talk(2), "t", f"c{conversation}")
    known = [
        bool(reader.read(talk(3), "t", f"c{conversation}").previous_fingerprint) for conversation in (8, 0)
    ]
    assert known == [True, False]


def test_hundreds_of_conversations_without_an_id_are_known_again() -> None:
    reader = IncrementalReader(KEY, CHAT)
    first = [talk(1)[:-2] + b',{"role":"user","content":"%d"}]}' % number for number in range(500)]
    marks = [reader.read(raw, "t").fingerprint for raw in first]
    grown = [reader.read(raw[:-2] + b',{"role":"assistant","content":"so"}]}', "t") for raw in first]
    assert [body.previous_fingerprint for body in grown] == marks


def test_a_conversation_is_known_again_whatever_it_has_grown_by() -> None:
    reader = IncrementalReader(KEY, CHAT)
    mark = reader.read(talk(2), "t", "c").fingerprint
    braces = "{}" * 5 * chat_reader.MAX_BRACES
    body = reader.read(talk(2)[:-2] + b',{"role":"user","content":"%b"}]}' % braces.encode(), "t", "c")
    assert body.previous_fingerprint == mark


def test_members_before_the_messages_count_as_before() -> None:
    reader = IncrementalReader(KEY, CHAT)
    head = b'{"model":"m","tools":[1],"max_tokens":7,"messages":[{"role":"user","content":"%b"}' % (
        b"x" * 300
    )
    reader.read(head + b"]}", "t")
    body = reader.read(head + b',{"role":"user"}],"functions":[2]}', "t")
    assert body.previous_fingerprint
    assert (body.model, body.max_output, body.prompt_members) == ("m", 7, ("[1]", "[2]"))
