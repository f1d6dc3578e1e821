import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.free_ports import find_free_port
from tests.helpers.scripted_admin import scripted_admin

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
    assert (done.returncode, done.stdout) == (
        1,
        f"{url}: no server is running there; run `compaction-proxy serve`, or set `--url`\n",
    )
    assert done.stderr == "[]\n"


def test_the_health_check_of_a_configuration_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    done = run(["health"], tmp_path, COMPACTION_PROXY__SERVER__PORT="-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        "COMPACTION_PROXY__SERVER__PORT: server.port: Input should be greater than or equal to 0"
    )


def test_what_a_server_says_at_the_health_check_moves_no_cursor(tmp_path: Path) -> None:
    fields = {"version": "1", "store": "ok", "problems": ["\x1b[2Jno\nway"]}
    with scripted_admin() as script:
        script.answers["GET", "/readyz"] = (200, fields)
        done = run(["health", "--url", script.url], tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        f"{script.url}: ready, but degraded: \\x1b[2Jno\\nway\n",
    )


def test_other_options_of_the_health_check_are_those_of_every_command(tmp_path: Path) -> None:
    assert "--url" in run(["health", "--help"], tmp_path).stdout
    assert run(["health", "--nonsense"], tmp_path).returncode == 2


def test_every_other_command_runs_as_before(tmp_path: Path) -> None:
    done = run(["version"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")


def test_what_the_encoding_of_the_output_lacks_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("models: {\u5b57: {window: 9000}}\n", encoding="utf-8")
    done = run(["config", "show"], tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert (done.returncode, r"\u5b57" in done.stdout) == (0, True)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_traceback(closed: str, tmp_path: Path) -> None:
    words = f"{sys.executable} -m compaction_proxy forget --credential 'authorization: Bearer k' {closed}"
    done = subprocess.run(
        ["sh", "-c", words], cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    refused = "" if "2>" in closed else "nothing was deleted: without a terminal, --yes is required\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", refused)
