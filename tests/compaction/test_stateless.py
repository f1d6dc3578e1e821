"""Compaction of a list that leaves nothing behind: what comes back, what it costs, and what is stored."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.round_job import JobBuilder
from compaction_proxy.compaction.stateless import (
    StatelessCompaction,
    find_window_for_limit,
    shorten_messages,
)
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.errors import InternalError, SummaryError, UnreadableBodyError
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.core.summary.call import SummaryAnswer
from compaction_proxy.gateway.identity import mint_conversation_id
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry.event_history import EventBus
from compaction_proxy.wires.content import MAX_PARTS
from tests.helpers.compaction_bench import (
    RECORD,
    ROUTE,
    TTL_S,
    Bench,
    JsonObject,
    Summaries,
    ask,
    bench,
    forwarded,
    talk,
    user,
)


class Closing(MemoryStore):
    """A store that remembers whether it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True
        await super().close()


@dataclass
class Stateless:
    """A replica, and its compaction that stores nothing.

    Attributes:
        heard: The events that were announced.
        stores: The temporary stores.
    """

    replica: Bench
    heard: list[Event] = field(default_factory=list)
    stores: list[Closing] = field(default_factory=list)

    def create_store(self) -> Closing:
        self.stores.append(Closing())
        return self.stores[-1]

    @property
    def compaction(self) -> StatelessCompaction:
        return StatelessCompaction(
            self.create_store,
            self.replica.reading,
            self.replica.learning,
            self.replica.rounds.summarizer,
            JobBuilder(lambda *named: mint_conversation_id(b"secret", *named), TTL_S, has_archive=False),
            EventBus(lambda _, event: self.heard.append(event)),
        )


@asynccontextmanager
async def stateless(summaries: Summaries | None = None) -> AsyncIterator[Stateless]:
    async with bench(summaries) as replica:
        yield Stateless(replica)


def forced(messages: list[JsonObject], **over: Any) -> FitRequest:
    return ask(messages, **{"mode": CompactionMode.FORCE, **over})


async def test_a_list_is_compacted_and_the_model_that_wrote_the_summary_is_named() -> None:
    async with stateless() as made:
        result = await shorten_messages(made.compaction, forced(talk(60)), None)
    report = result.fit.report
    assert (report.status, result.model) == (CompactionStatus.APPLIED, ROUTE.model)
    assert (report.tokens_after or 0) < (report.tokens_before or 0)
    assert result.fit is result.strategy_result


async def test_nothing_is_left_of_it_and_what_it_cost_is_announced() -> None:
    async with stateless() as made:
        made.replica.summaries.answers = [SummaryAnswer(RECORD, prompt_tokens=900, completion_tokens=100)]
        await shorten_messages(made.compaction, forced(talk(60)), None)
        [store] = made.stores
        assert store.closed
        assert await made.replica.events() == []
        again = await shorten_messages(made.compaction, forced(talk(60)), None)
    assert again.fit.report.status is CompactionStatus.APPLIED
    assert len(made.replica.summaries.calls) == 2  # nothing was kept to be used again
    compacted = [event for event in made.heard if event.kind == COMPACTED]
    assert [event.cost_usd is not None for event in compacted] == [True, True]


async def test_a_list_under_its_target_comes_back_unchanged_and_costs_nothing() -> None:
    async with stateless() as made:
        request = forced(talk(20))
        result = await shorten_messages(made.compaction, request, 100_000)
    assert result.fit.raw is request.body.raw
    report = result.fit.report
    assert (report.status, report.reason, result.model) == (CompactionStatus.NONE, None, None)
    assert made.replica.summaries.calls == []


async def test_what_the_strategy_leaves_over_its_target_is_cut() -> None:
    async with stateless() as made:
        result = await shorten_messages(made.compaction, forced(talk(60)), 700)
    before, after = result.strategy_result.report.tokens_after, result.fit.report.tokens_after
    assert before is not None
    assert after is not None
    assert after <= 700 < before
    assert forwarded(result.fit)[-1] == talk(60)[-1]


async def test_without_a_summary_a_text_without_a_model_is_used_and_no_model_is_named() -> None:
    async with stateless(Summaries([SummaryError("http-400")])) as made:
        result = await shorten_messages(made.compaction, forced(talk(60)), None)
    report = result.fit.report
    assert (result.model, report.reason) == (None, "http-400")
    assert (report.tokens_after or 0) < (report.tokens_before or 0)


async def test_a_message_that_cannot_be_read_is_an_error_of_the_caller() -> None:
    unread = {"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS + 1)}
    async with stateless() as made:
        with pytest.raises(UnreadableBodyError, match="too-many"):
            await shorten_messages(made.compaction, forced([user("a"), unread]), None)


async def test_a_fault_of_ours_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with stateless() as made:
        monkeypatch.setattr(made.replica.reading, "count_overhead", fail)
        with pytest.raises(InternalError):
            await shorten_messages(made.compaction, forced(talk(60)), None)


@given(limit=st.integers(1, 300_000), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_a_narrowed_window_leaves_no_more_room_than_wanted(limit: int, strategy: str) -> None:
    request = forced([user("x")], strategy=strategy)
    reserves = resolve_policy(request.settings, strategy).reserves
    window = find_window_for_limit(limit, request)
    assert (
        compute_budget(window, reserves, None).input_limit
        <= limit
        < compute_budget(window + 1, reserves, None).input_limit
    )
    assert window >= limit
