"""What two texts have in common, word for word, and that comparing stays cheap."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.admin.ui.diff import (
    MAX_COMPARED_CHARACTERS,
    ShownMessage,
    build_round_view,
    highlight_query,
    index_words,
    split_pieces,
)
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, VisibleMessage

LIMIT_S = 10.0  # a hundred times what is promised


def marked(text: str, *others: str) -> list[str]:
    return [piece.text for piece in split_pieces(text, index_words(others)) if piece.is_shared]


def test_runs_of_three_words_are_kept_in_whatever_order_they_stand() -> None:
    text = "first deploy this service and then quickly that other thing"
    assert marked(text, "That other thing! Later: deploy this service or not") == [
        "deploy this service",
        "that other thing",
    ]


def test_what_says_little_is_not_marked() -> None:
    for trifle in ("let me read", r"({\n\t\t\tconst", ': "",', r": \"\"", "=====", "a: b = c;"):
        assert marked(f"one {trifle} two", f"three {trifle} four") == [], trifle
    assert marked(r'"read\n\tsrc/app.py\n"', "see src/app.py") == ["src/app.py"]


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


@given(st.lists(st.sampled_from(["alpha", "beta", "gamma", "x.yz/1"]), min_size=3, max_size=40))
def test_a_text_is_kept_by_itself(words: list[str]) -> None:
    text = " ".join(words)
    assert marked(text, text) == [text]


def test_huge_messages_cost_no_more_than_others() -> None:
    huge = "word1 and then other things at /a/b.c again " * 100_000
    removed = [RemovedMessage(f"m_{n}", n, "tool", huge) for n in range(1_000)]
    seen = [VisibleMessage("user", huge, STAND_IN, "")]
    seen += [VisibleMessage("tool", huge, KEPT, each.id) for each in removed]
    begun = time.process_time()
    view = build_round_view(huge, removed, seen)
    assert time.process_time() - begun < LIMIT_S
    assert (view.removed, view.removed_left_out, view.seen, view.seen_left_out) == (1_000, 800, 1_001, 801)
    assert [each.change for each in view.rows] == ["replaced", *["kept"] * 199]
    assert len(view.rows[0].before) == 200
    after = view.rows[0].after
    assert after is not None
    assert len(text_of(after)) == MAX_COMPARED_CHARACTERS


def text_of(shown: ShownMessage) -> str:
    return "".join(span.text for block in shown.blocks for row in block.rows for cell in row for span in cell)


def test_what_a_round_did_to_each_message_is_told_in_the_order_of_the_list() -> None:
    removed = [RemovedMessage(f"m_{n}", n, "user", f"old text {n}") for n in (1, 2, 5)]
    seen = [
        VisibleMessage("user", "the task", KEPT, "m_0"),
        VisibleMessage("user", "record of an earlier round", STAND_IN, ""),
        VisibleMessage("user", "Record 2: the summary", STAND_IN, ""),
        VisibleMessage("tool", "old …", STAND_IN, "m_5"),
        VisibleMessage("user", "and now?", KEPT, "m_6"),
    ]
    view = build_round_view("the summary", removed, seen)
    assert [(each.change, [it.message.id for it in each.before]) for each in view.rows] == [
        ("kept", []),
        ("earlier", []),
        ("replaced", ["m_1", "m_2"]),
        ("shortened", ["m_5"]),
        ("kept", []),
    ]
    nothing = build_round_view("", removed[:1], seen[:1])
    assert [each.change for each in nothing.rows] == ["removed", "kept"]
    forgotten = build_round_view("the summary", (), ())
    assert [text_of(each.after) for each in forgotten.rows if each.after] == ["the summary"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("deploys", ["Deploy", "deployed"]),
        ('"it works" ye*', ["it works", "yesterday"]),
        ("what is it in the INNER", ["inner"]),
        ("as it", ["it", "as", "it"]),
        ("deploy_now camel", ["Deploy", "camelCase", "deployed"]),
        ("\u4f60\u597d", ["\u4f60\u597d"]),
        ("(.*+[", []),
        ('""', []),
        ("inner_camel deployed yesterday", ["Deploy", "inner_camelCase", "deployed", "yesterday"]),
    ],
)
def test_words_forms_and_phrases_of_a_query_are_highlighted(query: str, expected: list[str]) -> None:
    text = "Deploy: it works, as redeploy, into inner_camelCase, it deployed \u6211\u4f60\u597d yesterday"
    pieces = highlight_query(text, query)
    assert "".join(each.text for each in pieces) == text
    assert [each.text for each in pieces if each.is_shared] == expected
    assert all(each.text for each in pieces)


@given(st.text(max_size=200), st.text(max_size=50))
def test_highlighting_keeps_the_text(text: str, query: str) -> None:
    assert "".join(each.text for each in highlight_query(text, query)) == text
