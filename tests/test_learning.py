"""What an upstream has taught outlives the process, and nothing of it is lost on the way."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy import learning as module
from proxy.adapters.memory_store import MemoryStore
from proxy.errors import StoreUnavailable
from proxy.learning import BELIEVED_S, LOOK_EVERY_S, LOOKS_AT_ONCE, Learning
from proxy.ports import Store
from proxy.storage.records import Records

TENANT = "t"
ORIGIN, MODEL = "https://up.test:443", "some-model"


def ignored(_: StoreUnavailable) -> None:
    """A memory store does not fail."""


class Slow(MemoryStore):
    """A store whose first read ends after its others."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.late = asyncio.Event()

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        values = await super().read(keys)
        if not self.asked.is_set():
            self.asked.set()
            await self.late.wait()
        return values


async def test_a_window_named_by_an_error_is_believed_for_a_day_and_after_a_restart() -> None:
    now = [0.0]
    records = Records(MemoryStore(), ignored)
    learning = Learning(records, lambda: now[0])
    await learning.overflowed(TENANT, ORIGIN, MODEL, 9_000)
    await learning.overflowed(TENANT, ORIGIN, MODEL, 12_000)  # an error about a larger one changes nothing
    assert (await Learning(records, lambda: 0.0).of(TENANT, ORIGIN, MODEL)).window == 9_000
    now[0] = BELIEVED_S
    assert learning.window(TENANT, ORIGIN, MODEL) is None


async def test_what_was_learned_while_the_store_was_asked_is_not_lost() -> None:
    store = Slow()
    learning = Learning(Records(store, ignored))
    slow = asyncio.create_task(learning.of(TENANT, ORIGIN, MODEL))
    await store.asked.wait()
    await learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    store.late.set()
    assert (await slow).calibration.observations == 1


async def test_no_more_models_are_remembered_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    learning = Learning(Records(MemoryStore(), ignored))
    for name in ("one", "two", "three"):
        await learning.observed(TENANT, ORIGIN, name, 1_000, 1_500)
    assert [learning.calibration(TENANT, ORIGIN, name).observations for name in ("one", "two", "three")] == [
        0,
        1,
        1,
    ]
    assert len(learning._kept) == 2


class Replica:
    """What one of several replicas on a store knows, on a clock that the test sets."""

    def __init__(self, store: Store) -> None:
        self.time = 1_000.0
        self.learning = Learning(Records(store, ignored), clock=lambda: self.time)

    async def look_again(self) -> None:
        """Let a request come by when it is time to look, and wait for what it begins."""
        self.time += LOOK_EVERY_S
        self.learning.window(TENANT, ORIGIN, MODEL)
        while self.learning._looking:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)

    async def known(self) -> tuple[int | None, int]:
        """The window, and the number of observations."""
        learned = await self.learning.of(TENANT, ORIGIN, MODEL)
        return learned.window, learned.calibration.observations


async def test_what_one_replica_learns_reaches_another_while_it_runs() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert await other.known() == (None, 0)
    await one.learning.overflowed(TENANT, ORIGIN, MODEL, 9_000)
    await one.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    other.time += LOOK_EVERY_S - 1
    assert await other.known() == (None, 0)
    await other.look_again()
    assert await other.known() == (9_000, 1)
    assert other.learning.calibration(TENANT, ORIGIN, MODEL).ratio == pytest.approx(1.3)


async def test_a_model_that_a_process_has_not_seen_is_looked_up_behind_its_first_request() -> None:
    store = MemoryStore()
    await Replica(store).learning.overflowed(TENANT, ORIGIN, MODEL, 9_000)
    started = Replica(store)
    assert started.learning.window(TENANT, ORIGIN, MODEL) is None
    await asyncio.sleep(0.01)
    assert started.learning.window(TENANT, ORIGIN, MODEL) == 9_000


async def test_no_request_waits_for_what_other_replicas_may_have_learned() -> None:
    store = Slow()
    store.asked.set()
    replica = Replica(store)
    await replica.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    store.asked.clear()
    replica.time += LOOK_EVERY_S
    async with asyncio.timeout(0.1):
        assert await replica.known() == (None, 1)
    await store.asked.wait()
    store.late.set()
    await replica.learning.close()


async def test_a_replica_that_keeps_its_ratio_keeps_the_window_that_another_has_learned() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert await other.known() == (None, 0)
    await one.learning.overflowed(TENANT, ORIGIN, MODEL, 9_000)
    await other.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    assert await Replica(store).known() == (9_000, 1)


async def test_what_was_learned_from_most_answers_holds() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    for _ in range(5):
        await one.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    await other.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_500)
    await one.look_again()
    assert one.learning.calibration(TENANT, ORIGIN, MODEL).ratio == pytest.approx(1.3)


async def test_what_is_no_longer_stored_is_kept_again() -> None:
    store = MemoryStore()
    replica = Replica(store)
    await replica.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    await replica.learning._records.forget("")
    await replica.look_again()
    await replica.learning.observed(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    assert await Replica(store).known() == (None, 2)


async def test_of_many_models_only_a_few_are_looked_up_at_once() -> None:
    store = Slow()
    learning = Learning(Records(store, ignored))
    for number in range(50):
        learning.window(TENANT, ORIGIN, f"model-{number}")
    assert len(learning._looking) == LOOKS_AT_ONCE
    await learning.close()
    assert learning._looking == set()
