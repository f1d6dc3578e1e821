import pytest

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.headers import (
    get_content_length,
    refuse_loop,
    to_client_headers,
    to_upstream_headers,
)

HOP = "0123456789abcdef"
MARK = (b"x-compaction-hop", HOP.encode())

HOP_BY_HOP = [
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
]


JSON = (b"content-type", b"application/json")


def return_fields(status: int, fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What goes back of the fields of an answer that is no page for browsers."""
    if any(name == b"content-type" for name, _ in fields):
        return list(to_client_headers(status, fields))
    return [field for field in to_client_headers(status, [*fields, JSON]) if field != JSON]


@pytest.mark.parametrize(
    ("kind", "isolated"),
    [
        (b"application/json; charset=utf-8", False),
        (b"Text/Event-Stream", False),
        (b"text/plain", False),
        (b"audio/mpeg", False),
        (b" text/HTML", True),
        (b"image/svg+xml", True),
        (b"application/xhtml+xml", True),
        (b"junk", True),
        (b"", True),
        (None, True),
        (b"application/jsonx", True),
        (b"application/json, text/html", True),
        (b"text/event-stream;charset=utf-8, text/html", True),
        (b"audio/mpeg, text/html", True),
    ],
)
def test_a_page_of_the_upstream_is_isolated_from_the_dashboard(kind: bytes | None, *, isolated: bool) -> None:
    fields = [] if kind is None else [(b"content-type", kind)]
    assert ((b"content-security-policy", b"sandbox") in to_client_headers(200, fields)) == isolated
    assert (b"content-security-policy", b"sandbox") not in to_client_headers(204, [])


def test_a_page_with_several_content_types_is_isolated() -> None:
    fields = [(b"content-type", b"application/json"), (b"content-type", b"text/html")]
    assert (b"content-security-policy", b"sandbox") in to_client_headers(200, fields)


@pytest.mark.parametrize("name", [*HOP_BY_HOP, b"host", b"content-length", b"expect"])
def test_fields_of_this_connection_do_not_go_upstream(name: bytes) -> None:
    assert to_upstream_headers([(name, b"x"), (b"accept", b"*/*")], api_key="", hop_mark=HOP) == [
        (b"accept", b"*/*"),
        MARK,
    ]


@pytest.mark.parametrize("name", [*HOP_BY_HOP, b"server", b"date"])
def test_fields_of_the_upstream_connection_do_not_go_back(name: bytes) -> None:
    assert return_fields(200, [(name, b"x"), (b"x-request-id", b"1")]) == [(b"x-request-id", b"1")]


def test_fields_named_in_connection_end_here() -> None:
    fields = [(b"connection", b"close, X-Secret ,x-b"), (b"x-secret", b"1"), (b"x-b", b"2"), (b"x-c", b"3")]
    assert to_upstream_headers(fields, api_key="", hop_mark=HOP) == [(b"x-c", b"3"), MARK]
    assert return_fields(200, [(b"connection", b"X-Secret"), (b"x-secret", b"1"), (b"x-c", b"3")]) == [
        (b"x-c", b"3")
    ]


def test_our_own_fields_end_here_and_session_fields_go_on() -> None:
    fields = [
        (b"x-compaction", b"force"),
        (b"x-compaction-pin", b"1"),
        (b"x-session-id", b"s"),
        (b"cookie", b"a=b"),
    ]
    assert to_upstream_headers(fields, api_key="", hop_mark=HOP) == [
        (b"x-session-id", b"s"),
        (b"cookie", b"a=b"),
        MARK,
    ]


def test_the_proxys_own_key_replaces_every_credential() -> None:
    fields = [
        (b"authorization", b"Bearer theirs"),
        (b"api-key", b"theirs"),
        (b"x-api-key", b"theirs"),
        (b"x-goog-api-key", b"theirs"),
        (b"openai-organization", b"org"),
    ]
    assert to_upstream_headers(fields, api_key="ours", hop_mark=HOP) == [
        (b"openai-organization", b"org"),
        (b"authorization", b"Bearer ours"),
        MARK,
    ]
    assert to_upstream_headers(fields, api_key="", hop_mark=HOP) == [*fields, MARK]


@pytest.mark.parametrize("name", [b"api-key", b"x-api-key", b"x-goog-api-key"])
def test_the_proxys_own_key_takes_the_form_of_the_clients(name: bytes) -> None:
    assert to_upstream_headers([(name, b"theirs")], api_key="ours", hop_mark=HOP) == [(name, b"ours"), MARK]


def test_duplicates_keep_their_order() -> None:
    fields = [(b"set-cookie", b"a=1"), (b"x", b"1"), (b"set-cookie", b"b=2"), (b"content-encoding", b"gzip")]
    assert return_fields(200, fields) == fields


def test_content_length_goes_back_unless_no_body_may_follow() -> None:
    assert return_fields(200, [(b"content-length", b"5")]) == [(b"content-length", b"5")]
    for status in (204, 304):
        assert return_fields(status, [(b"content-length", b"5"), (b"etag", b"e")]) == [(b"etag", b"e")]


def test_fields_of_an_upstream_that_look_like_ours_do_not_go_back() -> None:
    fields = [(b"x-compaction-status", b"applied"), (b"x-compaction", b"1"), (b"not-x-compaction", b"2")]
    assert return_fields(200, fields) == [(b"not-x-compaction", b"2")]


def test_a_request_that_was_here_before_is_refused() -> None:
    with pytest.raises(RequestRefusedError) as refusal:
        refuse_loop([(b"x-compaction-hop", b"f" * 16), MARK], HOP)
    assert (refusal.value.status, refusal.value.code) == (508, "loop_detected")


def test_a_request_through_another_installation_passes_and_keeps_its_mark() -> None:
    other = (b"x-compaction-hop", b"f" * 16)
    refuse_loop([other], HOP)
    assert to_upstream_headers([other], api_key="", hop_mark=HOP) == [other, MARK]


@pytest.mark.parametrize(("declared", "expected"), [(b"12", 12), (b"x", None), (b"-1", None), (b"", None)])
def test_a_declared_length_is_a_number_or_nothing(declared: bytes, expected: int | None) -> None:
    assert get_content_length([(b"content-length", declared)]) == expected


def test_a_field_that_no_server_could_send_is_left_out() -> None:
    fields = [(b"x-a", b"a\x01b"), (b"x-b", b"a\r\nx-c: d"), (b"x-d", b"tab\tstays")]
    assert return_fields(200, fields) == [(b"x-d", b"tab\tstays")]


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ([(b"content-type", b"text/event-stream; charset=utf-8")], [(b"x-accel-buffering", b"no")]),
        ([(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"yes")], []),
        ([(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"")], []),
        ([(b"content-type", b"application/json")], []),
    ],
)
def test_whoever_stands_before_us_is_asked_to_hand_streams_on(
    fields: list[tuple[bytes, bytes]], added: list[tuple[bytes, bytes]]
) -> None:
    assert return_fields(200, fields) == [*fields, *added]
