"""The stores that the contract is run on. Another one joins by a class like these and a line in `BENCHES`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.adapters.memory_store import MemoryStore
from proxy.adapters.sqlite_store import SqliteStore
from proxy.ports import Store


class MemoryBench:
    """Opens memory stores on a clock of their own."""

    shared = False

    def __init__(self, directory: Path) -> None:
        self.time = 1000.0
        self.opened: list[Store] = []

    def open(self) -> Store:
        self.opened.append(MemoryStore(clock=lambda: self.time))
        return self.opened[-1]

    async def fast_forward(self, seconds: float) -> None:
        self.time += seconds


class SqliteBench:
    """Opens SQLite stores on one file, and on a clock of their own."""

    shared = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.db"
        self.time = 1_700_000_000.0
        self.opened: list[Store] = []

    def open(self) -> Store:
        self.opened.append(SqliteStore(self.path, now=lambda: self.time))
        return self.opened[-1]

    async def fast_forward(self, seconds: float) -> None:
        self.time += seconds


BENCHES: dict[str, type[MemoryBench] | type[SqliteBench]] = {"memory": MemoryBench, "sqlite": SqliteBench}


@pytest.fixture(params=list(BENCHES))
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryBench | SqliteBench]:
    made = BENCHES[request.param](tmp_path)
    yield made
    for store in made.opened:
        await store.close()


@pytest.fixture
def store(bench: MemoryBench | SqliteBench) -> Store:
    return bench.open()
