"""Wishes are kept, bounded, seen by every replica, and no change of one is lost to another's."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from compaction_proxy.compaction.directives import (
    AGING_S,
    FRESH_S,
    MAX_PINS,
    MAX_UNDONE,
    NO_DIRECTIVES,
    Directives,
    DirectiveStore,
    build_pin_id,
    parse_pin,
)
from compaction_proxy.storage.keys import directives_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from tests.helpers.compaction_bench import mark, undo

DAY_S = 86_400.0
WHO = ("t_1", "c_1")


def ignored(_: object) -> None:
    """Failures of a store that the test makes fail on purpose."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


def replica(store: Store) -> DirectiveStore:
    return DirectiveStore(RecordStore(store, ignored), DAY_S)


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


class Faulty(MemoryStore):
    """A store that can be away, and counts how often it is read."""

    away = False
    reads = 0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        if self.away:
            raise OSError("gone")
        return await super().read(keys)


async def test_another_replica_sees_every_wish(store: Store) -> None:
    wishing = replica(store)
    saved = [
        await wishing.add_pin(*WHO, "Use SI units."),
        await wishing.add_pin(*WHO, "Be brief."),
        await wishing.update(*WHO, mark),
        await wishing.update(*WHO, undo(place(1))),
        await wishing.update(*WHO, lambda known: replace(known, bypass=True)),
    ]
    assert saved == [True] * 5
    assert await replica(store).get(*WHO) == Directives(
        compact=True,
        pins=("Use SI units.", "Be brief."),
        undone=(place(1),),
        suppressed=True,
        bypass=True,
    )


async def test_no_pin_is_lost_when_replicas_pin_at_once(store: Store) -> None:
    replicas = [replica(store) for _ in range(3)]
    texts = [f"pin {number}" for number in range(12)]
    saved = await asyncio.gather(
        *(replicas[number % 3].add_pin(*WHO, text) for number, text in enumerate(texts))
    )
    assert all(saved)
    assert sorted((await replica(store).get(*WHO)).pins) == sorted(texts)


async def test_a_round_ends_the_mark_and_the_suppression_and_holds_again_if_it_was_undone() -> None:
    wishing = replica(MemoryStore())
    await wishing.add_pin(*WHO, "pin")
    await wishing.update(*WHO, mark)
    for number in (1, 2):
        await wishing.update(*WHO, undo(place(number)))
    await wishing.clear_compaction_request(*WHO, place(2))
    assert await wishing.get(*WHO) == Directives(pins=("pin",), undone=(place(1),))


async def test_nothing_to_take_ends_the_mark_and_leaves_what_was_undone() -> None:
    wishing = replica(MemoryStore())
    await wishing.update(*WHO, undo(place(1)))
    await wishing.update(*WHO, mark)
    await wishing.clear_compaction_request(*WHO)
    assert await wishing.get(*WHO) == Directives(undone=(place(1),))


async def test_what_nobody_asked_anything_of_costs_no_record() -> None:
    store = MemoryStore()
    await replica(store).clear_compaction_request(*WHO, place(1))
    assert await store.read([directives_key(*WHO)]) == [None]


async def test_tenants_and_conversations_have_wishes_of_their_own() -> None:
    wishing = replica(MemoryStore())
    await wishing.add_pin(*WHO, "pin")
    assert [await wishing.get("t_2", "c_1"), await wishing.get("t_1", "c_2")] == [
        NO_DIRECTIVES,
        NO_DIRECTIVES,
    ]


async def test_there_is_room_for_so_many_pins_and_the_first_ones_stay() -> None:
    wishing = replica(MemoryStore())
    saved = [await wishing.add_pin(*WHO, f"pin {number}") for number in range(MAX_PINS + 1)]
    assert saved == [True] * MAX_PINS + [False]
    await wishing.update(*WHO, lambda known: known.without_pin("pin 0"))
    assert await wishing.add_pin(*WHO, "one more")
    pins = (await wishing.get(*WHO)).pins
    assert (len(pins), pins[0], pins[-1]) == (MAX_PINS, "pin 1", "one more")


async def test_the_newest_so_many_rounds_stay_undone() -> None:
    wishing = replica(MemoryStore())
    for number in range(MAX_UNDONE + 5):
        await wishing.update(*WHO, undo(place(number)))
    assert (await wishing.get(*WHO)).undone == tuple(map(place, range(5, MAX_UNDONE + 5)))


@pytest.mark.parametrize("text", ["", "  ", "x" * 2_001, "two\nlines", "\x00", "\ud800"])
async def test_what_is_no_pin_is_not_kept(text: str) -> None:
    wishing = replica(MemoryStore())
    assert not await wishing.add_pin(*WHO, text)
    assert await wishing.get(*WHO) == NO_DIRECTIVES


def test_a_pin_is_stripped_and_has_the_same_id_everywhere() -> None:
    assert (parse_pin(" a "), build_pin_id("a")) == ("a", "p_ca978112ca1b")


async def test_the_store_is_asked_again_only_after_a_moment_and_not_for_a_pin_that_is_there() -> None:
    clock, store = Clock(), Faulty()
    wishing = DirectiveStore(RecordStore(store, ignored), DAY_S, clock=clock)
    await wishing.add_pin(*WHO, "pin")
    after_pin = store.reads
    for _ in range(5):
        await wishing.get(*WHO)
        await wishing.add_pin(*WHO, "pin")
    held = store.reads
    clock.time += FRESH_S
    await wishing.get(*WHO)
    assert (held - after_pin, store.reads - held) == (0, 1)


async def test_the_wish_of_another_replica_is_noticed_after_a_moment() -> None:
    clock, store = Clock(), MemoryStore()
    wishing = DirectiveStore(RecordStore(store, ignored), DAY_S, clock=clock)
    before = await wishing.get(*WHO)
    await replica(store).update(*WHO, mark)
    meanwhile = await wishing.get(*WHO)
    clock.time += FRESH_S
    assert (before, meanwhile, await wishing.get(*WHO)) == (
        NO_DIRECTIVES,
        NO_DIRECTIVES,
        Directives(compact=True),
    )


async def test_in_a_busy_conversation_wishes_are_read_again_behind_a_request() -> None:
    clock, store = Clock(), MemoryStore()
    records = RecordStore(store, ignored)
    wishing = DirectiveStore(records, DAY_S, clock=clock)
    await wishing.get(*WHO)
    await replica(store).update(*WHO, mark)
    clock.time += AGING_S
    assert wishing.get_cached(*WHO) == NO_DIRECTIVES
    while records.background_tasks.has_running_tasks:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0)
    assert wishing.get_cached(*WHO) == Directives(compact=True)
    clock.time += FRESH_S
    assert wishing.get_cached(*WHO) is None


async def test_while_the_store_is_away_this_process_uses_what_it_was_told() -> None:
    clock, store = Clock(), Faulty()
    records = RecordStore(store, ignored)
    wishing = DirectiveStore(records, DAY_S, clock=clock)
    await wishing.add_pin(*WHO, "before")
    store.away = True
    saved = await wishing.add_pin(*WHO, "meanwhile")
    clock.time += FRESH_S
    assert (saved, (await wishing.get(*WHO)).pins) == (False, ("before", "meanwhile"))
    await records.close()


async def test_a_holder_of_the_turn_that_died_does_not_block_a_change() -> None:
    store = MemoryStore()
    await store.acquire_lease(f"{directives_key(*WHO)}:lease", 0.2)
    assert await replica(store).add_pin(*WHO, "pin")


async def test_what_cannot_be_read_of_a_record_is_not_wished() -> None:
    records = RecordStore(MemoryStore(), ignored)
    fields = {
        "compact": "yes",
        "pins": ["good", "", 5, "bad\n", None],
        "undone": ["zz", "00", place(7).hex(), 7],
        "suppressed": 1,
        "bypass": "yes",
        "later": {},
    }
    await records.overwrite(directives_key(*WHO), fields, ttl_s=DAY_S)
    assert await DirectiveStore(records, DAY_S).get(*WHO) == Directives(pins=("good",), undone=(place(7),))


async def test_what_is_forgotten_is_read_again() -> None:
    store = MemoryStore()
    records = RecordStore(store, ignored)
    wishing = DirectiveStore(records, DAY_S)
    await wishing.update(*WHO, mark)
    await records.delete_prefix(directives_key(*WHO))
    assert await wishing.get(*WHO) == NO_DIRECTIVES
