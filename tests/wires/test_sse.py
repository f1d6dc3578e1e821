"""Streams of events are split the same however they arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.wires.sse import EventSplitter, has_only_events, read_data, replace_data

STREAM = b": hi\n\ndata: 1\n\nevent: x\r\ndata: 2\r\n\r\ndata: 3\r\rdata:4\ndata: 5\n\n"
EVENTS = [b": hi\n\n", b"data: 1\n\n", b"event: x\r\ndata: 2\r\n\r\n", b"data: 3\r\r", b"data:4\ndata: 5\n\n"]


def split(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events, splitter.flush_rest()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_the_sizes_of_chunks_make_no_difference(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in pairwise(places)]
    assert split(chunks) == (EVENTS, b"")


@given(st.lists(st.binary(max_size=8) | st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"data: x"])))
def test_no_byte_is_lost_or_moved(chunks: list[bytes]) -> None:
    events, rest = split(chunks)
    assert b"".join(events) + rest == b"".join(chunks)


def test_what_follows_the_last_event_is_the_rest() -> None:
    assert split([b"data: 1\n\ndata: 2"]) == ([b"data: 1\n\n"], b"data: 2")


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"event: a\ndata: one\ndata: two\n\n", b"one\ntwo"),
        (b"event: a\r\ndata: one\r\n\r\n", b"one"),
        (b": nothing\n\n", b""),
    ],
)
def test_the_data_of_an_event_is_read_over_all_its_lines(event: bytes, data: bytes) -> None:
    assert read_data(event) == data


def test_other_data_takes_the_place_of_all_lines_of_data() -> None:
    assert replace_data(b"event: a\r\ndata: 1\r\ndata: 2\r\nid: 7\r\n\r\n", b"{}") == (
        b"event: a\r\ndata: {}\r\nid: 7\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (b': hi\n\ndata: {"type":"a"}\n\n', True),
        (b'data: {"type":"a"}\n\ndata: {"type":"c"}\n\n', False),
        (b'data: {"type":"a"}\n\ndata: {"type":"c"', True),
        (b"data: no json\n\n", False),
        (b"data: \xff\n\n", False),
        (b"data: " + b"[" * 100_000 + b"\n\n", False),
    ],
)
def test_only_whole_events_of_a_stream_s_beginning_count(seen: bytes, *, expected: bool) -> None:
    assert has_only_events(seen, frozenset({"a", "b"})) is expected
