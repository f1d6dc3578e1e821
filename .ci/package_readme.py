"""Prints README.md with absolute links, because PyPI does not resolve relative ones.

    python .ci/package_readme.py > README.md

Links lead to the tag of this version in the repository on GitHub that [project.urls] in pyproject.toml names.
"""

# ruff: noqa: INP001, T201 - a script prints

import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Links and images as Markdown and HTML write them; `]` and attributes come before the target.
LINK = re.compile(r"""(?P<before>\]\(|(?P<image>(?:src|srcset)="))(?!https?:|#)(?P<target>[^)"\s]+)""")


def make_links_absolute(text: str, repository: str, version: str) -> str:
    """Returns a page of the repository's root with links that work elsewhere."""

    def replace(found: re.Match[str]) -> str:
        kind = "raw" if found["image"] else "blob"
        return f"{found['before']}{repository}/{kind}/v{version}/{found['target']}"

    return LINK.sub(replace, text)


def main() -> None:
    """Prints the page."""
    repository = runpy.run_path(str(ROOT / ".ci" / "docs_pages.py"))["read_repository"]()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    print(make_links_absolute((ROOT / "README.md").read_text("utf-8"), repository, version), end="")


if __name__ == "__main__":
    main()
