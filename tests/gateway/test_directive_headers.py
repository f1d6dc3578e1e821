from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.compaction.directives import MAX_PINS, parse_pin
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.control_headers import PIN_HEADER, parse_pins


def sent(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"here"), *((PIN_HEADER, value) for value in values)]


def test_a_request_without_the_header_pins_nothing() -> None:
    assert parse_pins(sent()) == ()


def test_each_field_is_one_pin_commas_and_all_in_their_order() -> None:
    found = parse_pins(sent(b"Never deploy on Friday, ever.", b" Answer in German. "))
    assert found == ("Never deploy on Friday, ever.", "Answer in German.")


def test_the_same_pin_twice_is_one() -> None:
    assert parse_pins(sent(b"a", b"b", b"a")) == ("a", "b")


@pytest.mark.parametrize(
    ("value", "pin"),
    [
        (b"Gr%C3%BC%C3%9Fe", "Grüße"),
        ("Grüße".encode(), "Grüße"),
        (b"100% sure, 5%x, %", "100% sure, 5%x, %"),
        (b"50%25 off", "50% off"),
        (b"a+b", "a+b"),
    ],
)
def test_percent_encoding_is_undone_where_it_is_one(value: bytes, pin: str) -> None:
    assert parse_pins(sent(value)) == (pin,)


@pytest.mark.parametrize(
    "value",
    [b"", b"   ", b"%20", b"a%0Ab", b"a%00", b"tab\there", b"y%C2%85x", b"x%E2%80%A8y", b"\xff", b"%FF",
     b"%ED%A0%80", b"x" * 2_001],
)  # fmt: skip
def test_what_is_no_pin_is_refused_as_the_client_s_fault(value: bytes) -> None:
    with pytest.raises(RequestRefusedError, match="x-compaction-pin") as refused:
        parse_pins(sent(value))
    assert (refused.value.status, refused.value.code) == (400, "invalid_compaction_header")


def test_a_pin_is_measured_in_characters() -> None:
    assert parse_pins(sent(quote("ß" * 2_000).encode())) == ("ß" * 2_000,)


def test_more_pins_than_a_conversation_may_have_are_refused() -> None:
    assert len(parse_pins(sent(*(b"%d" % number for number in range(MAX_PINS))))) == MAX_PINS
    with pytest.raises(RequestRefusedError, match="at most 50 times"):
        parse_pins(sent(*(b"%d" % number for number in range(MAX_PINS + 1))))


@given(st.text(min_size=1, max_size=50).filter(lambda text: parse_pin(text) is not None))
def test_any_pin_can_be_sent_in_percent_encoding(text: str) -> None:
    assert parse_pins(sent(quote(text).encode())) == (text.strip(),)
