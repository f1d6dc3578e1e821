"""Finds, orders and completes the sections that a strategy asks for in a summary.

A model may write a heading differently from the prompt: at another level, in another case, with another
number, in bold or in another language. Such headings are still recognised, and are replaced by those of the
prompt. The text below a heading is never changed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The text that is added for a section that the model left out, and for a section that may be missing because
# the answer was cut.
EMPTY_SECTION_TEXT = "None"
UNREACHED_SECTION_TEXT = "Not recorded."
# Maximum characters of a heading. A longer line is no heading.
HEADING_CHARACTERS = 120

_LEVEL = re.compile(r"#{1,6}(?=[^#])")
_BOLD = re.compile(r"(\*\*|__)[^*_]+\1:?$")
_NUMBER = re.compile(
    r"(?:(?:[^\W\d]{1,12}[ \t]+)?\d{1,2}|[IVX]{1,4}|[A-Za-z]|[一二三四五六七八九])[ \t]*[.):、．）][ \t]*"  # noqa: RUF001 - what models write
)
_PLAIN_NUMBER = re.compile(r"(\d{1,2})[.)、．][ \t]*\S")  # noqa: RUF001 - what models write
_NOTE = re.compile(r"\([^()]*\)")
_WORD = re.compile(r"[^\W_]+")
_FENCE = re.compile(r"[ \t]*(?:```|~~~)")
_ENTRY = re.compile(r"\s*(?:[-+•>|]|\*[ \t])")


@dataclass(frozen=True, slots=True)
class PromptSection:
    """A section that a prompt asks for.

    Attributes:
        heading: The line above the section, as the prompt has it.
        is_optional: Whether the prompt lets the model leave it out.
    """

    heading: str
    is_optional: bool = False

    @property
    def is_numbered(self) -> bool:
        """Whether the heading is a number and a title without any markup."""
        return bool(_PLAIN_NUMBER.match(self.heading))


class _SectionHeading(NamedTuple):
    """A line that opens a section.

    Attributes:
        line_index: Index of the line.
        section_index: Index of the section.
        rest_of_line: What follows the title on the same line.
    """

    line_index: int
    section_index: int
    rest_of_line: str


def repair_sections(text: str, sections: Sequence[PromptSection], *, is_cut: bool = False) -> str:
    """Returns the text with all sections in order under their exact headings.

    A missing section that is not optional is added with the text "None", or "Not recorded." if the text was
    cut. Text before the first section stays there. A text that has all sections in order under these headings
    is returned unchanged.

    Args:
        text: The text that the model wrote.
        sections: The sections that the prompt asked for. An empty sequence disables the check.
        is_cut: Whether the text was cut, so that a missing section may have had content.

    Returns:
        The text, or "" if it has fewer than half of the sections that are not optional.
    """
    lines = text.splitlines()
    headings = _find_headings(lines, sections)
    if 2 * _count_required_sections(headings, sections) < sum(not each.is_optional for each in sections):
        return ""
    order = [each.section_index for each in headings]
    wanted = [k for k, each in enumerate(sections) if k in order or not each.is_optional]
    if order == wanted and all(
        lines[each.line_index].rstrip() == sections[each.section_index].heading for each in headings
    ):
        return text
    stops = [each.line_index for each in headings[1:]] + [len(lines)]
    bodies: dict[int, list[str]] = {}
    for each, stop in zip(headings, stops, strict=True):
        body = "\n".join([each.rest_of_line, *lines[each.line_index + 1 : stop]]).strip("\n")
        bodies.setdefault(each.section_index, []).extend([body] if body.strip() else [])
    missing = UNREACHED_SECTION_TEXT if is_cut else EMPTY_SECTION_TEXT
    parts = ["\n".join(lines[: headings[0].line_index]).strip()]
    parts += [f"{sections[k].heading}\n" + "\n".join(bodies.get(k) or [missing]) for k in wanted]
    return "\n\n".join(part for part in parts if part)


def has_last_section(text: str, sections: Sequence[PromptSection]) -> bool:
    """Returns whether a text has the last required section. Returns True if no section is required."""
    required = [k for k, each in enumerate(sections) if not each.is_optional]
    headings = _find_headings(text.splitlines(), sections)
    return not required or required[-1] in {each.section_index for each in headings}


def _count_required_sections(headings: Sequence[_SectionHeading], sections: Sequence[PromptSection]) -> int:
    """Returns how many different required sections the headings open."""
    return len({each.section_index for each in headings if not sections[each.section_index].is_optional})


def _find_headings(lines: Sequence[str], sections: Sequence[PromptSection]) -> list[_SectionHeading]:
    """Returns the headings of the sections.

    They are found by their titles. If no title matches, they are found by their form, such as `##` or bold.
    """
    open_lines = list(_iter_lines_outside_code(lines))
    named = list(_find_headings_by_title(open_lines, sections))
    return named or next(_find_headings_by_form(open_lines, lines, sections), [])


def _iter_lines_outside_code(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields the lines outside of code blocks, each with its index."""
    is_code = False
    for at, line in enumerate(lines):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            yield at, line


def _find_headings_by_title(
    lines: Sequence[tuple[int, str]], sections: Sequence[PromptSection]
) -> Iterator[_SectionHeading]:
    titles = {_extract_title_words(each.heading): k for k, each in enumerate(sections)}
    for at, line in lines:
        head, colon, rest = line.replace("：", ":").partition(":")  # noqa: RUF001 - what models write
        if len(head) > HEADING_CHARACTERS or _ENTRY.match(line):
            continue
        section = titles.get(_extract_title_words(head))
        if section is not None:
            yield _SectionHeading(at, section, rest.lstrip(" \t*_"))
        elif (
            colon and (section := titles.get(_extract_title_words(line))) is not None
        ):  # such as "Section 1: Goals"
            yield _SectionHeading(at, section, "")


def _find_headings_by_form(
    open_lines: Sequence[tuple[int, str]], lines: Sequence[str], sections: Sequence[PromptSection]
) -> Iterator[list[_SectionHeading]]:
    """Yields a list of headings for each form, such as bold lines, in which the sections may be written.

    A form qualifies if the text has as many headings of this form as there are sections, or required
    sections, and there is text below each of them.
    """
    if not sections:
        return
    required = [k for k, each in enumerate(sections) if not each.is_optional]
    forms: dict[str, list[int]] = {}
    for at, line in open_lines:
        if form := _detect_heading_form(line):
            forms.setdefault(form, []).append(at)
    for form, places in forms.items():
        numbers = [_PLAIN_NUMBER.match(lines[at]) for at in places] if form == "number" else []
        counts = [int(each[1]) for each in numbers if each]
        if form == "number" and (counts != sorted(set(counts)) or not sections[0].is_numbered):
            continue
        stops = [*places[1:], len(lines)]
        filled = all("".join(lines[at + 1 : stop]).strip() for at, stop in zip(places, stops, strict=True))
        indexes = required if len(places) == len(required) else range(len(sections))
        if filled and len(places) == len(indexes):
            yield [_SectionHeading(at, k, "") for at, k in zip(places, indexes, strict=True)]


def _detect_heading_form(line: str) -> str:
    """Returns the form of a heading, such as "##", "bold" or "number", or "" if the line is no heading."""
    if len(line) > HEADING_CHARACTERS:
        return ""
    if level := _LEVEL.match(line):
        return level[0]
    if _BOLD.match(line.strip()):
        return "bold"
    return "number" if _PLAIN_NUMBER.match(line) else ""


def _extract_title_words(heading: str) -> tuple[str, ...]:
    """Returns the words of a title, without markup, number, text in parentheses and the word "and"."""
    bare = heading.strip(" \t#*_")
    number = _NUMBER.match(bare)
    title = _NOTE.sub("", bare[number.end() :] if number else bare).replace("\u2019", "'").casefold()
    return tuple(word for word in _WORD.findall(title.replace("'", "")) if word != "and")
