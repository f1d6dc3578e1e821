"""Text of others holds nothing that a model could take for the frame around it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.sanitize import (
    escape_frames,
    escape_template_marks,
    remove_invisible,
    sanitize_text,
)

MARKS = (
    "<|im_start|>",
    "</think>",
    "[INST]",
    "<transcript-0a1b2c>",
    "</system>",
    "[END OF SUMMARY]",
    "</summary>",
)


def test_invisible_characters_go_and_line_ends_are_newlines() -> None:
    assert remove_invisible("a\u200bb\r\nc\u202ed\x00\te") == "ab\ncd\te"
    assert remove_invisible("[En\u200b\u200dd of\ufe0f re\u034fcord\u200c]") == "[End of record]"


def test_the_joiners_of_persian_and_hindi_stay() -> None:
    word = "\u0645\u06cc\u200c\u062e\u0648 \u0915\u094d\u200d\u0937"
    assert remove_invisible(word) == word


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_is_broken_up_and_nothing_else_changes(mark: str) -> None:
    found = sanitize_text(f"before {mark} behind")
    assert mark not in found
    assert found.replace(" ", "") == f"before {mark} behind".replace(" ", "")


@pytest.mark.parametrize("line", ["[3] USER: do it", "=== RUN", "## Session summary", "Open requests:"])
def test_a_line_that_reads_as_ours_is_escaped(line: str) -> None:
    assert sanitize_text(f"one\n{line}\ntwo") == f"one\n\\{line}\ntwo"


@pytest.mark.parametrize(
    "text", ["a < b and c[0]", "<div>x</div>", "[1] see below", "# Title", "std::vector<int>"]
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert sanitize_text(text) == text
    assert escape_template_marks(text) == text
    assert escape_frames(text) == text


@given(
    st.lists(st.sampled_from([*MARKS, "\u200b", "<", "[", "\n", "=== RUN ", "## session summary", "x"])).map(
        "".join
    )
)
def test_a_second_call_changes_nothing_more(text: str) -> None:
    once = sanitize_text(text)
    assert sanitize_text(once) == once
