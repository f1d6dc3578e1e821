"""seeds/000 end to end: the strategy `full` through the whole proxy."""

import asyncio
import re

import httpx
import pytest

from compaction_proxy.core.strategies import FULL
from tests.helpers.summaries import put_in_sections
from tests.system.seeds.stage import (
    DIGEST,
    MODEL,
    SUMMARY_MODEL,
    JsonObject,
    Place,
    Placed,
    calling,
    loop,
    of_tools,
    report,
    result,
    said,
    system,
    talk,
    user,
)

# Summaries by the request's own model, as the strategy has it.
OWN: JsonObject = {"summary": {}}
ROOM = 1_000_000
SUMMARY = put_in_sections(DIGEST, FULL)
STAND_IN = {"role": "user", "content": f"{SUMMARY}\n\nLast request from user was: Now test it"}
SESSION = [system(), user("Build it"), *loop(5), said("Done."), user("Now test it")]


async def test_it_fires_at_200_000_tokens_and_not_below(placed: Placed) -> None:
    def asked(words: int) -> list[JsonObject]:
        return [system(), *talk(40, words), user("And now?")]

    async with placed("full", window=ROOM, **OWN) as place:
        below, at = await place.sizes(asked, 200_000)
        before = await place.ask(asked(below), "below")
        reached = await place.ask(asked(at), "at")

        assert report(before, "status", "reason") == ["none", None]
        assert report(reached, "status", "messages-after") == ["applied", "2"]
        assert [each["reason"] for each in await place.events(reached) if each["kind"] == "compacted"] == [
            "tokens"
        ]


async def test_a_threshold_of_0_disables_it_and_force_still_compacts(placed: Placed) -> None:
    off = {"strategies": {"full": {"tokens": 0}}}
    async with placed("full", window=4_000, compaction=off, **OWN) as place:
        huge = [system(), *talk(40, 9_000), user("And now?")]
        left = await place.ask(huge)
        assert report(left, "status") == ["none"]
        assert place.provider.sent == huge
        forced = await place.force(SESSION, name="two")
        assert report(forced, "status") == ["applied"]


async def test_system_prompt_and_one_user_message_with_the_last_request_are_what_is_left(
    placed: Placed,
) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        answer = await place.force(SESSION)
        assert place.provider.sent == [system(), STAND_IN]
        assert report(answer, "status", "strategy", "round") == ["applied", "full", "1"]
        assert report(answer, "messages-before", "messages-after") == ["14", "2"]


async def test_without_a_user_message_there_is_no_line_about_a_request(placed: Placed) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force([system(), said("Hello"), *loop(3), said("Ready.")])
        assert place.provider.sent == [system(), user(SUMMARY), said("Ready.")]


async def test_a_unit_that_nobody_has_answered_follows_the_summary(placed: Placed) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force([system(), user("Build it"), *loop(6)])
        assert place.provider.sent[2:] == [calling(5), result(5)]
        assert place.provider.sent[1]["content"].endswith("\n\nLast request from user was: Build it")


async def test_parts_of_the_last_request_that_are_no_text_stay_parts(placed: Placed) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://pictures.test/a.png", "detail": "low"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "Now test it"}, image]}
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force([*SESSION[:-1], asked])
        assert place.provider.sent[1]["content"] == [{"type": "text", "text": STAND_IN["content"]}, image]


@pytest.mark.parametrize("model", [MODEL, "gpt-4.1", "claude-sonnet-4-5"])
async def test_the_prompt_is_appended_to_the_conversation_itself(model: str, placed: Placed) -> None:
    models = {model: {"window": ROOM}}
    async with placed("full", models=models, **OWN) as place:
        await place.force(
            SESSION, model=model, tools=of_tools(2), tool_choice="auto", stream=False, stop=["x"], user="u-1"
        )
        [call] = place.provider.summaries

        assert call["messages"][:-1] == SESSION
        assert call["messages"][-1]["role"] == "user"
        del call["messages"]
        assert call == {
            "model": model,
            "tools": of_tools(2),
            "tool_choice": "none",
            "user": "u-1",
            "max_tokens": 3_750,
            "temperature": 0.0,
        }


async def test_the_prompt_has_the_seven_sections_in_their_order(placed: Placed) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force(SESSION)
        asked = place.provider.summaries[0]["messages"][-1]["content"]
        assert re.findall(r"^(\d\. .*)$", asked, re.MULTILINE) == [
            "1. User's Primary Goals and Intent",
            "2. Conversation Timeline and Progress",
            "3. Technical Context and Decisions",
            "4. Files and Code Changes",
            "5. Active Work and Last Actions (CRITICAL)",
            "6. Unresolved Issues and Pending Tasks",
            "7. Immediate Next Step",
        ]
        assert "At most 3000 tokens" in asked


async def test_an_aligned_call_that_does_not_fit_is_made_from_a_transcript(placed: Placed) -> None:
    trigger = {"trigger": [{"tokens": 2_000}]}
    long = [
        system(),
        user("Build it"),
        calling(1),
        result(1, "long " * 4_000),
        said("Read."),
        user("Now test it"),
    ]
    async with placed("full", window=8_000, compaction=trigger, **OWN) as place:
        await place.ask(long)
        [call] = place.provider.summaries
        assert [each["role"] for each in call["messages"]] == ["system", "user"]
        assert "## Messages to Summarize" in call["messages"][1]["content"]
        assert place.provider.sent[1] == STAND_IN


async def test_another_summary_model_gets_a_transcript(placed: Placed) -> None:
    async with placed("full", window=ROOM) as place:
        await place.force(SESSION, tools=of_tools())
        [call] = place.provider.summaries
        assert (call["model"], set(call)) == (
            SUMMARY_MODEL,
            {"model", "messages", "max_tokens", "temperature"},
        )


async def test_missing_results_are_filled_and_a_list_that_ends_in_one_is_acknowledged(placed: Placed) -> None:
    missing = [system(), user("Build it"), *loop(4), calling(7), user("Go on"), *loop(1, 8)]
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force(missing)
        [call] = place.provider.summaries
        filled = {"role": "tool", "tool_call_id": "call_7", "content": "Tool no response"}

        assert call["messages"][:-1] == [*missing[:11], filled, *missing[11:], said("Understood.")]
        assert place.provider.sent[2:] == loop(1, 8)  # the request itself goes on without it


async def test_results_without_a_call_are_left_out_of_what_is_summarised(placed: Placed) -> None:
    stray = [*SESSION[:2], result(99), *SESSION[2:]]
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force(stray)
        assert place.provider.summaries[0]["messages"][:-1] == SESSION


async def test_the_next_request_is_sized_by_what_the_provider_counted(placed: Placed) -> None:
    async with placed("full", window=ROOM, compaction={"trigger": [{"tokens": 9_000}]}, **OWN) as place:
        place.provider.prompt_tokens = 3_000
        first = await place.ask([system(), *talk(10, 2_000), user("One?")])
        again = await place.ask([system(), *talk(10, 2_000), user("One?"), said("Yes."), user("Two?")])
        sizes = [int(each.headers["x-compaction-tokens-after"]) for each in (first, again)]
        assert 2_000 <= sizes[0] <= 2_200
        assert 3_000 < sizes[1] < 3_050


async def test_a_probe_counts_what_was_forwarded_beside_the_answer(placed: Placed) -> None:
    async with placed("full", window=ROOM, compaction={"recount": "probe"}, **OWN) as place:
        place.provider.held = asyncio.Event()
        place.provider.prompt_tokens = 777
        answer = await place.force(SESSION, tools=of_tools(), stream=False, max_tokens=500)
        await place.provider.probed.wait()  # the client has its answer; nobody has answered the probe
        [probe] = place.provider.probes
        place.provider.held.set()

        assert (probe["max_tokens"], probe["messages"], probe["tools"]) == (
            16,
            place.provider.sent,
            of_tools(),
        )
        assert "stream" not in probe or probe["stream"] is False
        assert set(place.provider.keys) == {"Bearer sk-test"}
        assert await measured(place, answer) == [777]
        await place.ask([*SESSION, said("Yes."), user("And?")])
        assert len(place.provider.probes) == 1  # only a round is recounted


async def measured(place: Place, answer: httpx.Response) -> list[int]:
    for _ in range(100):
        found = [each["tokens_real"] for each in await place.events(answer)]
        if any(found):
            return found
        await asyncio.sleep(0.02)
    return []


async def test_a_second_round_summarises_the_first_one_with_what_came_since(placed: Placed) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        await place.force(SESSION)
        grown = [*SESSION, *loop(5, 20), said("Tested."), user("Ship it")]
        answer = await place.force(grown)

        assert place.provider.summaries[1]["messages"][:2] == [system(), STAND_IN]
        assert place.provider.sent == [system(), user(f"{SUMMARY}\n\nLast request from user was: Ship it")]
        assert report(answer, "round") == ["2"]


async def test_a_round_starts_the_counts_anew_and_keeps_events_and_archive(placed: Placed) -> None:
    turns = {"trigger": [{"turns": 3}]}
    async with placed("full", window=ROOM, compaction=turns, **OWN) as place:
        messages = [system()]
        statuses = []
        for number in range(6):
            messages += [user(f"Request {number}. " + "Please look at it. " * 20)]
            answer = await place.ask(messages)
            statuses += report(answer, "status")
            messages += [said(f"Answer {number}. " + "It is done now. " * 20)]
        events = [each for each in await place.events(answer) if each["kind"] == "compacted"]
        name = answer.headers["x-compaction-session"]
        hits = await place.client.get(f"/admin/v1/conversations/{name}/search", params={"q": "Answer 0"})

        assert statuses == ["none", "none", "applied", "reused", "reused", "applied"]
        assert [each["round"] for each in events] == [1, 2]
        assert [hit["role"] for hit in hits.json()["hits"]][:1] == ["assistant"]


@pytest.mark.parametrize("failure", [500, ""], ids=["error", "empty"])
async def test_without_a_summary_the_request_goes_on_as_it_came(failure: str | int, placed: Placed) -> None:
    async with placed("full", window=ROOM, **OWN) as place:
        place.provider.summary = failure
        answer = await place.force(SESSION)
        assert place.provider.sent == SESSION
        assert report(answer, "status", "round") == ["failed-open", None]
