"""Cues are found as whole words in languages with spaces, and anywhere in the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.cues import LABELS, STOP_WORDS, THESAURUS, StatementKind, has_cue
from compaction_proxy.core.ledger.statements import fold_text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("you must not restart it", "rule"),
        ("jamais sans moi", "rule"),
        ("请不要重启", "rule"),
        ("could you look", "request"),
        ("let's stick with redis", "decision"),
        ("use tabs instead", "correction"),
        ("and the logs, too", "addition"),
        ("then fix the parser", "request_start"),
        ("never mind", "withdrawal"),
        ("thanks, that's all", "thanks"),
        ("yes, go ahead", "approval"),
        ("what is the port", "question"),
        ("suppose it fails", "hypothesis"),
        ("it still fails", "failure_report"),
        ("the deploy is pending", "open_status"),
        ("the deploy is done", "done_status"),
        ("i never eat fish", "narrative"),
    ],
)
def test_a_cue_is_found_in_a_folded_text(text: str, name: str) -> None:
    assert has_cue(text, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a mustard sandwich", "rule"),
        ("the nevertheless clause", "rule"),
        ("the toolbox", "addition"),
        ("the port is open-ended", "done_status"),
        ("we fix the parser", "request_start"),
        ("it is what it is", "question"),
    ],
)
def test_no_cue_is_found_inside_another_word_or_behind_the_start(text: str, name: str) -> None:
    assert not has_cue(text, name)


@given(st.text("字語x ", max_size=5), st.text("字語x ", max_size=5))
def test_a_cue_is_found_anywhere_in_writing_without_spaces(before: str, after: str) -> None:
    assert has_cue(f"{before}禁止{after}", "negation")
    assert has_cue(f"{before}必须{after}", "wish")
    assert not has_cue(before + after, "wish")


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("rules", StatementKind.RULE),
        ("Policies", StatementKind.RULE),
        ("preferred", StatementKind.PREFERENCE),
        ("decision", StatementKind.DECISION),
        ("todo", StatementKind.REQUEST),
        ("port", None),
    ],
)
def test_a_label_names_one_kind_or_none(label: str, kind: StatementKind | None) -> None:
    assert [each for each, find in LABELS.items() if find(fold_text(label))] == ([kind] if kind else [])


def test_an_unknown_cue_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError):
        has_cue("text", "no such cue")


def test_no_word_of_the_thesaurus_means_two_things_or_nothing() -> None:
    words = [word for row in THESAURUS for word in row.split()]
    assert len(words) == len(set(words))
    assert STOP_WORDS.isdisjoint({row.split()[0] for row in THESAURUS})
