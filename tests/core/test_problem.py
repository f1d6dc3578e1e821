"""A problem reads as two sentences."""

from compaction_proxy.core.problem import Problem


def test_a_problem_reads_as_what_is_wrong_and_what_mends_it() -> None:
    assert str(Problem("The store is full.", "Make room.")) == "The store is full. Make room."
