"""Telling a silent cut from everything else that makes a count low."""

import pytest

from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.silent_truncation import AnsweredRequest, Verdict, infer_window, judge_answer

TRUSTED = Calibration(0.0, 0.02, 3)
NEW = Calibration(0.0, 0.02, 2)


@pytest.mark.parametrize(
    ("now", "last", "calibration", "verdict"),
    [
        # as it should be
        (AnsweredRequest(10_000, 10_000), None, TRUSTED, "whole"),
        (AnsweredRequest(10_000, 6_000), None, TRUSTED, "whole"),
        # far too low a count
        (AnsweredRequest(10_000, 5_999), None, TRUSTED, "low"),
        (AnsweredRequest(10_000, 5_999), None, NEW, "doubtful"),
        (AnsweredRequest(20_000, 2_100), AnsweredRequest(4_000, 3_900), TRUSTED, "low"),
        # low, but it follows the conversation: a request of tools that we count too high
        (AnsweredRequest(10_000, 5_500), AnsweredRequest(9_000, 5_000), TRUSTED, "whole"),
        (AnsweredRequest(10_000, 5_499), AnsweredRequest(9_000, 5_000), TRUSTED, "low"),
        # the same count again
        (AnsweredRequest(11_001, 9_000, 5), AnsweredRequest(10_000, 9_000, 4), NEW, "low"),
        (AnsweredRequest(11_000, 9_000, 5), AnsweredRequest(10_000, 9_000, 4), NEW, "whole"),
        (AnsweredRequest(11_001, 9_000), AnsweredRequest(10_000, 9_000), NEW, "low"),
        # out of a cache of answers
        (AnsweredRequest(11_001, 9_000, 5), AnsweredRequest(10_000, 9_000, 5), TRUSTED, "doubtful"),
        # cached tokens left out of the count
        (AnsweredRequest(10_000, 2_000, cached=8_000), None, TRUSTED, "whole"),
        # images priced too high
        (AnsweredRequest(10_000, 5_000, has_media=True), None, TRUSTED, "whole"),
        # tiny
        (AnsweredRequest(1_999, 300), None, TRUSTED, "whole"),
        (AnsweredRequest(10_000, 199), None, TRUSTED, "whole"),
        (AnsweredRequest(10_000, 0), None, TRUSTED, "whole"),
    ],
)
def test_an_answer_is_judged(
    now: AnsweredRequest, last: AnsweredRequest | None, calibration: Calibration, verdict: Verdict
) -> None:
    assert judge_answer(now, last, calibration) == verdict


@pytest.mark.parametrize("window", [2_050, 4_098, 16_386])
def test_low_counts_of_requests_that_grow_show_the_window(window: int) -> None:
    low = [AnsweredRequest(int(window * factor), window) for factor in (1.2, 1.4, 1.6)]
    assert [infer_window(low[:count], window) for count in range(4)] == [None, None, None, window]


@pytest.mark.parametrize(
    "low",
    [
        [AnsweredRequest(9_000, 2_267)] * 8,  # the same request again
        [
            AnsweredRequest(9_000, 2_267),
            AnsweredRequest(9_100, 2_270),
            AnsweredRequest(9_200, 2_280),
        ],  # hardly larger
        [
            AnsweredRequest(9_000, 2_267),
            AnsweredRequest(12_000, 3_000),
            AnsweredRequest(16_000, 4_000),
        ],  # counts that grow
        [
            AnsweredRequest(9_000, 2_267),
            AnsweredRequest(40_000, 20_000),
            AnsweredRequest(16_000, 2_300),
        ],  # only two are alike
    ],
)
def test_other_low_counts_show_no_window(low: list[AnsweredRequest]) -> None:
    assert infer_window(low, 0) is None


def test_an_inferred_window_is_never_smaller_than_what_has_been_answered() -> None:
    low = [AnsweredRequest(size, 4_000) for size in (8_000, 10_000, 12_000)]
    assert infer_window(low, 6_000) == 6_000
    assert infer_window(low, 8_000) is None


def test_counts_that_vary_with_the_messages_that_were_cut_show_the_largest_of_them() -> None:
    low = [AnsweredRequest(8_000, 3_800), AnsweredRequest(10_000, 4_090), AnsweredRequest(12_000, 3_700)]
    assert infer_window(low, 0) == 4_090


def test_a_conversation_that_fits_is_never_taken_for_cut() -> None:
    for ratio in (0.62, 0.8, 1.0, 1.4, 2.0):
        last = None
        for size in range(1_000, 100_000, 3_000):
            now = AnsweredRequest(size, int(size * ratio), completion=100)
            assert judge_answer(now, last, TRUSTED) == "whole"
            last = now
