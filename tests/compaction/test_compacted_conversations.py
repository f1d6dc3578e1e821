from typing import Any

import pytest

from compaction_proxy.compaction import compacted_conversations as module
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import compacted_conversations_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

HOUR_S, DAY_S = 3_600.0, 86_400.0
TTL_S = 4 * DAY_S


def _ignored(error: StoreUnavailableError) -> None:
    """What a test says is what counts."""


class Faulty(MemoryStore):
    """Takes no lines while it is told to."""

    fails = False

    async def write(self, items: Any) -> None:
        if self.fails:
            raise StoreUnavailableError("store-full")
        await super().write(items)


class Scene:
    """Processes on one store, by a clock that the test moves."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0
        self.store = Faulty(clock=lambda: self.time)

    def records(self) -> RecordStore:
        return RecordStore(self.store, _ignored)

    def process(self) -> CompactedConversations:
        return CompactedConversations(self.records(), TTL_S, now=lambda: self.time)

    async def restarted(self) -> CompactedConversations:
        compacted = self.process()
        assert await compacted.load()
        return compacted

    async def lines(self, tenant: str) -> int:
        return len(await self.store.read_tail(compacted_conversations_key(tenant), 10**6))


async def test_a_conversation_in_use_is_listed_once_a_day() -> None:
    scene = Scene()
    compacted = scene.process()
    for _ in range(3 * 24):
        await compacted.add("t", "c_1")
        scene.time += HOUR_S
    assert await scene.lines("t") == 3


async def test_a_conversation_is_forgotten_with_its_rounds() -> None:
    scene = Scene()
    await scene.process().add("t", "c_1")
    scene.time += TTL_S - DAY_S
    assert (await scene.restarted()).has_rounds("t", "c_1")
    await scene.process().add("t", "c_2")  # the list lives on
    scene.time += DAY_S + 1
    restarted = await scene.restarted()
    assert (restarted.has_rounds("t", "c_1"), restarted.has_rounds("t", "c_2")) == (False, True)


async def test_a_tenant_drives_out_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OF_TENANT", 5)
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 8)
    scene = Scene()
    compacted = scene.process()
    for name in ("c_1", "c_2"):
        await compacted.add("quiet", name)
    for tenant in ("loud", "louder"):
        for number in range(20):
            await compacted.add(tenant, f"c_{number}")
    for known in (compacted, await scene.restarted()):
        assert known.has_rounds("quiet", "c_1")
        assert known.has_rounds("quiet", "c_2")
        assert known.has_rounds("louder", "c_19")
        assert not known.has_rounds("loud", "c_1")
    assert await scene.lines("loud") == 5


async def test_what_the_store_did_not_take_is_listed_later() -> None:
    scene = Scene()
    compacted = scene.process()
    scene.store.fails = True
    await compacted.add("t", "c_1")
    assert compacted.has_rounds("t", "c_1")
    scene.store.fails = False
    await compacted.add("t", "c_1")
    assert (await scene.restarted()).has_rounds("t", "c_1")


async def test_what_need_not_be_known_elsewhere_is_not_written() -> None:
    scene = Scene()
    compacted = scene.process()
    await compacted.add("t", "c_1", should_publish=False)
    assert compacted.has_rounds("t", "c_1")
    assert await scene.lines("t") == 0
    await compacted.add("t", "c_1")  # it has become small
    assert await scene.lines("t") == 1


@pytest.mark.parametrize(
    "line", [{}, {"conversation": 5, "at": 1.0}, {"conversation": "c_1"}, {"conversation": "c_1", "at": "x"}]
)
async def test_a_line_that_is_none_of_ours_is_left_out(line: dict[str, Any]) -> None:
    scene = Scene()
    await scene.process().add("t", "c_2")
    await scene.records().append_line(compacted_conversations_key("t"), line, ttl_s=DAY_S, max_lines=9)
    restarted = await scene.restarted()
    assert (restarted.has_rounds("t", "c_1"), restarted.has_rounds("t", "c_2")) == (False, True)
