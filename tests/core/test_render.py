"""Where stand-ins and privileged messages end up, and how a text is shortened."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.message import Instruction, Message, Span
from compaction_proxy.core.render import build_effective_list, build_excerpt, format_replacement_text
from compaction_proxy.core.strategies import CHAINED, FULL, SPLIT, SummaryFrame

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

STAND_IN = Message("assistant", "summary")


def listed(roles: str) -> list[Message]:
    """A message for each letter: s system, d developer, u user, a assistant; its text is its index."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [Message(names[letter], str(index)) for index, letter in enumerate(roles)]


def texts(messages: tuple[Message, ...]) -> list[str]:
    return [message.text for message in messages]


def test_without_spans_a_list_stays_as_it_is() -> None:
    messages = listed("suasuda")

    assert build_effective_list(messages, (), ()) == tuple(messages)


def test_the_first_message_of_a_span_gives_way_to_its_stand_in() -> None:
    assert texts(build_effective_list(listed("suauau"), [Span(0, 3)], [[STAND_IN]])) == [
        "0",
        "summary",
        "4",
        "5",
    ]


@UNHURRIED
@given(st.integers(0, 2), st.integers(0, 9), st.sets(st.integers(0, 9), max_size=6), st.integers(0, 1))
def test_leading_privileged_messages_make_no_difference_to_the_others(
    leading: int, count: int, edges: set[int], late: int
) -> None:
    messages = listed("s" * leading + "u" * count)
    found = sorted(edge for edge in edges if edge <= count)
    spans = [Span(*pair) for pair in zip(found[::2], found[1::2], strict=False)]
    puts = [[Message("assistant", f"summary {span}")] for span in spans]
    behind = [Message("system", "late")] * late
    gone = {index for span in spans for index in range(*span)}
    rest = [
        text
        for index in range(count)
        for text in (
            *(put[0].text for span, put in zip(spans, puts, strict=True) if span.start == index),
            *([messages[leading + index].text] if index not in gone else []),
        )
    ]
    assert texts(build_effective_list([*messages, *behind], spans, puts)) == [
        *map(str, range(leading)),
        *rest,
        *(each.text for each in behind),
    ]


def test_a_span_without_a_stand_in_leaves_nothing() -> None:
    messages = listed("uauau")

    assert texts(build_effective_list(messages, [Span(0, 2), Span(3, 4)], [[STAND_IN], []])) == [
        "summary",
        "2",
        "4",
    ]


def test_privileged_messages_inside_a_span_move_up_behind_the_leading_ones() -> None:
    assert texts(build_effective_list(listed("suadua"), [Span(0, 3)], [[STAND_IN]])) == [
        "0",
        "3",
        "summary",
        "5",
    ]


def test_privileged_messages_behind_the_spans_stay_where_they_are() -> None:
    assert texts(build_effective_list(listed("suasud"), [Span(0, 2)], [[STAND_IN]])) == [
        "0",
        "summary",
        "3",
        "4",
        "5",
    ]


def test_privileged_messages_keep_their_order_where_one_stands_before_a_later_span() -> None:
    assert texts(build_effective_list(listed("usada"), [Span(1, 3)], [[STAND_IN]])) == [
        "1",
        "3",
        "0",
        "summary",
    ]


def test_several_stand_ins_of_a_span_keep_their_order() -> None:
    ours = [Message("user", "one"), Message("user", "two")]

    assert texts(build_effective_list(listed("uaau"), [Span(1, 3)], [ours])) == ["0", "one", "two", "3"]


def test_a_shortened_message_moves_no_privileged_one() -> None:
    edited = build_effective_list(
        listed("suausa"), [Span(0, 1), Span(2, 3)], [[STAND_IN], [STAND_IN]], {0, 2}
    )

    assert texts(edited) == ["0", "summary", "2", "summary", "4", "5"]


def test_privileged_messages_move_up_for_what_is_gone_and_not_for_what_is_shortened() -> None:
    edited = build_effective_list(listed("usausa"), [Span(0, 2), Span(3, 4)], [[STAND_IN], [STAND_IN]], {3})

    assert texts(edited) == ["1", "summary", "3", "4", "summary"]


def test_instructions_of_a_project_stay_behind_privileged_messages_that_move_up() -> None:
    messages = listed("uusaua")
    instruction = replace(messages[0], instruction=Instruction("claude-code", "instructions"))
    rendered = build_effective_list([instruction, *messages[1:]], [Span(1, 2)], [[STAND_IN]])

    assert texts(rendered) == ["2", "0", "1", "summary", "4", "5"]


def test_an_excerpt_keeps_head_and_tail_and_says_what_is_missing() -> None:
    text = "a" * 500 + "b" * 1_000 + "c" * 500

    assert (
        build_excerpt(text, 0.5, "m_1") == f"{'a' * 500}\n[… 1,000 characters of m_1 left out …]\n{'c' * 500}"
    )


def test_a_text_too_short_to_gain_from_it_is_not_cut() -> None:
    assert build_excerpt("word " * 5, 0.1, "m_1") == "word " * 5
    assert build_excerpt("odd", 1.0, "m_1") == "odd"


@UNHURRIED
@given(st.integers(0, 3_000), st.floats(0, 1), st.floats(0, 1))
def test_an_excerpt_grows_with_its_share_and_never_beyond_the_text(
    size: int, one: float, other: float
) -> None:
    text = "x" * size
    small, large = sorted((one, other))

    assert len(build_excerpt(text, small, "m_1")) <= len(build_excerpt(text, large, "m_1")) <= size


def test_heading_task_summary_and_rounds_stand_in_this_order() -> None:
    assert format_replacement_text(CHAINED.frame, 3, "### Current State", task="Build it") == (
        "## Session Summary (Compaction Round 3)\n\n"
        "### Original Task\nBuild it\n\n"
        "### Current State\n\n"
        "This summary incorporates context from 2 previous compaction rounds."
    )


def test_the_first_round_and_the_second_say_what_came_before_them() -> None:
    assert format_replacement_text(CHAINED.frame, 1, "### Current State") == (
        "## Session Summary (Compaction Round 1)\n\n### Current State"
    )
    assert format_replacement_text(CHAINED.frame, 2, "### Current State").endswith(
        "\n\nThis summary incorporates context from 1 previous compaction round."
    )


def test_the_request_stands_last_behind_an_empty_line() -> None:
    assert format_replacement_text(FULL.frame, 1, "Done: all.", request="Ship it") == (
        "Done: all.\n\nLast request from user was: Ship it"
    )
    assert format_replacement_text(FULL.frame, 1, "Done: all.") == "Done: all."


def test_a_frame_without_a_request_takes_none() -> None:
    assert format_replacement_text(SPLIT.frame, 2, "Prose.", task="Build it", request="Ship it") == (
        "[Previous conversation summary]\nProse.\n[End of summary]"
    )


def test_a_closing_mark_inside_a_summary_is_broken_up() -> None:
    assert format_replacement_text(SPLIT.frame, 1, "a\n[End of summary]\nb") == (
        "[Previous conversation summary]\na\n[ End of summary]\nb\n[End of summary]"
    )


def test_braces_of_a_frame_are_text() -> None:
    assert format_replacement_text(SummaryFrame(opening="{a} {round}: "), 4, "{round}") == "{a} 4: {round}"
