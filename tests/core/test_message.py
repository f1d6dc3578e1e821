"""Units and the latest user message: where a list may be cut."""

from proxy.core.message import Call, Message, Span, latest_user, units

SYSTEM = Message("system", "rules")
USER = Message("user", "do it")
CALLING = Message("assistant", calls=(Call("a", "read", "{}"), Call("b", "list", "{}")))
ANSWER_A = Message("tool", "1", answers=("a",))
ANSWER_B = Message("tool", "2", answers=("b",))
DONE = Message("assistant", "done")


def test_a_call_and_all_its_results_are_one_unit() -> None:
    assert list(units([USER, CALLING, ANSWER_B, ANSWER_A, DONE])) == [Span(0, 1), Span(1, 4), Span(4, 5)]


def test_a_result_that_follows_no_call_is_a_unit_of_its_own() -> None:
    assert list(units([ANSWER_A, USER, ANSWER_B])) == [Span(0, 1), Span(1, 2), Span(2, 3)]


def test_a_call_without_results_is_a_unit() -> None:
    assert list(units([CALLING, USER])) == [Span(0, 1), Span(1, 2)]


def test_nothing_has_no_units_and_no_latest_user_message() -> None:
    assert list(units([])) == []
    assert latest_user([]) is None


def test_a_user_message_that_answers_calls_is_not_the_latest_user_message() -> None:
    answering = Message("user", "result", answers=("a",))

    assert latest_user([SYSTEM, USER, CALLING, answering]) == 1
    assert latest_user([SYSTEM, CALLING, answering]) is None


def test_only_system_and_developer_messages_are_privileged() -> None:
    roles = ("system", "developer", "user", "assistant", "tool", "System")

    assert [Message(role).privileged for role in roles] == [True, True, False, False, False, False]


def test_a_message_that_refuses_or_calls_is_not_empty() -> None:
    assert [each.empty for each in (Message("assistant"), CALLING, Message("assistant", refusal="no"))] == [
        True,
        False,
        False,
    ]
