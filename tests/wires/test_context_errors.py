"""Wordings of every provider that is known to say that a request does not fit."""

import gzip
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.wires.context_errors import MAX_BODY_BYTES, Overflow, find_error_code, parse_overflow

GENEROUS_S = 5.0  # of the processor; a hundred times what it may take


VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "overflow.json").read_text())


def name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def written(body: object) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def expected(vector: dict[str, Any]) -> Overflow | None:
    return Overflow(**vector["expected"]) if vector["expected"] else None


def openai(message: str, code: str | None = None) -> bytes:
    return written({"error": {"message": message, "type": "invalid_request_error", "code": code}})


@pytest.mark.parametrize("vector", VECTORS["overflow"], ids=name)
def test_a_providers_wording_is_understood(vector: dict[str, Any]) -> None:
    assert parse_overflow(vector["status"], written(vector["body"])) == expected(vector)


@pytest.mark.parametrize("vector", VECTORS["other"], ids=name)
def test_another_error_is_not_taken_for_an_overflow(vector: dict[str, Any]) -> None:
    assert parse_overflow(vector["status"], written(vector["body"])) is None


@pytest.mark.parametrize("vector", VECTORS["events"], ids=name)
def test_an_error_in_the_place_of_a_streams_first_event(vector: dict[str, Any]) -> None:
    assert parse_overflow(200, vector["event"].encode()) == expected(vector)


@pytest.mark.parametrize(
    "number", ["128,000", "128_000", "128.000", "128'000", "128\u2019000", "128\u202f000"]
)
def test_thousands_separators_are_read(number: str) -> None:
    body = openai(f"prompt is too long: 1,213,462 tokens > {number} maximum")

    assert parse_overflow(400, body) == Overflow("context", 128_000, 1_213_462)


def test_a_code_outweighs_an_exclusion() -> None:
    body = openai("Please wait before trying again with less.", code="context_length_exceeded")

    assert parse_overflow(429, body) == Overflow("context", is_size_meaningful=False)


@pytest.mark.parametrize("status", [413, 429])
def test_a_status_about_a_rate_or_bytes_says_nothing_of_the_window_without_a_number(status: int) -> None:
    unnumbered = openai("It is too long.", code="context_length_exceeded")
    numbered = openai("prompt is too long: 213462 tokens > 200000 maximum", code="prompt_too_long")

    assert parse_overflow(status, unnumbered) == Overflow("context", is_size_meaningful=False)
    assert parse_overflow(status, numbered) == Overflow("context", 200_000, 213_462)


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("GZip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)],
)
def test_a_compressed_error_is_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    body = openai("prompt is too long: 213462 tokens > 200000 maximum")

    assert parse_overflow(400, encode(body), encoding) == Overflow("context", 200_000, 213_462)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br", "gzip"])
def test_what_cannot_be_decoded_says_nothing(encoding: str) -> None:
    assert parse_overflow(400, openai("prompt is too long"), encoding) is None


def test_a_bomb_says_nothing() -> None:
    body = openai("prompt is too long" + " " * MAX_BODY_BYTES)

    assert parse_overflow(400, gzip.compress(body), "gzip") is None


def test_a_200_with_an_error_in_the_place_of_an_answer() -> None:
    assert parse_overflow(200, openai("prompt is too long")) == Overflow("context")


STATUSES = st.sampled_from([200, 400, 413, 422, 429, 500, 502, 503])


@given(STATUSES, st.binary(max_size=400), st.sampled_from(["", "gzip", "deflate", "br"]))
def test_no_bytes_make_it_fail(status: int, body: bytes, encoding: str) -> None:
    assert isinstance(parse_overflow(status, body, encoding), Overflow | None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["error", "message", "code", "choices", "delta", "n_ctx"]), inner)
    ),
    max_leaves=20,
)


@given(STATUSES, JSON)
def test_no_shape_of_an_error_makes_it_fail(status: int, payload: object) -> None:
    body = json.dumps(payload).encode()

    assert isinstance(parse_overflow(status, body), Overflow | None)
    assert isinstance(parse_overflow(200, b"data: " + body), Overflow | None)


ADVERSARIAL = [
    "this model's maximum context length is 1 tokens. however, ",
    "maximum context length is 1 tokens requested ",
    "request too large limit 1 requested ",
    "trying to keep the first 1 tokens when context the overflows",
    "prompt contains 1 tokens",
    "input tokens exceed the configured limit of 1 tokens",
    "111,111,111,",
    "1",
    "x" * 100 + " ",
    "context_length_exceeded_",
    '{"error":',
    "[",
    '{"',
    "\u0130",
    ": \n\n",
    "data: 1\n",
]


@pytest.mark.parametrize("piece", ADVERSARIAL)
@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_64_kib_of_adversarial_text_are_judged_quickly(piece: str, status: int) -> None:
    text = (piece * MAX_BODY_BYTES)[: MAX_BODY_BYTES // 2]
    for body in (text.encode(), openai(text), b"data: " + openai(text)):
        started = time.thread_time()
        parse_overflow(status, body[:MAX_BODY_BYTES])
        assert time.thread_time() - started < GENEROUS_S


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"type": "billing", "code": "insufficient_quota"}}', "insufficient_quota"),
        (b'{"type": "error", "error": {"type": "rate_limit_error"}}', "rate_limit_error"),
        (b'{"object": "error", "code": 429, "type": "TooMany.Requests-1"}', "TooMany.Requests-1"),
        (b'{"error": {"code": "429", "type": null}}', ""),
        (b'{"error": {"code": "words of a message"}}', ""),
        (b'{"error": {"code": "' + b"x" * 65 + b'"}}', ""),
        (b'{"error": "no"}', ""),
        (b"[1]", ""),
        (b"no JSON", ""),
        (b"", ""),
    ],
)
def test_the_code_of_an_error_is_a_short_identifier_or_nothing(body: bytes, code: str) -> None:
    assert find_error_code(body) == code
    assert find_error_code(gzip.compress(body), "gzip") == code
