"""What makes messages and prefixes the same (DESIGN.md §5.3), and digests that must never change.

The digests of the vectors were made by other code than ours. What a dialect leaves out before there is a
record, such as `cache_control` or reasoning, is tested with the dialect.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core import digest as module
from compaction_proxy.core.digest import (
    DIGEST_VERSION,
    canonicalize_arguments,
    chain_digests,
    compute_message_digest,
    compute_outline_digest,
    compute_prefix_digests,
    format_message_id,
)
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "digest.json").read_text())
IMAGE = bytes(range(32))
OTHER_IMAGE = bytes(32)
_FIELD_OF_MEMBER = {"answers": "answered_call_ids", "signed": "has_signed_reasoning"}  # of the vectors


def read(fields: dict[str, Any]) -> Message:
    """A message as the vectors write it."""
    parts = tuple(
        ContentPart(kind, bytes.fromhex(payload), at) for kind, payload, at in fields.get("parts", ())
    )
    calls = tuple(MessageToolCall(*call) for call in fields.get("calls", ()))
    fields = {_FIELD_OF_MEMBER.get(name, name): value for name, value in fields.items()}
    fields["answered_call_ids"] = tuple(fields.get("answered_call_ids", ()))
    return Message(**{**fields, "parts": parts, "calls": calls})


def digested(message: Message) -> Message:
    return replace(message, digest=compute_message_digest(message))


def calling(arguments: str) -> Message:
    return Message("assistant", calls=(MessageToolCall("c1", "read", arguments),))


def test_the_version_is_the_one_of_the_vectors() -> None:
    assert DIGEST_VERSION == b"\x01"


@pytest.mark.parametrize("vector", VECTORS["message"], ids=lambda vector: vector["name"])
def test_a_message_has_the_digest_of_its_vector(vector: dict[str, Any]) -> None:
    assert compute_message_digest(read(vector["message"])).hex() == vector["expected"]


@pytest.mark.parametrize("vector", VECTORS["prefix"], ids=lambda vector: vector["name"])
def test_a_prefix_has_the_digest_of_its_vector(vector: dict[str, Any]) -> None:
    messages = [digested(read(message)) for message in vector["messages"]]

    assert [prefix.hex() for prefix in compute_prefix_digests(messages)] == vector["expected"]


IMAGE_PART = ContentPart("image_url", IMAGE, 0)
BASE = Message(
    "assistant",
    "text",
    parts=(IMAGE_PART,),
    refusal="no",
    name="ann",
    calls=(MessageToolCall("c1", "read", "{}"), MessageToolCall("c2", "list", "{}")),
    answered_call_ids=("c0", "c9"),
)
DIFFERENT = {
    "role": replace(BASE, role="user"),
    "text": replace(BASE, text="texts"),
    "text in another case": replace(BASE, text="Text"),
    "white space in text": replace(BASE, text="text "),
    "no part": replace(BASE, parts=()),
    "kind of part": replace(BASE, parts=(replace(IMAGE_PART, kind="file"),)),
    "payload of part": replace(BASE, parts=(replace(IMAGE_PART, payload_digest=OTHER_IMAGE),)),
    "place of part": replace(BASE, parts=(replace(IMAGE_PART, text_offset=2),)),
    "a part twice": replace(BASE, parts=(IMAGE_PART, IMAGE_PART)),
    "refusal": replace(BASE, refusal=""),
    "name": replace(BASE, name="bob"),
    "id of call": replace(BASE, calls=(MessageToolCall("c3", "read", "{}"), BASE.calls[1])),
    "name of call": replace(BASE, calls=(MessageToolCall("c1", "write", "{}"), BASE.calls[1])),
    "arguments of call": replace(BASE, calls=(MessageToolCall("c1", "read", "[]"), BASE.calls[1])),
    "order of calls": replace(BASE, calls=BASE.calls[::-1]),
    "a call fewer": replace(BASE, calls=BASE.calls[:1]),
    "answered_call_ids": replace(BASE, answered_call_ids=("c0",)),
    "order of answers": replace(BASE, answered_call_ids=("c9", "c0")),
}


def test_whatever_the_model_sees_makes_a_message_another() -> None:
    digests = [compute_message_digest(message) for message in (BASE, *DIFFERENT.values())]

    assert len(set(digests)) == len(digests)


def test_how_a_message_was_written_and_counted_does_not_matter() -> None:
    other = replace(BASE, raw=b'{"role": "assistant"}', tokens=7, digest=b"x" * 32)

    assert compute_message_digest(other) == compute_message_digest(BASE)


def test_the_place_of_one_part_among_others_matters() -> None:
    joined = Message(
        "user", "onetwo", parts=(ContentPart("image_url", IMAGE, 3), ContentPart("file", IMAGE, 3))
    )
    moved = Message(
        "user", "onetwo", parts=(ContentPart("image_url", IMAGE, 2), ContentPart("file", IMAGE, 3))
    )

    assert compute_message_digest(joined) != compute_message_digest(moved)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":1,"b":{"c":[1,2],"d":null}}',
        '{ "b" : { "d" : null, "c" : [ 1, 2 ] },\n\t"a" : 1 }',
        '{"\\u0061":1,"b":{"c":[1,2],"d":null}}',
    ],
)
def test_key_order_white_space_and_escapes_in_arguments_do_not_matter(arguments: str) -> None:
    canonical = '{"a":1,"b":{"c":[1,2],"d":null}}'

    assert canonicalize_arguments(arguments) == canonical
    assert compute_message_digest(calling(arguments)) == compute_message_digest(calling(canonical))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":" x"}', '{"a":"x"}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":1}', '{"a":true}'),
        ('{"a":null}', "{}"),
        ('{"a":12345678901234567890}', '{"a":12345678901234567891}'),
        ("", "{}"),
        ("{", "{ "),
    ],
)
def test_arguments_that_differ_make_another_message(one: str, other: str) -> None:
    assert compute_message_digest(calling(one)) != compute_message_digest(calling(other))


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "ls -la", '{"a":1} {"b":2}', '{"a":1,"a":2}', "[" * 100_000, "9" * 5000, "\ufeff{}"],
)
def test_arguments_that_do_not_parse_are_taken_as_they_are(arguments: str) -> None:
    assert canonicalize_arguments(arguments) == arguments


def test_a_cleared_tool_result_keeps_its_outline() -> None:
    full = digested(Message("tool", "42", parts=(IMAGE_PART,), answered_call_ids=("c1",)))
    cleared = digested(Message("tool", "[cleared]", answered_call_ids=("c1",)))

    assert full.digest != cleared.digest
    assert compute_outline_digest(full) == compute_outline_digest(cleared)
    assert compute_outline_digest(full) != compute_outline_digest(
        digested(Message("tool", "42", answered_call_ids=("c2",)))
    )


def test_what_answers_no_call_has_no_outline_but_itself() -> None:
    message = digested(Message("user", "42"))

    assert compute_outline_digest(message) == message.digest


def test_a_message_is_named_after_its_prefix() -> None:
    assert format_message_id(bytes(range(32))) == "m_000102030405"


CHARACTERS = st.characters(codec=None)
TEXT = st.text(CHARACTERS, max_size=6)
CALLS = st.lists(st.builds(MessageToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple)
ROLES = st.sampled_from(["user", "assistant", "tool"])
MESSAGES = st.builds(
    Message,
    ROLES,
    TEXT,
    refusal=TEXT,
    name=TEXT,
    calls=CALLS,
    answered_call_ids=st.lists(TEXT, max_size=2).map(tuple),
).map(digested)


def content(message: Message) -> tuple[object, ...]:
    """What the digest stands for, compared without it."""
    calls = [(call.id, call.name, canonicalize_arguments(call.arguments)) for call in message.calls]
    return message.role, message.text, message.refusal, message.name, calls, message.answered_call_ids


@given(MESSAGES, MESSAGES)
def test_messages_share_a_digest_only_if_they_share_their_content(one: Message, other: Message) -> None:
    assert len(one.digest) == 32
    assert (one.digest == other.digest) == (content(one) == content(other))


@given(MESSAGES)
def test_a_text_of_many_pieces_has_the_digest_that_it_has_in_one(message: Message) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARACTERS", 1)
        in_pieces = compute_message_digest(message)
    assert in_pieces == compute_message_digest(message)


@given(st.lists(TEXT, min_size=2, max_size=4), st.integers(1, 3))
def test_moving_the_edge_between_two_fields_makes_another_message(fields: list[str], cut: int) -> None:
    whole = "".join(fields)
    at = min(cut, len(whole))
    one = Message("user", name=whole[:at], refusal=whole[at:])
    other = Message("user", name=whole, refusal="")

    assert (compute_message_digest(one) == compute_message_digest(other)) == (at == len(whole))
    assert compute_message_digest(
        Message("tool", answered_call_ids=(whole[:at], whole[at:]))
    ) != compute_message_digest(Message("tool", answered_call_ids=(whole,)))


@given(st.lists(MESSAGES, max_size=6), st.lists(MESSAGES, max_size=3))
def test_a_prefix_does_not_depend_on_what_follows(before: list[Message], after: list[Message]) -> None:
    assert compute_prefix_digests(before + after)[: len(before)] == compute_prefix_digests(before)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5))
def test_a_change_anywhere_changes_every_prefix_from_there(digests: list[bytes]) -> None:
    for at in range(len(digests)):
        changed = list(digests)
        changed[at] = bytes(byte ^ 1 for byte in changed[at])
        pairs = list(zip(chain_digests(digests), chain_digests(changed), strict=True))

        assert all(one == other for one, other in pairs[:at])
        assert all(one != other for one, other in pairs[at:])


def test_prefixes_of_different_lengths_never_match() -> None:
    prefixes = chain_digests([IMAGE] * 50)

    assert len(set(prefixes)) == 50


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_arguments_written_in_any_way_are_the_same(
    value: object,
    indent: int | None,
    ascii_only: bool,  # noqa: FBT001 - filled by hypothesis
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    canonical = canonicalize_arguments(json.dumps(value))

    assert canonicalize_arguments(written) == canonical
    assert canonicalize_arguments(canonical) == canonical


def test_long_arguments_are_written_as_short_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, Any] = {"b": [1, 2.0, 1e-7, -3, True, None, {}], "a": 'é"\\\n\u2028🐎', "": [[], "x" * 9]}
    arguments = json.dumps({"rows": [row] * 1_000})
    assert len(arguments) > module.PIECE_CHARACTERS
    long = canonicalize_arguments(arguments)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", len(arguments))
    assert long == canonicalize_arguments(arguments) != arguments
