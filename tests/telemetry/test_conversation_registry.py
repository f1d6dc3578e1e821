import asyncio
from collections.abc import Sequence

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.envelope import pack
from compaction_proxy.storage.keys import (
    conversation_key,
    conversation_tenant_key,
    recent_conversations_key,
    scope_prefix,
    tenant_prefix,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Record
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry, RegisteredConversation

DAY_S = 86_400.0


class Counted(MemoryStore):
    """A memory store that counts what is written."""

    writes = 0

    async def write(self, items: object) -> None:
        self.writes += 1
        await super().write(items)  # type: ignore[arg-type]


def ignored(_: object) -> None:
    """Nothing fails here."""


async def test_another_replica_knows_whose_a_conversation_is() -> None:
    store = MemoryStore()
    await ConversationRegistry(RecordStore(store, ignored, deadline_s=10.0), DAY_S).record_activity(
        "t_1", "c_1"
    )
    other = ConversationRegistry(RecordStore(store, ignored, deadline_s=10.0), DAY_S)
    assert (await other.find_tenant("c_1"), await other.find_tenant("c_2")) == ("t_1", None)


async def test_it_is_written_once_a_minute_at_most() -> None:
    store, time = Counted(), [0.5]
    owners = ConversationRegistry(RecordStore(store, ignored, deadline_s=10.0), DAY_S, clock=lambda: time[0])
    for seconds in (0, 1, 58, 3, 1):
        time[0] += seconds
        await owners.record_activity("t_1", "c_1")
    assert store.writes == 3  # and once into the list of the day


async def test_what_is_forgotten_is_known_again_when_it_is_in_use_again() -> None:
    owners = ConversationRegistry(RecordStore(MemoryStore(), ignored), DAY_S)
    await owners.record_activity("t_1", "c_1")
    await owners.forget_conversation("c_1")
    gone = await owners.find_tenant("c_1")
    await owners.record_activity("t_1", "c_1")
    assert (gone, await owners.find_tenant("c_1")) == (None, "t_1")


async def test_whose_tenant_was_forgotten_is_nobody_s_until_it_is_in_use_again() -> None:
    store = MemoryStore()
    records = RecordStore(store, ignored, deadline_s=10.0)
    noting, asking = ConversationRegistry(records, DAY_S), ConversationRegistry(records, DAY_S)
    for tenant, name in (("t_1", "c_1"), ("t_1", "c_2"), ("t_2", "c_3")):
        await records.overwrite(conversation_key(tenant, name), {}, ttl_s=DAY_S)
        await noting.record_activity(tenant, name)
    with records.deletion_fence.scoped_start_mark():
        assert await records.delete_prefix(tenant_prefix("t_1")) == 2
        await noting.record_activity("t_1", "c_2")  # by a request from before

    assert [await asking.find_tenant(f"c_{n}") for n in (1, 2, 3)] == [None, None, "t_2"]
    await noting.record_activity("t_1", "c_1")
    assert [await asking.find_tenant(f"c_{n}") for n in (1, 2, 3)] == ["t_1", None, "t_2"]


async def test_a_note_that_is_written_while_its_tenant_is_forgotten_is_taken_back() -> None:
    class Slow(MemoryStore):
        async def write(self, items: object) -> None:
            await records.delete_prefix(tenant_prefix("t_1"))
            await super().write(items)  # type: ignore[arg-type]

    records = RecordStore(Slow(), ignored)
    owners = ConversationRegistry(records, DAY_S)
    with records.deletion_fence.scoped_start_mark():
        await owners.record_activity("t_1", "c_1")

    assert await owners.find_tenant("c_1") is None


async def test_a_record_that_names_no_tenant_is_nobody_s() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await records.overwrite(conversation_tenant_key("c_1"), {"tenant": 5}, ttl_s=DAY_S)
    assert await ConversationRegistry(records, DAY_S).find_tenant("c_1") is None


async def test_a_store_that_fails_is_asked_once_a_second() -> None:
    class Broken(Counted):
        async def write(self, items: object) -> None:
            self.writes += 1
            raise StoreUnavailableError("store-timeout")

    store, time = Broken(), [0.5]
    owners = ConversationRegistry(
        RecordStore(store, ignored, clock=lambda: time[0]), DAY_S, clock=lambda: time[0]
    )
    for seconds in (0, 0.4, 0.5, 60):
        time[0] += seconds
        await owners.record_activity("t_1", "c_1")
    assert store.writes == 2


async def test_conversations_are_listed_by_their_last_request() -> None:
    store, now = MemoryStore(), [10 * DAY_S - 10.0]
    records = RecordStore(store, ignored, deadline_s=10.0)
    for _ in range(2):  # each lists a conversation once an hour
        owners = ConversationRegistry(records, DAY_S, clock=lambda: now[0], now=lambda: now[0])
        for name in ("c_1", "c_2", "c_1", "c_3"):
            now[0] += 61.0
            await owners.record_activity("t_1", name)
            key = conversation_key("t_1", name)
            await records.overwrite(key, {"last_at": now[0]}, ttl_s=DAY_S)
    await records.delete_prefix(tenant_prefix("t_2"))
    found = await ConversationRegistry(
        RecordStore(store, ignored, deadline_s=10.0), DAY_S, now=lambda: now[0]
    ).list_recent(2)
    assert found == [
        RegisteredConversation("c_3", "t_1", now[0]),
        RegisteredConversation("c_1", "t_1", now[0] - 61.0),
    ]


async def test_the_last_in_use_is_listed_first_though_it_was_listed_early() -> None:
    store, now = MemoryStore(), [10 * DAY_S + 10.0]
    records = RecordStore(store, ignored, deadline_s=10.0)
    owners = ConversationRegistry(records, DAY_S, clock=lambda: now[0], now=lambda: now[0])
    for number, name in enumerate(["c_early", *(f"c_{n}" for n in range(5)), "c_early"]):
        now[0] += 70.0
        await owners.record_activity("t_1", name)
        await records.overwrite(conversation_key("t_1", name), {"last_at": float(number)}, ttl_s=DAY_S)
    assert [each.id for each in await owners.list_recent(2)] == ["c_early", "c_4"]


async def test_what_is_deleted_is_not_listed_and_a_line_of_nonsense_neither() -> None:
    records = RecordStore(MemoryStore(), ignored)
    owners = ConversationRegistry(records, DAY_S, now=lambda: 5.0)
    for name in ("c_1", "c_2"):
        await owners.record_activity("t_1", name)
        await records.overwrite(conversation_key("t_1", name), {"requests": 1}, ttl_s=DAY_S)
    await records.append_line(recent_conversations_key("1970-01-01"), {"id": 5}, ttl_s=DAY_S, max_lines=9)
    await records.delete_prefix(scope_prefix("t_1", "c_1"))
    assert await owners.list_recent(5) == [RegisteredConversation("c_2", "t_1", 5.0)]


async def test_deleted_conversations_take_no_place_in_the_list() -> None:
    records, now = RecordStore(MemoryStore(), ignored), [19_000 * DAY_S]
    owners = ConversationRegistry(records, 30 * DAY_S, clock=lambda: now[0], now=lambda: now[0])
    for n in range(120):
        now[0] += 700.0
        await owners.record_activity("t_1", f"c_{n:03}")
        if n not in range(105, 117):
            key = conversation_key("t_1", f"c_{n:03}")
            await records.overwrite(key, {"last_at": now[0]}, ttl_s=30 * DAY_S)
    assert len(await owners.list_recent(51)) == 51
    assert len(await owners.list_recent(200)) == 108


async def test_a_thousand_conversations_are_listed_in_a_few_round_trips() -> None:
    class Asked(MemoryStore):
        asked = 0

        async def read(self, keys: Sequence[str]) -> list[bytes | None]:
            self.asked += 1
            return await super().read(keys)

        async def read_tail(self, key: str, limit: int) -> list[bytes]:
            self.asked += 1
            return await super().read_tail(key, limit)

    store = Asked()
    records = RecordStore(store, ignored, deadline_s=10.0)
    owners = ConversationRegistry(records, DAY_S, now=lambda: 90 * DAY_S - 1.0)
    for number in range(1_500):
        name = f"c_{number}"
        await owners.record_activity("t_1", name)
        await store.write([Record(conversation_key("t_1", name), pack({"last_at": number + 1.0}), DAY_S)])
    store.asked = 0
    found = await owners.list_recent(1_000)
    assert [each.id for each in found] == [f"c_{number}" for number in range(1_499, 499, -1)]
    assert store.asked <= 4


async def test_after_an_outage_what_the_store_may_have_lost_is_written_again() -> None:
    class Forgetful(MemoryStore):
        away = False

        async def read(self, keys: Sequence[str]) -> list[bytes | None]:
            if self.away:
                raise StoreUnavailableError("store-timeout")
            return await super().read(keys)

    store = Forgetful()
    records = RecordStore(store, ignored, probe_every_s=0.005)
    owners = ConversationRegistry(records, DAY_S)
    await owners.record_activity("t_1", "c_1")
    await records.overwrite(conversation_key("t_1", "c_1"), {"last_at": 1.0}, ttl_s=DAY_S)
    store.away = True
    for _ in range(3):  # after which the store is left alone
        await records.get_many([conversation_tenant_key("c_3")], bypass_cache=True)
    await owners.record_activity("t_1", "c_2")
    await store.delete_prefix("v1:")
    store.away = False
    while not records.is_in_use:  # noqa: ASYNC110 - a store sets no event
        await asyncio.sleep(0.005)
    await owners.record_activity("t_1", "c_1")
    await records.overwrite(conversation_key("t_1", "c_1"), {"last_at": 1.0}, ttl_s=DAY_S)
    found = await ConversationRegistry(RecordStore(store, ignored, deadline_s=10.0), DAY_S).list_recent(9)
    assert [each.id for each in found] == ["c_1"]
