"""What commands print: aligned columns, cut to the terminal's width; nothing in them steers a terminal."""

import json
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ELLIPSIS = "…"
UNKNOWN = "n/a"
_GAP = "  "
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: What stands above it.
        right: Whether it is aligned to the right, as figures are.
    """

    title: str
    right: bool = False


def escape_unprintable(text: object) -> str:
    """A text in one line, whatever a server put into it: what cannot be seen is written as an escape.

    That covers control characters, which steer terminals, characters that turn the direction of writing
    around, line ends, and halves of surrogate pairs.
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)


def count_cells(text: str) -> int:
    """How many cells of a terminal a clean text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(bool(unicodedata.combining(each)) for each in text)


def truncate_text(text: str, most: int | None) -> str:
    """The text in at most so many cells; None: as it is."""
    if most is None or count_cells(text) <= most:
        return text
    kept, room = [], most - 1
    for each in text:
        room -= count_cells(each)
        if room < 0:
            break
        kept.append(each)
    return "".join(kept) + ELLIPSIS


def get_terminal_width() -> int | None:
    """Cells of a line of the terminal; None where the output goes elsewhere, and is not cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], most: int | None) -> list[str]:
    """A table's lines, its titles first; the texts are made clean.

    Args:
        columns: From left to right.
        rows: A text for each column.
        most: Cells of a line; None: it is not cut.
    """
    texts = [[each.title for each in columns], *([escape_unprintable(text) for text in row] for row in rows)]
    widths = [max(map(count_cells, column)) for column in zip(*texts, strict=True)]
    return [truncate_text(_format_row(columns, row, widths), most) for row in texts]


def _format_row(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, text, wanted in zip(columns, row, widths, strict=True):
        blank = " " * (wanted - count_cells(text))
        padded.append(blank + text if column.right else text + blank)
    return _GAP.join(padded).rstrip()


def print_lines(lines: Iterable[str]) -> None:
    """Print clean lines; what the output's encoding cannot hold is escaped."""
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))


def print_json(value: object) -> None:
    """Print a value as JSON, in ASCII."""
    print(json.dumps(value, indent=2))


def format_count(value: object) -> str:
    """A number of things, `12,345`."""
    return f"{value:,}" if _is_number(value) else UNKNOWN


def format_dollars(value: object) -> str:
    """An amount, `$1.23`; small ones with four digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return UNKNOWN
    digits = 2 if abs(value) >= 1 or value == 0 else 4
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def format_percent(part: object, total: object) -> str:
    """The share of a part in a total, `64 %`."""
    if not (isinstance(part, int | float) and isinstance(total, int | float)) or total <= 0:
        return UNKNOWN
    return f"{part / total:.0%}".replace("%", " %")


def format_age(at: object, now: float | None = None) -> str:
    """How long ago a moment was, in seconds since the epoch: `5 min`."""
    if not isinstance(at, int | float):
        return UNKNOWN
    age = max(0.0, (time.time() if now is None else now) - at)
    for unit_s, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if age >= unit_s:
            return f"{age // unit_s:.0f} {name}"
    return f"{age:.0f} s"


def format_time(at: object, shape: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A moment in local time."""
    if not isinstance(at, int | float):
        return UNKNOWN
    try:
        return time.strftime(shape, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def get_text(row: Mapping[str, object], name: str) -> str:
    """A field as text; a dash where it is absent or empty."""
    value = row.get(name)
    return "-" if value in (None, "") else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
