"""Checks that every relative link in README, CHANGELOG and docs leads to a file that is there."""

# ruff: noqa: INP001 - a script, not a package

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    return [link for link in local if not (page.parent / link).exists()]


def main() -> int:
    """Exit code 1 if any link is broken."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    lines = [f"{page.relative_to(ROOT)}: no such file: {link}" for page in pages for link in broken(page)]
    print("\n".join(lines) or f"{len(pages)} pages, no broken link")  # noqa: T201 - a script prints
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
