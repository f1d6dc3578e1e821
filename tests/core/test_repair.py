"""What a valid list is, and how one is made."""

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.repair import (
    ACKNOWLEDGEMENT_TEXT,
    CONTINUE_TEXT,
    NO_RESPONSE_TEXT,
    insert_alternating_fillers,
    is_valid_message_list,
    repair_messages,
)

SYSTEM = Message("system", "rules")
DEVELOPER = Message("developer", "more rules")
USER = Message("user", "do it")
SAID = Message("assistant", "done")


def calling(*ids: str, name: str = "read") -> Message:
    return Message("assistant", calls=tuple(MessageToolCall(each, name, "{}") for each in ids))


def answer(call: str, text: str = "ok") -> Message:
    return Message("tool", text, answered_call_ids=(call,))


def test_a_valid_list_stays_as_it_is() -> None:
    messages = (SYSTEM, USER, calling("a", "b"), answer("b"), answer("a"), SAID, USER)

    assert repair_messages(messages) == messages


PLAIN = [SYSTEM, USER, SAID, Message("assistant")]
CALLING = [calling("a"), calling("a", "b"), calling("")]
ANSWERS = [answer("a"), answer("b"), answer("")]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*PLAIN, *CALLING, *ANSWERS]), max_size=8))
def test_a_list_is_sound_if_repairing_leaves_it_as_it_is(messages: list[Message]) -> None:
    assert is_valid_message_list(messages) == (repair_messages(messages) == tuple(messages))


def test_a_missing_result_is_filled_in_behind_those_that_came() -> None:
    assert repair_messages([calling("a", "b"), answer("b"), USER]) == (
        calling("a", "b"),
        answer("b"),
        answer("a", NO_RESPONSE_TEXT),
        USER,
    )


def test_a_missing_legacy_result_is_filled_in_by_name() -> None:
    assert repair_messages([calling("", name="weather")]) == (
        calling("", name="weather"),
        Message("function", NO_RESPONSE_TEXT, name="weather", answered_call_ids=("",)),
    )


def test_results_that_follow_no_call_of_theirs_are_dropped() -> None:
    assert repair_messages(
        [answer("a"), USER, calling("a"), answer("x"), answer("a"), SAID, answer("a")]
    ) == (
        USER,
        calling("a"),
        answer("a"),
        SAID,
    )


def test_a_second_result_of_the_same_call_is_dropped() -> None:
    assert repair_messages([calling("a"), answer("a", "1"), answer("a", "2")]) == (
        calling("a"),
        answer("a", "1"),
    )


def test_reused_ids_are_paired_by_position() -> None:
    messages = [calling("a"), answer("a", "1"), calling("a"), USER, calling("a"), answer("a", "3")]

    assert repair_messages(messages) == (
        calling("a"),
        answer("a", "1"),
        calling("a"),
        answer("a", NO_RESPONSE_TEXT),
        USER,
        calling("a"),
        answer("a", "3"),
    )


def test_an_id_used_twice_in_one_message_takes_two_results() -> None:
    messages = (calling("a", "a"), answer("a", "1"), answer("a", "2"))

    assert repair_messages(messages) == messages


def test_a_message_that_names_a_call_twice_answers_it_once() -> None:
    twice = Message("user", "both", answered_call_ids=("a", "a"))

    assert repair_messages([calling("a"), twice]) == (calling("a"), twice)


def test_empty_assistant_messages_are_dropped_and_empty_user_messages_stay() -> None:
    assert repair_messages([Message("user"), Message("assistant"), SAID]) == (Message("user"), SAID)


def test_privileged_messages_among_results_move_before_the_call() -> None:
    messages = [USER, calling("a", "b"), SYSTEM, answer("a"), DEVELOPER, answer("b"), SAID]

    assert repair_messages(messages) == (
        USER,
        SYSTEM,
        DEVELOPER,
        calling("a", "b"),
        answer("a"),
        answer("b"),
        SAID,
    )


def test_privileged_messages_among_orphans_keep_their_order() -> None:
    orphaned = [calling("a"), answer("a"), USER, SYSTEM, answer("x"), DEVELOPER, answer("y")]

    assert repair_messages(orphaned) == (calling("a"), answer("a"), USER, SYSTEM, DEVELOPER)
    assert repair_messages([SYSTEM, USER, answer("x"), DEVELOPER, answer("y")]) == (SYSTEM, USER, DEVELOPER)


def test_a_privileged_message_behind_the_results_stays_behind_them() -> None:
    messages = (calling("a"), answer("a"), SYSTEM, USER)

    assert repair_messages(messages) == messages


def test_alternation_begins_with_a_user_message() -> None:
    assert insert_alternating_fillers([SYSTEM, SAID]) == (SYSTEM, Message("user", CONTINUE_TEXT), SAID)


def test_two_of_a_kind_get_the_other_between_them() -> None:
    assert insert_alternating_fillers([USER, USER, SAID, SAID]) == (
        USER,
        Message("assistant", ACKNOWLEDGEMENT_TEXT),
        USER,
        SAID,
        Message("user", CONTINUE_TEXT),
        SAID,
    )


def test_results_take_the_place_of_a_user_message() -> None:
    assert insert_alternating_fillers([USER, calling("a"), answer("a"), SAID]) == (
        USER,
        calling("a"),
        answer("a"),
        SAID,
    )
    assert insert_alternating_fillers([USER, calling("a"), answer("a"), USER]) == (
        USER,
        calling("a"),
        answer("a"),
        Message("assistant", ACKNOWLEDGEMENT_TEXT),
        USER,
    )
