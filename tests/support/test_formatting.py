"""Figures as people read them."""

import pytest

from compaction_proxy.core.upstream_failure import CAUSES
from compaction_proxy.support import formatting
from compaction_proxy.support.formatting import MINUS


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "n/a"),
        (0.0, "$0.00"),
        (12.406, "$12.41"),
        (0.011, "$0.01"),
        (0.0031, "$0.0031"),
        (1e-9, "<$0.0001"),
        (-0.2, f"{MINUS}$0.20"),
        (1_234.5, "$1,234.50"),
    ],
)
def test_dollars_that_are_not_known_are_never_nothing(value: float | None, told: str) -> None:
    assert formatting.format_usd(value) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "n/a"),
        (0, "0"),
        (950, "950"),
        (4_100, "4.1k"),
        (32_000, "32k"),
        (312_345, "312k"),
        (999_400, "999k"),
        (999_960, "1M"),
        (999_960_000, "1G"),
        (4_100_000, "4.1M"),
        (-2_500, f"{MINUS}2.5k"),
    ],
)
def test_large_numbers_are_short(value: float | None, told: str) -> None:
    assert formatting.format_short_number(value) == told


def test_shares_times_and_reasons() -> None:
    assert [
        formatting.format_percent(1, 3),
        formatting.format_percent(1, 0),
        formatting.format_percent(None, 3),
    ] == [
        "33 %",
        "n/a",
        "n/a",
    ]
    assert [formatting.format_age(at, 100_000.0) for at in (None, 99_998.0, 99_700.0, 90_000.0, 1.0)] == [
        "n/a",
        "2 s ago",
        "5 min ago",
        "3 h ago",
        "1 d ago",
    ]
    assert [formatting.format_iso_time(1e300), formatting.format_display_time(None)] == [
        "9999-12-31T23:59:59Z",
        "n/a",
    ]
    assert formatting.describe_reason("timeout") == "the summary model took too long (timeout)"
    assert (
        formatting.describe_reason("http-503")
        == "the provider of the summary model returned an error (http-503)"
    )
    assert [formatting.describe_due_reasons("percent,http-503"), formatting.describe_due_reasons("")] == [
        "trigger reached, http 503",
        "n/a",
    ]
    assert [formatting.format_price_per_million(each) for each in (None, 2.5, 0.025, 10.0, 0.0)] == [
        "n/a",
        "$2.50",
        "$0.025",
        "$10.00",
        "$0.00",
    ]
    assert formatting.describe_reason("of-another-version") == "of another version"


def test_every_cause_of_an_upstream_failure_is_explained() -> None:
    assert formatting.UPSTREAM_CAUSE_TEXTS.keys() == CAUSES
    assert formatting.describe_upstream_cause("http-503") == "upstream answered 503"
    assert [formatting.describe_upstream_cause(each) for each in ("of-another-version", "")] == [
        "of another version",
        "n/a",
    ]


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 rounds"), (1, "1 round"), (1.2, "1 round"), (1.6, "2 rounds"), (1_200, "1,200 rounds")],
)
def test_one_is_not_many(count: float, told: str) -> None:
    assert formatting.format_quantity(count, "round") == told


@pytest.mark.parametrize(
    ("size", "most", "text"),
    [
        (None, 900, ""),
        (1_234, None, ", 1,234 bytes"),
        (1_234, 9_000.5, ", 1,234 bytes; up to 9,000 need no compaction"),
        (1_234, 900, ", 1,234 bytes"),  # the limit was another one when the request came
    ],
)
def test_a_small_request_is_shown_with_what_it_was_compared_with(
    size: int | None, most: float | None, text: str
) -> None:
    assert formatting.describe_status("none", "small", size, most) == f"not inspected (small){text}"


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((2, 2, 0), "all requests failed"),
        ((2, 2, 9), "all requests failed"),
        ((2, 1, 0), "the provider has not reported token counts (usage)"),
        ((0, 0, 0), "the provider has not reported token counts (usage)"),
        ((2, 0, 9), "the prices of all used models are unknown; set `models.*.prices` in config.yaml"),
    ],
)
def test_dollars_are_missing_for_a_reason(counts: tuple[int, int, int], reason: str) -> None:
    assert formatting.describe_missing_dollars(*counts, list_prices=True) == reason
