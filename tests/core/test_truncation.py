"""Telling a silent cut from everything else that makes a count low."""

import pytest

from proxy.core.calibration import Calibration
from proxy.core.truncation import Answered, Verdict, judged

TRUSTED = Calibration(0.0, 0.02, 3)
NEW = Calibration(0.0, 0.02, 2)


@pytest.mark.parametrize(
    ("now", "last", "calibration", "verdict"),
    [
        # as it should be
        (Answered(10_000, 10_000), None, TRUSTED, "whole"),
        (Answered(10_000, 6_000), None, TRUSTED, "whole"),
        # far too low a count
        (Answered(10_000, 5_999), None, TRUSTED, "truncated"),
        (Answered(10_000, 5_999), None, NEW, "doubtful"),
        (Answered(20_000, 2_100), Answered(4_000, 3_900), TRUSTED, "truncated"),
        # low, but it follows the conversation: a request of tools that we count too high
        (Answered(10_000, 5_500), Answered(9_000, 5_000), TRUSTED, "whole"),
        (Answered(10_000, 5_499), Answered(9_000, 5_000), TRUSTED, "truncated"),
        # the same count again
        (Answered(11_001, 9_000, 5), Answered(10_000, 9_000, 4), NEW, "truncated"),
        (Answered(11_000, 9_000, 5), Answered(10_000, 9_000, 4), NEW, "whole"),
        (Answered(11_001, 9_000), Answered(10_000, 9_000), NEW, "truncated"),
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
def test_a_conversation_that_outgrows_an_upstream_in_silence_is_noticed_by_its_second_cut_answer(
    window: int,
) -> None:
    answers = [Answered(size, min(size, window), completion=size) for size in range(1_000, 60_000, 2_000)]
    cut = next(index for index, answer in enumerate(answers) if answer.prompt == window)
    verdicts = [judged(now, last, NEW) for last, now in zip([None, *answers], answers, strict=False)]
    assert "truncated" not in verdicts[:cut]
    assert verdicts[cut + 1] == "truncated"


@pytest.mark.parametrize(
    ("most", "verdict"), [(4_800, "truncated"), (4_801, "doubtful"), (16_000, "doubtful")]
)
def test_an_upstream_that_has_read_far_more_does_not_cut_at_less(most: int, verdict: Verdict) -> None:
    assert judged(Answered(5_324, 2_400), None, TRUSTED, most) == verdict


def test_a_conversation_that_fits_is_never_taken_for_cut() -> None:
    for ratio in (0.62, 0.8, 1.0, 1.4, 2.0):
        last = None
        for size in range(1_000, 100_000, 3_000):
            now = Answered(size, int(size * ratio), completion=100)
            assert judged(now, last, TRUSTED) == "whole"
            last = now
