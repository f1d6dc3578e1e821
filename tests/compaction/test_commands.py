"""What people do with a conversation is noted in its history, and told to whoever listens."""

from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore, build_pin_id
from compaction_proxy.core.event import BYPASSED, MARKED, PINNED, RESUMED, UNPINNED, Event
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import ArchiveSearch
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_history import EventHistory

DAY_S = 86_400.0
NAME = "c_1"
PIN = "Use SI units."


def ignored(_: object) -> None:
    """Nothing fails here."""


async def test_everything_that_is_asked_is_told_once_and_kept() -> None:
    records = RecordStore(MemoryStore(), ignored)
    history, owners, wishing = (
        EventHistory(records, DAY_S),
        ConversationRegistry(records, DAY_S),
        DirectiveStore(records, DAY_S),
    )
    heard: list[tuple[str, Event]] = []
    steering = ConversationCommands(
        records,
        owners,
        history,
        wishing,
        ArchiveSearch(
            records, history, ArchiveRetention(records, DAY_S, ArchiveBounds()), SqliteTextIndexBuilder()
        ),
        compacted=CompactedConversations(records, DAY_S),
        announce=lambda tenant, event: heard.append((tenant, event)),
    )
    await owners.record_activity("t_1", NAME)
    await steering.request_compaction(NAME)
    await steering.add_pin(NAME, PIN)
    await steering.add_pin(NAME, PIN)
    await steering.remove_pin(NAME, build_pin_id(PIN))
    await steering.bypass_compaction(NAME)
    await steering.bypass_compaction(NAME)
    assert (await steering.get_overview(NAME)).directives.bypass
    await steering.resume_compaction(NAME)
    await steering.resume_compaction(NAME)
    assert not (await steering.get_overview(NAME)).directives.bypass
    assert [event.kind for _, event in heard] == [MARKED, PINNED, UNPINNED, BYPASSED, RESUMED]
    assert [("t_1", event) for event in await history.list_events("t_1", NAME)] == heard
    assert len({event.id for _, event in heard}) == 5
    await records.close()
