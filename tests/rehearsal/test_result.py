"""What requests come to."""

from dataclasses import replace

import pytest

from compaction_proxy.core.cost.price import Price, Tier
from compaction_proxy.replay.costs import Played, Subject, result
from compaction_proxy.replay.result import Bill, Point, Result, Spending, bill, summed, to_fields
from compaction_proxy.replay.writer import Call

PRICE = Price((Tier(0, 2.0, 0.5, 2.0, 8.0),), "configuration")
SAVING = Spending(2, 1, 0, round=False)
SUBJECT = Subject("anchored", "talk", "big", 1_000)
PLAYED = (
    Played(Point(900, 900, 0, 0, round=False), 10, (), 800, over=False, failed=False, kept=False),
    Played(
        Point(1_100, 300, 128, 896, round=True), 10, (Call("small", 700, 0, 50),), 800,
        over=False, failed=False, kept=False,
    ),
    Played(Point(1_200, 400, 256, 1_024, round=False), 10, (), 800, over=True, failed=False, kept=True),
)  # fmt: skip


def test_figures_add_up_by_hand() -> None:
    told = result(SUBJECT, PLAYED, {"big": PRICE, "small": PRICE})
    counted = (told.requests, told.rounds, told.summary_calls, told.sent_tokens, told.forwarded_tokens)
    assert counted == (3, 1, 1, 3_200, 1_600)
    assert (told.over_without, told.over_with, told.largest_tokens, told.failed) == (2, 1, 900, 0)
    assert (told.cached_share, told.cached_share_without, told.prefix_stability) == (0.24, 0.6, 1.0)
    assert told.dollars is not None
    assert told.dollars.without == pytest.approx((1_280 * 2 + 1_920 * 0.5 + 30 * 8) / 1e6)
    assert told.dollars.compacted == pytest.approx((1_216 * 2 + 384 * 0.5 + 30 * 8) / 1e6)
    assert told.dollars.summaries == pytest.approx((700 * 2 + 50 * 8) / 1e6)
    assert told.tokens.summaries == pytest.approx(0.1 * (700 + 5 * 50))
    assert told.tokens.without == pytest.approx(1_280 + 192 + 150)


def test_without_a_price_nothing_is_said_in_dollars() -> None:
    told = result(SUBJECT, PLAYED, {"big": PRICE, "small": None})
    assert (told.dollars, to_fields(told)["dollars"]) == (None, None)


@pytest.mark.parametrize(
    ("spendings", "after"),
    [
        ([Spending(2, 2, 0, round=False), Spending(2, 1, 3, round=True), *[SAVING] * 3], 3),
        ([Spending(2, 1, 0, round=True)], 0),
        ([Spending(2, 3, 1, round=True)], None),
        ([Spending(2, 2, 0, round=False)], None),
    ],
)
def test_a_round_has_paid_for_itself_when_all_that_it_cost_is_back(
    spendings: list[Spending], after: int | None
) -> None:
    assert bill(spendings).pays_back_after == after


def test_several_conversations_are_summed() -> None:
    one = result(SUBJECT, PLAYED, {"big": PRICE, "small": PRICE})
    other = replace(one, conversation="other", model="else", dollars=None)
    total: Result = summed([one, other], "2 conversations")
    assert (total.requests, total.sent_tokens, total.largest_tokens, total.model) == (6, 6_400, 900, "")
    assert (total.dollars, total.tokens.without) == (None, 2 * one.tokens.without)
    assert one.dollars is not None
    without, compacted, summaries, _ = one.dollars
    assert summed([one, one], "twice").dollars == Bill(2 * without, 2 * compacted, 2 * summaries, None)
