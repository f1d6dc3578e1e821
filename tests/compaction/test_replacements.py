"""Stand-ins say how to get at what was removed only where the model is offered the tool for it."""

import pytest

from compaction_proxy.compaction.replacements import SEARCH_HINT
from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.core.strategies import STRATEGIES
from tests.helpers.compaction_bench import COUNTER, JsonObject, bench, loop, prefix, says, talk, user

SUMMARISING = tuple(name for name, row in STRATEGIES.items() if row.summary)
LOW = {"trigger_tokens": 3_000}
OFFERED = {"tools": True, "recall": {"tool": "inject"}}


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_a_record_says_it_once_and_stays_as_it_is_whatever_later_requests_are_offered(
    strategy: str,
) -> None:
    async with bench(strategy=strategy) as made:
        fit = await made.fit(talk(40, 120), **LOW, model=OFFERED)
        later = await made.fit([*talk(40, 120), says("So."), user("Go on.")])
    assert (fit.report.status, later.report.status) == (CompactionStatus.APPLIED, CompactionStatus.REUSED)
    assert [each.raw.count(TOOL_NAME.encode()) for each in (fit, later)] == [1, 1]
    assert later.raw.startswith(prefix(fit))


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_where_the_tool_is_not_offered_nothing_names_it(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        fit = await made.fit(talk(100), **LOW)
    assert fit.report.status is CompactionStatus.APPLIED
    assert TOOL_NAME.encode() not in fit.raw


@pytest.mark.parametrize("body", [{"n": 2}, {"functions": [{"name": "read"}]}])
async def test_nor_where_the_request_could_not_have_the_tool(body: JsonObject) -> None:
    async with bench() as made:
        fit = await made.fit(talk(100), model=OFFERED, body=body)
    assert fit.report.status is CompactionStatus.APPLIED
    assert TOOL_NAME.encode() not in fit.raw


async def test_a_masked_result_names_the_tool_beside_its_handle() -> None:
    async with bench() as made:
        fit = await made.fit(loop(24, lines=95), model=OFFERED)
    assert fit.report.round is None
    assert b"left out, memory_search id m_" in fit.raw
    assert b"left out, m_" not in fit.raw


async def test_a_chain_of_records_says_it_once_after_every_round() -> None:
    messages = talk(100)
    async with bench() as made:
        await made.fit(messages, model=OFFERED)
        messages += [says("So."), *talk(100)[1:]]
        second = await made.fit(messages, model=OFFERED)
    assert (second.report.status, second.report.round) == (CompactionStatus.APPLIED, 2)
    assert second.raw.count(TOOL_NAME.encode()) == 1


def test_the_sentence_is_short() -> None:
    assert COUNTER.count(SEARCH_HINT, "gpt-4o") <= 30


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_a_pin_stands_once_in_what_replaces_the_removed_messages(strategy: str) -> None:
    pin = "The host is db7."
    async with bench(strategy=strategy) as made:
        fit = await made.fit(talk(100), pins=(pin,), conversation="c_1", **LOW)
    assert fit.report.status is CompactionStatus.APPLIED
    assert fit.raw.count(pin.encode()) == 1
