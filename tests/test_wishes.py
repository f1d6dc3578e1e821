"""Wishes are kept, bounded, seen by every replica, and no change of one is lost to another's."""

import asyncio
from collections.abc import Sequence

import pytest

from compaction_proxy.compaction.directives import (
    AGING_S,
    FRESH_S,
    MAX_PINS,
    MAX_UNDONE,
    NONE,
    Wishes,
    Wishing,
    pin_id,
    valid_pin,
)
from compaction_proxy.storage.keys import wishes_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Records
from compaction_proxy.storage.store import Store

DAY_S = 86_400.0
WHO = ("t_1", "c_1")


def ignored(_: object) -> None:
    """Failures of a store that the test makes fail on purpose."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


def replica(store: Store) -> Wishing:
    return Wishing(Records(store, ignored), DAY_S)


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
        await wishing.pin(*WHO, "Use SI units."),
        await wishing.pin(*WHO, "Be brief."),
        await wishing.ask_compact(*WHO),
        await wishing.undo(*WHO, place(1)),
        await wishing.bypass(*WHO, on=True),
    ]
    assert saved == [True] * 5
    assert await replica(store).of(*WHO) == Wishes(
        compact=True,
        pins=("Use SI units.", "Be brief."),
        undone=(place(1),),
        suppressed=True,
        bypass=True,
    )


async def test_no_pin_is_lost_when_replicas_pin_at_once(store: Store) -> None:
    replicas = [replica(store) for _ in range(3)]
    texts = [f"pin {number}" for number in range(12)]
    saved = await asyncio.gather(*(replicas[number % 3].pin(*WHO, text) for number, text in enumerate(texts)))
    assert all(saved)
    assert sorted((await replica(store).of(*WHO)).pins) == sorted(texts)


async def test_a_round_ends_the_mark_and_the_suppression_and_holds_again_if_it_was_undone() -> None:
    wishing = replica(MemoryStore())
    await wishing.pin(*WHO, "pin")
    await wishing.ask_compact(*WHO)
    for number in (1, 2):
        await wishing.undo(*WHO, place(number))
    await wishing.compacted(*WHO, place(2))
    assert await wishing.of(*WHO) == Wishes(pins=("pin",), undone=(place(1),))


async def test_nothing_to_take_ends_the_mark_and_leaves_what_was_undone() -> None:
    wishing = replica(MemoryStore())
    await wishing.undo(*WHO, place(1))
    await wishing.ask_compact(*WHO)
    await wishing.compacted(*WHO)
    assert await wishing.of(*WHO) == Wishes(undone=(place(1),))


async def test_what_nobody_asked_anything_of_costs_no_record() -> None:
    store = MemoryStore()
    await replica(store).compacted(*WHO, place(1))
    assert await store.read([wishes_key(*WHO)]) == [None]


async def test_tenants_and_conversations_have_wishes_of_their_own() -> None:
    wishing = replica(MemoryStore())
    await wishing.pin(*WHO, "pin")
    assert [await wishing.of("t_2", "c_1"), await wishing.of("t_1", "c_2")] == [NONE, NONE]


async def test_there_is_room_for_so_many_pins_and_the_first_ones_stay() -> None:
    wishing = replica(MemoryStore())
    saved = [await wishing.pin(*WHO, f"pin {number}") for number in range(MAX_PINS + 1)]
    assert saved == [True] * MAX_PINS + [False]
    await wishing.unpin(*WHO, "pin 0")
    assert await wishing.pin(*WHO, "one more")
    pins = (await wishing.of(*WHO)).pins
    assert (len(pins), pins[0], pins[-1]) == (MAX_PINS, "pin 1", "one more")


async def test_the_newest_so_many_rounds_stay_undone() -> None:
    wishing = replica(MemoryStore())
    for number in range(MAX_UNDONE + 5):
        await wishing.undo(*WHO, place(number))
    assert (await wishing.of(*WHO)).undone == tuple(map(place, range(5, MAX_UNDONE + 5)))


@pytest.mark.parametrize("text", ["", "  ", "x" * 2_001, "two\nlines", "\x00", "\ud800"])
async def test_what_is_no_pin_is_not_kept(text: str) -> None:
    wishing = replica(MemoryStore())
    assert not await wishing.pin(*WHO, text)
    assert await wishing.of(*WHO) == NONE


def test_a_pin_is_stripped_and_has_the_same_id_everywhere() -> None:
    assert (valid_pin(" a "), pin_id("a")) == ("a", "p_ca978112ca1b")


async def test_the_store_is_asked_again_only_after_a_moment_and_not_for_a_pin_that_is_there() -> None:
    clock, store = Clock(), Faulty()
    wishing = Wishing(Records(store, ignored), DAY_S, clock=clock)
    await wishing.pin(*WHO, "pin")
    after_pin = store.reads
    for _ in range(5):
        await wishing.of(*WHO)
        await wishing.pin(*WHO, "pin")
    held = store.reads
    clock.time += FRESH_S
    await wishing.of(*WHO)
    assert (held - after_pin, store.reads - held) == (0, 1)


async def test_the_wish_of_another_replica_is_noticed_after_a_moment() -> None:
    clock, store = Clock(), MemoryStore()
    wishing = Wishing(Records(store, ignored), DAY_S, clock=clock)
    before = await wishing.of(*WHO)
    await replica(store).ask_compact(*WHO)
    meanwhile = await wishing.of(*WHO)
    clock.time += FRESH_S
    assert (before, meanwhile, await wishing.of(*WHO)) == (NONE, NONE, Wishes(compact=True))


async def test_in_a_busy_conversation_wishes_are_read_again_behind_a_request() -> None:
    clock, store = Clock(), MemoryStore()
    records = Records(store, ignored)
    wishing = Wishing(records, DAY_S, clock=clock)
    await wishing.of(*WHO)
    await replica(store).ask_compact(*WHO)
    clock.time += AGING_S
    assert wishing.held(*WHO) == NONE
    while records.behind.busy:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0)
    assert wishing.held(*WHO) == Wishes(compact=True)
    clock.time += FRESH_S
    assert wishing.held(*WHO) is None


async def test_while_the_store_is_away_this_process_uses_what_it_was_told() -> None:
    clock, store = Clock(), Faulty()
    records = Records(store, ignored)
    wishing = Wishing(records, DAY_S, clock=clock)
    await wishing.pin(*WHO, "before")
    store.away = True
    saved = await wishing.pin(*WHO, "meanwhile")
    clock.time += FRESH_S
    assert (saved, (await wishing.of(*WHO)).pins) == (False, ("before", "meanwhile"))
    await records.close()


async def test_a_holder_of_the_turn_that_died_does_not_block_a_change() -> None:
    store = MemoryStore()
    await store.acquire(f"{wishes_key(*WHO)}:lease", 0.2)
    assert await replica(store).pin(*WHO, "pin")


async def test_what_cannot_be_read_of_a_record_is_not_wished() -> None:
    records = Records(MemoryStore(), ignored)
    fields = {
        "compact": "yes",
        "pins": ["good", "", 5, "bad\n", None],
        "undone": ["zz", "00", place(7).hex(), 7],
        "suppressed": 1,
        "bypass": "yes",
        "later": {},
    }
    await records.keep(wishes_key(*WHO), fields, ttl_s=DAY_S)
    assert await Wishing(records, DAY_S).of(*WHO) == Wishes(pins=("good",), undone=(place(7),))


async def test_what_is_forgotten_is_read_again() -> None:
    store = MemoryStore()
    records = Records(store, ignored)
    wishing = Wishing(records, DAY_S)
    await wishing.ask_compact(*WHO)
    await records.forget(wishes_key(*WHO))
    assert await wishing.of(*WHO) == NONE
