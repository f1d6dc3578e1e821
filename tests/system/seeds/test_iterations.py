"""seeds/003 end to end: the strategy `iterations` through the whole proxy."""

import pytest

from tests.system.seeds.stage import (
    DIGEST,
    SUMMARY_MODEL,
    JsonObject,
    Placed,
    calling,
    loop,
    of_tools,
    report,
    result,
    said,
    system,
    user,
)

STAND_IN = user(f"[Summary of the earlier work, for reference]\n{DIGEST}\n[End of the summary]")
TASK = user("Build it")


async def test_every_eighth_iteration_is_compacted_and_none_between(placed: Placed) -> None:
    async with placed("iterations") as place:
        fired = []
        for count in range(1, 25):
            answer = await place.ask([system(), TASK, *loop(count)])
            fired += [count] if report(answer, "status") == ["applied"] else []
        assert fired == [8, 16, 24]
        assert [each["reason"] for each in await place.events(answer)] == ["iterations"] * 3


async def test_it_fires_at_80_000_tokens_too_and_not_below(placed: Placed) -> None:
    def asked(words: int) -> list[JsonObject]:
        return [system(), TASK, calling(1), result(1, "word " * words), *loop(4, 20)]

    async with placed("iterations") as place:
        below, at = await place.sizes(asked, 80_000)
        assert report(await place.ask(asked(below), "below"), "status") == ["none"]
        reached = await place.ask(asked(at), "at")
        assert report(reached, "status") == ["applied"]
        assert [each["reason"] for each in await place.events(reached)] == ["tokens"]


async def test_a_summary_as_user_message_and_six_messages_are_what_is_left(placed: Placed) -> None:
    messages = [system(), said("Hello"), *loop(8)]
    async with placed("iterations") as place:
        answer = await place.ask(messages)
        assert place.provider.sent == [system(), STAND_IN, *messages[-6:]]
        assert report(answer, "messages-before", "messages-after") == ["18", "8"]


async def test_three_iterations_stay_whole_where_their_calls_are_parallel(placed: Placed) -> None:
    def parallel(number: int) -> list[JsonObject]:
        calls = [calling(10 * number + each)["tool_calls"][0] for each in (1, 2)]
        asked = {"role": "assistant", "content": None, "tool_calls": calls}
        return [asked, result(10 * number + 1), result(10 * number + 2)]

    messages = [system(), said("Hello"), *(each for k in range(8) for each in parallel(k))]
    async with placed("iterations") as place:
        await place.ask(messages)
        assert place.provider.sent == [system(), STAND_IN, *messages[-9:]]


async def test_in_a_loop_of_one_request_that_request_stays_in_front(placed: Placed) -> None:
    messages = [system(), TASK, *loop(8)]
    async with placed("iterations") as place:
        await place.ask(messages)
        assert place.provider.sent == [system(), TASK, STAND_IN, *messages[-6:]]


async def test_the_transcript_holds_texts_and_tool_results(placed: Placed) -> None:
    messages = [system(), TASK, said("I begin with the loader."), *loop(8)]
    async with placed("iterations") as place:
        await place.ask(messages, tools=of_tools())
        [call] = place.provider.summaries
        data = call.pop("messages")[1]["content"]
        assert "I begin with the loader." in data
        assert "[Tool: read(" in data
        assert "line 0; line 0;" in data
        assert call == {"model": SUMMARY_MODEL, "max_tokens": 1_875, "temperature": 0.0}


async def test_the_prompt_says_what_to_preserve_and_what_to_omit(placed: Placed) -> None:
    async with placed("iterations") as place:
        await place.ask([TASK, *loop(8)])
        asked = place.provider.summaries[0]["messages"][0]["content"]
        preserve, omit = " ".join(asked.split()).split("Preserve:")[1].split("Omit:")
        for wanted in (
            "paths of files",
            "key decisions and the reasoning",
            "error messages",
            "current state",
        ):
            assert wanted in preserve
        for unwanted in ("raw file contents", "pairs of calls and results that repeat", "verbose output"):
            assert unwanted in omit


async def test_the_instructions_are_the_same_bytes_in_every_call(placed: Placed) -> None:
    async with placed("iterations") as place:
        for count in (8, 16):
            await place.ask([TASK, *loop(count)])
        first, second = (call["messages"] for call in place.provider.summaries)
        assert first[0] == second[0]
        assert first[1] != second[1]


async def test_a_summary_that_is_too_long_is_cut_at_a_line_and_not_written_again(placed: Placed) -> None:
    lines = [f"- src/part_{k}.py was read and then changed" for k in range(400)]
    async with placed("iterations") as place:
        place.provider.summary = "\n".join(lines)
        await place.ask([TASK, calling(50), result(50, "long " * 3_000), *loop(7)])
        held = place.provider.sent[1]["content"].splitlines()
        assert held[1:-1] == lines[: len(held) - 2]
        assert 50 < len(held) < 400
        assert len(place.provider.summaries) == 1


async def test_a_summary_that_makes_nothing_shorter_is_not_used(placed: Placed) -> None:
    messages = [TASK, *loop(8)]
    async with placed("iterations") as place:
        place.provider.summary = "It all went well, part after part of it. " * 300
        answer = await place.ask(messages)
        assert place.provider.sent == messages
        assert report(answer, "status", "reason") == ["failed-open", "longer"]


async def test_earlier_rounds_are_part_of_what_is_summarised(placed: Placed) -> None:
    async with placed("iterations") as place:
        await place.ask([TASK, *loop(8)])
        place.provider.summary = "All of the sixteen parts have been read by now, and the guard is in place."
        await place.ask([TASK, *loop(16)])
        data = place.provider.summaries[1]["messages"][1]["content"]
        assert DIGEST in data.split("## Previous Summary")[1].split("## Messages to Summarize")[0]
        assert DIGEST not in str(place.provider.sent)
        assert place.provider.summary in place.provider.sent[1]["content"]


@pytest.mark.parametrize(
    "off",
    [{"mode": "bypass"}, {"strategies": {"iterations": {"iterations": 0, "tokens": 0}}}, {"trigger": 0}],
    ids=["bypass", "thresholds-0", "trigger-0"],
)
async def test_switched_off_it_compacts_nothing(off: JsonObject, placed: Placed) -> None:
    messages = [TASK, *loop(40)]
    async with placed("iterations", compaction=off) as place:
        await place.ask(messages)
        assert place.provider.seen[0]["messages"] == messages
        assert len(place.provider.seen) == 1


async def test_without_anybody_who_summarises_requests_go_on_as_they_came(placed: Placed) -> None:
    messages = [TASK, *loop(8)]
    async with placed("iterations", summary={"model": "none"}) as place:
        answer = await place.ask(messages)
        assert place.provider.sent == messages
        assert report(answer, "status") == ["failed-open"]


async def test_without_configuration_of_the_strategy_its_defaults_hold(placed: Placed) -> None:
    messages = [TASK, *loop(8)]
    async with placed("chained") as place:
        answer = await place.ask(messages, headers={"x-compaction-strategy": "iterations"})
        assert report(answer, "status", "strategy") == ["applied", "iterations"]
        assert place.provider.sent == [TASK, STAND_IN, *messages[-6:]]
