"""What was begun before something was forgotten is told apart from what was begun since, tasks included."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.storage import deletions as module
from compaction_proxy.storage.deletions import Outdated
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Fields, Records

DAY_S = 86_400.0
NAMES = st.text("ab", max_size=2)


def ignored(_: StoreUnavailable) -> None:
    """Nothing fails here."""


@given(st.lists(NAMES, max_size=5), st.lists(NAMES, max_size=5), NAMES)
def test_only_what_was_forgotten_since_it_began_is_too_old(
    before: list[str], since: list[str], key: str
) -> None:
    outdated = Outdated()
    for prefix in before:
        outdated.add(prefix)
    with outdated.beginning():
        for prefix in since:
            outdated.add(prefix)
        assert outdated.covers(key) == any(key.startswith(prefix) for prefix in since)
    assert not outdated.covers(key)  # what never began is never too old


async def test_what_a_request_starts_is_as_old_as_the_request() -> None:
    outdated, go = Outdated(), asyncio.Event()

    async def later() -> bool:
        await go.wait()
        return outdated.covers("k")

    async def request() -> bool:
        outdated.begin()
        return await asyncio.create_task(later())

    old = asyncio.create_task(request())
    await asyncio.sleep(0)
    outdated.add("k")
    new = asyncio.create_task(request())
    go.set()

    assert (await old, await new) == (True, False)


def test_what_is_older_than_all_that_is_remembered_writes_nothing() -> None:
    outdated = Outdated()
    with outdated.beginning():
        for _ in range(module.KEPT + 1):
            outdated.add("k")
        assert outdated.covers("other")


async def test_nothing_that_is_too_old_reaches_the_store_or_what_is_held() -> None:
    store = MemoryStore()
    records = Records(store, ignored)
    with records.outdated.beginning():
        await records.forget("v1:{t.")
        used: list[Fields | bool | None] = [
            await records.save("v1:{t.c}:k", {"n": 1}, ttl_s=DAY_S),
            await records.keep("v1:{t.c}:k", {"n": 1}, ttl_s=DAY_S),
            await records.append("v1:{t.c}:l", {"n": 1}, ttl_s=DAY_S, keep=3),
            await records.keep("v1:{u.c}:k", {"n": 1}, ttl_s=DAY_S),
        ]
        found = await records.find(["v1:{t.c}:k", "v1:{u.c}:k"])

    assert used == [{"n": 1}, False, False, True]
    assert (found, await store.delete("")) == ([None, {"n": 1}], 1)


async def test_what_is_forgotten_between_the_two_steps_of_a_write_is_not_written() -> None:
    class Slow(MemoryStore):
        async def read(self, keys: object) -> list[bytes | None]:
            found = await super().read(keys)  # type: ignore[arg-type]
            await records.forget("k")
            return found

    told: list[str] = []
    store = Slow()
    records = Records(store, lambda error: told.append(error.reason))
    with records.outdated.beginning():
        assert not await records.keep("k", {"n": 1}, ttl_s=DAY_S)

    assert (await store.delete(""), told) == (0, [])
