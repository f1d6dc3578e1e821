"""What there is to spend, at the sizes that models have and at those they should not have."""

import pytest

from compaction_proxy.core.budget import Budget, Reserves, compute_budget

SEED = Reserves(system=2_000, output=4_000, safety=5_000)


@pytest.mark.parametrize(
    ("window", "asked", "expected"),
    [
        (128_000, None, Budget(128_000, usable=117_000, compaction_limit=123_000, input_limit=123_000)),
        (128_000, 2_000, Budget(128_000, usable=117_000, compaction_limit=121_000, input_limit=123_000)),
        (128_000, 16_000, Budget(128_000, usable=105_000, compaction_limit=107_000, input_limit=123_000)),
        (8_192, None, Budget(8_192, usable=6_144, compaction_limit=8_192 - 930, input_limit=8_192 - 930)),
        (8_192, 4_096, Budget(8_192, usable=6_144, compaction_limit=6_144, input_limit=8_192 - 930)),
        (8_192, 10**9, Budget(8_192, usable=6_144, compaction_limit=6_144, input_limit=8_192 - 930)),
        (0, None, Budget(0, usable=0, compaction_limit=0, input_limit=0)),
    ],
)
def test_reserves_shrink_in_proportion_to_a_quarter_of_the_window(
    window: int, asked: int | None, expected: Budget
) -> None:
    assert compute_budget(window, SEED, asked) == expected


def test_without_reserves_all_is_usable() -> None:
    assert compute_budget(1_000, Reserves(0, 0, 0), None) == Budget(
        1_000, usable=1_000, compaction_limit=1_000, input_limit=1_000
    )


def test_output_asked_for_takes_a_quarter_of_the_limit_at_most_and_nothing_of_the_input_limit() -> None:
    for asked in (1_000, 8_000, 32_000, 10**9):
        spent = compute_budget(28_000, SEED, asked)
        assert spent.compaction_limit >= 21_000
        assert spent.input_limit == compute_budget(28_000, SEED, None).input_limit


@pytest.mark.parametrize(("asked", "least", "limit"), [(None, 0, 0), (500, 500, 500), (32_000, 1_024, 1_280)])
def test_an_upstream_that_adds_output_leaves_room_for_the_least(
    asked: int | None, least: int, limit: int
) -> None:
    spent = compute_budget(24_000, Reserves(0, 0, 0), asked, adds_output=True)
    assert (spent.prompt_limit, spent.input_limit) == (24_000 - least, 24_000 - limit)


def test_rounds_make_room_for_output_up_to_a_quarter_of_the_window() -> None:
    limits = [
        compute_budget(24_000, Reserves(0, 0, 0), asked, adds_output=True).output_compaction_limit
        for asked in (2_000, 16_000)
    ]
    assert limits == [22_000, 18_000]
    assert compute_budget(24_000, Reserves(0, 0, 0), 2_000).output_compaction_limit is None
