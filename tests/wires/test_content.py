"""What all wires share in reading messages: text and parts, digests of parts, and estimates of their size."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import ContentPart, Message
from compaction_proxy.wires.content import (
    MAX_PARTS,
    UNKNOWN_PART_TOKENS,
    PieceParser,
    count_base64_bytes,
    decode_fields,
    estimate_unknown_part,
    get_kind,
    hash_address,
    hash_part,
    hash_text,
    read_content,
    shorten_member,
)
from compaction_proxy.wires.json.values import JsonObject

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def read_text(part: Any) -> str | None:
    return part if isinstance(part, str) else None


def build_part(part: Any, offset: int) -> ContentPart | None:
    return ContentPart("image", hash_part(part), offset) if part else None


def convert(raw: bytes, fields: JsonObject) -> Message:
    if fields.get("deep"):
        raise RecursionError
    text, parts = read_content(fields.get("content"), read_text, build_part)
    return Message("user", text, parts, raw=raw)


PARSER = PieceParser[JsonObject](
    decode_fields, convert, lambda record: bool(record.parts), lambda fields, model: 7 * len(model)
)


@pytest.mark.parametrize(
    ("content", "expected"), [("hi", "hi"), (None, ""), ({"b": 1, "a": 2}, '{"a": 2, "b": 1}'), (4.5, "4.5")]
)
def test_content_that_is_no_list_is_its_text_or_its_json(content: object, expected: str) -> None:
    assert read_content(content, read_text, build_part) == (expected, ())


def test_a_part_stands_at_the_length_of_the_text_before_it_and_may_be_left_out() -> None:
    image, other = {"type": "image"}, {"type": "other"}
    assert read_content(["ab", image, {}, "c", other], read_text, build_part) == (
        "abc",
        (ContentPart("image", hash_part(image), 2), ContentPart("image", hash_part(other), 3)),
    )


def test_content_with_more_parts_than_any_model_reads_is_refused() -> None:
    assert read_content(["a"] * MAX_PARTS, read_text, build_part)[0] == "a" * MAX_PARTS
    with pytest.raises(UnreadableBodyError, match="too-many"):
        read_content(["a"] * (MAX_PARTS + 1), read_text, build_part)


@pytest.mark.parametrize(
    ("raw", "reason"), [(b"[]", "no-messages"), (b'"a"', "no-messages"), (b"{", "not-json")]
)
def test_a_piece_that_is_no_object_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        decode_fields(raw)
    assert refused.value.reason == reason


def test_a_message_has_its_digest_and_only_parts_are_estimated() -> None:
    text, image = b'{"content":"hi"}', b'{"content":["hi",{"type":"image"}]}'
    for raw, tokens in ((text, 0), (image, 7 * len("gpt"))):
        message = PARSER.parse_message(raw)
        uncounted = PARSER.parse_uncounted(raw, "gpt")
        assert (message.raw, message.tokens) == (raw, 0)
        assert (uncounted.digest, uncounted.nontext_tokens) == (message.digest, tokens)
    assert PARSER.parse_message(text).digest != PARSER.parse_message(image).digest


def test_a_piece_that_is_nested_too_deeply_to_be_written_again_is_refused() -> None:
    with pytest.raises(UnreadableBodyError, match="too-deep"):
        PARSER.parse_message(b'{"deep":true}')


def test_an_invalid_piece_is_estimated_as_nothing() -> None:
    assert (PARSER.estimate_nontext_tokens(b"{", "gpt"), PARSER.estimate_nontext_tokens(b"{}", "gpt")) == (
        0,
        21,
    )


@given(st.binary(max_size=100))
def test_a_data_url_is_known_by_the_data_that_it_encodes(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    expected = hashlib.sha256(data).digest()
    assert {hash_address(f"data:{kind};base64,{encoded}") for kind in ("image/png", "image/gif")} == {
        expected
    }
    assert count_base64_bytes(encoded) in range(len(data), len(data) + 3)


def test_an_http_url_is_known_without_its_query_and_any_other_text_as_a_whole() -> None:
    assert hash_address("https://a.example/x.png?sig=1") == hash_address("https://a.example/x.png?sig=2")
    assert hash_address("https://a.example/x.png") != hash_address("https://a.example/y.png")
    for text in ("data:text/plain,a?b", "data:image/png;base64,!", "gs://a/b?c"):
        assert hash_address(text) == hash_text(text)


def test_a_lone_surrogate_has_a_digest() -> None:
    assert hash_text("\ud800") != hash_text("\udc00")


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), VALUES)
def test_a_part_is_known_without_its_cache_mark_in_any_order(part: dict[str, Any], mark: Any) -> None:
    part.pop("cache_control", None)
    turned = dict(reversed([*part.items(), ("cache_control", mark)]))
    assert hash_part(turned) == hash_part(part)
    assert hash_part({**part, "one more": 1}) != hash_part({**part, "one more": 2})


@given(VALUES)
def test_an_unknown_part_never_weighs_more_tokens_than_bytes(part: Any) -> None:
    shortest = json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    assert 0 < estimate_unknown_part(part) <= len(shortest)
    assert estimate_unknown_part([part, "x" * UNKNOWN_PART_TOKENS]) == UNKNOWN_PART_TOKENS


@pytest.mark.parametrize("raw", ['{"type":"x","t":"%s"}' % ("字" * 120), "[1e9,1E300,-2.5e-9]", '"\\ud800"'])
def test_an_unknown_part_never_has_more_tokens_than_the_client_sent_bytes(raw: str) -> None:
    assert estimate_unknown_part(json.loads(raw)) <= len(raw.encode())


@pytest.mark.parametrize(
    ("part", "kind"), [({"type": "text"}, "text"), ({"type": 1}, ""), ({}, ""), ("text", "")]
)
def test_the_type_of_a_part_is_a_text_or_empty(part: object, kind: str) -> None:
    assert get_kind(part) == kind


def test_a_member_gets_shorter_as_a_text_or_part_by_part() -> None:
    def cut(text: str) -> str:
        return text[:1]

    def shorten(value: object) -> JsonObject:
        return shorten_member({"role": "user", "content": value}, "content", cut, lambda part: [part])

    assert shorten("abc") == {"role": "user", "content": "a"}
    assert shorten(["abc", 1]) == {"role": "user", "content": [["abc"], [1]]}
    assert shorten(7) == {"role": "user", "content": 7}
