"""Search finds what questions are about, by the figures of the bench."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture(scope="module")
def retrieval() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("retrieval")


@pytest.fixture(scope="module")
def conversations(shared: Path) -> Path:
    return shared / "data" / "conversations"


def test_evidence_is_among_the_first_five_hits(retrieval: Any, conversations: Path) -> None:
    asked = list(retrieval.questions(conversations / "memory_qa.jsonl", retrieval.ranked(retrieval.DEFAULT)))
    assert len(asked) == 797
    assert retrieval.recall(asked, "locomo") >= 0.70
    assert retrieval.recall(asked, "locomo", answerable=True) >= 0.70
    assert retrieval.recall(asked, "locomo", chosen_by=False) >= 0.70, "of conversations that had no say"
    assert retrieval.recall(asked, "bfcl") >= 0.95


def test_names_planted_in_a_long_conversation_are_the_first_hits(retrieval: Any, conversations: Path) -> None:
    shares = retrieval.planted(retrieval.longest(conversations), 15)
    assert shares == dict.fromkeys(("ids", "uuids", "paths", "amounts", "error codes", "versions"), 1)


def test_a_long_conversation_is_searched_fast_and_held_small(retrieval: Any, conversations: Path) -> None:
    cost = retrieval.speed(retrieval.longest(conversations), 50)
    assert quantiles(cost.warm_s, n=100)[98] <= 0.5  # seconds: ten times what was promised
    assert cost.build_s <= 2
    assert cost.size_bytes <= 3 * cost.characters


def test_without_the_conversations_it_says_so(
    retrieval: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retrieval.main([str(tmp_path)])
    absent = "memory_qa.jsonl and no coding_aider.jsonl"
    assert capsys.readouterr().out == f"skipped: {tmp_path} has no {absent}\n"
