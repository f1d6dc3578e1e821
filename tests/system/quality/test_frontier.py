"""What forwarded lists say of the work agrees with the conversations: `bench/frontier.py`, judged."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Mean tokens of a ledger, by kind of conversation, before requests had a state.
FIXTURE_LEDGERS = {"ledger, desk": 170, "ledger, coding": 699}


@cache
def measure(summary: str) -> dict[str, Any]:
    """The figures of a run in which summaries are written so."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            str(ROOT / "bench/frontier.py"),
            "--json",
            str(report),
            "--summary",
            summary,
        ]
        subprocess.run(command, check=True, timeout=1_800, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(report.read_text())[0]
    return found


@pytest.fixture(scope="module", params=["none", "poor", pytest.param("wrong", marks=pytest.mark.slow)])
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {each["name"]: each for each in measure(request.param)["figures"]}


def check(figures: Mapping[str, Any], name: str, bound: float) -> None:
    """A share is on the right side of a bound; there must be something that it is a share of."""
    figure = figures[name]
    assert figure["of"] > 0, f"{name}: nothing was judged"
    is_right = figure["share"] <= bound if figure["at_most"] else figure["share"] >= bound
    assert is_right, f"{name}: {figure['hits']} of {figure['of']}, {figure['cases'][:5]}"


def test_requests_of_finished_conversations_are_not_called_open(figures: dict[str, Any]) -> None:
    check(figures, "open at the end, of finished requests", 0.1)


def test_answered_requests_of_coding_sessions_are_not_called_open(figures: dict[str, Any]) -> None:
    check(figures, "marks: answered, called open", 0.1)
    check(figures, "marks: answered, called open at any later cut", 0.1)


def test_withdrawn_requests_are_neither_open_nor_rules(figures: dict[str, Any]) -> None:
    check(figures, "marks: withdrawn, called open or a rule", 0.0)


def test_the_request_under_way_is_named(figures: dict[str, Any]) -> None:
    check(figures, "named in the middle", 0.95)
    # One of five: a test that failed two messages after the request for it was answered.
    check(figures, "marks: open, named", 0.8)


def test_calls_that_wrote_stand_with_their_ids_and_their_outcome(figures: dict[str, Any]) -> None:
    # One conversation pays six times by one tool, and a record of 250 tokens has no room for each failure.
    check(figures, "writes: tool, keys and outcome together", 0.88)


def test_arguments_of_the_next_call_are_there_or_one_search_away(figures: dict[str, Any]) -> None:
    check(figures, "next arguments forwarded or found", 0.9)


def test_observed_values_are_whole_and_named_by_what_they_belong_to(figures: dict[str, Any]) -> None:
    if figures["values: named and whole"]["of"]:  # a ledger need not have room for any
        check(figures, "values: named and whole", 0.95)


def test_ledgers_are_no_larger_than_they_were() -> None:
    # Without a summary model the sizes are the same in every run: no round is made behind an answer.
    sizes = measure("none")["sizes"]
    larger = {name: size for name, size in sizes.items() if size > FIXTURE_LEDGERS.get(name, size) + 0.5}
    assert larger == {}
