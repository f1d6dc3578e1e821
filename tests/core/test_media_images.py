"""Sizes read from the first bytes of real encoders' layouts."""

import base64
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.media import ImageSize, decode_data_url_header, read_image_size


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + b"\x08\x06\0\0\0"


def jpeg(width: int, height: int, metadata: int = 16) -> bytes:
    app = b"\xff\xe1" + struct.pack(">H", 2 + metadata) + b"\xff" * metadata
    table = b"\xff\xc4\x00\x04\x00\x00"  # a Huffman table's marker lies among the frame headers'
    return (
        b"\xff\xd8"
        + app
        + table
        + b"\xff\xff\xc2"
        + struct.pack(">HBHH", 17, 8, height, width)
        + b"\x03" * 10
    )


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0" * 3


def webp(kind: bytes, payload: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def webp_extended(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(b"VP8X", b"\0" * 4 + sizes)


def webp_lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (height - 1) << 14 | (width - 1)) + b"\0" * 8)


def webp_lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height) + b"\0" * 4)


Writer = Callable[[int, int], bytes]
WRITERS: list[Writer] = [png, jpeg, gif, webp_extended, webp_lossless, webp_lossy]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("size", [ImageSize(1, 1), ImageSize(1024, 768), ImageSize(300, 16_383)])
def test_the_size_is_read_from_the_header(write: Writer, size: ImageSize) -> None:
    assert read_image_size(write(*size)) == size


def test_a_jpeg_is_read_past_its_metadata() -> None:
    assert read_image_size(jpeg(640, 480, metadata=40_000)) == ImageSize(640, 480)


@pytest.mark.parametrize("write", WRITERS)
def test_a_cut_header_tells_nothing_or_the_size(write: Writer) -> None:
    whole = write(800, 600)
    assert {read_image_size(whole[:stop]) for stop in range(len(whole))} <= {None, ImageSize(800, 600)}


def test_a_size_without_extent_is_none() -> None:
    assert [read_image_size(png(0, 10)), read_image_size(gif(10, 0))] == [None, None]


@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF8", b"\xff\xd8\xff", b"RIFF"]), st.binary(max_size=100)
)
def test_no_bytes_are_too_strange(magic: bytes, rest: bytes) -> None:
    size = read_image_size(magic + rest)
    assert size is None or min(size) > 0


@given(st.binary(max_size=300))
def test_a_data_url_gives_its_first_bytes(data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert data[: len(data) // 3 * 3] == decode_data_url_header(url)[: len(data) // 3 * 3]


def test_only_the_beginning_of_a_large_data_url_is_decoded() -> None:
    url = "DATA:image/png;charset=x;BASE64," + base64.b64encode(png(7, 9) + bytes(10**6)).decode()
    assert len(decode_data_url_header(url)) == 48 * 1024
    assert read_image_size(decode_data_url_header(url)) == ImageSize(7, 9)


@pytest.mark.parametrize(
    "url",
    ["", "https://a.example/b.png", "data:image/svg+xml,<svg/>", "data:image/png;base64,é", "data:;base64"],
)
def test_other_urls_give_no_bytes(url: str) -> None:
    assert decode_data_url_header(url) == b""
