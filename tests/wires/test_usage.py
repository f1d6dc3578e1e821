"""The tap tells what a response said of tokens, however it came, and nothing else."""

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.usage import TokenUsage

STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"
KEPT_BYTES = 65_536


def watched(pieces: Sequence[bytes], content_type: str = STREAM, encoding: str = "") -> TokenUsage | None:
    tap = CHAT.open_tap(content_type, encoding)
    for piece in pieces:
        tap.feed(piece)
    return tap.result()


def event(payload: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(payload)}{end}{end}".encode()


def chunk(text: str = "", reason: str | None = None, **extra: object) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"object": "chat.completion.chunk", "choices": [choice], **extra}


def usage(prompt: object, completion: object = 5, **extra: object) -> dict[str, object]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **extra}


def body(**extra: object) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    return {"id": "x", "choices": [choice], **extra}


DONE = b"data: [DONE]\n\n"
CACHED = {"prompt_tokens_details": {"cached_tokens": 64}}


def test_a_stream_ends_with_its_usage() -> None:
    pieces = [
        event(chunk("a", usage=None)),
        event(chunk("", "length", usage=None)),
        event({"choices": [], "usage": usage(100, 7, **CACHED)}),
        DONE,
    ]

    assert watched(pieces) == TokenUsage(100, 7, 64, "length")


def test_a_body_carries_its_usage() -> None:
    assert watched([json.dumps(body(usage=usage(100, 7, **CACHED))).encode()], JSON) == TokenUsage(
        100, 7, 64, "stop"
    )


def test_of_a_usage_in_every_chunk_the_last_counts() -> None:
    pieces = [event(chunk("a", usage=usage(100, 1))), event(chunk("b", "stop", usage=usage(100, 2)))]

    assert watched(pieces) == TokenUsage(100, 2, 0, "stop")


def test_a_usage_of_null_does_not_undo_an_earlier_one() -> None:
    assert watched([event({"choices": [], "usage": usage(9)}), event(chunk(usage=None))]) == TokenUsage(9, 5)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_and_comments_are_read(end: str) -> None:
    pieces = [
        f": waiting{end}{end}".encode(),
        f"event: x{end}id: 1{end}".encode() + event(chunk("", "stop"), end),
        event({"choices": [], "usage": usage(9)}, end).replace(b"data: ", b"data:"),
        f": bye{end}".encode(),
    ]

    assert watched(pieces) == TokenUsage(9, 5, 0, "stop")


def test_an_error_after_the_usage_does_not_hide_it() -> None:
    pieces = [event({"choices": [], "usage": usage(9)}), b'event: error\ndata: {"error":"gone"}\n\n']

    assert watched(pieces) == TokenUsage(9, 5)


def test_an_error_alone_tells_nothing() -> None:
    assert watched([b'event: error\ndata: {"error":"gone"}\n\n']) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36},
        {"cached_tokens": 64},
        {"prompt_tokens_details": None, "cached_tokens": 64},
        {"prompt_tokens_details": {"cached_tokens": 64}, "cached_tokens": 3},
        {"prompt_tokens_details": {"cached_tokens": -1}, "cached_tokens": 64},
    ],
)
def test_cached_tokens_are_found_where_a_provider_puts_them(extra: dict[str, object]) -> None:
    assert watched([event({"choices": [], "usage": usage(100, **extra)})]) == TokenUsage(100, 5, 64)


def test_no_more_tokens_are_cached_than_were_read() -> None:
    assert watched([event({"choices": [], "usage": usage(9, **CACHED)})]) == TokenUsage(9, 5, 9)


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [{"delta": {}, "finish_reason": "stop", "usage": usage(9)}]},
        chunk("", "stop", x_groq={"id": "r", "usage": usage(9)}),
    ],
)
def test_usage_is_found_where_a_provider_puts_it(payload: object) -> None:
    assert watched([event(payload)]) == TokenUsage(9, 5, 0, "stop")


def test_a_response_without_completion_tokens_has_used_none() -> None:
    assert watched([json.dumps({"usage": {"prompt_tokens": 9}}).encode()], JSON) == TokenUsage(9)


@pytest.mark.parametrize("number", [-1, 10**9, 1.0, "9", True, None, [9], {}])
def test_numbers_that_cannot_be_true_are_not_believed(number: object) -> None:
    assert watched([event({"usage": usage(number)})]) is None
    if number is not None:
        assert watched([event({"usage": usage(9, number)})]) is None


def test_the_largest_number_is_believed() -> None:
    assert watched([event({"usage": usage(10**9 - 1, 0)})]) == TokenUsage(10**9 - 1)


LURE = 'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'


@pytest.mark.parametrize("text", [LURE, f"\n{LURE}\n", f"\r{LURE}", f'"}}]}}\n\n{LURE}'])
def test_text_that_talks_of_usage_does_not_count(text: str) -> None:
    answer = body(choices=[{"message": {"content": text}, "finish_reason": "stop"}])

    assert watched([event(chunk(text)), DONE]) is None
    assert watched([json.dumps(answer).encode()], JSON) is None


def test_usage_deeper_in_a_body_does_not_count() -> None:
    assert watched([json.dumps({"metadata": {"usage": usage(9)}}).encode()], JSON) is None


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_the_remainder_of_a_cut_line_does_not_count(end: bytes) -> None:
    lure = LURE.encode() + end
    rest = b":" + b"x" * (KEPT_BYTES - len(lure) - 2) + end

    assert watched([b": comment ", lure, rest]) is None
    assert watched([b": comment" + end, lure, rest[1:]]) == TokenUsage(1, 1)


def test_usage_at_the_end_of_a_long_stream_is_found() -> None:
    pieces = [event(chunk("word" * 50))] * 2000

    assert watched([*pieces, event({"choices": [], "usage": usage(9)}), DONE]) == TokenUsage(9, 5)


LONG = 'a\\" \u00e9 \U0001f600' * 40_000


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [{"message": {"content": LONG}}], "usage": usage(9)},
        {"choices": [{"message": {"content": LONG}}], "usage": usage(9), "timings": {"usage": [1]}},
        {"usage": usage(9), "choices": [{"message": {"content": LONG}}]},
        {"id": "x", "usage": usage(9), "choices": [{"message": {"content": LONG}}], "model": "m"},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_usage_at_either_end_of_a_long_body_is_found(payload: object, ascii_only: bool) -> None:  # noqa: FBT001 - filled by pytest
    sent = json.dumps(payload, ensure_ascii=ascii_only).encode()

    assert len(sent) > 4 * KEPT_BYTES
    assert watched([sent], JSON) == TokenUsage(9, 5)


@pytest.mark.parametrize(
    "payload",
    [
        {"a": {"usage": usage(9)}, "content": LONG},
        {"content": LONG, "a": {"usage": usage(9)}},
        {"content": LONG, "a": [{"usage": usage(9)}]},
        {"content": LURE + LONG + LURE},
        {"content": LONG, "usage": None},
    ],
)
def test_usage_deeper_in_a_long_body_does_not_count(payload: object) -> None:
    assert watched([json.dumps(payload).encode()], JSON) is None


def test_a_response_cut_before_its_usage_tells_nothing() -> None:
    sent = json.dumps(body(usage=usage(9))).encode()

    assert watched([event(chunk("a"))]) is None
    assert watched([sent[:-5]], JSON) is None


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


ENCODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("", bytes),
    ("identity", bytes),
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
]


@pytest.mark.parametrize(("encoding", "encode"), ENCODINGS)
def test_a_compressed_response_is_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    sent = encode(event(chunk("text" * 1000, "stop")) + event({"choices": [], "usage": usage(9)}))

    assert watched([sent], STREAM, encoding) == TokenUsage(9, 5, 0, "stop")


def test_a_compressed_stream_is_read_as_far_as_it_came() -> None:
    engine = zlib.compressobj(wbits=31)
    sent = engine.compress(event({"choices": [], "usage": usage(9)})) + engine.flush(zlib.Z_SYNC_FLUSH)

    assert watched([sent], STREAM, "gzip") == TokenUsage(9, 5)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip", "deflate"])
def test_what_cannot_be_inflated_tells_nothing(encoding: str) -> None:
    assert watched([event({"choices": [], "usage": usage(9)})], STREAM, encoding) is None


def test_a_bomb_tells_nothing_and_is_not_kept() -> None:
    tap = CHAT.open_tap(STREAM, "gzip")
    bomb = gzip.compress(b"\n" * 40_000_000 + event({"choices": [], "usage": usage(9)}))
    tap.feed(bomb)

    assert tap.result() is None
    assert sys.getsizeof(tap._tail) < 4 * KEPT_BYTES


@pytest.mark.parametrize("content_type", [STREAM, JSON])
@pytest.mark.parametrize("size", [1, 1000, KEPT_BYTES, 10 * KEPT_BYTES])
def test_little_is_kept_of_a_long_response(content_type: str, size: int) -> None:
    tap = CHAT.open_tap(content_type)
    piece = b"x" * size
    for _ in range(20 * KEPT_BYTES // size):
        tap.feed(piece)

    assert sys.getsizeof(tap._head) + sys.getsizeof(tap._tail) < 4 * KEPT_BYTES


def test_nothing_tells_nothing() -> None:
    assert watched([], STREAM) is None
    assert watched([b""], JSON) is None


TEXT = st.text(max_size=8) | st.sampled_from([LURE, '"usage":', "\u00e9\U0001f600", "x" * 40_000])
TOKENS = st.integers(-1, 20)
CHUNKS = st.builds(chunk, TEXT, st.sampled_from([None, "stop", "length"]))
USAGES: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
    {"choices": st.just([]), "usage": st.none() | st.builds(usage, TOKENS, TOKENS)}
)
EVENTS = st.builds(event, CHUNKS | USAGES, st.sampled_from(["\n", "\r\n", "\r"])) | st.just(DONE)


def sliced(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


@given(
    st.lists(EVENTS, max_size=6),
    st.lists(st.integers(0, 10**6), max_size=20),
    st.sampled_from(ENCODINGS),
    st.sampled_from([STREAM, JSON]),
)
def test_the_slicing_of_a_response_does_not_matter(
    events: list[bytes], cuts: list[int], coding: tuple[str, Callable[[bytes], bytes]], content_type: str
) -> None:
    sent = coding[1](b"".join(events))

    assert watched(sliced(sent, cuts), content_type, coding[0]) == watched([sent], content_type, coding[0])


@given(st.lists(EVENTS, max_size=6))
def test_the_last_believable_usage_of_a_stream_counts(events: list[bytes]) -> None:
    told = [json.loads(each[5:]).get("usage") for each in events if each != DONE]
    valid = [each for each in told if each and min(each.values()) >= 0]
    found = watched(events)

    kept = len(b"".join(events)) <= KEPT_BYTES
    if kept:
        pair = (found.prompt_tokens, found.completion_tokens) if found else None
        assert pair == (tuple(valid[-1].values()) if valid else None)


@given(
    st.lists(st.binary(max_size=200), max_size=5),
    st.sampled_from([STREAM, JSON, "", "text/html"]),
    st.sampled_from(["", "gzip", "deflate", "br", "\u0130"]),
)
def test_no_bytes_make_it_fail(pieces: list[bytes], content_type: str, encoding: str) -> None:
    assert isinstance(watched(pieces, content_type, encoding), TokenUsage | None)


@pytest.mark.parametrize("piece", [b"[", b'{"usage":', b'{"a":', b"data: [", b'"usage":{"a":'])
@pytest.mark.parametrize("content_type", [STREAM, JSON])
def test_deep_nesting_does_not_make_it_fail(piece: bytes, content_type: str) -> None:
    for prefix in (b"", b"data: ", b'{"usage":'):
        assert watched([prefix, piece * 20_000, b"\n"], content_type) is None
