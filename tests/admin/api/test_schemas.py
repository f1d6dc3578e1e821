"""What the admin API says of records: its fields, and what is null where nothing is known."""

from dataclasses import asdict, fields
from typing import Any

import pytest

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.queries import CompactionRecord, ListedConversation, StatisticsReport
from compaction_proxy.compaction.commands import ConversationOverview
from compaction_proxy.compaction.directives import Directives, NotedInstruction, build_pin_id
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.size_gate import GateLimits
from compaction_proxy.recall.archive import ArchivedRound, RecalledMessage, RemovedMessage
from compaction_proxy.recall.round_detail import RoundDetail, SummaryPrompt, VisibleMessage
from compaction_proxy.telemetry.live_feed import COMPACTION, FeedItem
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow
from compaction_proxy.telemetry.usage import ExchangeEntry, Totals

PLACE = "ab" * 64
NAME, KEY = "c_1", "k_1"
MADE = Event(COMPACTED, 7.0, NAME, id="e_1", round=1, place=PLACE, strategy="chained", summary="done")


def names(schema: Any) -> set[str]:
    return {each.name for each in fields(schema)}


def archived(text: str, lines: str) -> dict[str, Any]:
    message = RemovedMessage("m_1", 3, "tool", text, turn=2)
    return schemas.to_archived_message(
        RecalledMessage(message, ArchivedRound(NAME, "chained", bytes.fromhex(PLACE), 4, 9.0)), lines
    )


def test_a_conversation_without_a_known_price_has_no_dollars() -> None:
    priced = Totals(requests=2, priced=1, cost_usd=2.0, gross_usd=1.5, summary_usd=0.5)
    row = schemas.to_conversation_row(ListedConversation(NAME, priced, KEY))
    assert set(row) == names(schemas.ConversationRow)
    assert (row["id"], row["requests"], row["cost_usd"], row["net_usd"]) == (NAME, 2, 2.0, 1.0)
    unknown = schemas.to_conversation_row(ListedConversation(NAME, Totals(requests=2), KEY))
    assert (unknown["cost_usd"], unknown["net_usd"]) == (None, None)


def test_an_exchange_has_its_figures_and_its_saving_if_that_is_known() -> None:
    exchange = Exchange(1.0, "m", "none", 200)
    line = schemas.to_exchange_line(ExchangeEntry("t", NAME, exchange, Saving(2.0, 3.0, 0.5, 2.5)))
    assert line == {
        **exchange._asdict(),
        "saving": {"cost": 2.0, "gross": 3.0, "cache_loss": 0.5, "net": 2.5},
    }
    assert schemas.to_exchange_line(ExchangeEntry("t", NAME, exchange, None))["saving"] is None


def test_a_compaction_is_told_with_what_it_removed_and_what_the_model_sees_now() -> None:
    record = CompactionRecord(MADE, undone=True, pays_back_after=2.5, state="undone", used_at=7.0)
    detail = RoundDetail(
        MADE,
        (RemovedMessage("m_1", 0, "user", "old", turn=1),),
        (SummaryPrompt("small", "Summarise.", "user: old"),),
        (VisibleMessage("user", "new", "kept", "m_2"),),
    )
    told = schemas.to_compaction_detail(record, detail)
    assert set(told) == names(schemas.CompactionDetail)
    assert told == {
        **asdict(MADE),
        "undone": True,
        "pays_back_after": 2.5,
        "state": "undone",
        "used_at": 7.0,
        "removed": [{"id": "m_1", "index": 0, "role": "user", "text": "old"}],
        "prompts": [asdict(detail.prompts[0])],
        "seen": [{"id": "m_2", "role": "user", "text": "new", "origin": "kept"}],
    }


def test_an_item_of_the_feed_shows_no_text_and_no_ids_of_messages() -> None:
    shown = {"kind": COMPACTED, "round": 1}
    item = FeedItem("1", COMPACTION, {**shown, "summary": "secret", "message_ids": ["m_1"]})
    assert schemas.to_item_fields(item) == shown


@pytest.mark.parametrize(
    ("counters", "net"),
    [
        (ExchangeCounters(requests=4, failed=1, unpriced=3), None),  # no price of any answer is known
        (ExchangeCounters(requests=4, failed=1, unpriced=2, gross_usd=3.0, cache_loss_usd=1.0), 2.0),
        (ExchangeCounters(requests=4, failed=4, summary_usd=0.5), -0.5),
        (ExchangeCounters(requests=4, failed=4), None),
        (ExchangeCounters(), 0.0),
    ],
)
def test_counters_have_dollars_where_the_price_of_an_answer_is_known(
    counters: ExchangeCounters, net: float | None
) -> None:
    told = schemas.to_counters(counters)
    assert (told["net_usd"], told["requests"]) == (net, counters.requests)
    assert (told["cost_usd"] is None) is (net is None)


def test_statistics_have_a_row_for_each_label_and_a_total() -> None:
    counters = ExchangeCounters(requests=3, statuses={"none": 1, "failed-open": 2})
    report = StatisticsReport((StatisticsRow("m", counters),), counters)
    told = schemas.to_stats(1.0, 9.0, "model", report, list_prices=True)
    assert set(told) == names(schemas.Stats)
    assert set(told["rows"][0]) == names(schemas.StatsRow)
    assert [told[name] for name in ("since", "until", "by")] == [1.0, 9.0, "model"]
    assert told["rows"] == [{"of": "m", **told["total"]}]
    assert told["total"]["failed_open"] == 2


def test_a_conversation_is_told_with_what_users_asked_for() -> None:
    noted = NotedInstruction("instructions", "AGENTS.md", "user", 12)
    directives = Directives(pins=("Use SI units.",), instructions=(noted,), removed=(noted.id,), bypass=True)
    overview = ConversationOverview(Totals(priced=0), (MADE,), frozenset({PLACE}), directives)
    limits = GateLimits(84_998.5, 88_500)
    told = schemas.to_conversation(NAME, overview, limits, hard_tokens=90_000, list_prices=False)
    assert set(told) == names(schemas.Conversation)
    assert (told["rounds"][0]["undone"], told["rounds"][0]["round"]) == (True, 1)
    assert told["pins"] == [{"id": build_pin_id("Use SI units."), "text": "Use SI units."}]
    assert [(each["id"], each["removed"]) for each in told["instructions"]] == [(noted.id, True)]
    assert (told["bypass"], told["compact"], told["money"]) == (True, False, None)
    assert told["hard_tokens"] == 90_000
    assert (told["tokens"], told["list_prices"]) == (None, False)
    assert (told["small_bytes"], told["min_trigger"]) == (84_998, 88_500)


def test_a_conversation_has_saved_tokens_where_a_count_is_known() -> None:
    totals = Totals(counted=1, sent_tokens=900, read_tokens=300, summary_tokens=50)
    overview = ConversationOverview(totals, (), frozenset(), Directives())
    told = schemas.to_conversation(NAME, overview, GateLimits(-1.0, None), hard_tokens=None, list_prices=True)
    assert told["tokens"] == {"gross_tokens": 600, "summary_tokens": 50, "net_tokens": 550}
    assert (told["small_bytes"], told["min_trigger"]) == (None, None)


@pytest.mark.parametrize(
    ("lines", "text", "first", "last"),
    [("2-3", "b\nc", 2, 3), ("3-99", "c\nd", 3, 4), ("2", "b", 2, 2)],
)
def test_of_a_removed_message_the_lines_that_were_asked_for_are_told(
    lines: str, text: str, first: int, last: int
) -> None:
    told = archived("a\nb\nc\nd", lines)
    assert set(told) == names(schemas.ArchivedMessage)
    assert (told["text"], told["lines"]) == (text, {"first": first, "last": last, "of": 4})
    assert (told["round"], told["conversation"], told["turn"]) == (4, NAME, 2)


def test_a_removed_message_is_told_whole_where_no_lines_are_asked_for() -> None:
    told = archived("a\nb", "")
    assert (told["text"], told["lines"]) == ("a\nb", None)


@pytest.mark.parametrize("lines", ["5-6", "x", "3-2"])
def test_lines_that_a_message_does_not_have_are_refused(lines: str) -> None:
    with pytest.raises(RequestRefusedError, match="from 1 to 2") as refused:
        archived("a\nb", lines)
    assert refused.value.status == 422
