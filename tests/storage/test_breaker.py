from compaction_proxy.support.circuit_breaker import CircuitBreaker


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_three_failures_within_a_second_open_it() -> None:
    breaker = CircuitBreaker(Clock())
    states = []
    for _ in range(3):
        breaker.record_failure()
        states.append(breaker.is_closed)

    assert states == [True, True, False]


def test_failures_spread_over_time_do_not_open_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(10):
        breaker.record_failure()
        clock.time += 0.6

    assert breaker.is_closed


def test_a_success_forgets_failures() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.record_failure()
    breaker.record_failure()
    breaker.record_success()
    breaker.record_failure()

    assert breaker.is_closed


def test_one_timeout_opens_it() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.record_failure(timed_out=True)

    assert not breaker.is_closed


def test_it_stays_open_until_something_succeeds() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.record_failure(timed_out=True)
    clock.time += 1000
    breaker.record_failure()

    assert not breaker.is_closed
    breaker.record_success()
    assert breaker.is_closed
