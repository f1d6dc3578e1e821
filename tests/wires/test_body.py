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
    build_probe_body,
    lower_output_limits,
    parse_body,
    rewrite_messages,
)
from compaction_proxy.wires.chat.messages import PARSER
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.prescan import MentionedNumbers, find_models, find_output_limits, may_have_media

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
        (b'{"messages":[{}],"x":%b' % (b"[" * 100_000), "too-deep"),
        (b'{"messages":%b{}%b}' % (b"[" * 5_000, b"]" * 5_000), "too-deep"),
        (b'{"messages":[{"a":%b1%b}]}' % (b'{"a":' * 5_000, b"}" * 5_000), "too-deep"),
    ],
)
def test_a_body_that_cannot_be_rewritten_is_refused_with_its_reason(raw: bytes, expected: str) -> None:
    assert reason(raw) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, None),
        ({"max_tokens": 64}, 64),
        ({"max_completion_tokens": 32, "max_tokens": 64}, 32),
        ({"max_completion_tokens": None, "max_tokens": 64}, 64),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "64"}, None),
        ({"max_tokens": 64.0}, None),
        ({"max_tokens": [64]}, None),
    ],
)
def test_the_largest_output_is_a_positive_number_or_unknown(
    members: dict[str, Any], expected: int | None
) -> None:
    assert parse_body(body(**members), CHAT).max_output == expected


@pytest.mark.parametrize(("model", "expected"), [("a/b", "a/b"), (None, ""), (4, ""), ({"model": "x"}, "")])
def test_a_model_is_a_string_or_unknown(model: Any, expected: str) -> None:
    assert parse_body(body(model=model), CHAT).model == expected


def test_definitions_are_prompt_members_in_their_own_order() -> None:
    raw = body(response_format={"type": "json"}, functions=[1], tools=[2], stop=["x"])

    assert parse_body(raw, CHAT).prompt_members == ("[2]", "[1]", '{"type": "json"}')


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"model":"gpt-4o"}', {"gpt-4o"}),
        (b'{\n"model"\t: \n"gpt-4o"}', {"gpt-4o"}),
        (b'{"x":"C:\\\\","model":"gpt-4o"}', {"gpt-4o"}),
        (b'{"model":"openai\\/gpt-4o"}', {"openai/gpt-4o"}),
        (b'{"model":"a\\"b"}', {'a"b'}),
        (b'{"model":"\\ud83d\\ude00"}', {"😀"}),
        (b'{"model":"a","x":{"model":"b"}}', {"a", "b"}),
        (b'{"messages":[{"content":"\\"model\\":\\"b\\""}],"model":"a"}', {"a"}),
        (b'{"messages":[{"content":"{\\"model\\": \\"b\\"}\\\\"}],"model":"a"}', {"a"}),
        (b'{"x":"model","y":["model"]}', set()),
        (b'{"model":null}', set()),
        (b'{"model":"a', set()),
        (b'{"model":"\\q"}', {"\\q"}),
        (b"", set()),
    ],
)
def test_models_are_found_without_parsing(raw: bytes, expected: set[str]) -> None:
    assert find_models(raw) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"max_tokens":64,"max_completion_tokens" : 32}', [64, 32]),
        (b'{"max_tokens":1234567890123}', [1234567890123]),
        (b'{"max_tokens":%b}' % (b"9" * 5_000), [10**18 - 1]),
        (b'{"x":"\\"max_tokens\\":64"}', []),
        (b'{"max_tokens":null,"max_output_tokens":3}', [3]),
        (b"", []),
    ],
)
def test_limits_of_the_output_are_found_without_parsing(raw: bytes, expected: list[int]) -> None:
    assert find_output_limits(raw) == expected


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


@UNHURRIED
@given(VALID)
def test_the_model_and_the_output_asked_for_are_never_missed(raw: bytes) -> None:
    cut = parse_body(raw, CHAT)

    assert cut.model in find_models(raw)
    assert cut.max_output in find_output_limits(raw)


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


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"type":"image_url"}', True),
        (b'{"type":"input_audio"}', True),
        (b'{"type":"file"}', True),
        (b'{"type":"video_url"}', True),
        (b'{"content":"an image_url, a file"}', False),
    ],
)
def test_media_are_noticed_without_parsing(raw: bytes, expected: bool) -> None:  # noqa: FBT001 - a column
    assert may_have_media(raw) is expected


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


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (7, "[7]"),
        (100, '"\\u0031\\u0030\\u0030"'),
        (12_800, '"12,800 and more"'),
        (12_800, '"\\n12800"'),
        (3_000, '"3 000"'),
        (3_000, '"3\\u00A0000"'),
        (3_000, '"3\u00a0000"'),
        (1_234_567, '"1.234.567"'),
    ],
)
def test_numbers_that_a_request_mentions_are_found_however_they_are_written(
    number: int, written: str
) -> None:
    assert number in MentionedNumbers(f'{{"a":[1],"b":{written}}}'.encode())


@pytest.mark.parametrize(
    "written", ['"128001"', '"412800"', '"12 8000"', '"12,80"', '"12\\u005800"', '"1\\\\u00312800"']
)
def test_numbers_that_only_look_alike_are_not_mentioned(written: str) -> None:
    assert 12_800 not in MentionedNumbers(f'{{"a":[1],"b":{written}}}'.encode())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"max_tokens": 900,', '"max_tokens": 300,'),
        ('"max_completion_tokens":900,"max_tokens":900,', '"max_completion_tokens":300,"max_tokens":300,'),
        ("", ""),
    ],
)
def test_less_output_is_asked_for_where_more_was_and_every_other_byte_stays(
    fields: str, expected: str
) -> None:
    raw = '{{ {}"messages":[{{"role":"user","content":"\\"max_tokens\\": 7"}}] }}'
    body = parse_body(raw.format(fields).encode(), CHAT)
    assert lower_output_limits(body.raw, CHAT, 300) == raw.format(expected).encode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"max_completion_tokens":900,"max_tokens":200,', '"max_completion_tokens":300,"max_tokens":200,'),
    ],
)
def test_less_output_is_never_more_than_was_asked_for(fields: str, expected: str) -> None:
    raw = '{%s"messages":[{"role":"user","content":"Hello"}]}'
    assert lower_output_limits((raw % fields).encode(), CHAT, 300) == (raw % expected).encode()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('"thinking":{"budget_tokens":8000}', '"thinking":{"budget_tokens":3976}'),
        ('"thinking": { "type":"enabled", "budget_tokens" : 8e3 }', None),
        ('"reasoning":{"max_tokens":8000}', '"reasoning":{"max_tokens":3976}'),
        ('"thinking":{"budget_tokens":3976}', '"thinking":{"budget_tokens":3976}'),
        ('"thinking":{"budget_tokens":"8000"}', '"thinking":{"budget_tokens":"8000"}'),
        ('"thinking":{"budget_tokens":true}', '"thinking":{"budget_tokens":true}'),
        ('"thinking":null,"reasoning":"max_tokens"', '"thinking":null,"reasoning":"max_tokens"'),
    ],
)
def test_the_budget_of_thinking_leaves_room_for_the_answer(given: str, expected: str | None) -> None:
    raw = '{"max_tokens":%d,%s,"messages":[{"role":"user","content":"Hello"}]}'
    expected = given.replace("8e3", "3976") if expected is None else expected
    assert (
        lower_output_limits((raw % (9_000, given)).encode(), CHAT, 5_000)
        == (raw % (5_000, expected)).encode()
    )


@pytest.mark.parametrize(("tokens", "is_lowered"), [(1_024, False), (1_025, True)])
def test_nothing_is_lowered_where_thinking_would_take_all_output(tokens: int, *, is_lowered: bool) -> None:
    raw = b'{"max_tokens":9000,"thinking":{"budget_tokens":8000},"messages":[]}'
    assert (lower_output_limits(raw, CHAT, tokens) is not raw) == is_lowered


def test_a_probe_asks_for_sixteen_tokens_of_the_same_prompt_unstreamed() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [], "user": "u"}
    asked = {**fields, "stream": True, "stream_options": {"include_usage": True}, "n": 3}
    probe = build_probe_body(json.dumps({**asked, "max_completion_tokens": 900}).encode(), CHAT)
    assert json.loads(probe or b"") == {**fields, "max_completion_tokens": 16}
    assert json.loads(build_probe_body(json.dumps(asked).encode(), CHAT) or b"") == {
        **fields,
        "max_tokens": 16,
    }
    assert build_probe_body(b"[]", CHAT) is None
