"""Checks that the wheel in the folder given is whole: vocabularies, prompts, pages and the type marker."""

# ruff: noqa: INP001 - a script, not a package

import sys
from pathlib import Path
from zipfile import ZipFile

PATTERNS = (
    "data/*.xz", "data/*.json", "data/NOTICE", "prompts/*.md", "py.typed",
    "admin/templates/*.html", "admin/static/*.*", "admin/static/NOTICE",
)  # fmt: skip
PACKAGE = Path(__file__).resolve().parent.parent / "proxy" / "compaction_proxy"


def main(folder: Path) -> int:
    """Exit code 1 if anything is missing from the wheel, or a pattern names nothing."""
    (wheel,) = folder.glob("*.whl")
    names = set(ZipFile(wheel).namelist())
    found = {pattern: sorted(PACKAGE.glob(pattern)) for pattern in PATTERNS}
    lines = [
        f"proxy/compaction_proxy/{pattern}: no such file in the repository"
        for pattern in PATTERNS
        if not found[pattern]
    ]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for paths in found.values() for path in paths}
    lines += [f"{name}: not in {wheel.name}" for name in sorted(expected - names)]
    print("\n".join(lines) or f"{wheel.name} is complete: {len(names)} files")  # noqa: T201 - a script prints
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
