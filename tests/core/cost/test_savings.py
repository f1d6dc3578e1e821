"""What an exchange has saved: known answers, a provider's cache played through, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.cost.savings import (
    CacheState,
    Saving,
    compute_break_even_requests,
    compute_single_answer_saving,
)
from compaction_proxy.core.exchange import Exchange

# A dollar a token: input 1, cached 0.1.
PRICE = ModelPrice((PriceTier(0, 1e6, 1e5, 1e6, 5e6),), "test")
TIERED = ModelPrice((PriceTier(0, 1e6, 1e5, 1e6, 5e6), PriceTier(50_000, 2e6, 2e5, 2e6, 8e6)), "test")
BLOCK = 128
TOKENS = st.integers(0, 400_000)


def digests(count: int, branch: int = 0) -> tuple[bytes, ...]:
    return tuple(b"%d/%d" % (branch, k) for k in range(count))


def asked(
    at: float, before: int, prompt: int, cached: int | None, *, status: str = "none", **others: int | str
) -> Exchange:
    changed = {"strategy": "anchored", "round": 1} if before != prompt else {}
    told = {**changed, **others}
    return Exchange(
        at,
        "m",
        status,
        code=200,
        tokens_before=before,
        tokens_after=prompt,
        prompt_tokens=prompt,
        cached_tokens=cached,
        **told,  # type: ignore[arg-type]  # fields of two types
    )


def saved(*exchanges: Exchange, price: ModelPrice = PRICE) -> list[Saving | None]:
    """The savings of a conversation whose requests continue one another."""
    standing: CacheState | None = None
    made = []
    for count, exchange in enumerate(exchanges, 1):
        each, standing = compute_single_answer_saving(exchange, digests(2 * count), standing, price)
        made.append(each if each is None else Saving(*(round(value, 3) for value in each)))
    return made


def test_a_round_costs_the_cache_once_and_then_saves_the_price_of_cached_tokens() -> None:
    assert saved(
        asked(0, 20_000, 20_000, 0),
        asked(10, 30_000, 30_000, 20_000),
        asked(20, 40_000, 15_000, 2_000, status="applied"),
        asked(30, 50_000, 25_000, 15_000, status="reused"),
    ) == [
        Saving(20_000),
        Saving(12_000),
        # unchanged it would have had 30,000 of 40,000 cached: 13,000; of 15,000 all: 1,500; it had 2,000
        Saving(13_200, gross=11_500, cache_loss=11_700, net=-200),
        # 40,000 of 50,000 would have been cached: 14,000; and 25,000 of 25,000: 2,500; it had 15,000
        Saving(11_500, gross=11_500, cache_loss=9_000, net=2_500),
    ]


def test_a_request_that_went_on_as_it_came_saves_exactly_nothing() -> None:
    counted_otherwise = asked(0, 20_000, 20_000, 512)._replace(tokens_before=19_000, tokens_after=19_000)

    assert saved(
        counted_otherwise,
        asked(1, 9, 30_000, 0)._replace(tokens_before=None, tokens_after=None),
        asked(2, 40_000, 40_000, 0, status="bypassed"),
    ) == [Saving(19_539.2), Saving(30_000), Saving(40_000)]


def test_the_first_request_that_is_known_has_as_much_cached_as_it_shows() -> None:
    [made] = saved(asked(0, 40_000, 20_000, 10_000, status="reused"))

    # half: 20,000 of 40,000 would cost 22,000; of 20,000 all 2,000; it cost 11,000
    assert made == Saving(11_000, gross=20_000, cache_loss=9_000, net=11_000)


def test_what_providers_leave_over_at_the_end_of_a_block_they_would_leave_over_of_the_whole_request() -> None:
    made = saved(
        asked(0, 20_000, 20_000, 0),
        asked(1, 30_000, 30_000, 19_900),  # 100 less than it had read
        asked(2, 40_000, 15_000, 0, status="applied"),
    )[-1]

    # 29,900 of 40,000 would have been cached
    assert made == Saving(15_000, gross=13_090 - 1_500, cache_loss=13_500, net=13_090 - 15_000)


def test_a_provider_that_caches_nothing_would_have_cached_nothing() -> None:
    made = saved(
        asked(0, 20_000, 20_000, 0),
        asked(1, 30_000, 30_000, 0),
        asked(2, 40_000, 15_000, 0, status="applied"),
        asked(3, 50_000, 25_000, 0, status="reused"),
    )[2:]

    assert made == [Saving(15_000, 25_000, 0, 25_000), Saving(25_000, 25_000, 0, 25_000)]


@pytest.mark.parametrize(
    ("gap", "cached", "expected"),
    [
        (600, 0, Saving(25_000, gross=11_500, cache_loss=22_500, net=-11_000)),  # the round broke it
        (601, 0, Saving(25_000, gross=25_000, cache_loss=0, net=25_000)),  # it had expired anyway
        (601, 128, Saving(24_884.8, gross=11_500, cache_loss=22_384.8, net=-10_884.8)),  # it had not
    ],
)
def test_a_cache_that_nobody_has_asked_for_in_ten_minutes_is_gone_unless_it_shows(
    gap: float, cached: int, expected: Saving
) -> None:
    made = saved(
        asked(0, 20_000, 20_000, 0),
        asked(1, 40_000, 40_000, 20_000),
        asked(1 + gap, 50_000, 25_000, cached, status="applied"),
    )
    assert made[-1] == expected


def test_what_is_below_a_surcharge_saves_the_surcharge_of_all_tokens() -> None:
    made = saved(
        asked(0, 40_000, 40_000, 0),
        asked(1, 60_000, 20_000, 0, status="applied")._replace(completion_tokens=100),
        price=TIERED,
    )[-1]

    # unchanged: 40,000 cached and 20,000 not, at twice the price, and 800 for the answer; kept: 2,000 and 500
    assert made == Saving(20_500, gross=48_800 - 2_500, cache_loss=18_000, net=28_300)


def test_a_branch_is_compared_with_the_request_that_it_continues() -> None:
    standing: CacheState | None = None
    trunk = digests(4)
    for exchange, prefixes in [
        (asked(0, 20_000, 20_000, 0), trunk[:2]),
        (asked(1, 30_000, 30_000, 20_000), trunk),
    ]:
        _, standing = compute_single_answer_saving(exchange, prefixes, standing, PRICE)
    branch = (*trunk[:2], *digests(2, branch=1))
    edited, _ = compute_single_answer_saving(
        asked(2, 30_000, 10_000, 0, status="applied"), branch, standing, PRICE
    )
    other, _ = compute_single_answer_saving(
        asked(2, 30_000, 10_000, 0, status="applied"), digests(4, branch=2), standing, PRICE
    )

    # 20,000 of 30,000 would have been cached; of another conversation's list nothing
    assert edited is not None
    assert other is not None
    assert [round(each.gross) for each in (edited, other)] == [12_000 - 1_000, 20_000]


def test_a_refused_request_costs_nothing_and_is_not_remembered() -> None:
    known = CacheState()

    assert compute_single_answer_saving(asked(0, 9, 9, 0)._replace(code=429), (b"a",), known, PRICE) == (
        Saving(0.0),
        known,
    )


def test_without_a_price_or_a_count_nothing_is_known_and_the_conversation_is_remembered_all_the_same() -> (
    None
):
    exchange = asked(0, 9, 9, 0)
    uncounted, nothing = compute_single_answer_saving(
        exchange._replace(prompt_tokens=None), (b"a",), None, PRICE
    )
    unpriced, remembered = compute_single_answer_saving(exchange, (b"a",), None, None)

    assert (uncounted, unpriced, nothing) == (None, None, CacheState())
    assert [each.client_tokens for each in remembered.requests] == [9]


@st.composite
def conversations(draw: st.DrawFn) -> list[Exchange]:
    """Requests of one conversation, whatever is counted of them."""
    made, at = [], 0.0
    for _ in range(draw(st.integers(1, 6))):
        at += draw(st.sampled_from([1.0, 700.0]))
        before, prompt = draw(TOKENS), draw(TOKENS)
        cached = draw(st.one_of(st.none(), st.integers(0, prompt)))
        status = draw(st.sampled_from(["none", "applied", "reused", "over-limit", "failed-open"]))
        made.append(asked(at, max(before, prompt), prompt, cached, status=status))
    return made


@given(conversations(), st.sampled_from([PRICE, TIERED]))
def test_net_is_gross_less_cache_loss_and_nothing_changed_is_nothing_saved(
    exchanges: list[Exchange], price: ModelPrice
) -> None:
    standing: CacheState | None = None
    for count, exchange in enumerate(exchanges, 1):
        made, standing = compute_single_answer_saving(exchange, digests(2 * count), standing, price)
        assert made is not None
        assert made.net == made.gross - made.cache_loss
        assert made.cache_loss >= 0
        if exchange.tokens_before == exchange.tokens_after:
            assert made == Saving(made.cost)
        assert len(standing.requests) <= 8


@given(st.integers(1_000, 6_000), st.integers(20_000, 60_000), st.integers(5, 40))
def test_the_sum_agrees_with_two_conversations_that_are_played(
    growth: int, trigger: int, requests: int
) -> None:
    """One is compacted, one never; both before a provider that caches blocks of 128 tokens."""
    standing: CacheState | None = None
    net = cost = never = 0.0
    fixed, before, size = 3_000, 3_000, 3_000
    read_before = read = made = 0
    for count in range(1, requests + 1):
        before, size, status, common = before + growth, size + growth, "none", read
        if size >= trigger:
            size, status, common, made = 8_000, "applied", fixed, made + 1
        elif made:
            status = "reused"
        cached, whole = common // BLOCK * BLOCK, read_before // BLOCK * BLOCK
        exchange = asked(count, before, size, cached, status=status, round=made)
        each, standing = compute_single_answer_saving(exchange, digests(2 * count), standing, PRICE)
        assert each is not None
        net, cost = net + each.net, cost + each.cost
        never += PRICE.compute_cost(before, whole)
        read_before, read = before, size

    assert cost + net == pytest.approx(never, rel=0.01)


def before(*listed: tuple[Exchange, tuple[int, int]]) -> list[int]:
    """Tokens of the client's lists as the provider would count them, by exchange and our own counts of it."""
    standing: CacheState | None = None
    for count, (exchange, counted) in enumerate(listed, 1):
        _, standing = compute_single_answer_saving(exchange, digests(2 * count), standing, PRICE, counted)
    assert standing is not None
    return [each.client_tokens for each in standing.requests]


def test_what_calibration_makes_of_a_count_from_one_request_to_the_next_is_no_saving() -> None:
    assert before(
        (asked(0, 30_000, 30_000, 0), (30_000, 30_000)),
        (asked(1, 40_000, 15_000, 0, status="applied"), (40_000, 15_000)),
        (asked(2, 42_900, 17_000, 15_000, status="reused"), (42_000, 17_000)),
        (asked(3, 69_900, 20_000, 17_000, status="reused"), (69_000, 20_000)),  # a new result was shortened
    ) == [30_000, 40_000, 42_000, 69_000]


def test_what_was_never_counted_is_worth_what_the_conversation_was_to_the_provider_so_far() -> None:
    assert before(
        (asked(0, 9, 9, 0)._replace(prompt_tokens=36_000), (30_000, 30_000)),  # six for five of ours
        (asked(1, 9, 8, 0, status="applied")._replace(prompt_tokens=20_000), (40_000, 15_000)),
        (asked(2, 9, 8, 0, status="reused")._replace(prompt_tokens=22_000), (42_000, 17_000)),
        (asked(3, 9, 8, 0, status="reused")._replace(prompt_tokens=23_000), (47_000, 18_000)),
    ) == [36_000, 48_000, 50_000, 50_000 + 1_000 + 4_762]


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (29_952, 39_936),  # 234 blocks of 128; of 40,000 it would have had 312
        (29_696, 39_808),  # two blocks less than there is room for: it leaves 177 tokens, or more
        (30_080, 40_064),  # a block more: it has the answer cached, too
        (
            29_888,
            39_936,
        ),  # 467 blocks of 64; one less than there is room for, so that it leaves 49 tokens, or more
        (29_990, 39_990),  # no blocks
    ],
)
def test_a_provider_caches_whole_blocks_of_the_unchanged_request(cached: int, expected: int) -> None:
    made = saved(
        asked(0, 30_000, 30_000, 0),
        asked(1, 40_000, 40_000, cached),
        asked(2, 60_000, 15_000, 0, status="applied"),
    )[-1]

    assert made is not None
    assert made.net == pytest.approx(60_000 - 0.9 * expected - 15_000)


def test_a_round_pays_back_what_it_cost_by_what_it_saves_with_each_request() -> None:
    # 80,000 tokens fewer at 0.1 save 8,000 a request; the cache of the 20,000 that stay costs 18,000
    assert compute_break_even_requests(100_000, 20_000, PRICE, summary_usd=6_000) == pytest.approx(3.0)
    assert compute_break_even_requests(
        100_000, 20_000, PRICE, summary_usd=8_000, cached_share=0.0
    ) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("after", "price", "summary"), [(20_000, None, 0.0), (20_000, PRICE, None), (100_000, PRICE, 0.0)]
)
def test_a_round_of_which_too_little_is_known_or_that_saves_nothing_never_pays(
    after: int, price: ModelPrice | None, summary: float | None
) -> None:
    assert compute_break_even_requests(100_000, after, price, summary_usd=summary) is None
