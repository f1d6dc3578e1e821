"""Finds edits of files that models write as text: SEARCH/REPLACE blocks and patches.

Models without tools write SEARCH/REPLACE blocks into their replies, and the client applies them. Aider made
this format known. Other agents have a tool such as `apply_patch`, whose argument is a patch of several files.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

# Maximum number of edits that are read from one text, and maximum characters that are kept of each field of
# an edit.
MAX_EDITS, MAX_CHARACTERS = 40, 4_000

_PATCHED_FILE = re.compile(r"(?:\*\*\* (?:Add|Update|Delete) File: |\+\+\+ (?:b/)?)(\S.*)")
_BLOCK_START = re.compile(r"<{5,9} SEARCH\b")
_BLOCK_MIDDLE = re.compile(r"={5,9}\s*\Z")
_BLOCK_END = re.compile(r">{5,9} REPLACE\b")
# A line of one word, with or without markup, and a word that names a file.
_WORD_LINE = re.compile(r"[\s`*#]{0,9}([^\s`*#<>|\"':]{2,200})[\s`*:]{0,9}")
_FILE = re.compile(r"[./]\w")


class FileEdit(NamedTuple):
    """An edit of one file.

    Attributes:
        path: The file, as written; "" if the text does not name it.
        old: The lines that the edit removes.
        new: The lines that the edit adds.
    """

    path: str
    old: str
    new: str


def find_edit_blocks(text: str) -> list[FileEdit]:
    """Returns the edits in the SEARCH/REPLACE blocks of a reply, in order. Incomplete blocks are left out."""
    return list(islice(_iter_edit_blocks(text), MAX_EDITS)) if "<<<<< SEARCH" in text else []


def _iter_edit_blocks(text: str) -> Iterator[FileEdit]:
    path, old, new = "", list[str](), list[str]()
    # The list into which the lines of a block go; None outside of blocks.
    lines: list[str] | None = None
    for line in text.splitlines():
        if lines is None and _BLOCK_START.match(line):
            lines = old
        elif lines is None:
            found = _WORD_LINE.fullmatch(line)
            path = found[1] if found and _FILE.search(found[1]) else path
        elif lines is old and _BLOCK_MIDDLE.match(line):
            lines = new
        elif lines is new and _BLOCK_END.match(line):
            yield _build_edit(path, old, new)
            old, new, lines = [], [], None
        else:
            lines.append(line)


def find_patches(text: str) -> list[FileEdit]:
    """Returns the edits in a patch, one for each file, in order. The text of the patch may be any text."""
    return list(islice(_iter_patches(text), MAX_EDITS)) if "*** " in text or "+++ " in text else []


def _iter_patches(text: str) -> Iterator[FileEdit]:
    path, old, new = "", list[str](), list[str]()
    for line in text.splitlines():
        if found := _PATCHED_FILE.match(line):
            if path:
                yield _build_edit(path, old, new)
            path, old, new = found[1].strip(), [], []
        elif line.startswith("+"):
            new.append(line[1:])
        elif line.startswith("-"):
            old.append(line[1:])
    if path:
        yield _build_edit(path, old, new)


def _build_edit(path: str, old: list[str], new: list[str]) -> FileEdit:
    return FileEdit(path[:MAX_CHARACTERS], "\n".join(old)[:MAX_CHARACTERS], "\n".join(new)[:MAX_CHARACTERS])
