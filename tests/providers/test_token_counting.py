"""Counting beside the loop: same numbers, a loop that goes on, requests that take turns."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from compaction_proxy.providers import token_counting
from compaction_proxy.providers.token_counting import (
    MAX_INLINE_CHARACTERS,
    MAX_INLINE_TEXT_CHARACTERS,
    SLICE_CHARACTERS,
    TokenScheduler,
)
from compaction_proxy.providers.tokenizers import CharacterCounter, TiktokenCounter
from compaction_proxy.providers.types import TokenCounter

TEXT = "The proxy counts 1,234 tokens; 压缩代理 stays responsive.\n" * 20


def silent(line: str) -> None:
    raise AssertionError(line)


class Watched:
    """⌈characters/4⌉, remembering who counted what."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bool]] = []

    def count(self, text: str, model: str) -> int:
        on_loop = threading.current_thread() is threading.main_thread()
        self.seen.append((model, text[:1], on_loop))
        return -(-len(text) // 4)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]


class Slow(Watched):
    """Takes a millisecond for each text."""

    def count(self, text: str, model: str) -> int:
        time.sleep(0.001)
        return super().count(text, model)


class Gated:
    """Counts one text for each time it is let."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.finished = 0

    def count(self, text: str, model: str) -> int:
        self.started.release()
        assert self.go.acquire(timeout=30)
        self.finished += 1
        return len(text)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]


@pytest.fixture(scope="module")
def tiktoken_counter() -> TokenCounter:
    counter = TiktokenCounter(silent)
    counter.warm_up()
    return counter


@pytest.fixture
async def real(tiktoken_counter: TokenCounter) -> AsyncIterator[TokenScheduler]:
    made = TokenScheduler(tiktoken_counter)
    yield made
    made.close()


PIECES = ["", "a", TEXT, TEXT * 200, "x" * 150_000, "", "bc"]


async def test_counts_come_in_order_and_equal_the_counters(
    real: TokenScheduler, tiktoken_counter: TokenCounter
) -> None:
    assert await real.count(PIECES, "gpt-5") == [tiktoken_counter.count(text, "gpt-5") for text in PIECES]


async def test_slicing_leaves_the_character_rule_exact() -> None:
    made = TokenScheduler(CharacterCounter())
    assert await made.count(PIECES, "any") == [-(-len(text) // 4) for text in PIECES]
    made.close()


@pytest.mark.parametrize("pieces", [[], [""]])
async def test_nothing_counts_nothing(real: TokenScheduler, pieces: Sequence[str]) -> None:
    assert await real.count(pieces, "gpt-5") == [0] * len(pieces)


async def test_little_text_is_counted_on_the_loop_and_much_beside_it() -> None:
    watched = Watched()
    made = TokenScheduler(watched)
    await made.count(["first"], "m")
    await made.count(["a" * MAX_INLINE_TEXT_CHARACTERS, "b"], "m")
    await made.count(["c", "d" * (MAX_INLINE_TEXT_CHARACTERS + 1), "e"], "m")
    await made.count(["f" * 4_096] * (MAX_INLINE_CHARACTERS // 4_096) + ["g"], "m")
    made.close()
    assert watched.seen == [
        ("m", "f", False),  # a model's first count may load its vocabulary
        ("m", "a", True),
        ("m", "b", True),
        ("m", "c", True),
        ("m", "d", False),
        ("m", "e", False),
        *[("m", "f", False)] * 16,
        ("m", "g", False),
    ]


async def test_a_counter_is_prepared_on_a_thread_that_counts_with_it() -> None:
    seen: list[str] = []
    made = TokenScheduler(Watched())
    await made.run_in_worker(lambda: seen.append(threading.current_thread().name))
    made.close()
    assert seen == ["counting_0"]


async def test_no_text_is_begun_on_the_loop_once_others_have_waited_long_enough() -> None:
    slow = Slow()
    made = TokenScheduler(slow)
    await made.count(["first"], "m")
    assert await made.count(["a", "b", "c"], "m") == [1, 1, 1]
    made.close()
    assert [on_loop for *_, on_loop in slow.seen] == [False, True, False, False]


async def test_requests_take_turns() -> None:
    watched = Watched()
    made = TokenScheduler(watched, workers=1, time_slot_s=0.0)
    large = made.count(["x" * SLICE_CHARACTERS * 20], "large")
    small = made.count(["y" * SLICE_CHARACTERS], "small")
    await asyncio.gather(large, small)
    made.close()
    order = [model for model, *_ in watched.seen]
    assert order.count("large") == 20
    assert order.index("small") < 5


async def test_a_turn_is_as_long_as_it_may_be() -> None:
    watched = Watched()
    made = TokenScheduler(watched, workers=1, time_slot_s=60.0)
    large = made.count(["x" * SLICE_CHARACTERS * 20], "large")
    small = made.count(["y" * SLICE_CHARACTERS], "small")
    await asyncio.gather(large, small)
    made.close()
    assert [model for model, *_ in watched.seen] == ["large"] * 20 + ["small"]


async def test_a_cancelled_request_ends_after_the_step_under_way() -> None:
    gated = Gated()
    made = TokenScheduler(gated, workers=1)
    task = asyncio.create_task(made.count(["x" * SLICE_CHARACTERS * 10], "m"))
    assert await asyncio.to_thread(gated.started.acquire, timeout=30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(3):
        gated.go.release()
    assert await made.count(["abc"], "m") == [3]
    made.close()
    assert gated.finished == 2


async def test_after_closing_nothing_is_counted_beside_the_loop() -> None:
    made = TokenScheduler(CharacterCounter())
    made.close()
    made.close()
    with pytest.raises(RuntimeError):
        await made.count(["abc"], "m")


async def test_beyond_the_budget_counts_are_extrapolated() -> None:
    watched = Watched()
    made = TokenScheduler(watched)
    pieces = ["x" * 400_000] * 50
    counts = await made.count(pieces, "m")
    made.close()
    assert sum(counts) == pytest.approx(sum(map(len, pieces)) / 4, rel=0.001)
    assert len(watched.seen) <= 128  # budget / slice


async def test_known_models_are_remembered_within_bounds() -> None:
    made = TokenScheduler(CharacterCounter())
    for number in range(600):
        await made.count(["a"], f"m{number}")
    made.close()
    assert len(made._known) <= token_counting._KNOWN_MODELS


async def test_the_loop_goes_on_while_four_megabytes_are_counted(real: TokenScheduler) -> None:
    gaps: list[float] = []  # seconds of the processor that the loop's thread took between two turns

    async def beat() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    gc.freeze()  # looking through what the test process holds takes longer than anything here
    heart = asyncio.create_task(beat())
    await real.count([TEXT * 3_400], "gpt-5")
    heart.cancel()
    gc.unfreeze()
    assert len(gaps) > 10
    assert max(gaps) < 0.1
