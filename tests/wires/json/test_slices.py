"""Where the members of an object and the elements of an array stand, and what is refused."""

import pytest

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json.slices import (
    MAX_STRUCTURAL,
    SEARCHED_BYTES,
    contains_bytes,
    find_members,
    split_elements,
)

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "start", [0, SEARCHED_BYTES - 5, SEARCHED_BYTES - 1, SEARCHED_BYTES, 2 * SEARCHED_BYTES]
)
def test_bytes_are_found_wherever_they_begin(start: int) -> None:
    raw = bytes(start) + b"needle" + bytes(9)
    assert contains_bytes(raw, b"needle")
    assert not contains_bytes(raw, b"needles")
    assert not contains_bytes(b"", b"needle")


def values(raw: bytes) -> dict[str, bytes]:
    return {key: raw[at.start : at.stop] for key, at in find_members(raw).items()}


@pytest.mark.parametrize("escape", [b"\\u00e9", b"\\ud800"], ids=["fast", "with-a-lone-surrogate"])
def test_values_are_cut_out_as_they_were_written(escape: bytes) -> None:
    raw = (
        b' \r\n{ "n" : 123456789012345678901234567890 ,"f":1.0,\t"d":{"a":1,"a":2},'
        b'"s":"%b","u":"\xc3\xa9\xf0\x9f\x98\x80" , '
        b'"l":[ 1 , {} ],"e\\"\\u006b":null } '
    ) % escape

    assert values(raw) == {
        "n": b"123456789012345678901234567890",
        "f": b"1.0",
        "d": b'{"a":1,"a":2}',
        "s": b'"%b"' % escape,
        "u": b'"\xc3\xa9\xf0\x9f\x98\x80"',
        "l": b"[ 1 , {} ]",
        'e"k': b"null",
    }


@pytest.mark.parametrize("raw", [b"{}", b" { } "])
def test_an_empty_object_has_no_members(raw: bytes) -> None:
    assert find_members(raw) == {}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"[]", ()),
        (b" [ 1 ,\n{ } ] ", (b"1", b"{ }")),
        (b'[ "\\ud800" , {"a" : "\xc3\xa9"} ]', (b'"\\ud800"', b'{"a" : "\xc3\xa9"}')),
    ],
)
def test_elements_are_cut_out_as_they_were_written(raw: bytes, expected: tuple[bytes, ...]) -> None:
    assert split_elements(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"a":2}',
        b'{"a":12,"a":1}',
        b'{"a":1,"b":2,"a":1}',
        b'{"a":1,"\\u0061":1}',
        b'{"a":"\\ud800","b":1,"a":"\\ud800"}',
    ],
)
def test_a_key_that_stands_twice_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        find_members(raw)
    assert refused.value.reason == "duplicate-keys"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"{}"',
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,}',
        b'{"a":1}}',
        b'{"a":1} x',
        b"{'a':1}",
        b"{a:1}",
        b"{1:1}",
        b'{1:1,"a":"\\ud800"}',
        b'{"a":"\\ud800",}',
        b'{"a":01}',
        b'{"a":NaN}',
        b'{"a":"\\ud800","b":-Infinity}',
        b'{"a":"\\q"}',
        b'{"a":"\n"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        find_members(raw)
    assert refused.value.reason == "not-json"


@pytest.mark.parametrize("raw", [b"", b"null", b'"x"', b"{}", b"[", b"[1,]", b"[1] 2", b"[NaN]"])
def test_what_is_no_json_array_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        split_elements(raw)
    assert refused.value.reason == "no-array"


@pytest.mark.parametrize("start", [b'{"a":', b'{"s":"\\ud800","a":'], ids=["fast", "with-a-lone-surrogate"])
def test_nesting_without_end_is_refused(start: bytes) -> None:
    with pytest.raises(UnreadableBodyError) as refused:
        find_members(start + DEEP)
    assert refused.value.reason in {"too-deep", "not-json"}  # how deep the parser goes depends on Python


@pytest.mark.parametrize("item", [b"[]", b"{}", b"7"])
def test_a_body_that_no_model_could_read_is_refused(item: bytes) -> None:
    many = b'{"a":[%b]}' % b",".join([item] * MAX_STRUCTURAL)
    with pytest.raises(UnreadableBodyError) as refused:
        find_members(many)
    assert refused.value.reason == "too-many"
    assert values(b'{"a":"%b"}' % (b"," * MAX_STRUCTURAL * 2)) == {"a": b'"%b"' % (b"," * MAX_STRUCTURAL * 2)}
