"""seeds/001 end to end: the strategy `selective` through the whole proxy."""

import json
from pathlib import Path

import pytest

from tests.system.seeds.stage import (
    DIGEST,
    MODEL,
    SUMMARY_MODEL,
    JsonObject,
    Placed,
    calling,
    loop,
    report,
    result,
    said,
    system,
    user,
)

TAGGED = said(f"<summary>\n{DIGEST}\n</summary>")
# The example of the document, with answers as long as they are in life.
DEBUGGING = [
    user("Can you debug this code?"),
    calling(1, text="Let me take a look."),
    result(1),
    said("I found the issue. " + "The handler swallows the error. " * 20),
    calling(2, name="patch", text="Let me fix it."),
    result(2, "patched"),
    said("The fix is applied. Here's what I changed: " + "a guard was added. " * 10),
    user("Can you explain why that fixed it?"),
]


def runs(count: int) -> list[JsonObject]:
    """So many requests, each with a run of six messages behind it."""
    return [each for k in range(count) for each in (user(f"Request {k}"), *loop(3, 10 * k))]


def retaining(kept: int, **fields: object) -> JsonObject:
    return {"strategies": {"selective": {"keep_messages": kept, **fields}}}


async def test_it_fires_at_60_000_tokens_and_not_below(placed: Placed) -> None:
    def asked(words: int) -> list[JsonObject]:
        filler = said("So:" + " word" * (words - 3_000))
        return [system(), user("Build it"), filler, *runs(3), user("And now?")]

    async with placed("selective") as place:
        below, at = await place.sizes(asked, 60_000)
        assert report(await place.ask(asked(below), "below"), "status") == ["none"]
        reached = await place.ask(asked(at), "at")
        assert report(reached, "status") == ["applied"]
        assert [each["reason"] for each in await place.events(reached)] == ["tokens"]


@pytest.mark.parametrize(("count", "number"), [("messages", 12), ("turns", 4)])
async def test_it_fires_by_messages_or_turns_too_and_again_after_as_many(
    count: str, number: int, placed: Placed
) -> None:
    async with placed("selective", compaction=retaining(2, **{count: number})) as place:
        messages: list[JsonObject] = []
        fired = []
        for turn in range(9):
            messages += [user(f"Request {turn}"), calling(turn), result(turn)]
            answer = await place.ask(messages)
            fired += [turn] if report(answer, "status") == ["applied"] else []
            messages += [said(f"Answer {turn}: " + "all done " * 40)]
        assert fired == ([3, 6] if count == "messages" else [3, 7])


async def test_the_debugging_example_becomes_three_messages(placed: Placed) -> None:
    async with placed("selective", compaction=retaining(1)) as place:
        answer = await place.force(DEBUGGING)
        assert place.provider.sent == [DEBUGGING[0], TAGGED, DEBUGGING[-1]]
        assert report(answer, "messages-before", "messages-after") == ["8", "3"]


@pytest.mark.parametrize("count", [12, 13], ids=["even", "odd"])
async def test_six_messages_stay_by_default(count: int, placed: Placed) -> None:
    # Messages without calls: each is a unit, so that no edge of a unit makes six of five or seven.
    messages = [user("Build it"), *(said(f"Step {k}:" + " done" * 90) for k in range(count))]
    async with placed("selective") as place:
        await place.force(messages)
        assert place.provider.sent == [messages[0], TAGGED, *messages[-6:]]


async def test_what_users_and_the_system_say_stays_in_its_place(placed: Placed) -> None:
    messages = [system(), *runs(3), user("Request 3"), *loop(3, 90)]
    async with placed("selective", compaction={"trigger": [{"tokens": 600}]}) as place:
        await place.ask(messages)
        assert place.provider.sent == [
            system(),
            *(user("Request 0"), TAGGED, user("Request 1"), TAGGED, user("Request 2"), TAGGED),
            *(user("Request 3"), *loop(3, 90)),
        ]


async def test_runs_taken_together_share_one_call_and_have_a_text_each(placed: Placed) -> None:
    async with placed("selective", compaction={"trigger": [{"tokens": 600}]}) as place:
        await place.ask([system(), *runs(3), user("Request 3"), *loop(3, 90)])
        [call] = place.provider.summaries
        asked = call["messages"][1]["content"]
        assert [mark in asked for mark in ("=== RUN 1 ===", "=== RUN 3 ===", "=== RUN 4 ===")] == [
            True,
            True,
            False,
        ]


async def test_only_the_earliest_runs_are_taken_until_the_request_is_under_its_trigger(
    placed: Placed,
) -> None:
    messages = [system(), *runs(3), user("Request 3"), *loop(3, 90)]
    async with placed("selective", compaction={"trigger": [{"tokens": 2_800}]}) as place:
        await place.ask(messages)
        assert place.provider.sent == [*messages[:2], TAGGED, *messages[8:]]


async def test_one_run_a_request_where_that_is_configured(placed: Placed) -> None:
    messages = [system(), *runs(3), user("Request 3"), *loop(3, 90)]
    settings = {"trigger": [{"tokens": 600}], **retaining(6, take="one")}
    async with placed("selective", compaction=settings) as place:
        sizes = []
        for _ in range(4):
            await place.ask(messages)
            sizes.append(len(place.provider.sent))
        assert sizes == [24, 19, 14, 14]
        assert len(place.provider.summaries) == 3


async def test_a_summary_is_never_summarised_again(placed: Placed) -> None:
    messages = [user("Build it"), *loop(6)]
    async with placed("selective") as place:
        await place.force(messages)
        grown = [*messages, *loop(4, 50)]
        place.provider.summary = "Then I looked at the other parts as well, and they are as they should be."
        answer = await place.force(grown)
        second = said(f"<summary>\n{place.provider.summary}\n</summary>")
        assert place.provider.sent == [messages[0], TAGGED, second, *grown[-6:]]
        assert DIGEST not in place.provider.summaries[1]["messages"][1]["content"].split("<transcript")[1]
        assert report(answer, "round") == ["2"]


async def test_a_run_whose_summary_is_not_smaller_stays(placed: Placed) -> None:
    short = [user("Build it"), calling(1), result(1, "fine " * 40), user("And?"), *loop(8)]
    settings = {"trigger": [{"tokens": 700}]}
    async with placed("selective", compaction=settings) as place:
        place.provider.summary = DIGEST * 6
        await place.ask(short)
        tagged = said(f"<summary>\n{place.provider.summary}\n</summary>")
        assert place.provider.sent == [*short[:4], tagged, *short[-6:]]


async def test_the_tag_is_configurable_and_cannot_be_closed_from_inside(placed: Placed) -> None:
    async with placed("selective", compaction=retaining(1, tag="digest")) as place:
        place.provider.summary = f"{DIGEST}</digest> Then I went on."
        await place.force(DEBUGGING)
        inside = f"{DIGEST}< /digest> Then I went on."
        assert place.provider.sent[1] == said(f"<digest>\n{inside}\n</digest>")


async def test_the_summary_model_is_asked_for_2_000_tokens_at_temperature_0_without_tools(
    placed: Placed,
) -> None:
    async with placed("selective", compaction=retaining(1)) as place:
        await place.force(DEBUGGING)
        [call] = place.provider.summaries
        del call["messages"]
        assert call == {"model": SUMMARY_MODEL, "max_tokens": 2_000, "temperature": 0.0}


async def test_the_model_summarises_its_own_answers_where_no_other_is_known(placed: Placed) -> None:
    async with placed("selective", compaction=retaining(1), summary={}) as place:
        await place.force(DEBUGGING)
        assert [call["model"] for call in place.provider.summaries] == [MODEL]


async def test_the_prompt_is_a_file_of_the_users_where_one_is_named(placed: Placed, tmp_path: Path) -> None:
    own = tmp_path / "prompt.md"
    own.write_text("Tell me in one line what was done.\n")
    async with placed("selective", compaction=retaining(1, prompt_file=str(own))) as place:
        await place.force(DEBUGGING)
        asked = place.provider.summaries[0]["messages"][0]
        assert asked == system("Tell me in one line what was done.\n")


async def test_a_client_may_lower_the_trigger_for_one_request(placed: Placed) -> None:
    messages = [user("Build it"), *loop(6)]
    async with placed("selective") as place:
        answer = await place.ask(messages, headers={"x-compaction-trigger-tokens": "1000"})
        assert report(answer, "status") == ["applied"]


async def test_the_round_is_sent_again_as_the_same_bytes(placed: Placed) -> None:
    messages = [user("Build it"), *loop(6)]
    async with placed("selective") as place:
        await place.force(messages)
        first = json.dumps(place.provider.sent)
        answer = await place.ask([*messages, user("Go on")])
        assert json.dumps(place.provider.sent).startswith(first[:-1])
        assert report(answer, "status") == ["reused"]
