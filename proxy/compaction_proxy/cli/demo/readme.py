"""Writes the demo's output to README.md: `python -m compaction_proxy.cli.demo.readme README.md`."""

import re
import sys
from pathlib import Path

from compaction_proxy.cli.demo.run import render_table

_BLOCK = re.compile(
    r"(?P<start><!-- demo:start -->\n```\w*\n)(?P<shown>.*?)(?P<end>```\n<!-- demo:end -->)", re.DOTALL
)


def find_demo_block(readme: str) -> str | None:
    """Returns the text of the code block between the demo marks; None if there is no such block."""
    match = _BLOCK.search(readme)
    return match["shown"] if match else None


def replace_demo_block(readme: str, text: str) -> str:
    """Returns the README with `text` in the code block between the demo marks."""
    return _BLOCK.sub(lambda found: found["start"] + text + found["end"], readme)


def main(path: str) -> int:
    """Runs the demo and writes its output to the file. Returns 1 if the file has no demo marks, else 0."""
    file = Path(path)
    before = file.read_text("utf-8")
    if find_demo_block(before) is None:
        print(f"{path}: no fenced block between <!-- demo:start --> and <!-- demo:end -->", file=sys.stderr)
        return 1
    file.write_text(replace_demo_block(before, render_table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["README.md"]))
