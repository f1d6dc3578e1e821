"""A store that fails for hours is told of once a minute, and nothing that was left out is lost count of."""

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.resilient import REPEAT_AFTER_S, RateLimitedReporter, ReportThrottle


def test_the_first_of_each_reason_is_told_at_once_and_the_rest_once_a_minute_with_their_number() -> None:
    time, told = [0.5], []
    throttled = RateLimitedReporter(
        lambda error, suppressed: told.append((time[0], error.reason, suppressed)), clock=lambda: time[0]
    )
    for _ in range(1_200):  # ten a second for two minutes
        throttled(StoreUnavailableError("store-full"))
        if time[0] < 1.0:
            throttled(StoreUnavailableError("store-resting"))
        time[0] = round(time[0] + 0.1, 1)

    assert told == [(0.5, "store-full", 0), (0.5, "store-resting", 0), (60.5, "store-full", 599)]


def test_a_throttle_remembers_a_bounded_number_of_keys() -> None:
    time = [1.0]
    throttle = ReportThrottle[int](max_keys=2, clock=lambda: time[0])
    assert [throttle.admit_report(key) for key in (1, 1, 1, 2, 2, 3)] == [0, None, None, 0, None, 0]
    assert throttle.admit_report(2) is None  # still remembered
    assert throttle.admit_report(1) == 0  # forgotten: reported at once
    time[0] += REPEAT_AFTER_S
    assert [throttle.admit_report(key) for key in (3, 3)] == [0, None]
