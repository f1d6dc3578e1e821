"""The floor of the ladder: each rung only as far as needed, and what stays whole on it."""

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.truncate import KEEP_WHOLE, LEAVE_OUT, plan_truncation

SYSTEM = Message("system", "rules", tokens=100)


def user(tokens: int) -> Message:
    return Message("user", "u", tokens=tokens)


def said(tokens: int) -> Message:
    return Message("assistant", "a", tokens=tokens)


def calling(tokens: int) -> Message:
    return Message("assistant", "a", calls=(MessageToolCall("c", "read", "{}"),), tokens=tokens)


def answer(tokens: int) -> Message:
    return Message("tool", "r", answered_call_ids=("c",), tokens=tokens)


def squeezed(
    messages: list[Message], limit: int, ours: frozenset[int] = frozenset(), most: int = 0
) -> tuple[tuple[int | None, ...], bool]:
    """What each message may keep, and whether the list then fits."""
    made = plan_truncation(messages, limit, ours, most)
    return made.allowances, made.fits


def test_a_list_that_fits_stays_as_it_is() -> None:
    assert squeezed([SYSTEM, user(50), said(60)], 210) == ((KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE), True)


def test_the_largest_messages_are_capped_first_and_to_the_same_size() -> None:
    messages = [SYSTEM, user(100), calling(10), answer(5_000), calling(10), answer(3_000), user(100)]
    allowances = (KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, 1_000, KEEP_WHOLE, 1_000, KEEP_WHOLE)

    assert squeezed(messages, 2_320) == (allowances, True)


def test_the_newest_units_stay_whole_while_they_leave_the_older_ones_half() -> None:
    messages = [user(100), said(2_000), said(2_000), said(300), user(100)]

    assert squeezed(messages, 1_400) == ((KEEP_WHOLE, 450, 450, KEEP_WHOLE, KEEP_WHOLE), True)


def test_when_caps_would_get_too_small_the_oldest_units_are_left_out() -> None:
    messages = [user(100), said(2_000), said(2_000), said(300), user(100)]

    assert squeezed(messages, 1_000) == ((KEEP_WHOLE, LEAVE_OUT, 500, KEEP_WHOLE, KEEP_WHOLE), True)


def test_a_unit_is_left_out_with_all_its_results() -> None:
    messages = [user(100), calling(10), answer(10), answer(3_000), said(400), user(100)]

    assert squeezed(messages, 600) == (
        (KEEP_WHOLE, LEAVE_OUT, LEAVE_OUT, LEAVE_OUT, KEEP_WHOLE, KEEP_WHOLE),
        True,
    )


def test_of_the_last_unit_the_call_is_cut_before_the_last_result() -> None:
    messages = [user(50), said(900), calling(100), answer(900)]

    assert squeezed(messages, 1_200) == ((KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE, KEEP_WHOLE), True)
    assert squeezed(messages, 1_000) == ((KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE, 850), True)
    assert squeezed(messages, 150) == ((KEEP_WHOLE, LEAVE_OUT, 50, 50), True)


def test_of_the_last_unit_other_results_are_cut_before_the_last_one() -> None:
    messages = [user(50), calling(100), answer(900), answer(900)]

    assert squeezed(messages, 1_500) == ((KEEP_WHOLE, KEEP_WHOLE, 450, KEEP_WHOLE), True)


def test_the_last_result_is_cut_before_the_task() -> None:
    messages = [user(300), said(600), user(50), calling(20), answer(900)]

    assert squeezed(messages, 500) == ((KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE, KEEP_WHOLE, 130), True)


def test_stand_ins_and_the_task_are_cut_last_of_all() -> None:
    messages = [SYSTEM, user(2_000), said(1_000), said(1_000), user(300)]
    ours = frozenset({2})

    assert squeezed(messages, 3_900, ours) == ((KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, 500, KEEP_WHOLE), True)
    assert squeezed(messages, 3_400, ours) == (
        (KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE),
        True,
    )
    assert squeezed(messages, 700, ours) == ((KEEP_WHOLE, 150, 150, LEAVE_OUT, KEEP_WHOLE), True)


def test_stand_ins_and_the_task_may_take_half_of_what_is_kept_for_the_error_of_estimates() -> None:
    messages = [SYSTEM, user(2_000), said(1_000), said(1_000), user(300)]

    assert squeezed(messages, 700, frozenset({2}), most=4_000) == (
        (KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE),
        True,
    )


def test_the_task_and_the_newest_message_keep_head_and_tail_or_nothing_fits() -> None:
    messages = [user(5_000), said(600), user(3_000), said(6_000)]

    assert squeezed(messages, 4_000) == ((500, LEAVE_OUT, KEEP_WHOLE, 500), True)
    assert squeezed(messages, 3_700)[1] is False


def test_a_small_newest_result_gives_up_to_half_where_all_else_must_stay() -> None:
    messages = [Message("system", "rules", tokens=1_600), user(750), calling(50), answer(140)]

    assert squeezed(messages, 2_500) == ((KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, 100), True)
    assert squeezed(messages, 2_470) == ((KEEP_WHOLE, KEEP_WHOLE, KEEP_WHOLE, 70), True)
    assert squeezed(messages, 2_469)[1] is False


def test_what_may_not_be_touched_may_be_too_large() -> None:
    assert squeezed([SYSTEM, said(500), user(5_000)], 1_000) == ((KEEP_WHOLE, LEAVE_OUT, KEEP_WHOLE), False)


def test_the_latest_user_message_is_sought_among_the_clients_own() -> None:
    messages = [user(1_000), user(500), said(400)]

    assert squeezed(messages, 1_124, frozenset({1})) == ((KEEP_WHOLE, LEAVE_OUT, 124), True)


def test_an_equal_message_is_not_the_task() -> None:
    task = user(600)
    messages = [task, said(600), task, said(600), user(100)]

    assert squeezed(messages, 1_100) == ((KEEP_WHOLE, LEAVE_OUT, LEAVE_OUT, 400, KEEP_WHOLE), True)


def test_an_empty_list_fits() -> None:
    assert squeezed([], 0) == ((), True)
