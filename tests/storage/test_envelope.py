import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.storage import envelope

TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too: clients send them
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)
FIELDS = st.dictionaries(TEXT, VALUES, max_size=5)


@settings(deadline=None)
@given(FIELDS)
def test_what_was_packed_is_unpacked(fields: dict[str, object]) -> None:
    assert envelope.unpack(envelope.pack(fields)) == fields


@settings(deadline=None)
@given(FIELDS, st.integers(1, 200))
def test_large_records_are_deflated_and_come_back(fields: dict[str, object], times: int) -> None:
    large = {**fields, "text": "long text " * times * 10}
    packed = envelope.pack(large)

    assert envelope.unpack(packed) == large
    content = envelope.extract_json(packed)
    assert content is not None
    assert packed[:2] == (b"\x01\x01" if len(content) > 1024 else b"\x01\x00")


@settings(deadline=None)
@given(FIELDS, st.data())
def test_any_changed_byte_gives_none_or_fields(fields: dict[str, object], data: st.DataObject) -> None:
    packed = bytearray(envelope.pack({**fields, "pad": "x" * data.draw(st.sampled_from([0, 2000]))}))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))

    found = envelope.unpack(bytes(packed))

    assert found is None or isinstance(found, dict)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_give_none_or_fields(data: bytes) -> None:
    for start in (b"", b"\x01\x00", b"\x01\x01"):
        found = envelope.unpack(start + data)
        assert found is None or isinstance(found, dict)


def test_every_truncation_is_unreadable() -> None:
    for fields in ({"a": [1, "two", None]}, {"text": "abc" * 1000}):
        packed = envelope.pack(fields)
        assert [envelope.unpack(packed[:length]) for length in range(len(packed))] == [None] * len(packed)


def test_the_layout_is_final() -> None:
    assert envelope.pack({"b": "é", "a": [1, None]}) == b'\x01\x00{"a":[1,null],"b":"\xc3\xa9"}'
    packed = envelope.pack({"a": "x" * 2000})
    assert (packed[:2], zlib.decompress(packed[2:])) == (b"\x01\x01", b'{"a":"%s"}' % (b"x" * 2000))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x01\x00",
        b"\x00\x00{}",
        b"\x02\x00{}",
        b"\x01\x02{}",
        b"\x01\x00[]",
        b"\x01\x00null",
        b"\x01\x00{} x",
        b"\x01\x00\xff",
        b'\x01\x00{"n":' + b"9" * 5000 + b"}",
        b'\x01\x00{"n":' + b"[" * 100_000 + b"}",
        b"\x01\x01" + zlib.compress(b"{}") + b"more",
        b"\x01\x01" + zlib.compress(b'{"bomb":"' + b"0" * (17 * 1024 * 1024) + b'"}'),
    ],
    ids=range(14),
)
def test_what_is_not_ours_to_read_is_none(data: bytes) -> None:
    assert envelope.unpack(data) is None


def test_what_json_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError):
        envelope.pack({"a": b"bytes"})
    with pytest.raises(ValueError):
        envelope.pack({"a": float("nan")})


def test_a_record_that_could_not_be_read_back_is_refused() -> None:
    with pytest.raises(ValueError):
        envelope.pack({"a": "x" * envelope.MAX_JSON_BYTES})
