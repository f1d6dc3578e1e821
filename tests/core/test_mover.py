"""What the last messages of two requests tell of a client that moves messages."""

import hashlib

import pytest

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.mover import RequestEnd, build_request_end, find_moving_start, is_continuation


def messages(said: str) -> list[Message]:
    """A message for each word. `u…` is a user's, `c…` makes a call, `r…` answers it, others are answers."""
    made = []
    for word in said.split():
        calls = (MessageToolCall("1", "read", "{}"),) if word[0] == "c" else ()
        answers = ("1",) if word[0] == "r" else ()
        role = {"u": "user", "r": "tool"}.get(word[0], "assistant")
        digest = hashlib.sha256(word.encode()).digest()
        made.append(Message(role, word, calls=calls, answered_call_ids=answers, digest=digest))
    return made


def end_of(said: str, moving: int = 0) -> RequestEnd:
    listed = messages(said)
    return build_request_end(listed, len(listed) - moving)


def common(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one.split()), len(other.split())))


DONE = "u1 a1 u2 a2 u3 a3"


@pytest.mark.parametrize(
    ("before", "moving", "now", "expected"),
    [
        (DONE, 0, f"{DONE} u4", 0),
        (f"{DONE} u4", 0, f"{DONE} u4 c4 r4", 0),
        (f"{DONE} uf ok u4", 0, f"{DONE} u4 a4 ug ok u5", 3),
        (f"{DONE} uf ok u4", 0, f"{DONE} u4", 3),
        (f"{DONE} uf ok u4", 3, f"{DONE} uf ok u4", 3),
        (f"{DONE} uf ok u4", 3, f"{DONE} uf ok u4 a4 u5", 5),
        (f"{DONE} uf ok u4", 3, f"{DONE} ug ok u4 a4 u5", 5),
        (f"{DONE} u4", 0, f"{DONE} v4", 1),
        (f"{DONE} c4 r4 r4 r4 r4 r4 r4 c5 r5 r5 r5", 0, f"{DONE} u4 x1 x2 x3 x4 x5 x6 x7 x8 x9 y1 y2 y3", 11),
    ],
    ids=[
        "appended",
        "a call appended",
        "moved",
        "gone",
        "sent again",
        "a mover appends",
        "a mover rewrites in place",
        "the last one edited",
        "two units",
    ],
)
def test_as_many_last_messages_move_as_stood_behind_the_common_ones(
    before: str, moving: int, now: str, expected: int
) -> None:
    listed = messages(now)
    assert len(listed) - find_moving_start(listed, end_of(before, moving), common(before, now)) == expected


def test_a_mover_that_appends_more_than_eight_messages_moves_none() -> None:
    now = f"{DONE} uf ok u4 " + " ".join(f"a{k} u{k}" for k in range(5, 9))
    listed = messages(now)
    assert find_moving_start(listed, end_of(f"{DONE} uf ok u4", 3), 9) == len(listed)


def test_a_rewritten_tool_result_is_a_difference() -> None:
    before, now = messages(f"{DONE} c4 r4 c5 r5"), messages(f"{DONE} c4 rx c5 r5")
    moving_from = find_moving_start(now, build_request_end(before, len(before)), 10)  # outlines are the same
    assert moving_from == 7


def test_the_end_of_a_request_is_eight_messages_or_two_units() -> None:
    assert end_of(" ".join(f"a{k}" for k in range(20))).start_index == 12
    assert end_of(f"{DONE} c4 {'r4 ' * 9}c5 r5").start_index == 6


def test_few_common_messages_need_the_last_one_to_come_again() -> None:
    end = end_of("u1 uf ok u2")
    assert not is_continuation(end, messages("u1 u9 a9 u8 a8"), 1)
    assert is_continuation(end, messages("u1 u2 a2 ug ok u3"), 1)
    assert is_continuation(end_of("uf ok u1"), messages("u1 a1 ug ok u2"), 0)
    assert not is_continuation(end_of("uf ok u1"), messages("u1"), 0)
    assert is_continuation(end_of("u1"), messages("u1 a1 u2"), 1)
