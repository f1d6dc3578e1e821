"""What people do with a conversation is noted in its history, and told to whoever listens."""

from compaction_proxy.compaction.commands import Steering
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import Wishing, pin_id
from compaction_proxy.core.event import BYPASSED, MARKED, PINNED, RESUMED, UNPINNED, Event
from compaction_proxy.recall.fulltext import SqliteFullText
from compaction_proxy.recall.retention import Bounds, Holdings
from compaction_proxy.recall.search import Recall
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Records
from compaction_proxy.telemetry.conversation_registry import Owners
from compaction_proxy.telemetry.event_history import History

DAY_S = 86_400.0
NAME = "c_1"
PIN = "Use SI units."


def ignored(_: object) -> None:
    """Nothing fails here."""


async def test_everything_that_is_asked_is_told_once_and_kept() -> None:
    records = Records(MemoryStore(), ignored)
    history, owners, wishing = History(records, DAY_S), Owners(records, DAY_S), Wishing(records, DAY_S)
    heard: list[tuple[str, Event]] = []
    steering = Steering(
        records,
        owners,
        history,
        wishing,
        Recall(records, history, Holdings(records, DAY_S, Bounds()), SqliteFullText()),
        compacted=CompactedConversations(records, DAY_S),
        announce=lambda tenant, event: heard.append((tenant, event)),
    )
    await owners.note("t_1", NAME)
    await steering.compact(NAME)
    await steering.pin(NAME, PIN)
    await steering.pin(NAME, PIN)
    await steering.unpin(NAME, pin_id(PIN))
    await steering.bypass(NAME)
    await steering.bypass(NAME)
    assert (await steering.overview(NAME)).wishes.bypass
    await steering.resume(NAME)
    await steering.resume(NAME)
    assert not (await steering.overview(NAME)).wishes.bypass
    assert [event.kind for _, event in heard] == [MARKED, PINNED, UNPINNED, BYPASSED, RESUMED]
    assert [("t_1", event) for event in await history.of("t_1", NAME)] == heard
    assert len({event.id for _, event in heard}) == 5
    await records.close()
