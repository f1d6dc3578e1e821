"""One message of any shape: its record, what makes two of them the same, and how one is made shorter."""

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.wires.chat.messages import (
    PARSER,
    encode_message,
    shorten_message,
)
from compaction_proxy.wires.content import UNKNOWN_PART_TOKENS
from compaction_proxy.wires.json.values import LONG_ARGUMENT

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PIXEL = b"\x89PNG not really"
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()


def written(value: object) -> bytes:
    return json.dumps(value).encode()


def read(**fields: Any) -> Message:
    """The record without its bytes and digest, which are checked here."""
    raw = written(fields)
    record = PARSER.parse_message(raw)
    assert record.raw == raw
    assert record.digest == compute_message_digest(record)
    return replace(record, raw=b"", digest=b"")


def sha(data: str | bytes) -> bytes:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).digest()


def digest(**fields: Any) -> bytes:
    return PARSER.parse_message(written(fields)).digest


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def call(arguments: Any, **extra: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}, **extra}


SHAPES: list[tuple[dict[str, Any], Message]] = [
    ({"role": "user", "content": "hi", "name": "ann"}, Message("user", "hi", name="ann")),
    ({"role": "developer", "content": None}, Message("developer")),
    ({"role": "assistant"}, Message("assistant")),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]},
        Message("user", "abc"),
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "look"}, image(DATA_URL)]},
        Message("user", "look", parts=(ContentPart("image_url", sha(PIXEL), 4),)),
    ),
    (
        {"role": "user", "content": [image("https://x/y.png?sig=1"), {"type": "text", "text": "look"}]},
        Message("user", "look", parts=(ContentPart("image_url", sha("https://x/y.png"), 0),)),
    ),
    (
        {
            "role": "user",
            "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        },
        Message("user", parts=(ContentPart("input_audio", sha(bytes(3)), 0),)),
    ),
    (
        {"role": "user", "content": [{"type": "file", "file": {"file_data": "data:x;base64,AAAA"}}]},
        Message("user", parts=(ContentPart("file", sha(bytes(3)), 0),)),
    ),
    (
        {"role": "user", "content": [{"type": "new", "new": 1, "cache_control": {}}, 7]},
        Message(
            "user",
            parts=(
                ContentPart("new", sha('{"new": 1, "type": "new"}'), 0),
                ContentPart("unknown", sha("7"), 0),
            ),
        ),
    ),
    ({"role": "assistant", "content": None, "refusal": "no"}, Message("assistant", refusal="no")),
    (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        Message("assistant", "no"),
    ),
    (
        {"role": "assistant", "content": "", "audio": {"id": "audio_1", "expires_at": 1}},
        Message("assistant", parts=(ContentPart("audio", sha("audio_1"), 0),)),
    ),
    (
        {
            "role": "assistant",
            "tool_calls": [call('{"a":1}'), {"id": "c2", "custom": {"name": "sh", "input": "ls"}}],
        },
        Message(
            "assistant", calls=(MessageToolCall("c1", "read", '{"a":1}'), MessageToolCall("c2", "sh", "ls"))
        ),
    ),
    (
        {"role": "assistant", "function_call": {"name": "read", "arguments": "{}"}},
        Message("assistant", calls=(MessageToolCall("", "read", "{}"),)),
    ),
    (
        {"role": "assistant", "tool_calls": [call({"a": 1})]},
        Message("assistant", calls=(MessageToolCall("c1", "read", '{"a": 1}'),)),
    ),
    (
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
        Message("tool", "ok", answered_call_ids=("c1",)),
    ),
    (
        {"role": "function", "name": "read", "content": "ok"},
        Message("function", "ok", name="read", answered_call_ids=("",)),
    ),
    (
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "thinking_blocks": [1],
            "prefix": True,
        },
        Message("assistant", "x"),
    ),
    ({"role": "user", "content": {"a": [1]}}, Message("user", '{"a": [1]}')),
    ({"role": "user", "content": 5}, Message("user", "5")),
    ({"role": 1, "content": "x", "name": 2, "refusal": 3}, Message("", "x")),
    ({"role": "tool", "tool_call_id": 5, "content": "x"}, Message("tool", "x", answered_call_ids=("",))),
    ({"role": "assistant", "tool_calls": "x", "function_call": "y", "audio": "z"}, Message("assistant")),
    (
        {
            "role": "assistant",
            "tool_calls": [1, {"id": 2, "function": 3}, {"id": "c", "function": {"name": 4}}],
        },
        Message("assistant", calls=(MessageToolCall("", "", ""), MessageToolCall("c", "", ""))),
    ),
    ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, Message("user", "x")),
    ({}, Message("")),
]


@pytest.mark.parametrize(("fields", "expected"), SHAPES)
def test_a_message_of_any_shape_has_its_record(fields: dict[str, Any], expected: Message) -> None:
    assert read(**fields) == expected


def test_a_lone_surrogate_and_a_number_beyond_64_bits_are_read() -> None:
    raw = b'{"role":"user","content":"a\\ud800","seed":123456789012345678901234567890,"x":1e999}'

    assert PARSER.parse_message(raw).text == "a\ud800"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not-json"),
        (b"{", "not-json"),
        (b'{"content":NaN}', "not-json"),
        (b'{"content":"\xff"}', "not-json"),
        ('{"content":"x"}'.encode("utf-16"), "not-json"),
        (b"[]", "no-messages"),
        (b'"x"', "no-messages"),
        (b'{"a":%b}' % (b"[" * 100_000), "too-deep"),
    ],
)
def test_what_is_no_message_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        PARSER.parse_message(raw)
    assert refused.value.reason == reason


@pytest.mark.parametrize("depth", range(900, 1_000, 7))
def test_nesting_near_what_can_be_decoded_is_read_or_refused(depth: int) -> None:
    nested = b'{"role":"user","content":[{"type":"x","x":%b%b}]}' % (b"[" * depth, b"]" * depth)
    reason = "read"
    try:
        PARSER.parse_message(nested)
    except UnreadableBodyError as refused:
        reason = refused.reason

    assert reason in {"read", "too-deep"}


SAME: dict[str, list[dict[str, Any]]] = {
    "a string and its text parts": [
        {"role": "user", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    "absent, null and empty": [
        {"role": "assistant", "refusal": "", "name": "", "tool_calls": [], "content": ""},
        {"role": "assistant", "refusal": None, "name": None, "tool_calls": None, "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant"},
    ],
    "cache marks": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image(DATA_URL)]},
        {
            "role": "user",
            "cache_control": {"type": "ephemeral"},
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {**image(DATA_URL), "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "cache marks on parts of an unknown kind": [
        {"role": "user", "content": [{"type": "new", "x": 1}]},
        {"role": "user", "content": [{"x": 1, "cache_control": {}, "type": "new"}]},
    ],
    "reasoning": [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_details": [{"data": "x"}]},
        {
            "role": "assistant",
            "content": "a",
            "thinking_blocks": [{"signature": "x"}],
            "extra_content": {"a": 1},
        },
    ],
    "addresses signed anew": [
        {"role": "user", "content": [image("https://x/y.png?sig=1")]},
        {"role": "user", "content": [image("https://x/y.png?sig=2&exp=3")]},
        {"role": "user", "content": [image("https://x/y.png")]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png?sig=4"}]},
    ],
    "the same bytes in another data URL": [
        {"role": "user", "content": [image(DATA_URL)]},
        {"role": "user", "content": [image(DATA_URL.replace("png", "x-png;a=b"))]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}]},
    ],
    "arguments written in another way, and the call's index": [
        {"role": "assistant", "tool_calls": [call('{"a":1,"b":[]}')]},
        {"role": "assistant", "tool_calls": [call('{ "b" : [], "a" : 1 }', index=0)]},
        {"role": "assistant", "tool_calls": [call({"b": [], "a": 1}, extra_content={"google": 1})]},
    ],
}


@pytest.mark.parametrize("messages", SAME.values(), ids=SAME.keys())
def test_the_same_message_is_known_by(messages: list[dict[str, Any]]) -> None:
    digests = {digest(**dict(reversed(fields.items()))) for fields in messages}
    digests |= {digest(**fields) for fields in messages}

    assert len(digests) == 1


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "another address": [
        {"role": "user", "content": [image("https://x/y.png?sig=1")]},
        {"role": "user", "content": [image("https://x/z.png?sig=1")]},
        {"role": "user", "content": [image("http://x/y.png?sig=1")]},
    ],
    "other bytes": [
        {"role": "user", "content": [image(DATA_URL)]},
        {"role": "user", "content": [image("data:image/png;base64,AAAA")]},
        {"role": "user", "content": [{"type": "file", "file": {"file_data": DATA_URL}}]},
    ],
    "another file": [
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]},
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "f2"}}]},
    ],
    "an image before and behind the text": [
        {"role": "user", "content": ["a", image(DATA_URL)]},
        {"role": "user", "content": [image(DATA_URL), "a"]},
        {"role": "user", "content": ["a"]},
    ],
    "content of another type": [
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": {"a": 2}},
        {"role": "user", "content": None},
    ],
    "a refusal and a text": [{"role": "assistant", "content": "no"}, {"role": "assistant", "refusal": "no"}],
    "another expiring audio": [
        {"role": "assistant", "audio": {"id": "a1"}},
        {"role": "assistant", "audio": {"id": "a2"}},
        {"role": "assistant"},
    ],
}


@pytest.mark.parametrize("messages", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_messages_differ_by(messages: list[dict[str, Any]]) -> None:
    assert len({digest(**fields) for fields in messages}) == len(messages)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Message("assistant", 'é "x"\n'), '{"role":"assistant","content":"é \\"x\\"\\n"}'.encode()),
        (Message("user", "\ud800"), b'{"role":"user","content":"\\ud800"}'),
        (
            Message("tool", "x", answered_call_ids=("c1",)),
            b'{"role":"tool","tool_call_id":"c1","content":"x"}',
        ),
        (
            Message("function", "x", name="read", answered_call_ids=("",)),
            b'{"role":"function","name":"read","content":"x"}',
        ),
    ],
)
def test_a_message_of_ours_is_written_and_read_as_it_is(record: Message, expected: bytes) -> None:
    assert encode_message(record) == expected
    assert replace(PARSER.parse_message(encode_message(record)), raw=b"", digest=b"") == record


TEXT_OF_2000 = "head " * 200 + "tail " * 200


def cut(**fields: Any) -> Any:
    return json.loads(shorten_message(PARSER.parse_message(written(fields)), 0.1, "m_1").raw)


def expected_cut(text: str = TEXT_OF_2000, size: int = 1_800) -> str:
    half = (len(text) - size) // 2
    return f"{text[:half]}\n[… {size:,} characters of m_1 left out …]\n{text[-half:]}"


def test_text_keeps_head_and_tail_and_unknown_fields_stay() -> None:
    assert cut(role="user", content=TEXT_OF_2000, name="ann", x={"y": [1, 2**70]}) == {
        "role": "user",
        "content": expected_cut(),
        "name": "ann",
        "x": {"y": [1, 2**70]},
    }


def test_text_in_parts_and_refusals_is_shortened_and_images_become_a_note() -> None:
    content = [
        {"type": "text", "text": TEXT_OF_2000, "cache_control": {"type": "ephemeral"}},
        TEXT_OF_2000,
        {"type": "refusal", "refusal": TEXT_OF_2000},
        image(DATA_URL * 9),
        7,
    ]

    assert cut(role="assistant", content=content, refusal=TEXT_OF_2000) == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": expected_cut(), "cache_control": {"type": "ephemeral"}},
            expected_cut(),
            {"type": "refusal", "refusal": expected_cut()},
            {"type": "text", "text": "[image_url of m_1 left out]"},
            {"type": "text", "text": "[part of m_1 left out]"},
        ],
        "refusal": expected_cut(),
    }


def test_long_strings_in_arguments_are_shortened_wherever_a_call_stands() -> None:
    arguments = {"path": "/x" * 90, "lines": [TEXT_OF_2000], "n": 2**70}
    shorter = {**arguments, "lines": [expected_cut()]}
    made = cut(
        role="assistant",
        content=None,
        tool_calls=[
            call(json.dumps(arguments)),
            {"id": "c2", "type": "custom", "custom": {"name": "sh", "input": TEXT_OF_2000}},
        ],
        function_call={"name": "read", "arguments": json.dumps(arguments)},
    )

    assert json.loads(made["tool_calls"][0]["function"]["arguments"]) == shorter
    assert made["tool_calls"][1] == {
        "id": "c2",
        "type": "custom",
        "custom": {"name": "sh", "input": expected_cut()},
    }
    assert json.loads(made["function_call"]["arguments"]) == shorter
    assert len(arguments["path"]) < LONG_ARGUMENT  # type: ignore[arg-type]


def test_arguments_that_never_parsed_are_shortened_as_text() -> None:
    made = cut(role="assistant", tool_calls=[call(TEXT_OF_2000)])

    assert made["tool_calls"][0]["function"]["arguments"] == expected_cut()


@pytest.mark.parametrize(
    "raw",
    [
        b'{ "role" : "user", "content" : "short" }',
        b'{"role":"user","content":"short","x":1e999}',
        b'{"role":"assistant","content":null,"tool_calls":5}',
        b'{"role":"assistant","content":7,"tool_calls":[5,{"function":6},{"function":{"arguments":7}}]}',
    ],
)
def test_what_cannot_get_shorter_stays_valid_and_says_the_same(raw: bytes) -> None:
    made = shorten_message(PARSER.parse_message(raw), 0.1, "m_1")

    assert json.loads(made.raw) == json.loads(raw)
    assert len(made.raw) <= len(raw)


def test_a_number_that_only_infinity_could_stand_for_keeps_a_message_as_it_is() -> None:
    record = PARSER.parse_message(b'{"role":"user","x":1e999,"content":%b}' % written(TEXT_OF_2000))

    assert shorten_message(record, 0.1, "m_1") is record


def test_a_message_of_ours_can_be_shortened() -> None:
    made = shorten_message(Message("assistant", TEXT_OF_2000), 0.1, "m_1")

    assert made.text == expected_cut()


TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/\n'), max_size=30)
LONG = st.builds(lambda text, times: text * times, TEXT, st.integers(1, 40))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | LONG,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PARTS = st.builds(lambda text: {"type": "text", "text": text}, LONG) | JSON
CALLS = st.builds(call, st.one_of(LONG, JSON.map(json.dumps), JSON)) | JSON
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": LONG | st.lists(PARTS, max_size=3) | JSON,
    },
    optional={
        "tool_calls": st.lists(CALLS, max_size=2) | JSON,
        "refusal": LONG,
        "x": JSON,
        "function_call": JSON,
    },
)


def parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@UNHURRIED
@given(MESSAGES, st.floats(0, 1), st.floats(0, 1))
def test_shorter_messages_stay_valid_and_their_sizes_follow_their_shares(
    fields: dict[str, Any], one: float, other: float
) -> None:
    record = PARSER.parse_message(written(fields))
    small, large = (shorten_message(record, share, "m_1") for share in sorted((one, other)))

    assert len(small.raw) <= len(record.raw)
    # The note in place of an image is text, too. Where the larger share wins nothing, no note is made.
    assert large is record or len(small.text) <= len(large.text)
    for before, after in zip(record.calls, small.calls, strict=True):
        assert (before.id, before.name) == (after.id, after.name)
        assert parses(after.arguments) or not parses(before.arguments)
    assert json.loads(small.raw).get("x") == fields.get("x")
    assert (small.role, small.answered_call_ids) == (record.role, record.answered_call_ids)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "x"}, 0),
        ({"type": "refusal", "refusal": "x"}, 0),
        ("x", 0),
        ({"type": "new"}, len('{"type":"new"}')),
        ({"type": "new", "new": {"data": "A" * 5_000}}, UNKNOWN_PART_TOKENS),
        ({"type": "video_url", "video_url": {"url": "https://x/y.mp4"}}, UNKNOWN_PART_TOKENS),
    ],
)
def test_parts_weigh_what_their_kind_weighs(part: Any, expected: int) -> None:
    assert PARSER.estimate_nontext_tokens(written({"role": "user", "content": [part]}), "gpt-4o") == expected


def test_an_image_weighs_the_same_beside_a_lone_surrogate() -> None:
    part = image("https://x/y.png")
    alone = PARSER.estimate_nontext_tokens(written({"role": "user", "content": [part]}), "gpt-4o")
    beside = PARSER.estimate_nontext_tokens(written({"role": "user", "content": ["\ud800", part]}), "gpt-4o")

    assert alone == beside > 0


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"content":"x"}', b'{"content":null}', b"{}"])
def test_what_has_no_parts_weighs_nothing(raw: bytes) -> None:
    assert PARSER.estimate_nontext_tokens(raw, "gpt-4o") == 0
