"""Formats what commands print: aligned columns, cut to the terminal's width, without control characters.

The functions that format a figure, such as `format_count`, take values from JSON. They return `n/a` for a
value of another type, which also stands for an unknown figure.
"""

import json
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ELLIPSIS = "…"
UNKNOWN = "n/a"
_GAP = "  "
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Heading of the column.
        is_right_aligned: Whether the column is aligned to the right, as figures are.
    """

    title: str
    is_right_aligned: bool = False


def escape_unprintable(text: object) -> str:
    """Returns the text as a single line, with every unprintable character escaped.

    Unprintable characters are line endings, control characters, which can control a terminal, characters that
    change the writing direction, and unpaired surrogates. A server may send any of them.
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)


def count_cells(text: str) -> int:
    """Returns how many terminal cells a text without control characters occupies."""
    if text.isascii():
        return len(text)
    wide_count = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide_count - sum(bool(unicodedata.combining(character)) for character in text)


def truncate_text(text: str, max_cells: int | None) -> str:
    """Cuts a text to at most `max_cells` terminal cells. None leaves the text as it is.

    A text that was cut ends with `…`.
    """
    if max_cells is None or count_cells(text) <= max_cells:
        return text
    characters, room = [], max_cells - 1
    for character in text:
        room -= count_cells(character)
        if room < 0:
            break
        characters.append(character)
    return "".join(characters) + ELLIPSIS


def get_terminal_width() -> int | None:
    """Returns the width of the terminal in cells, or None if stdout is not a terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], max_cells: int | None
) -> list[str]:
    """Formats a table as lines, the titles first. Unprintable characters in cells are escaped.

    Args:
        columns: The columns from left to right.
        rows: Rows with a text for each column.
        max_cells: Largest width of a line, in terminal cells. None does not cut lines.
    """
    texts = [[each.title for each in columns], *([escape_unprintable(text) for text in row] for row in rows)]
    widths = [max(map(count_cells, column)) for column in zip(*texts, strict=True)]
    return [truncate_text(_format_row(columns, row, widths), max_cells) for row in texts]


def _format_row(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, text, width in zip(columns, row, widths, strict=True):
        blank = " " * (width - count_cells(text))
        padded.append(blank + text if column.is_right_aligned else text + blank)
    return _GAP.join(padded).rstrip()


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines, and escapes characters that stdout's encoding cannot represent.

    The lines must not contain control characters.
    """
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))


def print_json(value: object) -> None:
    """Prints a value as JSON, in ASCII."""
    print(json.dumps(value, indent=2))


def format_count(value: object) -> str:
    """Formats a count, such as `12,345`."""
    return f"{value:,}" if _is_number(value) else UNKNOWN


def format_dollars(value: object) -> str:
    """Formats an amount, such as `$1.23`. Amounts below a dollar get four decimals."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return UNKNOWN
    digits = 2 if abs(value) >= 1 or value == 0 else 4
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def format_percent(part: object, total: object) -> str:
    """Formats a part of a total as a percentage, such as `64 %`; `n/a` if the total is not above 0."""
    if not (isinstance(part, int | float) and isinstance(total, int | float)) or total <= 0:
        return UNKNOWN
    return f"{part / total:.0%}".replace("%", " %")


def format_age(timestamp_s: object, now: float | None = None) -> str:
    """Formats how long before `now` a moment was, such as `5 min`. Both are seconds since the epoch."""
    if not isinstance(timestamp_s, int | float):
        return UNKNOWN
    age = max(0.0, (time.time() if now is None else now) - timestamp_s)
    for unit_s, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if age >= unit_s:
            return f"{age // unit_s:.0f} {name}"
    return f"{age:.0f} s"


def format_time(timestamp_s: object, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Formats a moment, given in seconds since the epoch, as local time."""
    if not isinstance(timestamp_s, int | float):
        return UNKNOWN
    try:
        return time.strftime(pattern, time.localtime(timestamp_s))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def get_text(row: Mapping[str, object], name: str) -> str:
    """Returns a field as text, or a dash if it is absent or empty."""
    value = row.get(name)
    return "-" if value in (None, "") else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_rows(answer: object, name: str) -> list[dict[str, Any]]:
    """Returns the objects in the list `name` of a JSON answer, or an empty list if there is no such list.

    Elements of the list that are not objects are skipped.
    """
    values = answer.get(name) if isinstance(answer, dict) else None
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
