"""Parses the Markdown in a message into blocks, which a template turns into elements.

The parser returns plain data. The template engine escapes every text, so no text can become an element or an
attribute. Links and images stay the text that they are written as: a page leads nowhere and loads nothing
because a message says so. Every pattern takes time that is linear in the length of the text.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r" {0,3}(```|~~~)")
_HEADING = re.compile(r"#{1,6} +")
_QUOTE = re.compile(r" {0,3}> ?")
_ITEM = re.compile(r"( *)(?:[-*+]|(\d{1,3}[.)])) +(?=\S)")
_INLINE = re.compile(r"`([^`\n]+)`|\*\*([^*\n]+)\*\*")
_LINE = re.compile(r"[^\n]*\n?")
_CELL = re.compile(r"[^|]+")
# Number of spaces by which an item of a nested list is indented, and the deepest level that a page shows.
_INDENT, _MAX_LEVEL = 2, 3

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of text. `is_shared` says whether another text contains it, too."""

    text: str
    is_shared: bool = False
    style: Literal["", "code", "strong"] = ""


Spans = tuple[TextSpan, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a message.

    Attributes:
        kind: What the part is.
        rows: The lines of a table, each with its cells. Any other block has one row with one cell.
        level: How deep an item of a list is nested, from 0.
        is_numbered: Whether the item of a list begins with its number.
    """

    kind: Literal["text", "heading", "code", "quote", "item", "table", "rule"]
    rows: tuple[tuple[Spans, ...], ...]
    level: int = 0
    is_numbered: bool = False


def parse_plain(text: str, shared: Sequence[Range] = ()) -> tuple[Block, ...]:
    """Returns the text as one block of code. `shared` is as in `parse_markdown`."""
    return (Block("code", ((tuple(_Parser(text, shared).split_shared(0, len(text))),),)),)


def parse_markdown(text: str, shared: Sequence[Range] = ()) -> tuple[Block, ...]:
    """Parses a text. `shared` has the ranges of the text that are marked, sorted, without overlaps."""
    return tuple(_Parser(text, shared).parse())


class _Parser:
    def __init__(self, text: str, shared: Sequence[Range]) -> None:
        self._text = text
        self._shared = shared
        self._starts = [start for start, _ in shared]
        self._lines = [match.span() for match in _LINE.finditer(text) if match[0]]

    def parse(self) -> Iterator[Block]:
        number = 0
        while number < len(self._lines):
            start, stop = self._lines[number]
            line = self._text[start:stop].rstrip()
            if line:
                block, number = self._parse_block(number, line)
                yield block
            else:
                number += 1

    def _parse_block(self, number: int, line: str) -> tuple[Block, int]:
        """Returns the block that begins with a line, and the number of the line after the block."""
        start, stop = self._lines[number]
        if _FENCE.match(line):
            return self._parse_fenced(number)
        if (heading := _HEADING.match(line)) or _is_rule(line):
            block = self._build("heading", [(start + heading.end(), stop)]) if heading else Block("rule", ())
            return block, number + 1
        if item := _ITEM.match(line):
            return self._parse_item(number, item)
        if _QUOTE.match(line):
            end = self._find_end(number, _QUOTE.match)
            return self._build("quote", list(self._iter_quoted(number, end))), end
        if self._is_table(number):
            end = self._find_end(number, _is_table_row)
            rows = [each for each in range(number, end) if each != number + 1]
            return Block("table", tuple(self._split_cells(each) for each in rows)), end
        end = self._find_end(number + 1, self._continues_text)
        return self._build("text", [(start, self._lines[end - 1][1])]), end

    def _parse_fenced(self, number: int) -> tuple[Block, int]:
        end = self._find_fence_end(number)
        first, last = self._lines[number][1], self._lines[end - 1][1]
        return self._build("code", [(first, max(first, last))], is_plain=True), end + 1

    def _parse_item(self, number: int, item: re.Match[str]) -> tuple[Block, int]:
        end = self._find_end(number + 1, self._continues_item)
        begin = self._lines[number][0] + (item.start(2) if item[2] else item.end())
        block = self._build("item", [(begin, self._lines[end - 1][1])])
        level = min(len(item[1]) // _INDENT, _MAX_LEVEL)
        return Block("item", block.rows, level, is_numbered=bool(item[2])), end

    def split_shared(
        self, start: int, stop: int, style: Literal["", "code", "strong"] = ""
    ) -> Iterator[TextSpan]:
        """Splits a range of the text into spans that are shared, and the spans between them."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            begin, end = self._shared[index] if index < len(self._shared) else (stop, stop)
            if end <= start:
                index += 1
                continue
            is_shared = begin <= start
            until = min(stop, end if is_shared else begin)
            yield TextSpan(self._text[start:until], is_shared, style)
            start = until

    def _build(
        self,
        kind: Literal["text", "heading", "code", "quote", "item"],
        ranges: Sequence[Range],
        *,
        is_plain: bool = False,
    ) -> Block:
        spans: list[TextSpan] = []
        for start, stop in ranges:
            end = start + len(self._text[start:stop].rstrip("\r\n")) if (start, stop) == ranges[-1] else stop
            spans += self.split_shared(start, end) if is_plain else self._parse_inline(start, end)
        return Block(kind, ((tuple(spans),),))

    def _parse_inline(self, start: int, stop: int) -> Iterator[TextSpan]:
        for match in _INLINE.finditer(self._text, start, stop):
            yield from self.split_shared(start, match.start())
            group = 1 if match[1] is not None else 2
            yield from self.split_shared(*match.span(group), "code" if group == 1 else "strong")
            start = match.end()
        yield from self.split_shared(start, stop)

    def _split_cells(self, number: int) -> tuple[Spans, ...]:
        start, stop = self._lines[number]
        stop = start + len(self._text[start:stop].rstrip())
        cells = [match.span() for match in _CELL.finditer(self._text, start, stop)]
        return tuple(tuple(self._parse_inline(*self._strip(*each))) for each in cells)

    def _strip(self, start: int, stop: int) -> Range:
        text = self._text[start:stop]
        return start + len(text) - len(text.lstrip()), start + len(text.rstrip())

    def _iter_quoted(self, first: int, end: int) -> Iterator[Range]:
        for start, stop in self._lines[first:end]:
            mark = _QUOTE.match(self._text, start, stop)
            yield (mark.end() if mark else start, stop)

    def _find_fence_end(self, first: int) -> int:
        """Returns the number of the line that closes a block of code, or the number of lines."""
        opening = _FENCE.match(self._text, *self._lines[first])
        fence = opening[1] if opening else ""
        for number in range(first + 1, len(self._lines)):
            start, stop = self._lines[number]
            if self._text[start:stop].strip().startswith(fence):
                return number
        return len(self._lines)

    def _find_end(self, number: int, continues: Callable[[str], object]) -> int:
        """Returns the number of the first line, from `number` on, that does not continue a block."""
        while number < len(self._lines):
            start, stop = self._lines[number]
            if not continues(self._text[start:stop].rstrip()):
                return number
            number += 1
        return number

    def _continues_item(self, line: str) -> bool:
        return line.startswith("  ") and not _ITEM.match(line)

    def _continues_text(self, line: str) -> bool:
        return bool(line) and not (
            _FENCE.match(line)
            or _HEADING.match(line)
            or _ITEM.match(line)
            or _QUOTE.match(line)
            or _is_table_row(line)
        )

    def _is_table(self, number: int) -> bool:
        if number + 1 >= len(self._lines):
            return False
        first, second = (self._text[slice(*self._lines[each])].strip() for each in (number, number + 1))
        return _is_table_row(first) and _is_table_row(second) and set(second) <= set("|-: ") and "-" in second


def _is_table_row(line: str) -> bool:
    return line.lstrip().startswith("|")


def _is_rule(line: str) -> bool:
    signs = line.replace(" ", "")
    return len(signs) >= 3 and len(set(signs)) == 1 and signs[0] in "-*_"
