"""What tests ask of the pages in docs/: their chapters, tables, and the tests that they name."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.helpers.source import parse_source

ROOT = Path(__file__).resolve().parents[2]
_NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)::(\w+)`")


def page(name: str) -> str:
    """The text of a page in docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def chapter(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    level = heading.partition(" ")[0]
    found = re.search(rf"^{re.escape(heading)}[^\n]*\n(.*?)(?=^{level} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, heading
    return found[1]


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {k for k, line in enumerate(lines) if set(line) <= set("|- ")}
    kept = (line for k, line in enumerate(lines) if not {k, k + 1} & rules)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def named_tests(text: str) -> list[tuple[str, str]]:
    """Each test that a text names as `folder/test_file.py::test`: its file below tests/, and its name."""
    return _NAMED.findall(text)


def missing_tests(text: str) -> list[str]:
    """The tests that a text names and that are not there."""
    return [f"{file}::{test}" for file, test in named_tests(text) if test not in _tests_of(file)]


@cache
def _tests_of(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    body = parse_source(path).body if path.is_file() else []
    return frozenset(each.name for each in body if isinstance(each, functions))
