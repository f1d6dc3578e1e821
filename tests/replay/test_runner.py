"""What requests come to."""

from dataclasses import replace

import pytest

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.replay.provider import SummaryCallUsage
from compaction_proxy.replay.runner import (
    PlayedRequest,
    ReplayBill,
    ReplayResult,
    RequestPoint,
    build_bill,
    build_result,
    sum_results,
)

PRICE = ModelPrice((PriceTier(0, 2.0, 0.5, 2.0, 8.0),), "configuration")
SUBJECT = ("anchored", "talk", "big", 1_000)
PLAYED = (
    PlayedRequest(
        RequestPoint(900, 900, 0, 0, round=False),
        10,
        (),
        800,
        exceeds_window=False,
        failed=False,
        has_stable_prefix=False,
    ),
    PlayedRequest(
        RequestPoint(1_100, 300, 128, 896, round=True),
        10,
        (SummaryCallUsage("small", 700, 0, 50),),
        800,
        exceeds_window=False,
        failed=False,
        has_stable_prefix=False,
    ),
    PlayedRequest(
        RequestPoint(1_200, 400, 256, 1_024, round=False),
        10,
        (),
        800,
        exceeds_window=True,
        failed=False,
        has_stable_prefix=True,
    ),
)


def test_figures_add_up_by_hand() -> None:
    told = build_result(*SUBJECT, PLAYED, {"big": PRICE, "small": PRICE})
    counted = (told.requests, told.rounds, told.summary_calls, told.sent_tokens, told.forwarded_tokens)
    assert counted == (3, 1, 1, 3_200, 1_600)
    assert (told.over_without, told.over_with, told.largest_tokens, told.failed) == (2, 1, 900, 0)
    fields = told.to_fields()
    shares = ("cached_share", "cached_share_without", "prefix_stability")
    assert [fields[name] for name in shares] == [0.24, 0.6, 1.0]
    assert told.dollars is not None
    assert told.dollars.uncompacted == pytest.approx((1_280 * 2 + 1_920 * 0.5 + 30 * 8) / 1e6)
    assert told.dollars.compacted == pytest.approx((1_216 * 2 + 384 * 0.5 + 30 * 8) / 1e6)
    assert told.dollars.summaries == pytest.approx((700 * 2 + 50 * 8) / 1e6)
    assert told.tokens.summaries == pytest.approx(0.1 * (700 + 5 * 50))
    assert told.tokens.uncompacted == pytest.approx(1_280 + 192 + 150)


def test_without_a_price_nothing_is_said_in_dollars() -> None:
    told = build_result(*SUBJECT, PLAYED, {"big": PRICE, "small": None})
    assert (told.dollars, told.to_fields()["dollars"]) == (None, None)


def request(uncompacted: int, compacted: int, summary: int, *, is_round: bool) -> PlayedRequest:
    """A request that costs what its sizes say."""
    calls = (SummaryCallUsage("small", summary, 0, 0),) if summary else ()
    point = RequestPoint(uncompacted, compacted, 0, 0, round=is_round)
    return PlayedRequest(
        point, 0, calls, None, exceeds_window=False, failed=False, has_stable_prefix=not is_round
    )


SAVING = request(2, 1, 0, is_round=False)


@pytest.mark.parametrize(
    ("requests", "after"),
    [
        ([request(2, 2, 0, is_round=False), request(2, 1, 3, is_round=True), *[SAVING] * 3], 3),
        ([request(2, 1, 0, is_round=True)], 0),
        ([request(2, 3, 1, is_round=True)], None),
        ([request(2, 2, 0, is_round=False)], None),
    ],
)
def test_a_round_has_paid_for_itself_when_all_that_it_cost_is_back(
    requests: list[PlayedRequest], after: int | None
) -> None:
    assert build_bill("big", requests, lambda _, prompt, *__: float(prompt)).pays_back_after == after


def test_several_conversations_are_summed() -> None:
    one = build_result(*SUBJECT, PLAYED, {"big": PRICE, "small": PRICE})
    other = replace(one, conversation="other", model="else", dollars=None)
    total: ReplayResult = sum_results([one, other], "2 conversations")
    assert (total.requests, total.sent_tokens, total.largest_tokens, total.model) == (6, 6_400, 900, "")
    assert (total.dollars, total.tokens.uncompacted) == (None, 2 * one.tokens.uncompacted)
    assert one.dollars is not None
    without, compacted, summaries, _ = one.dollars
    assert sum_results([one, one], "twice").dollars == ReplayBill(
        2 * without, 2 * compacted, 2 * summaries, None
    )
