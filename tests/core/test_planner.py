"""What a round takes, and what a conversation has gained since the last one."""

from dataclasses import replace

from proxy.core.checkpoint import Checkpoint
from proxy.core.message import Call, Message, Span
from proxy.core.planner import Plan, gained, plan
from proxy.core.policy import CHAINED
from proxy.core.render import render
from proxy.core.trigger import Gained

KEEP_3 = replace(CHAINED, keep_messages=3)
STAND_IN = Message("assistant", "summary")


def user(text: str = "u") -> Message:
    return Message("user", text)


def said(text: str = "a") -> Message:
    return Message("assistant", text)


def calling() -> Message:
    return Message("assistant", calls=(Call("c", "read", "{}"), Call("d", "read", "{}")))


def answer(call: str = "c") -> Message:
    return Message("tool", "ok", answers=(call,))


def chat(turns: int) -> list[Message]:
    return [message for _ in range(turns) for message in (user(), said())]


def made(spans: list[Span], length: int, listed: int = 0) -> Checkpoint:
    stand_ins = (STAND_IN, *(None for _ in spans[1:]))
    return Checkpoint(
        "chained", "c_", 1, length, bytes(32), (), tuple(spans), stand_ins, "summary", 9, 3, listed
    )


def planned(messages: list[Message], earlier: Checkpoint | None = None) -> Plan | None:
    effective = render(messages, earlier.spans, earlier.stand_ins) if earlier else messages
    return plan(messages, effective, KEEP_3, earlier)


def test_all_but_the_newest_messages_are_taken() -> None:
    assert planned(chat(4)) == Plan(round=1, length=5, spans=(Span(0, 5),), fresh=(0, 1, 2, 3, 4))


def test_with_one_more_message_than_are_kept_nothing_is_taken() -> None:
    assert planned(chat(2)) is None


def test_the_boundary_walks_back_to_the_edge_of_a_unit() -> None:
    messages = [user(), said(), calling(), answer("c"), answer("d"), said(), user()]

    assert planned(messages) == Plan(round=1, length=2, spans=(Span(0, 2),), fresh=(0, 1))


def test_when_the_boundary_walks_back_to_the_start_nothing_is_taken() -> None:
    assert planned([calling(), answer("c"), answer("d"), said(), user()]) is None


def test_the_latest_user_message_is_left_in_its_place() -> None:
    messages = [said(), user(), said(), said(), said(), said(), said()]

    assert planned(messages) == Plan(round=1, length=4, spans=(Span(0, 1), Span(2, 4)), fresh=(0, 2, 3))


def test_the_next_round_covers_the_earlier_one_and_summarises_only_what_is_new() -> None:
    assert planned(chat(6), made([Span(0, 5)], 5)) == Plan(
        round=2, length=9, spans=(Span(0, 9),), fresh=(5, 6, 7, 8)
    )


def test_a_message_that_was_kept_as_the_latest_is_summarised_once_it_no_longer_is() -> None:
    messages = [said(), user("first"), *(said() for _ in range(6)), user("second"), said()]

    assert planned(messages, made([Span(0, 1), Span(2, 4)], 4)) == Plan(
        round=2, length=7, spans=(Span(0, 7),), fresh=(1, 4, 5, 6)
    )


def test_a_round_that_would_take_nothing_new_is_not_made() -> None:
    messages = [said(), user(), said(), said(), said(), said(), said()]

    assert planned(messages, made([Span(0, 1), Span(2, 4)], 4)) is None


def test_nothing_is_gained_right_after_a_round() -> None:
    messages = chat(4)

    assert gained(messages, made([Span(0, 5)], 5, listed=8)) == Gained(messages=0, turns=0, iterations=0)


def test_what_came_after_a_round_is_gained() -> None:
    messages = [*chat(5), calling(), answer()]

    assert gained(messages, made([Span(0, 5)], 5, listed=8)) == Gained(messages=4, turns=1, iterations=2)
    assert gained(messages, None) == Gained(messages=12, turns=5, iterations=6)


def test_a_branch_that_is_shorter_than_its_round_was_has_gained_nothing() -> None:
    assert gained(chat(3), made([Span(0, 5)], 5, listed=8)) == Gained(messages=0, turns=0, iterations=0)
