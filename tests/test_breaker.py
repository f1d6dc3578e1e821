from proxy.breaker import Breaker


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    breaker.failed(timed_out=True)
    return breaker


def test_three_failures_within_a_second_open_it() -> None:
    breaker = Breaker(Clock())
    states = []
    for _ in range(3):
        breaker.failed()
        states.append((breaker.closed, breaker.allows()))

    assert states == [(True, True), (True, True), (False, False)]


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
    assert not opened(Clock()).closed


def test_after_the_rest_one_probe_is_allowed_and_its_success_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)

    clock.time += 0.9
    assert not breaker.allows()
    clock.time += 0.1
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]


def test_each_failed_probe_doubles_the_rest_up_to_thirty_seconds() -> None:
    clock = Clock()
    breaker = opened(clock)
    rests = []
    for _ in range(7):
        start = clock.time
        while not breaker.allows():
            clock.time += 0.5
        rests.append(clock.time - start)
        breaker.failed(timed_out=True)

    assert rests == [1, 2, 4, 8, 16, 30, 30]


def test_calls_under_way_when_it_opened_do_not_prolong_the_rest() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(10):
        breaker.failed(timed_out=True)
    clock.time += 1

    assert breaker.allows()


def test_a_probe_that_is_never_answered_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.time += 1
    assert breaker.allows()
    clock.time += 1

    assert breaker.allows()
