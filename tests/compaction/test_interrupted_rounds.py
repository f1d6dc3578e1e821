"""Rounds that are under way when the process ends, and what rounds archive."""

import asyncio
import json

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.event import FAILED
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import ArchiveSearch
from tests.helpers.compaction_bench import Summaries, bench, talk

TURNS = 93


async def test_closing_ends_a_round_that_waits_for_a_model() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        asked = asyncio.create_task(made.fit(talk(TURNS)))
        await made.summaries.asked()
        await asyncio.wait_for(made.rounds.close(), timeout=30)
        assert (await asked).report.reason == "cancelled"


async def test_what_a_round_that_fails_on_closing_has_to_tell_is_told() -> None:
    held = Summaries([SummaryError("http-500")], hold=asyncio.Event())
    async with bench(held) as made:
        asked = asyncio.create_task(made.fit(talk(TURNS)))
        await held.asked()
        held.release()
        while made.rounds.is_busy:  # noqa: ASYNC110 - it ends without anything else being waited for
            await asyncio.sleep(0)
        await made.rounds.close()
        assert not made.rounds._event_tasks
        assert FAILED in {event.kind for event in await made.events()}
        await asked


async def test_what_is_archived_says_its_turn_as_a_number_from_the_first_message_on() -> None:
    async with bench(strategy="full") as made:
        await made.fit(talk(3, 800), trigger_tokens=3_000)
        holdings = ArchiveRetention(made.records, 60.0, ArchiveBounds())
        recall = ArchiveSearch(made.records, made.history, holdings, SqliteTextIndexBuilder())
        taken = [each.message for each in await recall.list_removed_messages("t", "c_1")]
        await recall.close()
    assert json.dumps([each.turn for each in taken]) == "[1, 1, 2, 2, 3, 3, 4]"
