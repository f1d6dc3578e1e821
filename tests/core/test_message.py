"""Units and the latest user message: where a list may be cut."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.message import (
    ContentPart,
    Message,
    MessageToolCall,
    Span,
    find_latest_user_message,
    find_unit_start,
    iter_tool_exchanges,
    iter_units,
)

SYSTEM = Message("system", "rules")
USER = Message("user", "do it")
CALLING = Message("assistant", calls=(MessageToolCall("a", "read", "{}"), MessageToolCall("b", "list", "{}")))
ANSWER_A = Message("tool", "1", answered_call_ids=("a",))
ANSWER_B = Message("tool", "2", answered_call_ids=("b",))
DONE = Message("assistant", "done")
SIGNED = replace(CALLING, has_signed_reasoning=True)
SEARCHING = Message("assistant", "I search.", (ContentPart("server_tool_use", b"1", 9),))
CONTINUING = Message("assistant", "It says so.", (ContentPart("web_search_tool_result", b"2", 0),))


def test_a_call_and_all_its_results_are_one_unit() -> None:
    assert list(iter_units([USER, CALLING, ANSWER_B, ANSWER_A, DONE])) == [Span(0, 1), Span(1, 4), Span(4, 5)]


def test_a_result_that_follows_no_call_is_a_unit_of_its_own() -> None:
    assert list(iter_units([ANSWER_A, USER, ANSWER_B])) == [Span(0, 1), Span(1, 2), Span(2, 3)]


def test_a_call_without_results_is_a_unit() -> None:
    assert list(iter_units([CALLING, USER])) == [Span(0, 1), Span(1, 2)]


def test_a_reply_that_goes_on_with_a_result_of_the_provider_s_tool_is_one_unit() -> None:
    calling = replace(CONTINUING, calls=CALLING.calls)

    assert list(iter_units([USER, SEARCHING, CONTINUING, USER])) == [Span(0, 1), Span(1, 3), Span(3, 4)]
    assert list(iter_units([SEARCHING, calling, ANSWER_A, USER])) == [Span(0, 3), Span(3, 4)]
    assert [find_unit_start([USER, SEARCHING, calling, ANSWER_A], at) for at in range(4)] == [0, 1, 1, 1]


def test_nothing_has_no_units_and_no_latest_user_message() -> None:
    assert list(iter_units([])) == []
    assert find_latest_user_message([]) is None


def test_the_latest_user_message_may_be_the_last_message_or_the_first() -> None:
    assert find_latest_user_message([USER, SYSTEM, USER]) == 2
    assert find_latest_user_message([USER, SYSTEM, SYSTEM]) == 0


def test_a_user_message_that_answers_calls_is_not_the_latest_user_message() -> None:
    answering = Message("user", "result", answered_call_ids=("a",))

    assert find_latest_user_message([SYSTEM, USER, CALLING, answering]) == 1
    assert find_latest_user_message([SYSTEM, CALLING, answering]) is None


def test_only_system_and_developer_messages_are_privileged() -> None:
    roles = ("system", "developer", "user", "assistant", "tool", "System")

    assert [Message(role).is_privileged for role in roles] == [True, True, False, False, False, False]


def test_a_message_that_refuses_or_calls_is_not_empty() -> None:
    assert [
        each.is_empty for each in (Message("assistant"), CALLING, Message("assistant", refusal="no"))
    ] == [
        True,
        False,
        False,
    ]


def test_signed_reasoning_leaves_with_the_calls_behind_it_that_are_not_signed_themselves() -> None:
    listed = [
        CALLING,
        ANSWER_A,
        SIGNED,
        ANSWER_A,
        CALLING,
        ANSWER_B,
        CALLING,
        SIGNED,
        ANSWER_A,
        DONE,
        CALLING,
    ]

    assert list(iter_units(listed)) == [Span(0, 2), Span(2, 7), Span(7, 9), Span(9, 10), Span(10, 11)]
    assert [stop - start for start, stop in iter_tool_exchanges(listed)] == [2, 2, 2, 1, 2, 1, 1]


def test_signed_words_without_a_call_are_a_unit_of_their_own() -> None:
    assert list(iter_units([replace(DONE, has_signed_reasoning=True), CALLING])) == [Span(0, 1), Span(1, 2)]


def test_a_signature_is_kept_when_a_message_is_counted_and_is_no_part_of_what_it_says() -> None:
    assert SIGNED.with_digest_and_tokens(b"d", 3) == replace(SIGNED, digest=b"d", tokens=3)
    assert compute_message_digest(SIGNED) == compute_message_digest(CALLING)


@given(
    st.lists(
        st.sampled_from([USER, CALLING, SIGNED, ANSWER_A, ANSWER_B, DONE, SEARCHING, CONTINUING]),
        min_size=1,
        max_size=12,
    )
)
def test_the_start_of_a_unit_is_found_from_each_of_its_messages(listed: list[Message]) -> None:
    starts = [unit.start for unit in iter_units(listed) for _ in range(unit.start, unit.stop)]

    assert [find_unit_start(listed, at) for at in range(len(listed))] == starts


def test_a_result_belongs_to_the_call_directly_before_it() -> None:
    assert find_unit_start([CALLING, CALLING, ANSWER_A], 2) == 1
