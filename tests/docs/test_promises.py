"""docs/reliability.md and docs/security.md: each promise has a row of its own, and tests that are there."""

from typing import NamedTuple

import pytest

from tests.helpers.pages import cells, missing_tests, named_tests, page

FAILURES = [
    f"{kind}{n}" for kind, last in zip("RSUCP", (9, 8, 9, 7, 15), strict=True) for n in range(1, last + 1)
]
THREATS = [f"T{n}" for n in range(1, 25)]


class Promise(NamedTuple):
    """A row: what can go wrong, what the proxy does then, and the tests that cause it."""

    number: str
    wrong: str
    ours: str
    shown: str


def promises(name: str) -> list[Promise]:
    return [Promise(*row) for row in cells(page(name)) if row[0][1:].isdigit()]


@pytest.mark.parametrize(("name", "numbers"), [("reliability.md", FAILURES), ("security.md", THREATS)])
def test_every_promise_stands_once_and_in_order(name: str, numbers: list[str]) -> None:
    assert [promise.number for promise in promises(name)] == numbers


@pytest.mark.parametrize("name", ["reliability.md", "security.md"])
def test_every_promise_says_what_happens_and_names_a_test(name: str) -> None:
    silent = [
        promise.number
        for promise in promises(name)
        if not (promise.wrong and promise.ours and named_tests(promise.shown))
    ]

    assert silent == []


@pytest.mark.parametrize("name", ["reliability.md", "security.md"])
def test_every_test_that_is_named_exists(name: str) -> None:
    assert missing_tests(page(name)) == []
