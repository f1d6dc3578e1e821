"""The totals of conversations add up, whoever writes them and whenever the store is away."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import conversations as module
from proxy.adapters.memory_store import MemoryStore
from proxy.conversations import Conversations
from proxy.core.keys import conversation_key
from proxy.dialects.usage import Usage
from proxy.errors import StoreUnavailable
from proxy.ports import Store
from proxy.storage.records import Records

DAY_S = 86_400.0
TENANT = "t"
USED = Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=60)


def ignored(_: StoreUnavailable) -> None:
    """Failures of a store that the test makes fail on purpose."""


class Faulty(MemoryStore):
    """A store that raises `fault` as long as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Exception | None = None

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.fault is not None:
            raise self.fault
        return await super().read(keys)


def replica(store: Store, now: Callable[[], float] = lambda: 7.0) -> Conversations:
    return Conversations(Records(store, ignored, probe_every_s=0.005), DAY_S, now)


async def kept(store: Store, conversation: str = "c_1", tenant: str = TENANT) -> Any:
    """What a process that has just started would read."""
    [fields] = await Records(store, ignored).find([conversation_key(tenant, conversation)])
    return fields


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it is about a store, which sets no event
            await asyncio.sleep(0.002)


async def test_every_total_is_gathered_and_written() -> None:
    store = MemoryStore()
    at = [1.0]
    conversations = replica(store, lambda: at[0])
    conversations.note(TENANT, "c_1", "m", 1_000, USED)
    at[0] = 2.0
    conversations.note(TENANT, "c_1", "", 500, None)  # neither read nor told
    await conversations.flush()
    assert await kept(store) == {
        "model": "m",
        "requests": 2,
        "request_bytes": 1_500,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cached_tokens": 60,
        "last_at": 2.0,
    }


async def test_the_model_asked_last_is_the_one_that_is_known() -> None:
    store = MemoryStore()
    conversations = replica(store)
    for model in ("first", "second", ""):
        conversations.note(TENANT, "c_1", model, 1, None)
        await conversations.flush()
    assert (await kept(store))["model"] == "second"


async def test_one_id_of_two_tenants_is_two_conversations() -> None:
    store = MemoryStore()
    conversations = replica(store)
    conversations.note("one", "c_1", "m", 10, None)
    conversations.note("two", "c_1", "m", 20, None)
    await conversations.flush()
    assert [(await kept(store, tenant=tenant))["request_bytes"] for tenant in ("one", "two")] == [10, 20]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["note", "note", "flush", "restart"]), st.integers(0, 1), st.sampled_from("ab")
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
async def test_totals_add_up_across_flushes_restarts_and_replicas(steps: list[tuple[str, int, str]]) -> None:
    store = MemoryStore()
    replicas = [replica(store), replica(store)]
    noted = {"a": 0, "b": 0}
    for step, index, conversation in [*steps, ("restart", 0, ""), ("restart", 1, "")]:
        if step == "note":
            replicas[index].note(TENANT, conversation, "m", 3, USED)
            noted[conversation] += 1
        elif step == "flush":
            await replicas[index].flush()
        else:
            await replicas[index].close()
            replicas[index] = replica(store)
    names = ("requests", "request_bytes", "prompt_tokens", "completion_tokens", "cached_tokens")
    for conversation, count in noted.items():
        fields = await kept(store, conversation) or dict.fromkeys(names, 0)
        assert tuple(fields[name] for name in names) == (
            count,
            3 * count,
            100 * count,
            10 * count,
            60 * count,
        )


async def test_what_waits_while_the_store_is_away_is_written_when_it_is_back() -> None:
    store = Faulty()
    records = Records(store, ignored, probe_every_s=0.005)
    conversations = Conversations(records, DAY_S)
    conversations.note(TENANT, "c_1", "m", 1, USED)
    await conversations.flush()
    store.fault = OSError("gone")
    while records.in_use:
        await records.find(["v1:{x}:y"])
    for _ in range(3):
        conversations.note(TENANT, "c_1", "m", 1, USED)
        conversations.note(TENANT, "c_2", "m", 1, USED)
        await conversations.flush()
    store.fault = None
    assert ((await kept(store))["requests"], await kept(store, "c_2")) == (1, None)
    await eventually(lambda: records.in_use)
    await conversations.flush()
    assert [(await kept(store, name))["requests"] for name in ("c_1", "c_2")] == [4, 3]
    await records.close()


async def test_a_fault_of_ours_neither_ends_the_writing_nor_loses_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.005)
    reported: list[BaseException] = []
    monkeypatch.setattr(module, "_not_written", reported.append)
    store = Faulty()
    store.fault = ZeroDivisionError()
    conversations = replica(store)
    conversations.start()
    conversations.note(TENANT, "c_1", "m", 1, USED)
    await eventually(lambda: len(reported) >= 2)
    store.fault = None
    conversations.note(TENANT, "c_1", "m", 1, USED)
    async with asyncio.timeout(5):
        while await kept(store) is None:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.002)
    assert (await kept(store))["requests"] == 2
    await conversations.close()


async def test_closing_writes_what_waits() -> None:
    store = MemoryStore()
    conversations = replica(store)
    conversations.start()
    conversations.note(TENANT, "c_1", "m", 1, USED)
    await conversations.close()
    assert (await kept(store))["requests"] == 1


async def test_no_more_conversations_wait_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    store = MemoryStore()
    conversations = replica(store)
    for name in ("c_1", "c_2", "c_3", "c_1"):
        conversations.note(TENANT, name, "m", 1, None)
    await conversations.flush()
    conversations.note(TENANT, "c_3", "m", 1, None)
    await conversations.flush()
    assert [(await kept(store, name))["requests"] for name in ("c_1", "c_2", "c_3")] == [2, 1, 1]


async def test_a_total_that_is_no_number_counts_as_nothing() -> None:
    store = MemoryStore()
    fields = {"requests": "many", "prompt_tokens": 5, "later_field": 1}
    await Records(store, ignored).keep(conversation_key(TENANT, "c_1"), fields, ttl_s=DAY_S)
    conversations = replica(store)
    conversations.note(TENANT, "c_1", "m", 1, USED)
    await conversations.flush()
    found = await kept(store)
    assert (found["requests"], found["prompt_tokens"]) == (1, 105)


async def test_what_is_forgotten_is_not_written_by_what_waited() -> None:
    store = MemoryStore()
    records = Records(store, ignored)
    conversations = Conversations(records, DAY_S)
    conversations.note(TENANT, "c_1", "m", 1, USED)
    conversations.note(TENANT, "c_2", "m", 1, USED)
    await records.forget(conversation_key(TENANT, "c_1"))
    await conversations.flush()
    assert await kept(store, "c_1") is None
    assert (await kept(store, "c_2"))["requests"] == 1


async def test_totals_that_are_being_written_while_they_are_forgotten_do_not_come_back() -> None:
    class Slow(MemoryStore):
        forgets = False

        async def read(self, keys: Sequence[str]) -> list[bytes | None]:
            found = await super().read(keys)
            if self.forgets:
                self.forgets = False
                await records.forget(conversation_key(TENANT, "c_1"))
                with records.outdated.beginning():  # a new request
                    conversations.note(TENANT, "c_1", "m", 7, None)
            return found

    store = Slow()
    records = Records(store, ignored)
    conversations = Conversations(records, DAY_S)
    for store.forgets in (False, True, False):
        conversations.note(TENANT, "c_1", "m", 1, USED)
        await conversations.flush()

    found = await kept(store)
    assert (found["requests"], found["request_bytes"], found["prompt_tokens"]) == (2, 8, 100)
