"""What a release, its workflows and the pages about it name is what the repository has."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT

GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# The files that each ecosystem of the update bot reads in a directory.
MANIFESTS = {
    "uv": ["uv.lock"],
    "pip": ["*.txt"],
    "github-actions": [".github/workflows/*.yml"],
    "docker": ["*Dockerfile", "*.yaml"],
    "docker-compose": ["docker-compose.yml"],
}
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
}


def script(name: str) -> dict[str, Any]:
    """Returns what a script in .ci defines."""
    return runpy.run_path(str(ROOT / ".ci" / name))


def test_every_place_that_names_the_version_names_the_same() -> None:
    named = list(script("release_notes.py")["find_versions"]())

    assert {"pyproject.toml", "proxy/compaction_proxy/__init__.py", "Dockerfile"} <= {
        file for file, _ in named
    }
    assert [(file, version) for file, version in named if version != PROJECT["version"]] == []


def test_a_tag_that_is_not_ready_is_refused_with_every_reason() -> None:
    problems = list(script("release_notes.py")["find_problems"]("9.9.9", "https://github.com/somebody/fork"))

    assert f"pyproject.toml: names version {PROJECT['version']}, the tag 9.9.9" in problems
    assert "CHANGELOG.md: has no dated chapter on 9.9.9" in problems
    assert problems[-1].endswith("the tag is in https://github.com/somebody/fork")


def test_a_tag_that_is_ready_is_released_with_its_chapter_of_the_changelog() -> None:
    notes = script("release_notes.py")

    assert list(notes["find_problems"](PROJECT["version"], PROJECT["urls"]["Repository"])) == []
    text = notes["find_chapter"](
        "## [Unreleased]\n\n- a\n\n## [0.2.0] - 2027-01-02\n\n- b\n\n## [0.1.0] - 2026-11-27\n", "0.2.0"
    )
    assert text == "- b"


def test_the_readme_of_the_package_has_absolute_links() -> None:
    make_absolute = script("package_readme.py")["make_links_absolute"]
    text = '[a](docs/a.md#b) [c](https://c.example) [d](#d) <img src="docs/i.png">'

    assert make_absolute(text, "https://github.com/o/p", "1.2.3") == (
        "[a](https://github.com/o/p/blob/v1.2.3/docs/a.md#b) [c](https://c.example) [d](#d) "
        '<img src="https://github.com/o/p/raw/v1.2.3/docs/i.png">'
    )
    readme = make_absolute((ROOT / "README.md").read_text("utf-8"), PROJECT["urls"]["Repository"], "1.2.3")
    assert re.findall(r"""(?:\]\(|(?:src|srcset|href)=")(?!https://)[^)"]+""", readme) == []


def test_one_table_names_the_repository_wherever_it_stands() -> None:
    pages = script("docs_pages.py")
    name = pages["name_repository"]
    name.__globals__["read_repository"] = lambda: "https://github.com/Somebody/compaction-proxy"

    assert name(
        "[a](https://github.com/OWNER/compaction-proxy/issues) https://github.com/OWNER/another\n"
        "* @OWNER\nghcr.io/owner/compaction-proxy ghcr.io/owner/charts/compaction-proxy"
        " --repo OWNER/compaction-proxy\n"
    ) == (
        "[a](https://github.com/Somebody/compaction-proxy/issues) https://github.com/OWNER/another\n"
        "* @Somebody\nghcr.io/somebody/compaction-proxy ghcr.io/somebody/charts/compaction-proxy"
        " --repo Somebody/compaction-proxy\n"
    )


def test_the_workflow_tries_every_python_that_the_project_names() -> None:
    matrix = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]["run"]["strategy"][
        "matrix"
    ]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]

    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_github_reads_has_the_form_that_it_expects(schema: str) -> None:
    files = map(str, SCHEMAS[schema])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_file_that_a_workflow_runs_is_there(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
    commands = " ".join(step.get("run", "") for job in jobs for step in job.get("steps", ()))

    files = re.findall(r"(?:\.ci|deploy)/[\w./]+", commands)
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_update_bot_reads_every_file_that_pins_an_image_or_the_tools_of_a_build() -> None:
    entries = yaml.safe_load((GITHUB / "dependabot.yml").read_text("utf-8"))["updates"]
    read = {
        (each["package-ecosystem"], folder): {
            file
            for pattern in MANIFESTS[each["package-ecosystem"]]
            for file in ROOT.glob(f"{folder}/{pattern}".strip("/"))
        }
        for each in entries
        for folder in each.get("directories") or [each["directory"]]
    }
    pinning = {
        file
        for file in (*ROOT.glob("*"), *ROOT.glob("deploy/**/*"))
        if file.suffix in {"", ".txt", ".yaml", ".yml"} and file.is_file()
        if re.search(r"sha256:[0-9a-f]{64}", file.read_text("utf-8", "replace"))
    }

    assert [place for place, files in read.items() if not files] == []
    assert {ROOT / "Dockerfile", ROOT / "docker-compose.yml", ROOT / "deploy/image/uv.txt"} <= pinning
    assert pinning <= set().union(*read.values())


def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    # `make test` tells a `make` below it to print folders, too.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = subprocess.run(["make"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)

    assert {line.split()[0] for line in listed.stdout.splitlines()} == set(phony.split())
