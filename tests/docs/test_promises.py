"""Every promise of reliability.md and threat-model.md has a row, and verification.md names tests for it."""

import pytest

from tests.helpers.pages import cells, chapter, missing_tests, named_tests, page

FAILURES = [
    f"{kind}{n}" for kind, last in zip("RSUCP", (9, 8, 9, 7, 14), strict=True) for n in range(1, last + 1)
]
THREATS = [f"T{n}" for n in range(1, 24)]
PAGES = pytest.mark.parametrize(
    ("name", "heading", "numbers"),
    [("reliability.md", "## Failures", FAILURES), ("threat-model.md", "## Threats", THREATS)],
)


def list_promises(text: str) -> list[list[str]]:
    """Returns the rows whose first cell is the number of a promise, such as R1."""
    return [row for row in cells(text) if row[0][1:].isdigit()]


@PAGES
def test_every_promise_has_one_row_that_says_what_happens(
    name: str, heading: str, numbers: list[str]
) -> None:
    rows = list_promises(page(name))

    assert [row[0] for row in rows] == numbers
    assert [row for row in rows if len(row) != 3 or not all(row)] == []


@PAGES
def test_every_promise_names_a_test(name: str, heading: str, numbers: list[str]) -> None:
    rows = list_promises(chapter(page("verification.md"), heading))

    assert [row[0] for row in rows] == numbers
    assert [row[0] for row in rows if not named_tests(row[-1])] == []


@PAGES
def test_pages_for_users_name_no_tests(name: str, heading: str, numbers: list[str]) -> None:
    assert named_tests(page(name)) == []


def test_every_test_that_is_named_exists() -> None:
    assert missing_tests(page("verification.md")) == []
