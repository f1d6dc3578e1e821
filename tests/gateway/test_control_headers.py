"""What clients ask for in headers, and what is refused of it."""

import pytest

from compaction_proxy.compaction.types import CompactionMode
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.control_headers import ControlHeaders, parse_control_headers


def test_a_request_without_headers_of_ours_asks_for_nothing() -> None:
    assert parse_control_headers([(b"authorization", b"Bearer x")]) == ControlHeaders()
    assert not ControlHeaders(patience_s=60.0).has_overrides


def test_wishes_are_read_whatever_their_case() -> None:
    headers = [(b"x-compaction", b" Force "), (b"x-compaction-trigger-tokens", b"050000")]
    assert parse_control_headers(headers) == ControlHeaders(mode=CompactionMode.FORCE, trigger_tokens=50_000)


def test_the_patience_of_a_client_is_the_timeout_that_its_sdk_declares() -> None:
    assert (
        parse_control_headers(
            [(b"x-stainless-timeout", b"600"), (b"x-stainless-read-timeout", b"30")]
        ).patience_s
        == 30.0
    )
    assert (
        parse_control_headers(
            [(b"x-stainless-read-timeout", b"none"), (b"x-stainless-timeout", b"600")]
        ).patience_s
        == 600.0
    )
    assert parse_control_headers([(b"x-stainless-timeout", b"nan")]).patience_s is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (b"x-compaction", b"please"),
        (b"x-compaction-strategy", b"magic"),
        (b"x-compaction-trigger-tokens", b"0"),
        (b"x-compaction-trigger-tokens", b"-5"),
        (b"x-compaction-trigger-tokens", b"5e3"),
        (b"x-compaction-trigger-tokens", "५".encode()),
        (b"x-compaction-trigger-tokens", b"9" * 5_000),  # more digits than Python turns into a number
    ],
)
def test_a_wish_that_makes_no_sense_is_the_clients_to_mend(name: bytes, told: bytes) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        parse_control_headers([(name, told)])
    assert (refused.value.status, refused.value.code) == (400, "invalid_compaction_header")
