"""A request body cut up and put together again, and what can be told of one without parsing it."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import (
    RequestBody,
    parse_body,
    rewrite_messages,
)
from compaction_proxy.wires.chat.messages import PARSER
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.prescan import find_models, find_output_limits

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

RAW = (
    b' {\n "z" : {"a":1,"a":2} ,"model":"gpt-4o", "seed":123456789012345678901234567890,"t":1.0,\t'
    b'"messages" : [ {"role":"user","content":"hi\\ud83d"} ,\n {"content":null,"role":"assistant"} ] , '
    b'"max_tokens":64,"tools":[ {"type" : "function"} ],"user":"\\ud800","a":"\xc3\xa9" } \n'
)
MESSAGES = (b'{"role":"user","content":"hi\\ud83d"}', b'{"content":null,"role":"assistant"}')
Result = TypeVar("Result")
REASONS = {"not-json", "duplicate-keys", "no-messages", "no-array", "too-deep"}


def reason(raw: bytes) -> str:
    with pytest.raises(UnreadableBodyError) as refused:
        parse_body(raw, CHAT)
    return refused.value.reason


def body(**members: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **members}).encode()


def test_a_body_is_cut_up_without_touching_a_byte() -> None:
    cut = parse_body(RAW, CHAT)

    assert cut == RequestBody(
        raw=RAW,
        messages_slice=cut.messages_slice,
        new_pieces=MESSAGES,
        model="gpt-4o",
        max_output=64,
        prompt_members=('[ {"type" : "function"} ]',),
        wire=CHAT,
    )
    assert RAW[cut.messages_slice.start : cut.messages_slice.stop] == b"[ %b ,\n %b ]" % MESSAGES


def test_only_the_value_of_messages_is_replaced() -> None:
    cut = parse_body(RAW, CHAT)
    written = rewrite_messages(cut, [PARSER.parse_message(MESSAGES[1]), Message("user", "née \ud800")])

    assert written == b"".join(
        (
            RAW[: cut.messages_slice.start],
            b'[{"content":null,"role":"assistant"},{"role":"user","content":"n\\u00e9e \\ud800"}]',
            RAW[cut.messages_slice.stop :],
        )
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not-json"),
        (b"null", "not-json"),
        (b"[]", "not-json"),
        (b"{", "not-json"),
        (b'{"messages":[{"content":NaN}]}', "not-json"),
        (b'{"messages":[{"content":"\xff"}]}', "not-json"),
        (b'{"messages":[{}],"user":"\xff"}', "not-json"),
        (b"{}", "no-messages"),
        (b'{"messages":[]}', "no-messages"),
        (b'{"messages":[1]}', "no-messages"),
        (b'{"messages":[{},null]}', "no-messages"),
        (b'{"Messages":[{}]}', "no-messages"),
        (b'{"messages":null}', "no-array"),
        (b'{"messages":{}}', "no-array"),
        (b'{"messages":"[{}]"}', "no-array"),
        (b'{"messages":[{}],"messages":[{}]}', "duplicate-keys"),
    ],
)
def test_a_body_that_cannot_be_rewritten_is_refused_with_its_reason(raw: bytes, expected: str) -> None:
    assert reason(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{}],"x":%b' % (b"[" * 100_000),
        b'{"messages":%b{}%b}' % (b"[" * 100_000, b"]" * 100_000),
    ],
    ids=["no end", "lists"],
)
def test_a_body_that_is_nested_without_sense_is_refused(raw: bytes) -> None:
    # How deep the parser goes depends on the version of Python; what it skips may have another reason.
    assert reason(raw) in REASONS


@pytest.mark.parametrize(("model", "expected"), [("a/b", "a/b"), (None, ""), (4, ""), ({"model": "x"}, "")])
def test_a_model_is_a_string_or_unknown(model: Any, expected: str) -> None:
    assert parse_body(body(model=model), CHAT).model == expected


TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/:{}, '), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
VALID = st.builds(
    lambda messages, rest, model, output, indent, ascii_only: json.dumps(
        {**rest, "messages": messages, "model": model, "max_tokens": output},
        indent=indent,
        ensure_ascii=ascii_only,
    ).encode("utf-8", "replace"),
    st.lists(st.dictionaries(TEXT, JSON, max_size=3), min_size=1, max_size=4),
    st.dictionaries(TEXT | st.sampled_from(["tools", "stop"]), JSON, max_size=4),
    TEXT,
    st.integers(1, 10**6),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)


@UNHURRIED
@given(VALID)
def test_what_is_read_can_be_written_again_with_every_other_byte_its_own(raw: bytes) -> None:
    cut = parse_body(raw, CHAT)
    records = [replace(Message("user"), raw=each) for each in cut.messages]
    written = rewrite_messages(cut, records)
    again = parse_body(written, CHAT)

    assert again.messages == cut.messages
    assert written[: cut.messages_slice.start] == raw[: cut.messages_slice.start]
    assert written[again.messages_slice.stop :] == raw[cut.messages_slice.stop :]
    assert json.loads(written) == json.loads(raw)
    assert [json.loads(each) for each in cut.messages] == json.loads(raw)["messages"]


def refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def is_json_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw.decode(), parse_constant=refuse), dict)
    except ValueError:
        return False


def judged(reader: Callable[[bytes], Result], raw: bytes) -> Result | None:
    """What a reader makes of bytes; None if it refuses them, which it must do with a reason."""
    reason = ""
    try:
        return reader(raw)
    except UnreadableBodyError as refused:
        reason = refused.reason
    assert reason in REASONS
    return None


@UNHURRIED
@given(VALID, st.data())
def test_a_damaged_body_is_read_or_refused_with_a_reason_and_only_json_is_read(
    raw: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(raw)))
    gone = data.draw(st.integers(0, 4))
    put = data.draw(st.binary(max_size=3) | st.sampled_from([b'"', b"\\", b"{", b"]", b",", b"NaN", b"0"]))
    damaged = raw[:at] + put + raw[at + gone :]
    cut = judged(partial(parse_body, wire=CHAT), damaged)
    assert cut is None or is_json_object(damaged)
    for each in cut.messages if cut else ():
        PARSER.parse_message(each)


@UNHURRIED
@given(st.binary(max_size=64) | st.text('{}[]",:\\ model1n', max_size=24).map(str.encode))
def test_any_bytes_are_read_or_refused_with_a_reason(raw: bytes) -> None:
    find_models(raw)
    find_output_limits(raw)
    judged(partial(parse_body, wire=CHAT), raw)
    judged(PARSER.parse_message, raw)


def test_a_very_long_model_name_is_cut_and_stays_its_own() -> None:
    names = ["m" * 300 + "a", "m" * 300 + "b"]
    cut = [
        parse_body(json.dumps({"model": name, "messages": [{"role": "user"}]}).encode(), CHAT).model
        for name in names
    ]
    assert len(set(cut)) == 2
    assert all(len(name) < 100 for name in cut)
    assert find_models(b'{"model":"%s"}' % names[0].encode()) == {cut[0]}


def test_more_messages_or_parts_than_any_model_reads_are_relayed_unread() -> None:
    many = b'{"messages":[' + b"{}," * 100_000 + b"{}]}"
    with pytest.raises(UnreadableBodyError, match="too-many"):
        parse_body(many, CHAT)
