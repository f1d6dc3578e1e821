"""Help: quick, light, and the same as docs/cli.md says."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import Result

import compaction_proxy
from compaction_proxy.cli.main import app

Run = Callable[..., Result]
ROOT = Path(compaction_proxy.__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
# Promised are 0.3 s on a quiet machine; a test on a busy one allows ten times that.
MAX_HELP_CPU_S = 3.0
HEAVY = {"rich", "fastapi", "httpx", "structlog", "tiktoken", "http.client", "compaction_proxy.config"}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that is no group, and its name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    for each, below in (inner or {}).items():
        yield from commands(below, f"{name} {each}".strip())


COMMANDS = dict(commands(get_command(app)))


def section(name: str, command: Any) -> str:
    """What the page says of a command."""
    given = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    shown = [each.metavar or each.name.upper() for each in given]
    usage = " ".join([f"compaction-proxy {name}", *(["[OPTIONS]"] if options else []), *shown])
    rows = [*zip(shown, (each.help or "" for each in given), strict=True)]
    rows += [(", ".join([*each.opts, *each.secondary_opts]), each.help or "") for each in options]
    table = "".join(f"| `{what}` | {means} |\n" for what, means in rows)
    head = f"### {name}\n\n```text\n{usage}\n```\n\n{' '.join(command.help.split())}\n"
    return f"{head}\n| | |\n| --- | --- |\n{table}" if table else head


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_says_what_a_command_takes(name: str) -> None:
    assert f"\n{section(name, COMMANDS[name])}" in PAGE.read_text(encoding="utf-8")


def test_the_page_names_no_other_command() -> None:
    titles = [line[4:] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert titles == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_option_says_what_it_does(name: str, run: Run) -> None:
    assert run(*name.split(), "--help").exit_code == 0
    undescribed = [each.name for each in COMMANDS[name].params if not each.help]
    assert (undescribed, bool(COMMANDS[name].help)) == ([], True)


def test_help_of_every_command_is_quick_and_imports_next_to_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom compaction_proxy.cli.main import app\n"
        f"for name in {list(COMMANDS)!r}:\n"
        "    try: app([*name.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "[]"
    assert after.ru_utime - before.ru_utime < MAX_HELP_CPU_S
