import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.free_ports import find_free_port

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The installed command, which says at its end what it has imported of what takes long."""
    code = (
        "import atexit, sys\n"
        "heavy = {'typer', 'rich', 'pydantic', 'fastapi', 'httpx', 'structlog', 'tiktoken'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from compaction_proxy.cli.program import run_program\n"
        "run_program()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["health"], ["health", "--url"]])
def test_the_health_check_loads_neither_the_other_commands_nor_the_configuration(
    arguments: list[str], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    words = [*arguments, url] if len(arguments) > 1 else arguments
    done = run(words, tmp_path, COMPACTION_PROXY__SERVER__PORT=url.rpartition(":")[2])
    assert (done.returncode, done.stdout) == (1, f"{url}: unreachable: ConnectionRefusedError\n")
    assert done.stderr == "[]\n"


def test_the_health_check_of_a_configuration_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    done = run(["health"], tmp_path, COMPACTION_PROXY__SERVER__PORT="-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        "COMPACTION_PROXY__SERVER__PORT: server.port: Input should be greater than or equal to 0"
    )


def test_other_options_of_the_health_check_are_those_of_every_command(tmp_path: Path) -> None:
    assert "--url" in run(["health", "--help"], tmp_path).stdout
    assert run(["health", "--nonsense"], tmp_path).returncode == 2


def test_every_other_command_runs_as_before(tmp_path: Path) -> None:
    done = run(["version"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")
