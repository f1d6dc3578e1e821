"""Lines of CSV for spreadsheets, which take some texts for formulas and would compute them."""

import csv
import io
from collections.abc import Iterable, Iterator

# What a spreadsheet takes for a formula begins with one of these.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def line(values: Iterable[object]) -> str:
    """A line of CSV with its end (RFC 4180); nothing in it is computed, and what is None stays empty."""
    made = io.StringIO()
    csv.writer(made, lineterminator="\r\n").writerow(_cells(values))
    return made.getvalue()


def _cells(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        formula = isinstance(value, str) and value.startswith(FORMULAS)
        yield f"'{value}" if formula else value
