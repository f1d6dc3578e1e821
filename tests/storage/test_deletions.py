"""What was begun before something was forgotten is told apart from what was begun since, tasks included."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage import deletions as module
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Fields, RecordStore

DAY_S = 86_400.0
NAMES = st.text("ab", max_size=2)


def ignored(_: StoreUnavailableError) -> None:
    """Nothing fails here."""


@given(st.lists(NAMES, max_size=5), st.lists(NAMES, max_size=5), NAMES)
def test_only_what_was_forgotten_since_it_began_is_too_old(
    before: list[str], since: list[str], key: str
) -> None:
    outdated = DeletionFence()
    for prefix in before:
        outdated.add_deletion(prefix)
    with outdated.scoped_start_mark():
        for prefix in since:
            outdated.add_deletion(prefix)
        assert outdated.is_deleted(key) == any(key.startswith(prefix) for prefix in since)
    assert not outdated.is_deleted(key)  # what never began is never too old


async def test_what_a_request_starts_is_as_old_as_the_request() -> None:
    outdated, go = DeletionFence(), asyncio.Event()

    async def later() -> bool:
        await go.wait()
        return outdated.is_deleted("k")

    async def request() -> bool:
        outdated.set_start_mark()
        return await asyncio.create_task(later())

    old = asyncio.create_task(request())
    await asyncio.sleep(0)
    outdated.add_deletion("k")
    new = asyncio.create_task(request())
    go.set()

    assert (await old, await new) == (True, False)


def test_what_is_older_than_all_that_is_remembered_writes_nothing() -> None:
    outdated = DeletionFence()
    with outdated.scoped_start_mark():
        for _ in range(module.MAX_DELETIONS + 1):
            outdated.add_deletion("k")
        assert outdated.is_deleted("other")


async def test_nothing_that_is_too_old_reaches_the_store_or_what_is_held() -> None:
    store = MemoryStore()
    records = RecordStore(store, ignored)
    with records.deletion_fence.scoped_start_mark():
        await records.delete_prefix("v1:{t.")
        used: list[Fields | bool | None] = [
            await records.save_if_absent("v1:{t.c}:k", {"n": 1}, ttl_s=DAY_S),
            await records.overwrite("v1:{t.c}:k", {"n": 1}, ttl_s=DAY_S),
            await records.append_line("v1:{t.c}:l", {"n": 1}, ttl_s=DAY_S, max_lines=3),
            await records.overwrite("v1:{u.c}:k", {"n": 1}, ttl_s=DAY_S),
        ]
        found = await records.get_many(["v1:{t.c}:k", "v1:{u.c}:k"])

    assert used == [{"n": 1}, False, False, True]
    assert (found, await store.delete_prefix("")) == ([None, {"n": 1}], 1)


async def test_what_is_forgotten_between_the_two_steps_of_a_write_is_not_written() -> None:
    class Slow(MemoryStore):
        async def read(self, keys: object) -> list[bytes | None]:
            found = await super().read(keys)  # type: ignore[arg-type]
            await records.delete_prefix("k")
            return found

    told: list[str] = []
    store = Slow()
    records = RecordStore(store, lambda error: told.append(error.reason))
    with records.deletion_fence.scoped_start_mark():
        assert not await records.overwrite("k", {"n": 1}, ttl_s=DAY_S)

    assert (await store.delete_prefix(""), told) == (0, [])
