"""Requests for summaries: what is cut or split to fit a model, sizes of calls, and what calls have used."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.compaction.summary_request import (
    ANSWER_SHARE,
    CallUsage,
    SummaryRequest,
    SummaryUsage,
    count_shown_characters,
    shrink_shape_to_fit,
    split_into_halves,
    split_into_portions,
)
from compaction_proxy.core.message import ContentPart, Message
from tests.helpers.summary_bench import BRIEF, CHEAP, OWN, SHAPE, says, tool

MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(0, 5_000)), min_size=1, max_size=12
).map(
    lambda drawn: tuple(
        message
        for role, length in drawn
        for message in (tool("x" * length) if role == "tool" else (Message(role=role, text="x" * length),))
    )
)


@given(MESSAGES, st.integers(100, 20_000))
def test_portions_are_the_messages_in_order_on_unit_edges(messages: tuple[Message, ...], room: int) -> None:
    cut = list(split_into_portions(messages, SHAPE, room))
    assert tuple(message for portion in cut for message in portion) == messages
    assert not any(portion[0].answered_call_ids for portion in cut)
    assert all(count_shown_characters(portion, SHAPE) <= room or len(portion) <= 2 for portion in cut)


@given(MESSAGES, st.integers(100, 40_000))
def test_a_narrowed_shape_shows_no_more_than_there_is_room_for(
    messages: tuple[Message, ...], room: int
) -> None:
    shape = shrink_shape_to_fit(messages, SHAPE, room)
    least = replace(SHAPE, tool_characters=40, message_characters=40)
    assert count_shown_characters(messages, shape) <= max(room, count_shown_characters(messages, least))
    if count_shown_characters(messages, SHAPE) <= room:
        assert count_shown_characters(messages, shape) == count_shown_characters(messages, SHAPE)


@given(st.lists(MESSAGES, min_size=2, max_size=6))
def test_halves_are_all_groups_in_order(groups: list[tuple[Message, ...]]) -> None:
    first, second = split_into_halves(groups, SHAPE)
    assert (*first, *second) == tuple(groups)
    assert first
    assert second


def test_results_are_cut_before_any_other_message_is() -> None:
    messages = (says("x" * 1_000), *tool("y" * 1_000))
    whole = replace(SHAPE, message_characters=5_000, tool_characters=5_000)
    shape = shrink_shape_to_fit(messages, whole, 1_500)
    assert (shape.message_characters, 300 < shape.tool_characters < 500) == (1_000, True)
    shape = shrink_shape_to_fit(messages, whole, 500)
    assert (shape.tool_characters, 300 < shape.message_characters < 500) == (40, True)


def test_all_that_a_transcript_shows_of_a_message_counts() -> None:
    def count(message: Message) -> int:
        return count_shown_characters([message], SHAPE)

    bare = count(Message("assistant"))
    assert count(Message("assistant", text="abc", refusal="de")) == bare + 5
    assert count(Message("user", parts=(ContentPart("image_url", b"", 0),))) == bare + len("image_url") + 3
    assert count(tool("")[0]) > bare + len("read{}")


def price(model: str, url: str, prompt: int, cached: int, completion: int) -> float | None:
    return None if model == "unknown" else prompt - cached + 2.0 * completion


@pytest.mark.parametrize(
    ("models", "expected"), [([], 0), (["a", "b"], 2 * (100 - 40 + 2.0 * 10)), (["a", "unknown"], None)]
)
def test_the_cost_of_all_calls_is_unknown_if_that_of_one_is(
    models: list[str], expected: float | None
) -> None:
    usage = SummaryUsage(answered_calls=[CallUsage(model, "u", 100, 40, 10) for model in models])
    assert usage.compute_cost_usd(price) == expected
    count = len(models)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (
        100 * count, 40 * count, 10 * count,
    )  # fmt: skip


def test_the_cost_of_a_call_without_a_token_count_is_unknown() -> None:
    usage = SummaryUsage(answered_calls=[CallUsage("a", "u", 100, 40, 10), CallUsage("a", "u", 0, 0, 0)])
    assert usage.compute_cost_usd(price) is None


def test_a_request_to_one_route_asks_for_no_more_than_the_window_of_the_model_has_room_for() -> None:
    small, large = replace(CHEAP, window=400), OWN
    brief = replace(BRIEF, routes=(small, large))
    assert (brief.select_route(large).routes, brief.select_route(large).tokens) == ((large,), BRIEF.tokens)
    selected = brief.select_route(small)
    assert selected.shape.compute_max_tokens(selected.tokens) <= ANSWER_SHARE * small.window
    assert brief.select_route(replace(small, window=1)).tokens == 1


def test_a_prompt_leaves_room_for_the_answer_and_counts_by_the_provider_s_measure() -> None:
    room = BRIEF.max_input_tokens
    assert room < CHEAP.window - BRIEF.answer_tokens
    assert replace(BRIEF, calibration_ratio=2.0).max_input_tokens == pytest.approx(room / 2)


def test_a_model_that_thinks_has_room_for_it_on_top_of_the_summary() -> None:
    thinking = replace(BRIEF, routes=(replace(CHEAP, model="gpt-5"),))
    assert BRIEF.answer_tokens == SHAPE.compute_max_tokens(BRIEF.tokens)
    assert thinking.answer_tokens > BRIEF.answer_tokens


def test_a_call_has_the_instructions_of_the_strategy_and_the_route() -> None:
    brief = replace(BRIEF, routes=(replace(CHEAP, headers={"authorization": "k"}),))
    call = brief.build_call("the prompt")
    assert (call.url, call.model, call.wire) == (CHEAP.url, "cheap", "chat")
    assert call.headers == {"authorization": "k"}
    assert (call.system, call.prompt, call.max_tokens) == ("Write the record.", "the prompt", 250)
    assert (call.temperature, call.conversation) == (SHAPE.temperature, None)


def test_the_cache_key_is_of_the_strategy_and_the_tenant_and_of_openai_only() -> None:
    def key(brief: SummaryRequest) -> str:
        return brief.build_call("").cache_key

    elsewhere = replace(CHEAP, url="https://api.example/v1/chat/completions")
    first = key(BRIEF)
    assert first.startswith("compaction-chained-")
    assert len(first) <= 64
    assert key(replace(BRIEF, tokens=7)) == first
    assert key(replace(BRIEF, tenant="u")) not in {"", first}
    assert key(replace(BRIEF, shape=replace(SHAPE, prompt_name="full"))) not in {"", first}
    assert key(replace(BRIEF, routes=(elsewhere,))) == ""


async def test_the_prompt_shows_the_messages_the_task_and_earlier_summaries() -> None:
    brief = replace(BRIEF, task="Mend the port.", earlier=("The round before.",))
    prompt = await brief.build_prompt()
    assert all(text in prompt for text in ("Set the port to 8443", "Mend the port.", "The round before."))


def test_no_text_and_no_credential_shows_where_a_request_is_logged() -> None:
    brief = replace(BRIEF, task="secret task", routes=(replace(CHEAP, headers={"authorization": "sk-1"}),))
    shown = repr(brief)
    assert "cheap" in shown
    assert not any(text in shown for text in ("secret task", "sk-1", "8443", "Write the record."))
