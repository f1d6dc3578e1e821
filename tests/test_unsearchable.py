"""A Python whose SQLite has no FTS5: that is said once, and whoever searches is told; all else works."""

import pytest
from structlog.testing import capture_logs

from compaction_proxy.cli.doctor import host
from compaction_proxy.core.errors import SearchUnavailable
from compaction_proxy.core.message import Message
from compaction_proxy.recall import fulltext
from compaction_proxy.recall.archive import Archived, Original, Recalled, Round, archived
from compaction_proxy.recall.fulltext import MISSING, SqliteFullText
from compaction_proxy.recall.retention import Bounds, Holdings
from compaction_proxy.recall.search import Recall
from compaction_proxy.recall.tool import UNSEARCHABLE, Asker, Memory
from compaction_proxy.runtime import opened_full_text
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Records
from compaction_proxy.telemetry.event_history import History

DAY_S = 86_400.0
ROOT = bytes(32)
MADE = Round("c_1", "chained", bytes(64), 1, 1.0)


def ignored(_: object) -> None:
    """Nothing fails here."""


@pytest.fixture(autouse=True)
def without_fts5(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite knows no module of the name that is asked for."""
    lists = fulltext._LISTS.replace("fts5(", "fts5_that_is_not_there(")
    monkeypatch.setattr(fulltext, "_LISTS", lists)


async def removed() -> Recall:
    """What finds the one message that a round has taken out."""
    records = Records(MemoryStore(), ignored)
    history, holdings = History(records, DAY_S), Holdings(records, DAY_S, Bounds())
    await history.rooted("t_1", "c_1", ROOT)
    archive = archived("t_1", ROOT, MADE, [Original(0, "m_0", 1, Message("user", "word"))], DAY_S)
    assert await records.write([*archive.items, archive.line])
    return Recall(records, history, holdings, SqliteFullText())


async def test_a_search_says_why_it_finds_nothing_and_a_message_is_read_nevertheless() -> None:
    recall = await removed()
    for _ in range(2):
        with pytest.raises(SearchUnavailable, match=MISSING):
            await recall.search("t_1", "c_1", "word")
    whole = Recalled(Archived("m_0", 0, "user", "word", 1), MADE)
    assert await recall.message("t_1", "c_1", "m_0") == whole
    memory, asker = Memory(recall, len), Asker("t_1", "c_1")
    assert await memory.answer(asker, '{"query": "word"}') == UNSEARCHABLE
    assert "word" in await memory.answer(asker, '{"id": "m_0"}')
    await recall.close()


def test_it_is_told_in_one_line_at_the_start_and_by_the_doctor() -> None:
    with capture_logs() as lines:
        opened_full_text()
    assert lines == [{"event": "search.unavailable", "log_level": "warning", "reason": MISSING}]
    finding = host.search()
    assert (finding.level, finding.topic, finding.what) == ("warning", "search", MISSING.rstrip("."))
