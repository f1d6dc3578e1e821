"""Cutting a list without a model: what goes first, what stays whole, and that the result can be forwarded."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from compaction_proxy.compaction.fallback_cut import cut_to_fit, fill_token_counts, round_trip_message
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import is_valid_message_list
from compaction_proxy.wires.chat.wire import CHAT
from tests.helpers.compaction_bench import Bench, JsonObject, bench, called, loop, says, talk, user

WINDOW = 2_000
RULE = "Never touch the file prod.env."


@pytest.fixture
async def narrow() -> AsyncIterator[Bench]:
    """A replica before a model with a small window."""
    async with bench(window=WINDOW) as made:
        yield made


async def load(made: Bench, messages: list[JsonObject]) -> RequestView:
    return await made.compactor._loader.load_view(made.ask(messages))


async def cut(made: Bench, messages: list[JsonObject]) -> tuple[RequestView, tuple[Message, ...]]:
    view = await load(made, messages)
    return view, await cut_to_fit(view.effective_messages, view, made.reading)


@pytest.mark.parametrize(
    "messages", [talk(60), loop(40), [*talk(5), *loop(3, lines=900)]], ids=["talk", "loop", "both"]
)
async def test_a_list_is_cut_until_it_fits_and_its_calls_have_their_results(
    narrow: Bench, messages: list[JsonObject]
) -> None:
    view, shorter = await cut(narrow, messages)
    assert view.exceeds_window
    assert not view.is_too_large(shorter)
    assert sum(each.tokens for each in shorter) < view.tokens
    assert is_valid_message_list(shorter)


async def test_old_results_are_masked_before_anything_else_is_touched(narrow: Bench) -> None:
    messages = loop(14)
    _, shorter = await cut(narrow, messages)
    assert len(shorter) == len(messages)
    masked = ["left out, m_" in each.text for each in shorter if each.role == "tool"]
    assert masked == sorted(masked, reverse=True)
    assert (masked[0], masked[-1]) == (True, False)
    assert shorter[-1].text == messages[-1]["content"]


async def test_the_operator_and_the_latest_question_stay_and_the_oldest_talk_goes(
    narrow: Bench,
) -> None:
    messages = talk(60, start=RULE)
    _, shorter = await cut(narrow, messages)
    texts = [each.text for each in shorter]
    assert (texts[0], texts[-1]) == ("Be brief.", "And now?")
    assert not any(text.startswith("Step 2:") for text in texts)
    assert any(text.startswith("Done 59:") for text in texts)


async def test_a_message_that_is_too_long_keeps_its_head_and_tail_and_names_itself(
    narrow: Bench,
) -> None:
    long = "The beginning. " + "and so on " * 5_000 + "The end."
    _, shorter = await cut(narrow, [user("Look."), says(long), user("Go on.")])
    text = shorter[1].text
    assert (text.startswith("The beginning."), text.endswith("The end.")) == (True, True)
    assert "of m_" in text
    assert [shorter[0].text, shorter[2].text] == ["Look.", "Go on."]


async def test_a_message_that_is_densest_where_it_is_kept_is_cut_again_until_it_fits() -> None:
    dense = "8f3a " * 4_000  # more tokens than words of the same length
    messages = [user("Look."), says(dense + "word " * 30_000 + dense), user("Go on.")]
    async with bench(window=8_000) as made:
        view, shorter = await cut(made, messages)
    assert not view.is_too_large(shorter)
    assert [shorter[0].text, shorter[2].text] == ["Look.", "Go on."]
    assert (shorter[1].text.startswith("8f3a "), shorter[1].text.rstrip().endswith("8f3a")) == (True, True)


async def test_a_single_message_of_the_user_that_does_not_fit_is_not_cut_away(narrow: Bench) -> None:
    view, shorter = await cut(narrow, [user("word " * 5_000)])
    assert [each.role for each in shorter] == ["user"]
    assert shorter[0].text.startswith("word word")
    assert view.tokens >= 5_000


async def test_a_list_that_fits_stays_as_it_is(narrow: Bench) -> None:
    view, shorter = await cut(narrow, talk(3))
    assert shorter == view.messages


async def test_a_replacement_of_a_compaction_is_cut_last(narrow: Bench) -> None:
    await narrow.fit(talk(20))
    view, shorter = await cut(narrow, [*talk(20), *called(0, "line of code; " * 900), user("Go on.")])
    assert view.checkpoint is not None
    kept = [put.text for puts in view.checkpoint.stand_ins for put in puts]
    assert kept
    assert all(text in [each.text for each in shorter] for text in kept)
    assert not view.is_too_large(shorter)


async def test_messages_without_a_count_are_counted_and_the_others_are_left_alone(narrow: Bench) -> None:
    view = await load(narrow, talk(2))
    mine = replace(view.messages[1], tokens=777)
    uncounted = replace(view.messages[2], tokens=0)
    filled = await fill_token_counts([mine, uncounted], view, narrow.reading)
    assert filled == (mine, view.messages[2])


def test_a_message_of_ours_equals_what_is_read_of_its_bytes() -> None:
    made = round_trip_message(Message("user", "The record.\n\ud800"), CHAT)
    assert made.raw
    assert CHAT.parse_message(made.raw) == made
