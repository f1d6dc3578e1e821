"""Encoded bodies: a request's at once and within bounds, a response's chunk by chunk."""

import gzip
import sys
import zlib
from collections.abc import Callable

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.content_coding import (
    MAX_MEMBERS,
    MAX_WINDOW_LOG,
    Inflater,
    decode_body,
    parse_codings,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 1_000_000


def deflate_raw(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflate_raw),
    "gzip as deflate": ("deflate", gzip.compress),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
}
every_encoder = pytest.mark.parametrize(("coding", "encode"), ENCODERS.values(), ids=ENCODERS)


def find_refusal(raw: bytes, *codings: str) -> str:
    with pytest.raises(UnreadableBodyError) as refused:
        decode_body(raw, codings, LIMIT)
    return refused.value.reason


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ()),
        ([b"identity"], ()),
        ([b"GZIP"], ("gzip",)),
        ([b"gzip, br"], ("gzip", "br")),
        ([b"gzip", b" identity , zstd"], ("gzip", "zstd")),
        ([b"gzip, gzip, gzip"], None),
        ([b"compress"], None),
        ([b"\xff"], None),
    ],
)
def test_up_to_two_known_codings_are_read_in_their_order(
    values: list[bytes], expected: tuple[str, ...] | None
) -> None:
    assert parse_codings(values) == expected


@every_encoder
@given(data=st.binary(max_size=2_000))
def test_a_body_is_decoded_to_what_it_was(coding: str, encode: Callable[[bytes], bytes], data: bytes) -> None:
    assert decode_body(encode(data), (coding,), LIMIT) == data


def test_the_coding_that_was_applied_last_is_decoded_first() -> None:
    assert decode_body(brotli.compress(gzip.compress(b"body")), ("gzip", "br"), LIMIT) == b"body"


@every_encoder
def test_a_body_of_the_largest_size_is_decoded_and_one_byte_more_is_too_long(
    coding: str, encode: Callable[[bytes], bytes]
) -> None:
    raw = encode(bytes(70_000))
    assert decode_body(raw, (coding,), 70_000) == bytes(70_000)
    assert decode_body(raw, (coding,), 69_999) is None


@every_encoder
def test_a_damaged_or_incomplete_body_is_refused(coding: str, encode: Callable[[bytes], bytes]) -> None:
    raw = encode(bytes(range(256)) * 9)
    assert {find_refusal(each, coding) for each in (raw[:-1], raw[: len(raw) // 2], b"", b"\xff" * 40)} == {
        "encoded"
    }


@pytest.mark.parametrize(("coding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_a_body_may_consist_of_several_members_but_of_no_more_than_a_bound(
    coding: str, encode: Callable[[bytes], bytes]
) -> None:
    assert decode_body(encode(b"x") * MAX_MEMBERS, (coding,), LIMIT) == b"x" * MAX_MEMBERS
    assert find_refusal(encode(b"x") * (MAX_MEMBERS + 1), coding) == "encoded"


def test_a_zstd_frame_with_a_larger_window_than_http_allows_is_refused() -> None:
    data = bytes(2 ** (MAX_WINDOW_LOG + 1))

    def encode(window_log: int) -> bytes:
        compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
        return compressor.compress(data) + compressor.flush()

    assert decode_body(encode(MAX_WINDOW_LOG), ("zstd",), len(data)) == data
    assert find_refusal(encode(MAX_WINDOW_LOG + 1), "zstd") == "encoded"


@pytest.mark.parametrize("name", ["gzip", "zlib", "raw deflate", "gzip as deflate"])
@given(data=st.binary(min_size=1, max_size=500), size=st.integers(1, 60))
def test_how_a_response_is_cut_into_chunks_makes_no_difference(name: str, data: bytes, size: int) -> None:
    coding, encode = ENCODERS[name]
    raw, inflater = encode(data), Inflater(f" {coding.upper()} ", LIMIT)
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert b"".join(map(inflater.feed, chunks)) == data
    assert inflater.feed(b"what follows the end") == b""
    assert not inflater.has_failed


def test_a_response_that_is_not_compressed_passes_without_a_bound() -> None:
    inflater = Inflater("identity", 1)
    assert (inflater.is_identity, inflater.feed(b"plain"), inflater.has_failed) == (True, b"plain", False)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
def test_a_response_in_another_coding_cannot_be_read(coding: str) -> None:
    inflater = Inflater(coding, LIMIT)
    assert (inflater.has_failed, inflater.feed(b"data")) == (True, b"")


def test_a_response_beyond_its_bound_or_with_damage_is_given_up() -> None:
    raw = gzip.compress(bytes(1_000))
    within, beyond, damaged = Inflater("gzip", 1_000), Inflater("gzip", 999), Inflater("gzip", 1_000)
    assert (within.feed(raw), within.has_failed) == (bytes(1_000), False)
    assert (beyond.feed(raw), beyond.has_failed) == (b"", True)
    assert (damaged.feed(raw[:2] + b"\xff" * 20), damaged.has_failed) == (b"", True)
    assert [each.feed(raw) for each in (beyond, damaged)] == [b"", b""]
