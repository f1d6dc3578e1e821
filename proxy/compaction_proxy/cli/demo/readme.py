"""Writes the demo's output to README.md: `python -m compaction_proxy.cli.demo.readme README.md`."""

import re
import sys
from pathlib import Path

from compaction_proxy.cli.demo.run import render_table

_BLOCK = re.compile(
    r"(?P<start><!-- demo:start -->\n```\w*\n)(?P<shown>.*?)(?P<end>```\n<!-- demo:end -->)", re.DOTALL
)


def find_demo_block(readme: str) -> str | None:
    """The block between the demo marks, without its fence; None if there is none."""
    found = _BLOCK.search(readme)
    return found["shown"] if found else None


def replace_demo_block(readme: str, text: str) -> str:
    """The README with `text` in its block."""
    return _BLOCK.sub(lambda found: found["start"] + text + found["end"], readme)


def main(path: str) -> int:
    """Write the demo's output into the file; 1 if it has no place for it."""
    file = Path(path)
    before = file.read_text("utf-8")
    if find_demo_block(before) is None:
        print(f"{path}: no fenced block between <!-- demo:start --> and <!-- demo:end -->", file=sys.stderr)
        return 1
    file.write_text(replace_demo_block(before, render_table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["README.md"]))
