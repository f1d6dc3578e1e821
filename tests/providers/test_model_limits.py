"""What an upstream has taught outlives the process, and nothing of it is lost on the way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.providers import model_limits as module
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import (
    INFERRED_TTL_S,
    LIMITS_TTL_S,
    MAX_LISTED_WINDOWS,
    REFRESH_INTERVAL_S,
    SAVE_INTERVAL_S,
    LearnedLimits,
    ModelLimits,
    from_fields,
    merge_limits,
    to_fields,
)
from compaction_proxy.providers.silent_truncation import AnsweredRequest
from compaction_proxy.storage.keys import model_limits_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import MAX_BACKGROUND_TASKS, RecordStore
from compaction_proxy.storage.store import Store

TENANT = "t"
ORIGIN, MODEL = "https://up.test:443", "some-model"


def ignored(_: StoreUnavailableError) -> None:
    """A memory store does not fail."""


class Slow(MemoryStore):
    """A store whose first read ends after its others."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.late = asyncio.Event()

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        values = await super().read(keys)
        if not self.asked.is_set():
            self.asked.set()
            await self.late.wait()
        return values


async def test_a_window_named_by_an_error_is_believed_for_a_day_and_after_a_restart() -> None:
    now = [0.0]
    records = RecordStore(MemoryStore(), ignored)
    learning = ModelLimits(records, lambda: now[0])
    await learning.learn_window(TENANT, ORIGIN, MODEL, 9_000)
    await learning.learn_window(TENANT, ORIGIN, MODEL, 12_000)  # an error about a larger one changes nothing
    assert (await ModelLimits(records, lambda: 0.0).get(TENANT, ORIGIN, MODEL)).window == 9_000
    now[0] = LIMITS_TTL_S
    assert learning.peek_effective_window(TENANT, ORIGIN, MODEL, None) == 128_000


async def test_what_was_learned_while_the_store_was_asked_is_not_lost() -> None:
    store = Slow()
    learning = ModelLimits(RecordStore(store, ignored))
    slow = asyncio.create_task(learning.get(TENANT, ORIGIN, MODEL))
    await store.asked.wait()
    await learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    store.late.set()
    assert (await slow).calibration.observations == 1


async def test_no_more_models_are_remembered_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    for name in ("one", "two", "three"):
        await learning.learn_token_count(TENANT, ORIGIN, name, 1_000, 1_500)
    assert [
        learning.peek_calibration(TENANT, ORIGIN, name).observations for name in ("one", "two", "three")
    ] == [
        0,
        1,
        1,
    ]
    assert len(learning._known) == 2


class Replica:
    """What one of several replicas on a store knows, on a clock that the test sets."""

    def __init__(self, store: Store) -> None:
        self.time = 1_000.0
        self.records = RecordStore(store, ignored)
        self.learning = ModelLimits(self.records, clock=lambda: self.time)

    async def look_again(self) -> None:
        """Let a request come by when it is time to look, and wait for what it begins."""
        self.time += REFRESH_INTERVAL_S
        self.learning.peek_effective_window(TENANT, ORIGIN, MODEL, None)
        while self.records.background_tasks.has_running_tasks:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)

    async def known(self) -> tuple[int | None, int]:
        """The window, and the number of observations."""
        learned = await self.learning.get(TENANT, ORIGIN, MODEL)
        return learned.window, learned.calibration.observations


async def test_what_one_replica_learns_reaches_another_while_it_runs() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert await other.known() == (None, 0)
    await one.learning.learn_window(TENANT, ORIGIN, MODEL, 9_000)
    await one.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    other.time += REFRESH_INTERVAL_S - 1
    assert await other.known() == (None, 0)
    await other.look_again()
    assert await other.known() == (9_000, 1)
    assert other.learning.peek_calibration(TENANT, ORIGIN, MODEL).ratio == pytest.approx(1.3)


async def test_a_model_that_a_process_has_not_seen_is_looked_up_behind_its_first_request() -> None:
    store = MemoryStore()
    await Replica(store).learning.learn_window(TENANT, ORIGIN, MODEL, 9_000)
    started = Replica(store)
    assert started.learning.peek_effective_window(TENANT, ORIGIN, MODEL, None) == 128_000
    await asyncio.sleep(0.01)
    assert started.learning.peek_effective_window(TENANT, ORIGIN, MODEL, None) == 9_000


async def test_no_request_waits_for_what_other_replicas_may_have_learned() -> None:
    store = Slow()
    store.asked.set()
    replica = Replica(store)
    await replica.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    store.asked.clear()
    replica.time += REFRESH_INTERVAL_S
    async with asyncio.timeout(100):
        assert await replica.known() == (None, 1)
    await store.asked.wait()
    store.late.set()
    await replica.learning.close()


async def test_a_replica_that_keeps_its_ratio_keeps_the_window_that_another_has_learned() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert await other.known() == (None, 0)
    await one.learning.learn_window(TENANT, ORIGIN, MODEL, 9_000)
    await other.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    assert await Replica(store).known() == (9_000, 1)


async def test_what_was_learned_from_most_answers_holds() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    for _ in range(5):
        await one.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    await other.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_500)
    await one.look_again()
    assert one.learning.peek_calibration(TENANT, ORIGIN, MODEL).ratio == pytest.approx(1.3)


async def test_what_is_no_longer_stored_is_kept_again() -> None:
    store = MemoryStore()
    replica = Replica(store)
    await replica.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    await replica.learning._records.delete_prefix("")
    await replica.look_again()
    await replica.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 1_300)
    assert await Replica(store).known() == (None, 2)


async def test_of_many_models_only_a_few_are_looked_up_at_once() -> None:
    records = RecordStore(Slow(), ignored)
    learning = ModelLimits(records)
    for number in range(50):
        learning.peek_effective_window(TENANT, ORIGIN, f"model-{number}", None)
    assert len(records.background_tasks._tasks) == MAX_BACKGROUND_TASKS
    await records.close()
    assert not records.background_tasks.has_running_tasks


async def answered(
    learning: ModelLimits,
    estimate: int,
    prompt: int,
    *,
    thread: str = "c",
    echoed: frozenset[int] = frozenset(),
) -> bool:
    answer = AnsweredRequest(estimate, prompt)
    return await learning.learn_answer(
        TENANT, ORIGIN, MODEL, answer, thread=thread, find_mentioned_numbers=lambda: echoed
    )


async def window(learning: ModelLimits, configured: int | None = None, model: str = MODEL) -> int:
    return (await learning.get(TENANT, ORIGIN, model)).get_effective_window(model, configured)


async def test_a_configured_window_beats_a_learned_one_that_beats_a_discovered_one_that_beats_the_table() -> (
    None
):
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    assert await window(learning) == 128_000
    assert await window(learning, model="gpt-4") == 8_192
    await learning.get(TENANT, ORIGIN, MODEL)
    learning.start_discovery(TENANT, ORIGIN, MODEL, told(50_000))
    await settled(learning)
    assert await window(learning) == 50_000
    await learning.learn_window(TENANT, ORIGIN, MODEL, 60_000)
    assert await window(learning) == 60_000
    assert await window(learning, 40_000) == 40_000
    assert await window(learning, 70_000) == 60_000
    assert learning.peek_effective_window(TENANT, ORIGIN, MODEL, 70_000) == 60_000
    assert learning.peek_effective_window(TENANT, ORIGIN, "gpt-4", None) == 8_192


async def test_an_answer_to_more_than_the_known_window_raises_it_but_never_a_configured_one() -> None:
    store = MemoryStore()
    learning = ModelLimits(RecordStore(store, ignored))
    assert not await answered(learning, 140_000, 150_000)
    assert await window(learning) == 150_000
    assert await window(learning, 100_000) == 100_000
    assert await window(ModelLimits(RecordStore(store, ignored))) == 150_000


async def test_a_count_that_cannot_be_true_raises_nothing() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    await answered(learning, 10_000, 150_000)
    assert await window(learning) == 128_000


async def test_what_was_answered_is_believed_for_a_day() -> None:
    now = [0.0]
    learning = ModelLimits(RecordStore(MemoryStore(), ignored), lambda: now[0])
    await answered(learning, 140_000, 150_000)
    now[0] = LIMITS_TTL_S
    assert await window(learning) == 128_000


async def test_silent_cuts_at_several_sizes_give_the_window_away_for_an_hour() -> None:
    now = [0.0]
    learning = ModelLimits(RecordStore(MemoryStore(), ignored), lambda: now[0])
    for _ in range(3):
        await answered(learning, 1_000, 1_070)
    cut = [await answered(learning, size, 4_098, thread=str(size)) for size in (16_000, 20_000, 24_000)]
    assert cut == [False, False, True]
    assert await window(learning) == 4_098
    assert (
        learning.peek_calibration(TENANT, ORIGIN, MODEL).observations == 3
    )  # the cut says nothing of the ratio
    now[0] = INFERRED_TTL_S
    assert await window(learning) == 128_000


async def test_one_odd_count_says_nothing_of_the_window() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    for _ in range(3):
        await answered(learning, 1_000, 1_070)
    for _ in range(5):
        assert not await answered(learning, 9_000, 2_267, thread="z")
    assert await window(learning) == 128_000


async def test_a_count_that_stands_still_while_the_conversation_grows_gives_the_window_away() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    assert not await answered(learning, 8_000, 2_050)
    assert learning.peek_calibration(TENANT, ORIGIN, MODEL) == Calibration.build_prior(MODEL)
    assert [await answered(learning, size, 2_050) for size in (8_500, 9_000, 9_500, 10_500)] == [
        False,
        False,
        False,
        True,
    ]
    assert await window(learning) == 2_050


async def test_an_inferred_window_holds_although_more_was_accepted_before() -> None:
    store = MemoryStore()
    learning = ModelLimits(RecordStore(store, ignored))
    await learning.learn_window(TENANT, ORIGIN, MODEL, 16_000)
    await answered(learning, 30_000, 30_000)
    again = ModelLimits(RecordStore(store, ignored))
    for _ in range(3):
        await answered(again, 1_000, 1_070)
    cut = [await answered(again, size, 8_000, thread=str(size)) for size in (16_000, 20_000, 24_000)]
    assert cut == [False, False, True]
    assert await window(again) == 8_000
    assert await window(ModelLimits(RecordStore(store, ignored))) == 8_000


async def test_a_learned_window_rises_when_a_larger_request_is_accepted() -> None:
    store = MemoryStore()
    learning = ModelLimits(RecordStore(store, ignored))
    await learning.learn_window(TENANT, ORIGIN, MODEL, 9_000)
    assert await window(learning) == 9_000
    await answered(learning, 12_000, 12_000)
    assert await window(learning) == 128_000
    assert await window(ModelLimits(RecordStore(store, ignored))) == 128_000
    await learning.learn_window(TENANT, ORIGIN, MODEL, 10_000)  # the upstream takes less again
    assert await window(learning) == 10_000


async def test_a_count_of_another_conversation_is_no_sign() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    assert not await answered(learning, 8_000, 2_050, thread="a")
    assert not await answered(learning, 9_000, 2_050, thread="b")
    assert await window(learning) == 128_000


async def test_a_number_that_stands_in_the_request_is_never_learned() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    await answered(learning, 8_000, 2_050)
    assert not await answered(learning, 9_000, 2_050, echoed=frozenset({2_050}))
    assert await window(learning) == 128_000


def told(tokens: int | None, asked: list[None] | None = None) -> Callable[[], Awaitable[int | None]]:
    """An upstream that tells its window."""

    async def ask() -> int | None:
        if asked is not None:
            asked.append(None)
        return tokens

    return ask


async def settled(learning: ModelLimits) -> None:
    while learning._discoveries.has_running_tasks:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0)


@pytest.mark.parametrize("tokens", [50_000, None])
async def test_an_upstream_is_asked_once_in_a_day_whoever_asks(tokens: int | None) -> None:
    store, now, asked = MemoryStore(), [0.0], list[None]()
    for _ in range(2):
        learning = ModelLimits(RecordStore(store, ignored), lambda: now[0])
        for _ in range(3):
            await learning.get(TENANT, ORIGIN, MODEL)
            learning.start_discovery(TENANT, ORIGIN, MODEL, told(tokens, asked))
            await settled(learning)
        assert await window(learning) == (tokens or 128_000)
    assert len(asked) == 1
    now[0] = LIMITS_TTL_S
    learning.start_discovery(TENANT, ORIGIN, MODEL, told(tokens, asked))
    await settled(learning)
    assert len(asked) == 2


async def test_a_model_that_this_process_does_not_know_is_looked_up_before_the_upstream_is_asked() -> None:
    store, asked = MemoryStore(), list[None]()
    for _ in range(2):
        learning = ModelLimits(RecordStore(store, ignored), lambda: 5.0)
        learning.start_discovery(TENANT, ORIGIN, MODEL, told(50_000, asked))
        await settled(learning)
        assert await window(learning) == 50_000
    assert len(asked) == 1


async def test_windows_that_upstreams_have_told_are_listed_for_a_day_whoever_asked() -> None:
    store, now = MemoryStore(), [0.0]
    learning = ModelLimits(RecordStore(store, ignored), lambda: now[0])
    for tenant, model, tokens in (("a", "m", 1_000), ("b", "m", 2_000), ("a", "n", None), ("a", "o", 3_000)):
        learning.start_discovery(tenant, ORIGIN, model, told(tokens))
        await settled(learning)
    other = ModelLimits(RecordStore(store, ignored), lambda: now[0])
    assert await other.list_discovered_windows(ORIGIN) == {"m": 2_000, "o": 3_000}
    assert await other.list_discovered_windows("https://other:443") == {}
    assert await other.list_discovered_windows("https://other:443", ORIGIN) == {"m": 2_000, "o": 3_000}
    now[0] = LIMITS_TTL_S
    assert await other.list_discovered_windows(ORIGIN) == {}


async def test_many_tenants_of_one_model_do_not_drop_other_models_from_the_list() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored), lambda: 0.0)
    for tenant, model in (("t", "rare"), *((f"t{number}", "m") for number in range(MAX_LISTED_WINDOWS + 1))):
        learning.start_discovery(tenant, ORIGIN, model, told(2_000))
        await settled(learning)
    assert await learning.list_discovered_windows(ORIGIN) == {"rare": 2_000, "m": 2_000}


async def test_a_window_that_is_told_again_stays_listed() -> None:
    now = [0.0]
    learning = ModelLimits(RecordStore(MemoryStore(), ignored), lambda: now[0])
    for tenant, now[0] in (("a", 0.0), ("b", 0.9 * LIMITS_TTL_S)):
        learning.start_discovery(tenant, ORIGIN, "m", told(2_000))
        await settled(learning)
    now[0] = 1.5 * LIMITS_TTL_S
    assert await learning.list_discovered_windows(ORIGIN) == {"m": 2_000}


async def test_no_request_waits_while_an_upstream_is_asked() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    await learning.get(TENANT, ORIGIN, MODEL)
    never: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    for _ in range(3):
        learning.start_discovery(TENANT, ORIGIN, MODEL, lambda: never)
    assert len(learning._discoveries._tasks) == 1
    assert await window(learning) == 128_000
    await learning.close()
    assert not learning._discoveries.has_running_tasks


async def test_an_upstream_that_cannot_be_asked_is_left_alone_for_a_day() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    await learning.get(TENANT, ORIGIN, MODEL)

    async def broken() -> int | None:
        raise RuntimeError

    learning.start_discovery(TENANT, ORIGIN, MODEL, broken)
    await settled(learning)
    asked: list[None] = []
    learning.start_discovery(TENANT, ORIGIN, MODEL, told(1, asked))
    await settled(learning)
    assert asked == []


async def test_what_an_earlier_version_has_kept_is_read() -> None:
    records = RecordStore(MemoryStore(), ignored)
    fields = {"window": 9_000, "until": 2.0**40, "calibration": Calibration(0.1, 0.02, 4).to_dict()}
    await records.overwrite(model_limits_key(TENANT, ORIGIN, MODEL), fields, ttl_s=60)
    learned = await ModelLimits(records).get(TENANT, ORIGIN, MODEL)
    assert (learned.window, learned.calibration.observations, learned.discovered_window) == (9_000, 4, None)


def test_what_rounds_come_to_is_learned_of_each_model_within_bounds() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    assert learning.get_post_compaction_factor(TENANT, ORIGIN, MODEL) == 1.0
    for _ in range(20):  # each estimate is made with what is known by then
        learning.learn_post_compaction_factor(
            TENANT,
            ORIGIN,
            MODEL,
            int(1_000 * learning.get_post_compaction_factor(TENANT, ORIGIN, MODEL)),
            950,
        )
    assert learning.get_post_compaction_factor(TENANT, ORIGIN, MODEL) == pytest.approx(0.95, abs=0.002)
    assert learning.get_post_compaction_factor("other", ORIGIN, MODEL) == 1.0
    for _ in range(20):
        learning.learn_post_compaction_factor(TENANT, ORIGIN, MODEL, 1_000, 1)
    assert learning.get_post_compaction_factor(TENANT, ORIGIN, MODEL) == pytest.approx(0.86, abs=0.01)


async def test_a_ratio_that_moves_with_every_answer_is_kept_now_and_then() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    for actual in (1_300, 1_500, 1_100, 1_600):
        await one.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, actual)
    assert await other.known() == (None, 1)
    one.time += SAVE_INTERVAL_S
    await one.learning.learn_token_count(TENANT, ORIGIN, MODEL, 1_000, 2_000)
    await other.look_again()
    assert await other.known() == (None, 5)


def limit_of(learned: LearnedLimits) -> int:
    return learned.get_effective_window("some-model", None)


async def test_a_limit_without_a_number_lies_between_what_was_accepted_and_refused() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    size = (await learning.get(TENANT, ORIGIN, MODEL)).calibration.predict_tokens
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 1_000, 4_000)  # no window is so small
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == 128_000
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 20_000, 80_000)
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 30_000, 120_000)
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == size(18_000)
    await learning.learn_accepted(TENANT, ORIGIN, MODEL, 19_000)
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == size(19_000)
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 10_000, 40_000)  # it takes less than it did
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == size(9_000)
    await learning.learn_accepted(TENANT, ORIGIN, MODEL, 10_000)
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == 128_000


async def test_a_body_that_was_accepted_unread_counts_at_the_ratio_of_the_refused_one() -> None:
    learning = ModelLimits(RecordStore(MemoryStore(), ignored))
    learning.record_accepted_bytes(TENANT, ORIGIN, MODEL, 76_000)
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 20_000, 80_000)
    learned = await learning.get(TENANT, ORIGIN, MODEL)
    assert limit_of(learned) == learned.calibration.predict_tokens(19_000)


async def test_a_limit_without_a_number_is_believed_for_an_hour() -> None:
    now = 1_000_000.0
    learning = ModelLimits(RecordStore(MemoryStore(), ignored), now=lambda: now)
    await learning.learn_refused(TENANT, ORIGIN, MODEL, 20_000, 80_000)
    now += 3_599.0
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) < 128_000
    now += 2.0
    assert limit_of(await learning.get(TENANT, ORIGIN, MODEL)) == 128_000


def test_replicas_do_not_pass_on_a_window_that_has_expired() -> None:
    nothing = LearnedLimits(Calibration.build_prior("some-model"))
    expired = nothing._replace(window=8_192, window_until=100.0)
    assert merge_limits(expired, nothing, 99.0).window == 8_192
    assert merge_limits(expired, nothing, 100.0).window is None


def test_replicas_put_sizes_together_in_the_order_in_which_they_were_learned() -> None:
    nothing = LearnedLimits(Calibration.build_prior("some-model"))
    refused, accepted = (
        nothing.with_refused_estimate(20_000, 100.0),
        nothing.with_accepted_estimate(20_000, 200.0),
    )
    for each in (merge_limits(refused, accepted, 0.0), merge_limits(accepted, refused, 0.0)):
        assert (each.refused_estimate, each.accepted_estimate) == (0, 20_000)
    later = nothing.with_refused_estimate(20_000, 300.0)
    for each in (merge_limits(later, accepted, 0.0), merge_limits(accepted, later, 0.0)):
        assert (each.refused_estimate, each.accepted_estimate) == (20_000, 0)
    assert merge_limits(later, accepted, 301.0).limit_estimate == 0
    assert from_fields(to_fields(later)) == later
