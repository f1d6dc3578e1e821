"""Auto-recall: what is placed before the latest user message, where, and when nothing is."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from compaction_proxy.compaction.auto_recall import DEADLINE_S, HEADING, AutoRecall, build_recall_query
from compaction_proxy.compaction.types import CompactionMode, FitRequest, FitResult
from compaction_proxy.core.search_tool import DATA_NOTICE
from compaction_proxy.recall.search import SearchHit
from compaction_proxy.wires.usage import TokenUsage
from tests.helpers.compaction_bench import (
    COUNTER,
    Bench,
    JsonObject,
    bench,
    called,
    forwarded,
    prefix,
    talk,
    user,
)

QUESTION = user("Which port does the ledger listen on?")
AUTO = {"recall": {"auto": "inject"}}
SNIPPET = "The ledger listens on port 8443."


def hit(message_id: str, score: float = 0.6, snippet: str = SNIPPET) -> SearchHit:
    return SearchHit(message_id, 2, "assistant", 1, "anchored", 1_000.0, score, snippet, "c_1", 1)


@dataclass
class Searches:
    """A search that finds the first removed message, or what it is told."""

    hits: list[SearchHit] | None = None
    takes_s: float = 0.0
    fails: bool = False
    asked: list[str] = field(default_factory=list)
    ended: int = 0

    async def __call__(
        self,
        tenant: str,
        conversation: str | None,
        query: str,
        limit: int,
        *,
        known_ids: AbstractSet[str],
        root: bytes | None,
    ) -> list[SearchHit]:
        assert root
        self.asked.append(f"{tenant} {conversation} {query}")
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        if self.fails:
            raise ZeroDivisionError
        self.ended += 1
        return [hit(min(known_ids))] if self.hits is None else self.hits


class Turn(NamedTuple):
    """A replica that reminds, and what was told of its searches."""

    made: Bench
    search: Searches
    remind: AutoRecall
    told: list[tuple[str, str]]

    async def fitted(
        self, messages: list[JsonObject], **over: Any
    ) -> tuple[FitResult, FitResult, FitRequest]:
        """A request before and after it was reminded."""
        asked = self.made.ask(messages, **{"model": AUTO, **over})
        fit = await self.made.compactor.fit_request(asked)
        return fit, await self.remind(fit, asked), asked


@asynccontextmanager
async def turn(search: Searches | None = None, strategy: str = "anchored") -> AsyncIterator[Turn]:
    told: list[tuple[str, str]] = []
    finds = search or Searches()
    async with bench(strategy=strategy) as made:
        remind = AutoRecall(
            finds,
            made.reading,
            made.records,
            lambda text: COUNTER.count(text, ""),
            on_search=lambda source, outcome: told.append((source, outcome)),
        )
        yield Turn(made, finds, remind, told)
        await remind.close()


def long() -> list[JsonObject]:
    return [*talk(100)[:-1], QUESTION]


async def test_what_matches_stands_right_before_the_latest_user_message_and_nothing_else_changes() -> None:
    async with turn() as each:
        bare, fit, _ = await each.fitted(long())
    *before, ours, latest = forwarded(fit)
    assert [*before, latest] == forwarded(bare)
    assert latest == QUESTION
    assert ours["role"] == "user"
    assert ours["content"].startswith(HEADING)
    assert DATA_NOTICE in ours["content"]
    assert SNIPPET in ours["content"]
    assert each.search.asked == [f"t c_1 {QUESTION['content']}"]
    assert each.told == [("auto", "found")]


async def test_what_was_added_is_counted_and_reported() -> None:
    async with turn() as each:
        bare, fit, _ = await each.fitted(long())
    added = fit.estimate - bare.estimate
    assert 0 < added <= 600
    assert (fit.report.messages_after or 0) == (bare.report.messages_after or 0) + 1
    grown = (fit.report.tokens_after or 0) - (bare.report.tokens_after or 0)
    assert added <= grown <= 1.1 * added
    assert fit.usage_basis == bare.usage_basis


async def test_every_request_of_a_turn_begins_with_the_same_bytes() -> None:
    messages = long()
    async with turn() as each:
        await each.fitted(messages)  # the round is made
        fits = []
        for step in range(3):
            fits.append((await each.fitted(messages))[1])
            each.search.hits = []  # what would be found later matters in a later turn only
            messages = [*messages, *called(step, "fine")]
    assert [SNIPPET.encode() in fit.raw for fit in fits] == [True] * 3
    assert all(later.raw.startswith(prefix(fit)) for fit, later in pairwise(fits))
    assert len(each.search.asked) == 1


async def test_the_real_size_of_a_request_with_it_says_how_large_the_next_one_is() -> None:
    messages = long()
    async with turn() as each:
        await each.fitted(messages)
        bare, fit, asked = await each.fitted(messages)
        real = int(fit.estimate * 1.1)
        counted = TokenUsage(prompt_tokens=real, completion_tokens=1, cached_tokens=0)
        await each.made.observing.learn_from_answer(asked, fit, counted)
        next_bare = (await each.fitted([*messages, *called(0, "fine")]))[0]
    grown = next_bare.estimate - bare.estimate
    expected = real - 1.1 * (fit.estimate - bare.estimate) + 1.1 * grown
    assert abs((next_bare.report.tokens_after or 0) - expected) <= 0.02 * expected


@pytest.mark.parametrize(
    "over",
    [
        {"model": {}},
        {"model": {"recall": {"auto": "inject", "auto_score": 0.7}}},
        {"mode": CompactionMode.BYPASS},
    ],
    ids=["not configured", "below the score", "bypassed"],
)
async def test_nothing_is_placed_where_it_is_not_wanted(over: dict[str, Any]) -> None:
    async with turn() as each:
        bare, fit, _ = await each.fitted(long(), **over)
    assert fit is bare


@pytest.mark.parametrize(
    "messages",
    [[*talk(2)[:-1], QUESTION], [*talk(100)[:-1], user("Please do.")]],
    ids=["nothing was removed", "nothing to go by"],
)
async def test_nothing_is_looked_for_where_nothing_could_be_found(messages: list[JsonObject]) -> None:
    async with turn() as each:
        bare, fit, _ = await each.fitted(messages)
    assert fit is bare
    assert each.search.asked == []


async def test_what_still_stands_in_the_list_is_not_placed_again() -> None:
    async with turn(Searches([hit("m_000000000000")])) as each:
        bare, fit, _ = await each.fitted(long())
    assert fit is bare
    assert each.told == [("auto", "nothing")]


async def test_what_has_no_room_is_left_out() -> None:
    large = AUTO["recall"] | {"auto_tokens": 2_000}
    async with turn() as each:
        bare, _, asked = await each.fitted(long(), model={"recall": large})
        full = replace(bare, report=bare.report._replace(tokens_after=bare.report.window))
        assert await each.remind(full, asked) is full
        short = replace(bare, client_tokens=bare.estimate)
        assert await each.remind(short, asked) is short
        estimated_short = replace(bare, report=bare.report._replace(tokens_before=bare.report.tokens_after))
        assert await each.remind(estimated_short, asked) is estimated_short


async def test_a_backend_that_wants_turns_to_alternate_gets_them_so() -> None:
    async with turn() as each:
        _, fit, _ = await each.fitted(long(), model=AUTO | {"alternation": "strict"})
    roles = [each["role"] for each in forwarded(fit)][1:]
    assert SNIPPET.encode() in fit.raw
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


async def test_a_latest_message_that_has_moved_into_a_stand_in_stays_there() -> None:
    async with turn(strategy="full") as each:
        bare, fit, _ = await each.fitted(long(), trigger_tokens=3_000)
    assert (bare.report.strategy, bare.report.round) == ("full", 1)
    assert fit is bare


@pytest.mark.virtual_time
async def test_a_slow_search_is_not_waited_for_and_goes_on_to_its_end() -> None:
    clock = asyncio.get_running_loop().time
    async with turn(Searches(takes_s=2 * DEADLINE_S)) as each:
        asked = each.made.ask(long(), model=AUTO)
        bare = await each.made.compactor.fit_request(asked)
        began_s = clock()
        fit = await each.remind(bare, asked)
        waited_s = clock() - began_s
        assert await each.remind(bare, asked) is bare  # nor later in this turn
        await asyncio.sleep(2 * DEADLINE_S)
    assert fit is bare
    assert waited_s == pytest.approx(DEADLINE_S)
    assert (len(each.search.asked), each.search.ended) == (1, 1)


async def test_a_search_that_fails_leaves_the_request_as_it_is() -> None:
    async with turn(Searches(fails=True)) as each:
        bare, fit, _ = await each.fitted(long())
    assert fit is bare


@pytest.mark.virtual_time
async def test_a_search_that_ends_at_shutdown_leaves_the_request_as_it_is() -> None:
    async with turn(Searches(takes_s=100)) as each:
        asked = each.made.ask(long(), model=AUTO)
        bare = await each.made.compactor.fit_request(asked)
        request = asyncio.create_task(each.remind(bare, asked))
        await asyncio.sleep(DEADLINE_S / 2)
        await each.remind.close()
        assert await request is bare
    assert each.search.ended == 0


async def test_what_is_forgotten_is_not_held() -> None:
    async with turn() as each:
        _, before, asked = await each.fitted(long())
        each.search.hits = []
        await each.made.records.delete_prefix("x")
        bare = await each.made.compactor.fit_request(asked)
        after = await each.remind(bare, asked)
    assert SNIPPET.encode() in before.raw
    assert after is bare


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Which port does the ledger listen on?", "Which port does the ledger listen on?"),
        ('Where did "ledger port" come up?', "Where did  ledger port  come up?"),
        ("E-4711?", "E-4711?"),
        ("yes", ""),
        ("Do it all.", ""),
        ("", ""),
    ],
)
def test_a_message_is_searched_by_its_words_if_it_has_enough(text: str, expected: str) -> None:
    assert build_recall_query(text) == expected
