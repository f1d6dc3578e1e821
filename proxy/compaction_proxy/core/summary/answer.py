"""Cleans and validates the text of a summary model, and finds, orders and completes its sections.

The proxy treats the text as data and takes no rules from it. A model may write a heading differently from the
prompt: at another level, in another case, with another number, in bold or in another language. Such headings
are still recognised, and are replaced by those of the prompt. The text below a replaced heading stays
unchanged.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.sanitize import escape_template_marks, remove_invisible

MIN_CHARACTERS = 40
# Maximum characters of a refusal. A longer text that begins like a refusal counts as a summary.
REFUSAL_CHARACTERS = 400
# A text is cut at the end of a line or a sentence only if the cut keeps at least this share of it.
LINE_SHARE = 0.5
# Values of `finish_reason` which mean that the model's output reached its limit or filled the context window.
_LIMIT_FINISH_REASONS = frozenset({
    "incomplete", "length", "max_output_tokens", "max_tokens", "model_context_window_exceeded",
    "model_length",
})  # fmt: skip

_OWN_HEADING = re.compile(r"\A\s*+#{1,6}[^\n]*session summary[^\n]*(?:\n+|\Z)", re.IGNORECASE)
_REASONING = r"(?:think(?:ing)?|reason(?:ing)?|thoughts?|analysis|scratchpad)"
_REASONING_START = re.compile(rf"\s*+[<\[◁](?P<name>{_REASONING})[>\]▷]", re.IGNORECASE)
_REASONING_END = re.compile(rf"^[ \t]*[<\[◁]/{_REASONING}[>\]▷][ \t]*$\n?", re.IGNORECASE | re.MULTILINE)
_RUN_MARK = re.compile(
    r"^[ \t]*+[=#*<\[][=#*<\[ \t]*+run[ \t]*+(?P<number>\d{1,4})[]=#*>:. \t]*+$",
    re.IGNORECASE | re.MULTILINE,
)
_HELP = (
    "help|assist|do (?:that|this)|summari[sz]e|comply|provide|fulfil|continue|process|share|answer|access|see"
)
_REFUSAL = re.compile(
    rf"\W*(?:(?:i'?m|i am|we'?re) (?:very |really |so )?(?:sorry|afraid|unable)|sorry\b|i apologi[sz]e|"
    rf"(?:unfortunately,? )?i (?:can't|cannot|can not|won't|am unable to|must decline to) (?:{_HELP})|"
    r"as an ai\b|(?:es )?tut mir (?:sehr )?leid|entschuldigung|leider kann ich|"
    r"ich kann (?:dabei|dir|ihnen|das) (?:\w+ )*nicht|je suis (?:vraiment )?désolé|désolée?\b|"
    r"je ne peux pas (?:vous|t'|faire|résumer|répondre|traiter)|lo siento|lo lamento|"
    r"no puedo (?:ayudar|hacer|resumir|responder|cumplir)|mi (?:dis)?spiace|"
    r"non posso (?:aiutar|far|riassumere|rispondere)|sinto muito|desculpe|lamento\b|"
    r"não posso (?:ajudar|fazer|resumir|responder)|het spijt me|ik kan (?:hier|dat|je) (?:\w+ )*niet|"
    r"przepraszam|jag kan (?:tyvärr )?inte|tyvärr|üzgünüm|извините|к сожалению|я не могу|простите|"
    r"很抱歉|抱歉|对不起|對不起|我无法|我無法|我不能|申し訳|すみません|ごめんなさい|죄송|미안|"
    r"عذرا|آسف|لا أستطيع|لا يمكنني|क्षमा|माफ़|मुझे खेद)",
    re.IGNORECASE,
)


def clean_summary(text: str) -> str:
    """Returns the text in a form that can be used as a summary.

    Invisible characters are removed, and a space is inserted into control tokens of chat templates. A heading
    "Session Summary" is removed, because the proxy itself writes this heading above the summary.
    """
    return _OWN_HEADING.sub("", escape_template_marks(remove_invisible(text))).strip()


def is_unfinished(finish_reason: str) -> bool:
    """Returns whether a provider's `finish_reason` means that the model's output was cut at a limit."""
    return finish_reason.casefold() in _LIMIT_FINISH_REASONS


def validate_summary(
    text: str, finish_reason: str, *, called_tools: bool, refused: bool, max_characters: int | None = None
) -> str:
    """Returns the cleaned text of a summary model, if it is a usable summary.

    If the text reached the output limit, its unfinished last line or sentence is removed.

    Args:
        text: The text as the model wrote it.
        finish_reason: The finish reason as the provider named it; empty if it named none.
        called_tools: Whether the model called a tool.
        refused: Whether the response contains a refusal outside the text.
        max_characters: For a strategy that cuts summaries, the maximum characters of the summary. A longer
            text is cut at the end of a line, a sentence or a word. None means no limit.

    Raises:
        SummaryError: If the text is no usable summary. The reason is `tool-calls`, `refused`,
            `content-filter`, `truncated`, `reasoning`, `empty` or `too-short`.
    """
    if called_tools:
        raise SummaryError("tool-calls")
    if refused:
        raise SummaryError("refused")
    if finish_reason == "content_filter":
        raise SummaryError("content-filter")
    unfinished = is_unfinished(finish_reason)
    try:
        return _require_usable_text(
            _cut_to_size(clean_summary(_strip_reasoning(text)), max_characters, unfinished=unfinished)
        )
    except SummaryError as error:
        if unfinished and max_characters is None and error.reason != "refused":
            raise SummaryError("truncated") from error
        raise


def _require_usable_text(text: str) -> str:
    if _is_refusal(text):
        raise SummaryError("refused")
    if len(text) < MIN_CHARACTERS:
        raise SummaryError("too-short" if text else "empty")
    return text


def _is_refusal(text: str) -> bool:
    return len(text) <= REFUSAL_CHARACTERS and _REFUSAL.match(text.replace("\u2019", "'")) is not None


def _strip_reasoning(text: str) -> str:
    """Returns the text without the reasoning at its beginning.

    Raises:
        SummaryError: If the reasoning has no end. The reason is `reasoning`.
    """
    start = 0
    while opening := _REASONING_START.match(text, start):
        closing = re.compile(rf"[<\[◁]/{opening['name']}[>\]▷]", re.IGNORECASE).search(text, opening.end())
        if closing is None:
            raise SummaryError("reasoning")
        start = closing.end()
    # Some chat templates write the opening tag of the reasoning themselves. The model's text then contains
    # only the closing tag.
    closings = list(_REASONING_END.finditer(text, start))
    return text[closings[-1].end() if closings else start :]


def _cut_to_size(text: str, max_characters: int | None, *, unfinished: bool) -> str:
    """Cuts a text at the end of a line or a sentence if it is too long or unfinished.

    If the text has no suitable end of a line or a sentence, it is cut at the end of a word; if
    `max_characters` is None, "" is returned instead.

    Args:
        text: The text.
        max_characters: Maximum characters of the result; None means no limit.
        unfinished: Whether the model did not finish the text. Its last line or sentence is then removed.
    """
    if not unfinished and (max_characters is None or len(text) <= max_characters):
        return text
    head = text[:max_characters]
    line = head.rfind("\n")
    if line >= len(head) * LINE_SHARE:
        return head[:line].rstrip()
    sentence = max(head.rfind(mark) for mark in (". ", "! ", "? ", "。"))
    if sentence >= len(head) * LINE_SHARE:
        return head[: sentence + 1].rstrip()
    return "" if max_characters is None else (head.rpartition(" ")[0] or head).rstrip()


def split_run_texts(answer: str, run_count: int) -> tuple[str, ...]:
    """Splits a model's text about several runs into one text for each run, in order.

    A run is a group of messages that gets a text of its own. The prompt asks the model to write a heading,
    such as "=== RUN 1 ===", above each text. The model's text is split at these headings.

    Args:
        answer: The text as the model wrote it.
        run_count: Number of runs.

    Raises:
        SummaryError: If the texts cannot be told apart or one is missing (reason `garbage`), or if one of
            them is a refusal (reason `refused`).
    """
    marks = list(_RUN_MARK.finditer(answer))
    if run_count == 1 and len(marks) != 1:
        return (answer.strip(),)
    if [int(mark["number"]) for mark in marks] != list(range(1, run_count + 1)):
        raise SummaryError("garbage")
    stops = [mark.start() for mark in marks[1:]] + [len(answer)]
    texts = tuple(answer[mark.end() : stop].strip() for mark, stop in zip(marks, stops, strict=True))
    if not all(texts):
        raise SummaryError("garbage")
    if any(_is_refusal(text) for text in texts):
        raise SummaryError("refused")
    return texts


# The texts of added sections: of a section that the model left out, and of a section that may be missing only
# because the model's text was cut.
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
        heading: The line above the section, as the prompt writes it.
        is_optional: Whether the prompt allows the model to leave the section out.
    """

    heading: str
    is_optional: bool = False


class _SectionHeading(NamedTuple):
    """A line of the text that is the heading of a section.

    Attributes:
        line_index: Index of the line.
        section_index: Index of the section.
        rest_of_line: The text after the title and a colon on the same line; empty if there is none.
    """

    line_index: int
    section_index: int
    rest_of_line: str


def repair_sections(text: str, sections: Sequence[PromptSection], *, is_cut: bool = False) -> str:
    """Returns the text with all sections in order under their exact headings.

    A missing section that is not optional is added with the text "None", or "Not recorded." if the text was
    cut. Text before the first section stays at the beginning. A text that has all sections in order under
    these headings is returned unchanged.

    Args:
        text: The text that the model wrote.
        sections: The sections that the prompt asked for. An empty sequence disables the check.
        is_cut: Whether the text was cut. A missing section may then have had content.

    Returns:
        The text, or "" if it has fewer than half of the sections that are not optional.
    """
    lines = text.splitlines()
    headings = _find_headings(lines, sections)
    required = {k for k, each in enumerate(sections) if not each.is_optional}
    if 2 * len(required.intersection(each.section_index for each in headings)) < len(required):
        return ""
    order = [each.section_index for each in headings]
    wanted = sorted(required.union(order))
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
    """Returns whether a text has the last of the sections that are not optional.

    Returns True if all sections are optional or there are none.
    """
    required = [k for k, each in enumerate(sections) if not each.is_optional]
    headings = _find_headings(text.splitlines(), sections)
    return not required or required[-1] in {each.section_index for each in headings}


def _find_headings(lines: Sequence[str], sections: Sequence[PromptSection]) -> list[_SectionHeading]:
    """Returns the headings of the sections in the lines.

    Headings are found by their titles. If no title matches, headings are found by their form, such as `##` or
    bold.
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
    """Yields a list of headings for each form, such as bold lines, that the section headings may have.

    A list is yielded only if it has as many headings as there are sections, or as there are sections that are
    not optional, and if there is text below each heading. Numbered lines count only if their numbers ascend
    and the prompt numbers its headings, too.
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
        is_numbered = _PLAIN_NUMBER.match(sections[0].heading) is not None
        if form == "number" and (counts != sorted(set(counts)) or not is_numbered):
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
