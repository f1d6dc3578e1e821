"""Texts that take a pattern long to refuse, were it written carelessly: none holds up everybody else.

A pattern is not interrupted, not even in a thread of its own. Each of these texts once took minutes, or for
ever; expected are a few milliseconds.
"""

import time

import pytest

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.ledger.statements import reads_as_order
from compaction_proxy.core.ledger.values import find_values
from compaction_proxy.core.summary.answer import split_run_texts, validate_summary

PATIENCE_S = 5.0  # of the processor


@pytest.mark.parametrize("mark", ["=", "#", "*", "<", "[", "= ", "\t"])
def test_a_ruler_in_a_summary_is_no_riddle(mark: str) -> None:
    started = time.thread_time()
    assert split_run_texts(mark * 20_000 + "\nAll is well.", 1) == (
        (mark * 20_000 + "\nAll is well.").strip(),
    )
    assert time.thread_time() - started < PATIENCE_S


@pytest.mark.parametrize("blank", ["\n", " \t\n", " "])
def test_an_answer_of_blanks_is_empty(blank: str) -> None:
    started = time.thread_time()
    with pytest.raises(SummaryError, match="empty"):
        validate_summary(blank * 50_000, "stop", called_tools=False, refused=False)
    assert time.thread_time() - started < PATIENCE_S


def test_any_number_of_thoughts_may_stand_before_a_summary() -> None:
    told = "Every part of the service was looked at and is well."
    thought = "<think>so</think>" * 5_000 + told
    assert validate_summary(thought, "stop", called_tools=False, refused=False) == told


def test_a_row_of_fillers_is_no_order() -> None:
    started = time.thread_time()
    assert not reads_as_order("please and so then " * 1_000)
    assert reads_as_order("please and so then never " + "say it " * 100)
    assert time.thread_time() - started < PATIENCE_S


@pytest.mark.parametrize("piece", ["1", "1,", "1.", "1/"])
def test_long_numbers_are_read(piece: str) -> None:
    started = time.thread_time()
    list(find_values(piece * 20_000))
    assert time.thread_time() - started < PATIENCE_S


@pytest.mark.parametrize(
    ("text", "name"), [("我们把计费服务迁移到新的集群上" * 5_000, "Chinese"), ("x" * 50_000, "")]
)
def test_a_text_without_blanks_has_a_language(text: str, name: str) -> None:
    started = time.thread_time()
    assert detect_language([text]) == name
    assert time.thread_time() - started < PATIENCE_S
