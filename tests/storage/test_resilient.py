from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.resilient import ResilientStore


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
async def store() -> AsyncIterator[ResilientStore]:
    """A store that is probed so seldom that no probe is made in a test."""
    made = ResilientStore(MemoryStore(), clock=Clock(), deadline_s=0.01, probe_every_s=1_000)
    yield made
    await made.close()


async def answer() -> None:
    pass


async def fail() -> None:
    raise OSError("gone")


async def hang() -> None:
    raise TimeoutError


async def call_failing(store: ResilientStore, call: Callable[[], Coroutine[Any, Any, None]] = fail) -> None:
    with pytest.raises(StoreUnavailableError):
        await store.run_call(call)


def advance(store: ResilientStore, seconds: float) -> None:
    clock = store._clock
    assert isinstance(clock, Clock)
    clock.time += seconds


async def test_three_failures_within_a_second_open_it(store: ResilientStore) -> None:
    states = []
    for _ in range(3):
        await call_failing(store)
        states.append(store.is_in_use)

    assert states == [True, True, False]


async def test_failures_spread_over_time_do_not_open_it(store: ResilientStore) -> None:
    for _ in range(10):
        await call_failing(store)
        advance(store, 0.6)

    assert store.is_in_use


async def test_a_success_forgets_failures(store: ResilientStore) -> None:
    await call_failing(store)
    await call_failing(store)
    await store.run_call(answer)
    await call_failing(store)

    assert store.is_in_use


async def test_a_refusal_to_write_shows_that_the_store_answers_again(store: ResilientStore) -> None:
    async def refuse() -> None:
        raise StoreUnavailableError("store-full")

    await call_failing(store)
    await call_failing(store)
    states = [store.is_reachable]
    await call_failing(store, refuse)
    states.append(store.is_reachable)
    await call_failing(store)

    assert (states, store.is_in_use) == ([False, True], True)


async def test_one_timeout_opens_it(store: ResilientStore) -> None:
    await call_failing(store, hang)

    assert not store.is_in_use


async def test_it_stays_open_until_a_probe_succeeds() -> None:
    probed = ResilientStore(MemoryStore(), clock=Clock(), probe_every_s=0.01)
    await call_failing(probed, hang)
    advance(probed, 1_000)
    await call_failing(probed)

    assert not probed.is_in_use
    probe = probed._probe
    assert probe is not None
    await probe
    assert probed.is_in_use
