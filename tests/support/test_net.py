"""A host with an optional port, as headers name it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.support.net import parse_authority


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("example.com", ("example.com", 443)),
        ("Example.COM:8080", ("example.com", 8080)),
        ("example.com.", ("example.com", 443)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:4000", ("::1", 4000)),
        ("[::1]", ("::1", 443)),
    ],
)
def test_a_host_is_read_with_its_port_or_the_default(value: str, expected: tuple[str, int]) -> None:
    assert parse_authority(value, 443) == expected


def test_without_a_default_a_missing_port_is_none() -> None:
    assert parse_authority("example.com") == ("example.com", None)


@pytest.mark.parametrize(
    "value", ["", ".", ".:80", ":80", "a/b", "user@host", "host:port", "host:70000", "[::1", "a?b", "a#b"]
)
def test_any_other_form_is_refused(value: str) -> None:
    assert parse_authority(value) is None


@given(st.text() | st.text(st.characters(max_codepoint=127)))
def test_any_text_is_read_or_refused(value: str) -> None:
    found = parse_authority(value)
    assert found is None or (found[0] and "@" not in found[0])
