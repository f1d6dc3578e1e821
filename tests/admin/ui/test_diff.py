"""What two texts have in common, word for word, and that comparing stays cheap."""

import time

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.admin.ui.diff import MAX_COMPARED_CHARACTERS, build_panes, index_words, split_pieces
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, VisibleMessage

LIMIT_S = 10.0  # a hundred times what is promised


def marked(text: str, *others: str) -> list[str]:
    return [piece.text for piece in split_pieces(text, index_words(others)) if piece.is_shared]


def test_runs_of_three_words_are_kept_in_whatever_order_they_stand() -> None:
    text = "first do this and then quickly that other thing"
    assert marked(text, "That other thing! Later: do this and nothing") == ["do this and", "that other thing"]


def test_two_words_are_chance_but_a_path_or_a_number_is_not() -> None:
    assert marked("we have src/app.py at 14:03", "see src/app.py, or 14:03.") == [
        "src/app.py",
        "14:03",
    ]
    assert marked("we have it", "we have none") == []


@given(st.text(max_size=300), st.text(max_size=300))
def test_the_pieces_make_up_the_text(text: str, other: str) -> None:
    found = split_pieces(text, index_words([other]))
    assert "".join(piece.text for piece in found) == text
    assert all(piece.text for piece in found)


@given(st.lists(st.sampled_from(["alpha", "beta", "gamma", "x.y/1"]), min_size=3, max_size=40))
def test_a_text_is_kept_by_itself(words: list[str]) -> None:
    text = " ".join(words)
    assert marked(text, text) == [text]


def test_huge_messages_cost_no_more_than_others() -> None:
    huge = "word1 and then other things at /a/b.c again " * 100_000
    removed = [RemovedMessage(f"m_{n}", n, "tool", huge) for n in range(1_000)]
    seen = [VisibleMessage("user", huge, STAND_IN, "")]
    seen += [VisibleMessage("tool", huge, KEPT, each.id) for each in removed]
    begun = time.process_time()
    shown = build_panes(huge, removed, seen)
    assert time.process_time() - begun < LIMIT_S
    assert (len(shown.removed), shown.removed_left_out, len(shown.seen), shown.seen_left_out) == (
        200,
        800,
        200,
        801,
    )
    assert sum(len(piece.text) for piece in shown.summary) == MAX_COMPARED_CHARACTERS
