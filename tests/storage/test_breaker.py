from compaction_proxy.support.circuit_breaker import Breaker


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_three_failures_within_a_second_open_it() -> None:
    breaker = Breaker(Clock())
    states = []
    for _ in range(3):
        breaker.failed()
        states.append(breaker.closed)

    assert states == [True, True, False]


def test_failures_spread_over_time_do_not_open_it() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(10):
        breaker.failed()
        clock.time += 0.6

    assert breaker.closed


def test_a_success_forgets_failures() -> None:
    breaker = Breaker(Clock())
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()

    assert breaker.closed


def test_one_timeout_opens_it() -> None:
    breaker = Breaker(Clock())
    breaker.failed(timed_out=True)

    assert not breaker.closed


def test_it_stays_open_until_something_succeeds() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed(timed_out=True)
    clock.time += 1000
    breaker.failed()

    assert not breaker.closed
    breaker.succeeded()
    assert breaker.closed
