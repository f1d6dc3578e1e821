"""A Python whose SQLite has no FTS5: that is said once, and whoever searches is told; all else works."""

import pytest
from structlog.testing import capture_logs

from compaction_proxy.cli.doctor import check_search
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.core.message import Message
from compaction_proxy.recall import fulltext
from compaction_proxy.recall.archive import (
    ArchivedRound,
    OriginalMessage,
    RecalledMessage,
    RemovedMessage,
    build_archive,
)
from compaction_proxy.recall.fulltext import FTS5_MISSING, SqliteTextIndexBuilder
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import ArchiveSearch
from compaction_proxy.recall.tool import SEARCH_UNAVAILABLE_TEXT, RecallContext, RecallTool
from compaction_proxy.runtime import Components
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.event_history import EventHistory

DAY_S = 86_400.0
ROOT = bytes(32)
MADE = ArchivedRound("c_1", "chained", bytes(64), 1, 1.0)


def ignored(_: object) -> None:
    """Nothing fails here."""


@pytest.fixture(autouse=True)
def without_fts5(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite knows no module of the name that is asked for."""
    lists = fulltext._SCHEMA_SQL.replace("fts5(", "fts5_that_is_not_there(")
    monkeypatch.setattr(fulltext, "_SCHEMA_SQL", lists)


async def removed() -> ArchiveSearch:
    """What finds the one message that a round has taken out."""
    records = RecordStore(MemoryStore(), ignored)
    history, holdings = EventHistory(records, DAY_S), ArchiveRetention(records, DAY_S, ArchiveBounds())
    await history.record_root("t_1", "c_1", ROOT)
    archive = build_archive("t_1", ROOT, MADE, [OriginalMessage(0, "m_0", 1, Message("user", "word"))], DAY_S)
    assert await records.write([*archive.items, archive.list_line])
    return ArchiveSearch(records, history, holdings, SqliteTextIndexBuilder())


async def test_a_search_says_why_it_finds_nothing_and_a_message_is_read_nevertheless() -> None:
    recall = await removed()
    for _ in range(2):
        with pytest.raises(SearchUnavailableError, match=FTS5_MISSING):
            await recall.search("t_1", "c_1", "word")
    whole = RecalledMessage(RemovedMessage("m_0", 0, "user", "word", 1), MADE)
    assert await recall.find_message("t_1", "c_1", "m_0") == whole
    memory, asker = RecallTool(recall, len), RecallContext("t_1", "c_1")
    assert await memory.answer_call(asker, '{"query": "word"}') == SEARCH_UNAVAILABLE_TEXT
    assert "word" in await memory.answer_call(asker, '{"id": "m_0"}')
    await recall.close()


def test_it_is_told_in_one_line_at_the_start_and_by_the_doctor() -> None:
    with capture_logs() as lines:
        Components(Config(), MemoryStore())
    assert lines == [{"event": "search.unavailable", "log_level": "warning", "reason": FTS5_MISSING}]
    finding = check_search()
    assert (finding.level, finding.topic, finding.what) == ("warning", "search", FTS5_MISSING.rstrip("."))
