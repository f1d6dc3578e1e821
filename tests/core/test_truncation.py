"""Telling a silent cut from everything else that makes a count low."""

import pytest

from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.silent_truncation import Answered, Verdict, infer_window, judged

TRUSTED = Calibration(0.0, 0.02, 3)
NEW = Calibration(0.0, 0.02, 2)


@pytest.mark.parametrize(
    ("now", "last", "calibration", "verdict"),
    [
        # as it should be
        (Answered(10_000, 10_000), None, TRUSTED, "whole"),
        (Answered(10_000, 6_000), None, TRUSTED, "whole"),
        # far too low a count
        (Answered(10_000, 5_999), None, TRUSTED, "low"),
        (Answered(10_000, 5_999), None, NEW, "doubtful"),
        (Answered(20_000, 2_100), Answered(4_000, 3_900), TRUSTED, "low"),
        # low, but it follows the conversation: a request of tools that we count too high
        (Answered(10_000, 5_500), Answered(9_000, 5_000), TRUSTED, "whole"),
        (Answered(10_000, 5_499), Answered(9_000, 5_000), TRUSTED, "low"),
        # the same count again
        (Answered(11_001, 9_000, 5), Answered(10_000, 9_000, 4), NEW, "low"),
        (Answered(11_000, 9_000, 5), Answered(10_000, 9_000, 4), NEW, "whole"),
        (Answered(11_001, 9_000), Answered(10_000, 9_000), NEW, "low"),
        # out of a cache of answers
        (Answered(11_001, 9_000, 5), Answered(10_000, 9_000, 5), TRUSTED, "doubtful"),
        # cached tokens left out of the count
        (Answered(10_000, 2_000, cached=8_000), None, TRUSTED, "whole"),
        # images priced too high
        (Answered(10_000, 5_000, guessed=True), None, TRUSTED, "whole"),
        # tiny
        (Answered(1_999, 300), None, TRUSTED, "whole"),
        (Answered(10_000, 199), None, TRUSTED, "whole"),
        (Answered(10_000, 0), None, TRUSTED, "whole"),
    ],
)
def test_an_answer_is_judged(
    now: Answered, last: Answered | None, calibration: Calibration, verdict: Verdict
) -> None:
    assert judged(now, last, calibration) == verdict


@pytest.mark.parametrize("window", [2_050, 4_098, 16_386])
def test_low_counts_of_requests_that_grow_show_the_window(window: int) -> None:
    low = [Answered(int(window * factor), window) for factor in (1.2, 1.4, 1.6)]
    assert [infer_window(low[:count], window) for count in range(4)] == [None, None, None, window]


@pytest.mark.parametrize(
    "low",
    [
        [Answered(9_000, 2_267)] * 8,  # the same request again
        [Answered(9_000, 2_267), Answered(9_100, 2_270), Answered(9_200, 2_280)],  # hardly larger
        [Answered(9_000, 2_267), Answered(12_000, 3_000), Answered(16_000, 4_000)],  # counts that grow
        [Answered(9_000, 2_267), Answered(40_000, 20_000), Answered(16_000, 2_300)],  # only two are alike
    ],
)
def test_other_low_counts_show_no_window(low: list[Answered]) -> None:
    assert infer_window(low, 0) is None


def test_an_inferred_window_is_never_smaller_than_what_has_been_answered() -> None:
    low = [Answered(size, 4_000) for size in (8_000, 10_000, 12_000)]
    assert infer_window(low, 6_000) == 6_000
    assert infer_window(low, 8_000) is None


def test_counts_that_vary_with_the_messages_that_were_cut_show_the_largest_of_them() -> None:
    low = [Answered(8_000, 3_800), Answered(10_000, 4_090), Answered(12_000, 3_700)]
    assert infer_window(low, 0) == 4_090


def test_a_conversation_that_fits_is_never_taken_for_cut() -> None:
    for ratio in (0.62, 0.8, 1.0, 1.4, 2.0):
        last = None
        for size in range(1_000, 100_000, 3_000):
            now = Answered(size, int(size * ratio), completion=100)
            assert judged(now, last, TRUSTED) == "whole"
            last = now
