"""What is read of the bytes of a response, what is refused, and whether the connection serves again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.gateway.client.parser import (
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_LINE_BYTES,
    ResponseParser,
)
from tests.gateway.client.test_response import CHUNKED, HEAD, REFUSED, WHOLE


def expecting(*, is_bodiless: bool = False) -> ResponseParser:
    parser = ResponseParser()
    parser.expect_response(is_bodiless=is_bodiless)
    return parser


def feed(parser: ResponseParser, *pieces: bytes) -> list[bool]:
    return [parser.feed_data(memoryview(piece)) for piece in pieces]


@given(name=st.sampled_from(sorted(WHOLE)), data=st.data())
def test_however_an_answer_is_sliced_its_parts_are_the_same(name: str, data: st.DataObject) -> None:
    whole, body, connections = WHOLE[name]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    parser = expecting()
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        assert parser.feed_data(memoryview(whole[start:stop]))
    assert (parser.status, b"".join(parser.body), parser.is_complete) == (200, body, True)
    assert parser.is_reusable is (connections == 1)


def test_the_head_is_read_with_names_in_lower_case_and_fields_in_order() -> None:
    parser = expecting()
    assert feed(parser, b"HTTP/1.1 418 I'm a teapot\r\nB: 1\r\nX-a: 2\r\nb: 3\r\n") == [True]
    assert not parser.has_head
    assert feed(parser, b"content-length: 1\r\n\r\n") == [True]
    assert (parser.has_head, parser.status, parser.reason) == (True, 418, b"I'm a teapot")
    assert parser.headers == [(b"b", b"1"), (b"x-a", b"2"), (b"b", b"3"), (b"content-length", b"1")]
    assert not parser.is_complete


@pytest.mark.parametrize("name", ["connection", "content-length", "upgrade"])
def test_white_space_after_a_name_is_no_part_of_it(name: str) -> None:
    parser = ResponseParser()
    feed(parser, f"HTTP/1.1 200 OK\r\n{name} : 0\r\n\r\n".encode())
    assert parser.headers == [(name.encode(), b"0")]


def test_trailers_are_no_fields_of_the_head() -> None:
    parser = expecting()
    assert feed(parser, CHUNKED, b"2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n") == [True, True]
    assert (parser.headers, parser.is_complete) == ([(b"transfer-encoding", b"chunked")], True)


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_no_response_or_out_of_bounds_is_refused(data: bytes) -> None:
    assert feed(expecting(), data) == [False]


def test_a_head_at_its_bounds_is_taken_and_one_beyond_them_is_not() -> None:
    end = b"content-length: 0\r\n\r\n"
    for count, is_taken in ((MAX_FIELDS - 1, True), (MAX_FIELDS, False)):
        assert feed(expecting(), HEAD + b"a: b\r\n" * count + end) == [is_taken]
    for size, is_taken in ((MAX_LINE_BYTES - 1, True), (MAX_LINE_BYTES, False)):
        assert feed(expecting(), HEAD + b"a: " + b"b" * size + b"\r\n" + end) == [is_taken]


def test_bytes_without_any_body_are_bounded_and_a_body_is_not() -> None:
    extension = b"2;" + b"x" * 999
    parser = expecting()
    assert feed(parser, CHUNKED)[0]
    for _ in range(2 * MAX_FRAMING_BYTES // len(extension)):  # each of them brings data
        assert feed(parser, extension + b"\r\nok\r\n") == [True]
        parser.body.clear()
    assert False in feed(parser, b"2;", *[b"x" * 1_000] * (MAX_FRAMING_BYTES // 1_000 + 1))


def test_bytes_after_the_end_are_refused_and_what_came_before_stays() -> None:
    parser = expecting()
    whole = HEAD + b"content-length: 2\r\n\r\nok"
    assert feed(parser, whole, whole) == [True, False]
    assert (parser.is_complete, b"".join(parser.body)) == (True, b"ok")


def test_a_response_to_head_ends_with_its_head_and_no_body_may_follow() -> None:
    head = HEAD + b"content-length: 2\r\n\r\n"
    parser = expecting(is_bodiless=True)
    assert feed(parser, head) == [True]
    assert (parser.is_complete, parser.is_reusable) == (True, True)

    parser = expecting(is_bodiless=True)
    assert feed(parser, head + b"ok") == [False]
    assert parser.body == []


def test_after_a_switch_of_protocols_the_connection_serves_no_other_request() -> None:
    parser = expecting()
    feed(parser, b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
    assert (parser.status, parser.is_complete, parser.is_reusable) == (101, True, False)


def test_one_parser_reads_the_responses_of_a_connection_one_after_the_other() -> None:
    parser, seen = ResponseParser(), []
    for number in range(3):
        parser.expect_response(is_bodiless=False)
        assert not parser.has_head
        assert feed(parser, HEAD + b"content-length: 1\r\n\r\n%d" % number) == [True]
        seen.append((parser.is_complete, parser.body.pop()))
    assert seen == [(True, b"0"), (True, b"1"), (True, b"2")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"", True),
        (b"content-length: 2\r\n", False),
        (b"transfer-encoding: gzip, Chunked\r\n", False),
        (b"transfer-encoding: chunked, gzip\r\n", True),
    ],
)
def test_a_body_without_a_declared_end_lasts_until_the_connection_closes(
    fields: bytes,
    expected: bool,  # noqa: FBT001 - a case of the table
) -> None:
    parser = expecting()
    feed(parser, HEAD + fields + b"\r\n")
    assert (parser.has_head, parser.is_delimited_by_close()) == (True, expected)
