"""The sections of a summary: found in other forms, put in order, completed, or refused."""

from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.strategies import CHAINED, FULL, STRATEGIES
from compaction_proxy.core.summary.answer import PromptSection, has_last_section, repair_sections

ASKED = (
    PromptSection("### Work Done"),
    PromptSection("### Rules & Decisions"),
    PromptSection("### Open Ends"),
    PromptSection("### Errors", is_optional=True),
)
WHOLE = "### Work Done\n- a\n\n### Rules & Decisions\n- b\n\n### Open Ends\n- c"
NUMBERED = (
    PromptSection("1. The Goals"),
    PromptSection("2. The Files"),
    PromptSection("3. The Next Step (CRITICAL)"),
)


@pytest.mark.parametrize("text", [WHOLE, f"{WHOLE}\n\n### Errors\n- d", f"Here it is:\n{WHOLE}", "  "])
@pytest.mark.parametrize("sections", [ASKED, ()])
def test_a_text_that_has_everything_comes_back_unchanged(
    text: str, sections: tuple[PromptSection, ...]
) -> None:
    expected = text if text.strip() or not sections else ""
    assert repair_sections(text, sections) == expected


@pytest.mark.parametrize(
    "text",
    [
        "# WORK DONE\n- a\n# rules and decisions\n- b\n# Open Ends:\n- c",
        "**Work Done**\n- a\n**Rules & Decisions:**\n- b\n__Open Ends__\n- c",
        "1. Work Done\n- a\n2) Rules & Decisions\n- b\nIII. Open Ends\n- c",
        "## A. Work Done\n- a\n## Section 2: Rules & Decisions\n- b\n## 三、Open Ends\n- c",
        "Work Done: - a\nRules & Decisions\n- b\n**Open Ends:** - c",
        "### Open Ends\n- c\n### Work Done\n- a\n### Rules & Decisions\n- b",
        "## Getane Arbeit\n- a\n## Regeln\n- b\n## Was offen ist\n- c",
        "**完成的工作**\n- a\n**决定**\n- b\n**待办**\n- c",
    ],
    ids=["level", "bold", "numbers", "words", "same line", "order", "German", "Chinese"],
)
def test_headings_in_another_form_become_those_asked_for(text: str) -> None:
    assert repair_sections(text, ASKED) == WHOLE


def test_numbered_headings_in_another_language_are_known_by_their_places() -> None:
    text = "1. Die Ziele\n   - a\n2. Die Dateien\n   - b\n3. Der nächste Schritt\n   - c"
    assert repair_sections(text, NUMBERED) == (
        "1. The Goals\n   - a\n\n2. The Files\n   - b\n\n3. The Next Step (CRITICAL)\n   - c"
    )


def test_a_line_that_is_too_long_for_a_heading_is_none() -> None:
    long = "x" * 200
    text = f"## Ziele\n- a\n## Dateien {long}\n- b\n## Schritt\n- c\n## Fehler\n- d"
    assert repair_sections(text, ASKED[:3]) == (
        f"### Work Done\n- a\n## Dateien {long}\n- b\n\n### Rules & Decisions\n- c\n\n### Open Ends\n- d"
    )


def test_numbered_lines_whose_numbers_do_not_ascend_are_no_headings() -> None:
    text = "2. Die Ziele\n   - a\n1. Die Dateien\n   - b\n3. Der nächste Schritt\n   - c"
    assert repair_sections(text, NUMBERED) == ""


@pytest.mark.parametrize(
    "text",
    [
        "1. I read it.\n2. I changed it.\n3. I ran it.",
        "1. I read it.\n- a\n2. I changed it.\n- b\n3. I ran it.\n- c",
        "All is well, and the tests pass.",
        "- Work done: a\n- Open ends: c\n| Rules & Decisions |",
        "```\n### Work Done\n### Rules & Decisions\n### Open Ends\n```",
        "### Work Done\n- a",
        "### Errors\n- a\n### Work Done\n- b",
        "",
    ],
)
def test_a_text_with_fewer_than_half_of_the_sections_is_none(text: str) -> None:
    assert repair_sections(text, ASKED) == ""


@pytest.mark.parametrize(("is_cut", "line"), [(False, "None"), (True, "Not recorded.")])
def test_a_missing_section_says_so_in_its_place_unless_it_is_optional(*, is_cut: bool, line: str) -> None:
    text = "### Open Ends\n- c\n### Work Done\n- a"
    assert repair_sections(text, ASKED, is_cut=is_cut) == (
        f"### Work Done\n- a\n\n### Rules & Decisions\n{line}\n\n### Open Ends\n- c"
    )


def test_a_section_that_stands_twice_holds_both_texts_and_nothing_is_lost() -> None:
    text = "Preface.\n### Work Done\n- a\n### Open Ends\n- c\n#### Detail\n- x\n### Work Done\n- b"
    assert repair_sections(text, ASKED) == (
        "Preface.\n\n### Work Done\n- a\n- b\n\n### Rules & Decisions\nNone\n\n"
        "### Open Ends\n- c\n#### Detail\n- x"
    )


def test_whether_the_last_section_that_is_not_optional_is_reached() -> None:
    assert has_last_section(WHOLE, ASKED)
    assert has_last_section("anything", ())
    assert not has_last_section("### Work Done\n- a\n### Rules & Decisions\n- b", ASKED)


@pytest.mark.parametrize("row", [CHAINED, FULL], ids=["chained", "full"])
def test_the_prompt_of_a_strategy_asks_for_exactly_its_sections(row: object) -> None:
    policy = next(each for each in STRATEGIES.values() if each is row)
    assert policy.summary is not None
    lines = (
        files("compaction_proxy")
        .joinpath("prompts", f"{policy.summary.prompt_name}.md")
        .read_text("utf-8")
        .splitlines()
    )
    headings = [each.heading for each in policy.summary.sections]
    assert [line for line in lines if line in headings] == headings


LINES = st.sampled_from([
    "### Work Done", "# rules and decisions", "**Open Ends**", "## Errors", "- a", "", "1. x", "b: c",
])  # fmt: skip


@given(st.lists(LINES, max_size=14), st.booleans())
def test_a_repaired_text_keeps_its_entries_and_is_not_repaired_again(lines: list[str], is_cut: bool) -> None:  # noqa: FBT001 - drawn
    text = "\n".join(lines)
    made = repair_sections(text, ASKED, is_cut=is_cut)
    assert not made or repair_sections(made, ASKED, is_cut=is_cut) == made
    assert not made or made.count("- a") == text.count("- a")
