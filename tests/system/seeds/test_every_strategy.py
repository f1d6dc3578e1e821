"""What every strategy has from the seeds, whichever it was written for, through the whole proxy."""

import json

import pytest
from structlog.testing import capture_logs

from compaction_proxy.core.strategies import STRATEGIES
from tests.system.seeds.stage import (
    DIGEST,
    JsonObject,
    Placed,
    calling,
    loop,
    report,
    said,
    system,
    talk,
    user,
)

SEEDS = [name for name in STRATEGIES if name != "anchored"]
SUMMARISING = [name for name in SEEDS if STRATEGIES[name].summary]
# Few messages stay, so that each strategy has something to take of this.
FEW: JsonObject = {"keep": {"messages": 4}, "trigger": [{"tokens": 1_000}]}
LONG = [
    system(),
    user("Build it"),
    *loop(8),
    said("Built."),
    user("Now test it"),
    *loop(6, 20),
    user("And now?"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_without_a_trigger_nothing_is_done_that_was_not_asked_for(
    strategy: str, placed: Placed
) -> None:
    huge = [system(), *talk(70, 9_000), user("And now?")]
    off = {"trigger": 0, "keep": {"messages": 4}}
    async with placed(strategy, window=4_000, compaction=off) as place:
        assert report(await place.ask(huge), "status") == ["none"]
        assert place.provider.sent == huge
        assert len(place.provider.seen) == 1
        assert report(await place.force(LONG, name="two"), "status") == ["applied"]


@pytest.mark.parametrize("strategy", SEEDS)
async def test_a_round_is_told_by_headers_log_and_event_alike(strategy: str, placed: Placed) -> None:
    async with placed(strategy, compaction=FEW) as place:
        with capture_logs() as lines:
            answer = await place.ask(LONG)
        started, finished = (each for each in lines if each["event"].startswith("compaction."))
        [event] = [each for each in await place.events(answer) if each["kind"] == "compacted"]
        names = ("strategy", "round", "tokens-before", "tokens-after")

        assert [started["event"], finished["event"]] == ["compaction.started", "compaction.finished"]
        assert started["messages"] == finished["messages"] == event["messages"] == len(event["message_ids"])
        told = [str(event[name.replace("-", "_")]) for name in names]
        assert told[:3] == report(answer, *names[:3])
        assert abs(int(told[3]) - int(answer.headers["x-compaction-tokens-after"])) <= 5
        assert int(told[3]) < int(told[2])
        assert report(answer, "messages-before", "messages-after") == [
            str(len(LONG)),
            str(len(place.provider.sent)),
        ]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_system_prompt_and_latest_request_are_in_what_is_forwarded(
    strategy: str, placed: Placed
) -> None:
    async with placed(strategy, compaction=FEW) as place:
        await place.ask(LONG, temperature=0.4, seed=7)
        sent = place.provider.forwarded[-1]
        assert sent["messages"][0] == system()
        assert sent["messages"][-1]["content"].endswith("And now?")
        assert {name: sent[name] for name in ("temperature", "seed")} == {"temperature": 0.4, "seed": 7}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_calls_and_results_stay_together_whole(strategy: str, placed: Placed) -> None:
    async with placed(strategy, compaction=FEW) as place:
        await place.ask([*LONG, *loop(2, 40)])
        asked = [call["id"] for each in place.provider.sent for call in each.get("tool_calls", ())]
        assert asked == [each["tool_call_id"] for each in place.provider.sent if each["role"] == "tool"]
        assert asked


@pytest.mark.parametrize("strategy", SEEDS)
async def test_a_round_is_reused_as_the_same_bytes_without_another_call(
    strategy: str, placed: Placed
) -> None:
    async with placed(strategy, compaction={**FEW, "trigger": [{"messages": 20}]}) as place:
        first = await place.ask(LONG)
        sent, calls = json.dumps(place.provider.sent), len(place.provider.summaries)
        again = await place.ask([*LONG, said("All is well."), user("Thanks.")])
        assert report(first, "status") == ["applied"]
        assert report(again, "status", "round") == ["reused", "1"]
        assert json.dumps(place.provider.sent).startswith(sent[:-1])
        assert len(place.provider.summaries) == calls


@pytest.mark.parametrize("failure", [500, "Sorry, I can't help with that."], ids=["error", "refusal"])
@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_below_the_limit_a_failed_summary_leaves_the_request_as_it_came(
    strategy: str, failure: str | int, placed: Placed
) -> None:
    async with placed(strategy, compaction=FEW) as place:
        place.provider.summary = failure
        answer = await place.ask(LONG)
        assert place.provider.sent == LONG
        assert report(answer, "status", "round") == ["failed-open", None]
        assert [each for each in await place.events(answer) if each["kind"] == "compacted"] == []


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_above_the_limit_a_request_fits_even_without_a_summary(strategy: str, placed: Placed) -> None:
    huge = [*LONG[:-1], *loop(24, 60), user("And now?")]
    async with placed(strategy, window=6_000, compaction={"keep": {"messages": 4}}) as place:
        place.provider.summary = 500
        answer = await place.ask(huge)
        assert report(answer, "status") == ["applied"]
        assert (
            int(answer.headers["x-compaction-tokens-after"])
            < 6_000
            < int(answer.headers["x-compaction-tokens-before"])
        )
        assert place.provider.sent[-1]["content"].endswith("And now?")


@pytest.mark.parametrize("strategy", SEEDS)
async def test_a_call_without_a_result_gets_one_where_the_list_is_rewritten(
    strategy: str, placed: Placed
) -> None:
    missing = [*LONG, calling(90), user("Go on"), said("I go on."), user("And then?")]
    async with placed(strategy, compaction=FEW) as place:
        await place.ask(missing)
        sent = place.provider.sent
        kept = [k for k, each in enumerate(sent) if each.get("tool_calls", [{}])[0].get("id") == "call_90"]
        assert [sent[k + 1]["content"] for k in kept] == ["Tool no response"] * len(kept)
        assert len(kept) == 1


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_a_summary_is_the_only_thing_that_the_summary_model_writes(
    strategy: str, placed: Placed
) -> None:
    async with placed(strategy, compaction=FEW) as place:
        await place.ask(LONG)
        ours = [each for each in place.provider.sent if each not in LONG]
        assert ours
        assert all(DIGEST in each["content"] for each in ours)
        assert {each["role"] for each in ours} == {STRATEGIES[strategy].stand_in_role}
