"""docs/strategies.md has the keys and defaults of the configuration, and docs/verification.md leaves out no
part of the documents that the strategies come from.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import BaseModel

from compaction_proxy.config.config import Config
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.support import log_events
from tests.docs.blocks import ROOT
from tests.helpers.pages import cells, chapter, missing_tests, named_tests, page

PAGE = page("strategies.md")
TRACES = page("verification.md")
SEEDS = ("000", "001", "002", "003", "004")
NONE = "–"  # noqa: RUF001 - as the page writes it
NOT_OURS = "not in the proxy: "
EVENTS = {value for value in vars(log_events).values() if isinstance(value, str)}
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s")


class Row(NamedTuple):
    """A row of a map: which parts of a section became what, and the tests that show it."""

    section: str
    parts: str
    ours: str
    shown: str

    @property
    def numbers(self) -> list[int]:
        first, _, last = self.parts.partition(NONE)
        return list(range(int(first), int(last or first) + 1)) if first else []


def rows(seed: str) -> list[Row]:
    return [Row(*row) for row in cells(chapter(TRACES, f"### seeds/{seed}"))]


def sections(text: str) -> list[tuple[str, int]]:
    """The headings of a document, and of how many parts each section is made.

    A part is a paragraph, a list item, a row of a table, or a block of code.
    """
    found: list[tuple[str, int]] = []
    code, before = False, ""
    for line in text.splitlines():
        fence = line.strip().startswith("```")
        kind = "code" if code or fence else kind_of(line, before)
        starts = (
            fence and not code if kind == "code" else kind in {"item", "row"} or (kind == "text" != before)
        )
        if kind == "heading":
            found.append((line.lstrip("# ").strip(), 0))
        elif starts:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        code = code != fence
        before = {"item": "text", "rule": "row"}.get(kind, kind)
    return found


def kind_of(line: str, before: str) -> str:
    """What a line outside of code is, by the kind of the line before it."""
    if line.startswith("#"):
        return "heading"
    if not line.strip() or set(line.strip()) == {"-"}:
        return "gap"
    if line.startswith("|"):
        return "rule" if set(line) <= set("|-: ") else ("row" if before == "row" else "head")
    return "item" if ITEM.match(line) else "text"


def test_parts_are_paragraphs_items_rows_and_blocks_of_code() -> None:
    document = "# A\none\nstill one\n\ntwo\n## B\n- one\n  still\n- two\n\n---\n\n```\n# no heading\n```\n"
    table = "## C\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nafter\n"

    assert sections(document + table) == [("A", 2), ("B", 3), ("C", 3)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_leaves_no_part_of_its_document_out(seed: str, shared: Path) -> None:
    [document] = (shared / "seeds").glob(f"{seed}_*.txt")
    expected = [
        (name, part)
        for name, parts in sections(document.read_text(encoding="utf-8"))
        for part in range(parts + 1)
    ]
    mapped = [
        (row.section, part) for row in rows(seed) for part in (row.numbers if row.parts != NONE else [])
    ]

    assert mapped == [each for each in expected if each[1]]
    assert {row.section for row in rows(seed)} == {name for name, _ in expected}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_of_a_map_names_a_test_or_says_why_it_is_not_ours(seed: str) -> None:
    silent = [
        row
        for row in rows(seed)
        if row.parts != NONE and (row.shown == NONE) != row.ours.startswith(NOT_OURS)
    ]

    assert silent == []
    assert len(rows(seed)) > 10


def test_every_test_that_is_named_exists() -> None:
    assert missing_tests(TRACES) == []
    assert len(named_tests(chapter(TRACES, "## Source documents"))) > 200
    assert named_tests(PAGE) == []


def test_keys_and_defaults_are_those_of_the_configuration() -> None:
    written = runpy.run_path(str(ROOT / ".ci" / "config_reference.py"))["key_table"]()

    shown = chapter(PAGE, "## Every key and its default").splitlines()
    assert [line for line in shown if line.startswith("|")] == written
    assert len(written) > 30


def test_every_key_that_is_named_exists() -> None:
    text = PAGE + chapter(TRACES, "## Source documents")
    named = set(re.findall(r"`((?:compaction|summary|models|upstream|store)\.[\w.]+)[`:]", text))
    named |= {
        f"compaction.strategies.{each}" for each in re.findall(rf"`((?:{'|'.join(STRATEGIES)})\.\w+)`", text)
    }
    unknown = sorted(each for each in named - EVENTS if each not in set(keys(Config)))

    assert unknown == []
    assert len(named) > 10


def keys(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """The dotted names of all keys."""
    for name, field in section.model_fields.items():
        yield before + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{before}{name}.")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_when_it_compacts_what_it_costs_and_what_it_loses(name: str) -> None:
    text = chapter(PAGE, f"## {name}")

    assert text.lstrip().startswith("When: ")
    assert {"Costs: ", "Loses: "} <= set(re.findall(r"^\w+: ", text, re.MULTILINE))
