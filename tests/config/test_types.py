"""Types of configuration values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.config.config import (
    to_plain_value,
)
from compaction_proxy.config.types import parse_duration


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:hunter2@h/0", "redis://u:********@h/0"),
        ("redis://:hun:t@er2@h", "redis://:********@h"),
        (
            "redis+sentinel://u@h/s?sentinel_password=hunter2&prefix=x",
            "redis+sentinel://u@h/s?sentinel_password=********&prefix=x",
        ),
        ("https://h:80/v1", "https://h:80/v1"),
        ("sqlite:////srv/a@b.db", "sqlite:////srv/a@b.db"),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert to_plain_value(url) == shown


@given(st.integers(1, 10**9 - 1), st.sampled_from("smhd"))
def test_a_duration_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_duration(f"{number}{unit}") == number * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
