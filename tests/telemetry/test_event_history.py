"""The history of a conversation: its rounds, from every root it has, and what else has happened."""

from dataclasses import replace
from pathlib import Path

import pytest

from compaction_proxy.core.checkpoint import Checkpoint, to_fields
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, MEASURED, Event
from compaction_proxy.storage.keys import checkpoint_keys, checkpoint_list_key, round_events_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import (
    KEPT_EVENTS,
    EventHistory,
    build_round_event_line,
)

DAY_S = 86_400.0
WHO = ("t_1", "c_1")
ROOTS = [bytes([number]) * 32 for number in (1, 2)]


def ignored(_: object) -> None:
    """Nothing fails here."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


def made(number: int, *, conversation: str = "c_1", strategy: str = "chained") -> Event:
    """The event of a round that was made `number` seconds after the epoch, at that place."""
    return Event(
        COMPACTED,
        float(number),
        conversation,
        strategy=strategy,
        round=number,
        place=place(number).hex(),
        tokens_after=10 * number,
    )


async def kept(records: RecordStore, root: bytes, event: Event) -> None:
    """What making a round does."""
    await EventHistory(records, DAY_S).record_root("t_1", event.conversation, root)
    line = build_round_event_line("t_1", root, event, DAY_S)
    await records.save_if_absent(f"{line.key}:{event.place}", {}, ttl_s=DAY_S, other_items=[line])
    await listed(records, root, event.strategy, event.place)


async def listed(records: RecordStore, root: bytes, strategy: str, digits: str) -> None:
    """What installing a round does."""
    key = checkpoint_list_key("t_1", root, strategy)
    await records.append_line(key, {"place": digits}, ttl_s=DAY_S, max_lines=200)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "state.db")


async def test_events_of_all_roots_and_of_none_come_oldest_first(store: Store) -> None:
    records = RecordStore(store, ignored, deadline_s=10.0)
    history = EventHistory(records, DAY_S)
    failed = Event(FAILED, 2.0, "c_1", reason="timeout")
    await history.record_event("t_1", failed)
    for root, event in ((ROOTS[0], made(1)), (ROOTS[1], made(3)), (ROOTS[0], made(4))):
        await kept(records, root, event)
    assert await EventHistory(RecordStore(store, ignored, deadline_s=10.0), DAY_S).list_events(*WHO) == [
        made(1),
        failed,
        made(3),
        made(4),
    ]
    await records.close()


async def test_a_round_made_ahead_is_applied_once_it_is_installed_and_that_is_told_once() -> None:
    records = RecordStore(MemoryStore(), ignored)
    history = EventHistory(records, DAY_S)
    ahead = [replace(made(number), outcome="scheduled") for number in (1, 2)]
    for event in ahead:
        await kept(records, ROOTS[0], event)
    installed = replace(made(1), kind=INSTALLED, at=3.0, outcome="applied")
    shortened = replace(made(2), kind=INSTALLED, at=4.0, outcome="applied", place=place(9).hex())
    for event in (installed, replace(installed, at=3.5), shortened):
        await history.record_event("t_1", event)
    applied = [replace(event, outcome="applied") for event in ahead]
    assert await history.list_events(*WHO) == [*applied, installed, shortened]


async def test_a_conversation_that_begins_alike_has_a_history_of_its_own() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await kept(records, ROOTS[0], made(1))
    await kept(records, ROOTS[0], made(2, conversation="c_2"))
    history = EventHistory(records, DAY_S)
    assert await history.list_events("t_1", "c_1") == [made(1)]
    assert await history.list_events("t_1", "c_2") == [made(2, conversation="c_2")]
    assert await history.list_events("t_2", "c_1") == []


async def test_a_round_says_what_the_upstream_counted_first() -> None:
    records = RecordStore(MemoryStore(), ignored)
    history = EventHistory(records, DAY_S)
    await kept(records, ROOTS[0], made(1))
    await kept(records, ROOTS[0], made(2))
    for at, tokens in ((1.5, 111), (1.7, 222)):
        await history.record_event("t_1", replace(made(1), kind=MEASURED, at=at, tokens_real=tokens))
    assert await history.list_events(*WHO) == [replace(made(1), tokens_real=111), made(2)]


async def test_the_rounds_that_are_installed_come_newest_first_whatever_made_them() -> None:
    records = RecordStore(MemoryStore(), ignored)
    rounds = [made(1), made(2, strategy="full"), made(3)]
    for root, event in zip([ROOTS[0], ROOTS[1], ROOTS[0]], rounds, strict=True):
        await kept(records, root, event)
    history = EventHistory(records, DAY_S)
    await history.record_event("t_1", Event(FAILED, 9.0, "c_1"))
    assert await history.list_installed_rounds(*WHO) == [rounds[number - 1] for number in (3, 2, 1)]


async def test_a_round_that_is_only_ready_is_not_installed() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await kept(records, ROOTS[0], made(1))
    ready = build_round_event_line("t_1", ROOTS[0], replace(made(2), outcome="scheduled"), DAY_S)
    await records.save_if_absent(f"{ready.key}:ready", {}, ttl_s=DAY_S, other_items=[ready])
    history = EventHistory(records, DAY_S)
    assert [event.round for event in await history.list_events(*WHO)] == [1, 2]
    assert [each.place for each in await history.list_installed_rounds(*WHO)] == [place(1).hex()]


async def test_a_round_without_an_event_is_told_of_by_its_checkpoint_if_it_is_this_conversation_s() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await kept(records, ROOTS[0], made(5))
    for number, conversation in ((8, "c_1"), (9, "c_2")):
        stored = Checkpoint("chained", conversation, 3, 4, bytes(32), (), (), (), "said", 90, 40)
        [key] = checkpoint_keys("t_1", ROOTS[0], "chained", [place(number)])
        await records.overwrite(key, to_fields(stored), ttl_s=DAY_S)
        await listed(records, ROOTS[0], "chained", place(number).hex())
    told = Event(
        COMPACTED,
        5.0,
        "c_1",
        strategy="chained",
        round=3,
        place=place(8).hex(),
        tokens_before=90,
        tokens_after=40,
        summary="said",
    )
    history = EventHistory(records, DAY_S)
    assert await history.list_installed_rounds(*WHO) == [
        told,
        made(5),
    ]


async def test_a_count_belongs_to_the_newest_round_of_its_number_where_the_place_is_another() -> None:
    records = RecordStore(MemoryStore(), ignored)
    history = EventHistory(records, DAY_S)
    rounds = [made(1), replace(made(2), round=1), replace(made(3), round=1)]
    for event in rounds:
        await kept(records, ROOTS[0], event)
    counted = Event(MEASURED, 2.5, "c_1", strategy="chained", round=1, place=place(77).hex(), tokens_real=55)
    await history.record_event("t_1", counted)
    assert [event.tokens_real for event in await history.list_events(*WHO)] == [None, 55, None]


async def test_only_a_compaction_in_use_is_counted_and_a_counted_one_is_in_use() -> None:
    records = RecordStore(MemoryStore(), ignored)
    history = EventHistory(records, DAY_S)
    late = replace(made(2), round=1, outcome="scheduled")
    joined = replace(made(3), outcome="scheduled")
    for event in (made(1), late, joined):
        await kept(records, ROOTS[0], event)
    extended = replace(made(1), kind=MEASURED, at=4.0, place=place(77).hex(), tokens_real=55)
    for event in (extended, replace(joined, kind=MEASURED, at=5.0, outcome="", tokens_real=66)):
        await history.record_event("t_1", event)
    assert await history.list_events(*WHO) == [
        replace(made(1), tokens_real=55),
        late,
        replace(joined, outcome="applied", tokens_real=66),
    ]


async def test_a_round_of_an_older_version_has_no_place_and_is_history_all_the_same() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await kept(records, ROOTS[0], replace(made(1), place=""))
    await kept(records, ROOTS[0], replace(made(2), place="no digits"))
    history = EventHistory(records, DAY_S)
    assert [event.round for event in await history.list_events(*WHO)] == [1, 2]
    assert await history.list_installed_rounds(*WHO) == []


async def test_what_is_no_event_is_passed_over() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await kept(records, ROOTS[0], made(1))
    await records.append_line(round_events_key("t_1", ROOTS[0]), {"kind": 5}, ttl_s=DAY_S, max_lines=9)
    assert await EventHistory(records, DAY_S).list_events(*WHO) == [made(1)]


async def test_the_newest_events_stay() -> None:
    history = EventHistory(RecordStore(MemoryStore(), ignored), DAY_S)
    for number in range(KEPT_EVENTS + 2):
        await history.record_event("t_1", Event(FAILED, float(number), "c_1"))
    assert [event.at for event in await history.list_events(*WHO)] == [
        float(number) for number in range(2, KEPT_EVENTS + 2)
    ]


async def test_a_root_that_is_used_all_the_time_does_not_push_another_out() -> None:
    history = EventHistory(RecordStore(MemoryStore(), ignored), DAY_S)
    for root in [ROOTS[0], *[ROOTS[1]] * 60]:
        await history.record_root(*WHO, root)
    assert await history.list_roots(*WHO) == (ROOTS[1], ROOTS[0])
