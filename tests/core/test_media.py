"""Prices of content that is not text, against the providers' own examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.media import (
    ImageSize,
    decode_data_url_header,
    estimate_audio_tokens,
    estimate_file_tokens,
    estimate_image_tokens,
    estimate_image_url_tokens,
    read_image_size,
)

PIXELS = st.integers(1, 20_000)
MODELS = [
    "gpt-4o", "gpt-4o-mini", "gpt-4.1-mini", "gpt-5", "gpt-5.2", "gpt-5.4", "gpt-5.6", "o3", "o4-mini",
    "claude-opus-4-7", "claude-3-5-sonnet",
]  # fmt: skip
ONE_PIXEL_GIF = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAAC"


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        ("gpt-4o", ImageSize(1024, 1024), "high", 765),
        ("gpt-4o", ImageSize(2048, 4096), "high", 1105),
        ("gpt-4o", ImageSize(4096, 8192), "low", 85),
        ("gpt-4o", None, "auto", 85 + 8 * 170),
        ("gpt-4-turbo", ImageSize(512, 512), "auto", 255),
        ("gpt-4o-mini", ImageSize(512, 512), "high", 2833 + 5667),
        ("gpt-5", ImageSize(1024, 1024), "auto", 70 + 4 * 140),
        ("gpt-4.1-mini", ImageSize(1024, 1024), "high", 1659),
        ("gpt-4.1-mini", ImageSize(10_000, 10_000), "high", 2489),
        ("gpt-5.4", ImageSize(1024, 1024), "high", 1229),
        ("gpt-5.5", ImageSize(1024, 1024), "low", 308),
        ("gpt-5.6", ImageSize(6400, 6400), "auto", 36_000),
        ("claude-3-5-sonnet", ImageSize(280, 280), "auto", 100),
        ("claude-3-5-sonnet", ImageSize(8000, 8000), "auto", 1568),
        ("anthropic/claude-opus-4.7", None, "auto", 4784),
        ("gemini-2.5-pro", ImageSize(384, 384), "auto", 258),
        ("gemini-2.5-pro", ImageSize(1000, 700), "auto", 516),
        ("gemini-2.5-pro", None, "auto", 4128),
        ("my-local", ImageSize(10, 10), "high", 1000),
        ("my-local", None, "low", 1000),
    ],
)
def test_an_image_has_its_familys_price(model: str, size: ImageSize | None, detail: str, tokens: int) -> None:
    assert estimate_image_tokens(model, size, detail) == tokens


@pytest.mark.parametrize("model", MODELS)
@given(width=PIXELS, height=PIXELS, detail=st.sampled_from(["low", "high", "auto", "original", "odd"]))
def test_an_unseen_size_has_the_highest_price(model: str, width: int, height: int, detail: str) -> None:
    assert (
        0
        < estimate_image_tokens(model, ImageSize(width, height), detail)
        <= estimate_image_tokens(model, None, detail)
    )


def test_a_data_url_is_measured_and_any_other_url_is_not() -> None:
    assert estimate_image_url_tokens("gpt-4o", ONE_PIXEL_GIF) == 255
    assert estimate_image_url_tokens("gpt-4o", "https://a.example/b.png") == estimate_image_tokens(
        "gpt-4o", None
    )


@pytest.mark.parametrize(
    ("model", "size", "container", "tokens"),
    [
        ("gpt-4o-audio", 320_000, "wav", 100),
        ("gpt-4o-audio", 80_000, "mp3", 100),
        ("gemini-2.5-pro", 320_000, "wav", 320),
        ("gpt-4o-audio", 0, "mp3", 0),
    ],
)
def test_audio_is_priced_by_its_guessed_length(model: str, size: int, container: str, tokens: int) -> None:
    assert estimate_audio_tokens(model, size, container) == tokens


@pytest.mark.parametrize("data", [b"RIFF\0\0\0\0WEBPALPH" + bytes(30), b"BM" + bytes(40), b""])
def test_an_unknown_format_has_no_size(data: bytes) -> None:
    assert read_image_size(data) is None


@pytest.mark.parametrize("url", ["data:image/gif;base64,A===", "data:image/gif;base64,é\xe9\xe9\xe9"])
def test_invalid_base64_gives_no_bytes(url: str) -> None:
    assert decode_data_url_header(url) == b""


def test_a_file_is_priced_by_its_bytes_up_to_a_limit() -> None:
    assert [estimate_file_tokens(size) for size in (None, 0, 20_001, 10**9)] == [1000, 192, 1193, 150_192]
