"""Checks README, CHANGELOG and docs: links, the site's list of pages, and what scripts have written.

Every relative link leads to a file, every page is in the nav of mkdocs.yml, and .ci/docs_pages.py would write
what is there. tests/docs holds what pages say to what the code does.
"""

# ruff: noqa: INP001 - a script, not a package

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"""(?:\]\(|(?:href|src|srcset)=")([^)"#\s]+)(?:#[^)"]*)?[)"]""")
FENCE = re.compile(r"```.*?```", re.DOTALL)
# Pictures of the dashboard are taken of a running proxy; a checkout may be without all of them.
PICTURES = DOCS / "images"
# Made where the site is.
MADE = {DOCS / "llms-full.txt"}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    return [link for link in local if not there(page.parent / link)]


def there(target: Path) -> bool:
    """Whether a link's target is there, or need not be."""
    pictured = PICTURES in target.resolve().parents and not any(PICTURES.glob("*.png"))
    return pictured or target.exists() or target in MADE


def problems() -> Iterator[str]:
    """What is wrong, a line each."""
    written = runpy.run_path(str(ROOT / ".ci" / "docs_pages.py"))
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), DOCS / "llms.txt"]:
        yield from (f"{page.relative_to(ROOT)}: no such file: {link}" for link in broken(page))
    listed = {DOCS / page.file for page in written["pages"]()}
    for page in sorted(set(DOCS.rglob("*.md")) ^ listed):
        yield f"{page.relative_to(ROOT)}: in docs/ or in the nav of mkdocs.yml, but not in both"
    for page, text in written["generated"]().items():
        if page.read_text("utf-8") != text:
            yield f"{page.relative_to(ROOT)}: is not what it should be: run `python .ci/docs_pages.py`"


def main() -> int:
    """Exit code 1 if anything is wrong."""
    lines = list(problems())
    print("\n".join(lines) or "pages, links and lists are whole")  # noqa: T201 - a script prints
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
