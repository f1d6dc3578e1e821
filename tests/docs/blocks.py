"""The blocks of code in README and docs: what they are written in, and where they stand."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block that is only read has a comment before it that says why: `<!-- block: only read, … -->`.
_BLOCK = re.compile(
    r"(?:<!-- block: only read, (?P<why>[^>]+?) -->\s*\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of code.

    Attributes:
        place: File and line.
        language: What it is written in.
        text: What it holds.
        why: Why it is only read; empty: it is run.
    """

    place: str
    language: str
    text: str
    why: str


def blocks_of(text: str, name: str) -> list[Block]:
    """The blocks of a page, in their order."""
    found = _BLOCK.finditer(text)
    return [
        Block(
            f"{name}:{text.count(chr(10), 0, each.start('text'))}",
            each["language"], each["text"], each["why"] or "",
        )
        for each in found
    ]  # fmt: skip


def blocks() -> list[Block]:
    """All of them."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page.read_text("utf-8"), page.relative_to(ROOT).as_posix())
    ]
