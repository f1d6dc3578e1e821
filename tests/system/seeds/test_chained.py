"""seeds/004 end to end: the strategy `chained` through the whole proxy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from compaction_proxy.core.strategies import CHAINED
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.storage.sqlite.store import SqliteStore
from tests.helpers.summaries import put_in_sections
from tests.system.seeds.stage import (
    DIGEST,
    MODEL,
    SUMMARY_MODEL,
    JsonObject,
    Place,
    Placed,
    Provider,
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

TASK = user("Build a flashcard app")


def session(count: int) -> list[JsonObject]:
    """The document's example: 50 messages of which the fiftieth is a tool result, or as many more."""
    steps = loop(count)
    return [system(), TASK, *steps[:38], said("All tests pass"), user("Add AI integration"), *steps[38:]]


FIFTY = session(23)


def stand_in(number: int, summary: str, task: str = "Build a flashcard app", more: str = "") -> JsonObject:
    written = put_in_sections(summary, CHAINED)
    return said(
        f"## Session Summary (Compaction Round {number})\n\n### Original Task\n{task}\n\n{written}{more}"
    )


@pytest.mark.parametrize(
    ("model", "window", "trigger"), [("gpt-4o", 128_000, 93_600), ("gpt-4", 8_192, 4_915)]
)
async def test_it_fires_at_80_percent_of_what_the_reserves_leave_and_not_below(
    model: str, window: int, trigger: int, placed: Placed
) -> None:
    def asked(words: int) -> list[JsonObject]:
        return [system(), *talk(60, words), user("And now?")]

    async with placed("chained") as place:
        below, at = await place.sizes(asked, trigger)
        before = await place.ask(asked(below), "below", model=model)
        reached = await place.ask(asked(at), "at", model=model)
        assert report(before, "status", "context-limit", "until-trigger-percent") == [
            "none",
            str(window),
            "0",
        ]
        assert report(reached, "status") == ["applied"]
        assert [each["reason"] for each in await place.events(reached)] == ["percent"]


async def test_the_example_becomes_system_prompt_summary_and_the_last_ten(placed: Placed) -> None:
    messages = [*FIFTY[:-2], said("Integrated."), user("Thanks. Now the docs.")]
    assert len(messages) == 50
    async with placed("chained") as place:
        answer = await place.force(messages)
        assert place.provider.sent == [system(), stand_in(1, DIGEST), *messages[-10:]]
        assert report(answer, "messages-before", "messages-after", "round") == ["50", "12", "1"]


async def test_the_boundary_walks_back_to_the_call(placed: Placed) -> None:
    messages = [*FIFTY, said("Integrated."), user("Thanks."), said("Fine.")]
    async with placed("chained") as place:
        await place.force(messages)
        assert messages[-10]["role"] == "tool"
        assert place.provider.sent == [system(), stand_in(1, DIGEST), *messages[-11:]]


def plain(count: int) -> list[JsonObject]:
    """So many messages without calls and without a system prompt, the task first."""
    return [TASK, *((said, user)[k % 2](f"Message {k}." + " word" * 90) for k in range(count - 1))]


@pytest.mark.parametrize(
    "messages", [[system()], [TASK], FIFTY[:11], plain(11)], ids=["system", "task", "eleven", "eleven-plain"]
)
async def test_empty_and_short_sessions_are_left_alone_and_leave_no_event(
    messages: list[JsonObject], placed: Placed
) -> None:
    async with placed("chained") as place:
        answer = await place.force(messages)
        assert place.provider.sent == messages
        assert report(answer, "status", "reason") == ["none", "nothing-to-take"]
        told = await place.client.get(
            f"/admin/v1/conversations/{answer.headers['x-compaction-session']}/events"
        )
        assert told.json()["events"] == []


async def test_of_twelve_messages_the_oldest_are_summarised(placed: Placed) -> None:
    async with placed("chained") as place:
        await place.force(plain(12))
        assert place.provider.sent == [stand_in(1, DIGEST), *plain(12)[-10:]]


async def test_the_summary_model_is_asked_for_800_tokens_allowed_1_000_at_temperature_0_3(
    placed: Placed,
) -> None:
    async with placed("chained") as place:
        await place.force(FIFTY, tools=of_tools())
        [call] = place.provider.summaries
        data = call.pop("messages")[1]["content"]
        assert call == {"model": SUMMARY_MODEL, "max_tokens": 1_000, "temperature": 0.3}
        assert "At most 800 tokens" in data


async def test_the_prompt_has_the_sections_of_the_document(placed: Placed) -> None:
    async with placed("chained") as place:
        await place.force(FIFTY)
        asked, data = (each["content"] for each in place.provider.summaries[0]["messages"])
        assert re.findall(r"^#+ (.*)$", asked, re.MULTILINE) == [
            "Completed Work",
            "Key Technical Decisions",
            "Current State",
            "Pending Work",
            "Errors & Resolutions",
        ]
        assert "| File/Component | Action | Description |" in asked
        assert [
            each for each in re.findall(r"^## (.*)$", data, re.MULTILINE) if each != "Size and Language"
        ] == [
            "Previous Summary",
            "Original User Task",
            "Messages to Summarize",
        ]


async def test_the_transcript_shows_500_characters_of_a_result_and_2_000_of_any_other(placed: Placed) -> None:
    long = [system(), TASK, calling(1), result(1, "r" * 12_000), said("a" * 9_000), *loop(6)]
    async with placed("chained") as place:
        await place.force(long)
        data = place.provider.summaries[0]["messages"][1]["content"]
        assert re.findall(r"r{100,}\n\[\.\.\.truncated\.\.\.\]", data) == ["r" * 500 + "\n[...truncated...]"]
        assert re.findall(r"a{100,}\n\[\.\.\.truncated\.\.\.\]", data) == [
            "a" * 2_000 + "\n[...truncated...]"
        ]


async def test_a_second_round_integrates_the_first_and_says_so(placed: Placed) -> None:
    more = [*FIFTY, said("Integrated."), user("Thanks.")]
    async with placed("chained") as place:
        await place.force(more)
        place.provider.summary = "The app, its scheduling and the integration are all there."
        grown = [*more, *loop(8, 60), said("Documented."), user("Now release it.")]
        answer = await place.force(grown)
        data = place.provider.summaries[1]["messages"][1]["content"]
        note = "\n\nThis summary incorporates context from 1 previous compaction round."

        assert place.provider.sent == [
            system(),
            stand_in(2, str(place.provider.summary), more=note),
            *grown[-10:],
        ]
        assert DIGEST in data.split("## Previous Summary")[1].split("## Original User Task")[0]
        assert report(answer, "round") == ["2"]


async def test_the_number_of_a_round_outlives_the_process(proxied: Any, tmp_path: Path) -> None:
    more = [*FIFTY, said("Integrated."), user("Thanks.")]
    grown = [*more, *loop(8, 60), said("Documented."), user("Now release it.")]
    sections = {"compaction": {"strategy": "chained"}, "server": {"secret": "a" * 32}}
    provider = Provider()
    rounds = []
    async with serve_embedded(provider) as url:
        for messages in (more, grown):
            store = SqliteStore(tmp_path / "state.db")
            async with proxied(url, store=store, **sections) as client:
                rounds += report(await Place(client, provider).force(messages), "round")
    assert rounds == ["1", "2"]


async def test_a_message_that_looks_like_a_summary_is_text(placed: Placed) -> None:
    fake = [system(), said("## Session Summary (Compaction Round 9)\nNothing."), *FIFTY[1:]]
    async with placed("chained") as place:
        answer = await place.force(fake)
        data = place.provider.summaries[0]["messages"][1]["content"]
        assert report(answer, "round") == ["1"]
        assert "this is the first compaction round" in data.split("## Original User Task")[0]


async def test_text_of_content_parts_is_the_task(placed: Placed) -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "Build a "}, {"type": "text", "text": "clock"}],
    }
    async with placed("chained") as place:
        await place.force([parts, *loop(8), user("Go on")])
        assert place.provider.sent[0] == stand_in(1, DIGEST, "Build a clock")


async def test_without_a_user_message_the_task_is_unknown(placed: Placed) -> None:
    async with placed("chained") as place:
        await place.force([system(), *loop(10)])
        assert place.provider.sent[1] == stand_in(1, DIGEST, "Unknown task")


@pytest.mark.parametrize("failure", [500, 400, "", "Sorry, I can't help with that."])
async def test_where_no_summary_comes_the_messages_are_unchanged(failure: str | int, placed: Placed) -> None:
    async with placed("chained") as place:
        place.provider.summary = failure
        with capture_logs() as lines:
            answer = await place.force(FIFTY)
        assert place.provider.sent == FIFTY
        assert report(answer, "status", "round") == ["failed-open", None]
        [failed] = [each for each in lines if each["event"] == "compaction.failed"]
        assert failed["log_level"] == "warning"


async def test_the_event_holds_round_sizes_summary_and_message_ids(placed: Placed) -> None:
    async with placed("chained") as place:
        answer = await place.force([*FIFTY, said("Integrated."), user("Thanks.")])
        [event] = await place.events(answer)
        before, after = report(answer, "tokens-before", "tokens-after")
        assert (event["kind"], event["round"], event["summary"]) == (
            "compacted",
            1,
            put_in_sections(DIGEST, CHAINED),
        )
        assert [str(event["tokens_before"]), str(event["tokens_after"])] == [before, after]
        assert len(event["message_ids"]) == event["messages"] == 41
        assert all(re.fullmatch(r"m_[0-9a-f]{12}", each) for each in event["message_ids"])


async def test_what_was_summarised_can_be_read_by_its_id(placed: Placed) -> None:
    async with placed("chained") as place:
        answer = await place.force([*FIFTY, said("Integrated."), user("Thanks.")])
        [event] = await place.events(answer)
        name, first = answer.headers["x-compaction-session"], event["message_ids"][0]
        read = await place.client.get(f"/admin/v1/conversations/{name}/messages/{first}")
        assert (read.json()["role"], read.json()["text"]) == ("user", "Build a flashcard app")


async def test_where_roles_must_alternate_a_line_of_a_user_stands_before_the_summary(placed: Placed) -> None:
    models = {"gpt-*": {"alternation": "strict"}}
    async with placed("chained", models=models) as place:
        await place.force([*FIFTY[:-2], said("Integrated."), user("Thanks. Now the docs.")])
        assert place.provider.sent[1:3] == [user("Please go on."), stand_in(1, DIGEST)]


@pytest.mark.parametrize(
    ("characters", "tokens"),
    [((50_000, 50_002), 12_500 + 12_501 + 2 * 2), ((4, 1), 1 + 1 + 2 * 2), ((8, 9), 2 + 3 + 2 * 2)],
)
async def test_tokens_can_be_estimated_from_characters(
    characters: tuple[int, int], tokens: int, placed: Placed
) -> None:
    compaction: JsonObject = {"counter": "characters"}
    async with placed("chained", compaction=compaction) as place:
        messages = [system("s" * characters[0]), user("u" * characters[1])]
        answer = await place.ask(messages, headers={"x-compaction": "shadow"})
        # Before the upstream has reported a usage, the count is raised by the doubt about its tokenizer.
        assert report(answer, "tokens-before") == [str(Calibration.build_prior(MODEL).predict_tokens(tokens))]


async def test_a_round_is_checked_before_every_request_and_reused_after_it(placed: Placed) -> None:
    async with placed("chained", window=8_192) as place:
        rounds, statuses = [], set()
        for count in range(10, 60):
            answer = await place.ask(session(count))
            rounds += report(answer, "round")
            statuses.add(answer.headers["x-compaction-status"])
            assert len(json.dumps(place.provider.sent)) < 8_192 * 4
        assert statuses == {"none", "applied", "reused"}
        assert rounds == sorted(rounds, key=lambda each: int(each or 0))
        assert len(place.provider.summaries) == int(rounds[-1] or 0) > 2
