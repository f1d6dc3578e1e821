"""Prints what the changelog says of a release, or what keeps the tag from becoming one.

    python .ci/release_notes.py v0.1.0 https://github.com/OWNER/compaction-proxy

A tag is released only if every place that names the version names this one, if the changelog has a dated
chapter on it, and if pyproject.toml names the repository that the tag is in.
"""

# ruff: noqa: INP001 - a script, not a package

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where a version stands; the first group of the pattern is the version.
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "proxy/compaction_proxy/__init__.py": r'^__version__ = "(.+)"$',
    "deploy/helm/compaction-proxy/Chart.yaml": r'^(?:appV|v)ersion: "?([^"\n]+)"?$',
    "deploy/kubernetes/*/kustomization.yaml": r'newTag: "?([^"\n]+)"?$',
    "Dockerfile": r"^ARG VERSION=(.+)$",
    "docker-compose.yml": r"compaction-proxy:(\d\S*)",
    "docs/*.md": r"compaction[-_]proxy[-:](\d+\.\d+\.\d+)",
}


def find_versions() -> Iterator[tuple[str, str]]:
    """Yields each file that names the version, and the version that it names."""
    for place, pattern in PLACES.items():
        for file in sorted(ROOT.glob(place)):
            found = re.findall(pattern, file.read_text("utf-8"), re.MULTILINE)
            yield from ((file.relative_to(ROOT).as_posix(), version) for version in found)


def find_chapter(changelog: str, version: str) -> str:
    """Returns the text of the changelog's dated chapter on a version; empty if there is none."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |^\[|\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def find_problems(version: str, repository: str) -> Iterator[str]:
    """Yields what keeps a version from being released from a repository, a line each."""
    for file, named in find_versions():
        if named != version:
            yield f"{file}: names version {named}, the tag {version}"
    if not find_chapter((ROOT / "CHANGELOG.md").read_text("utf-8"), version):
        yield f"CHANGELOG.md: has no dated chapter on {version}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    if urls["Repository"] != repository:
        yield f"pyproject.toml: names the repository {urls['Repository']}, the tag is in {repository}"


def main(tag: str, repository: str) -> int:
    """Exit code 1 if the tag cannot be released."""
    version = tag.removeprefix("v")
    problems = list(find_problems(version, repository))
    sys.stderr.write("".join(f"{line}\n" for line in problems))
    if not problems:
        print(find_chapter((ROOT / "CHANGELOG.md").read_text("utf-8"), version))  # noqa: T201 - a script prints
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
