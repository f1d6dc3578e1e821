"""What an upstream has taught outlives the process, and nothing of it is lost on the way."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy import learning as module
from proxy.adapters.memory_store import MemoryStore
from proxy.errors import StoreUnavailable
from proxy.learning import BELIEVED_S, Learning
from proxy.records import Records

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
