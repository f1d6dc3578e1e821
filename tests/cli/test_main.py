"""The commands as processes: what they print, where, and how they end."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

import compaction_proxy

ROOT = Path(compaction_proxy.__file__).parents[2]


def run(arguments: Sequence[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder, with nothing in the environment but what is given."""
    return subprocess.run(
        [sys.executable, "-m", "compaction_proxy", *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_the_commands(tmp_path: Path) -> None:
    shown = run(["--help"], tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    commands = [line.split()[0] for line in shown.stdout.partition("Commands:")[2].strip().splitlines()]
    assert commands == [
        "serve", "check", "health", "forget", "demo", "demo-provider", "version", "run", "connect", "replay",
        "doctor", "mcp", "models", "savings", "search", "ui", "watch", "sessions", "config",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["health", "--url", "http://127.0.0.1:1"]])
def test_what_must_be_quick_imports_no_server(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from compaction_proxy.cli.main import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'fastapi', 'httpx', 'structlog', 'tiktoken', 'compaction_proxy.config'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    environ = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_that_of_the_distribution(argument: str, tmp_path: Path) -> None:
    assert run([argument], tmp_path).stdout == f"{metadata.version('compaction-proxy')}\n"


@pytest.mark.parametrize("command", [[], ["serve"], ["sessions"], ["sessions", "list"]])
def test_the_short_option_prints_the_same_help(command: list[str], tmp_path: Path) -> None:
    short, long = (run([*command, option], tmp_path) for option in ("-h", "--help"))
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert "Usage: " in short.stdout


def test_check_says_which_file_is_fine(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("server: {port: 4242}\n")
    done = run(["check", "--config", "mine.yaml"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok: mine.yaml\n", "")
    assert run(["check"], tmp_path).stdout == "ok: built-in defaults and the environment\n"


@pytest.mark.parametrize("command", [["check"], ["serve"], ["config", "show"], ["health"]])
def test_a_bad_configuration_ends_every_command_with_one_line_a_problem(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("compaction:\n  stratgy: x\n  mode: fast\n")
    done = run(command, tmp_path, COMPACTION_PROXY__SERVER__PORT="-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "COMPACTION_PROXY__SERVER__PORT: server.port: Input should be greater than or equal to 0",
        "config.yaml:3:3: compaction.mode: Input should be 'active', 'shadow' or 'bypass'",
        "config.yaml:2:3: compaction.stratgy: unknown key, did you mean 'strategy'?",
    ]


def test_warnings_go_to_stderr(tmp_path: Path) -> None:
    done = run(["check"], tmp_path, COMPACTION_PROXY__SERVER__HOST="0.0.0.0")
    assert done.returncode == 0
    expected = (
        "warning: server.host: 0.0.0.0 is reachable from other machines, but server.admin_key is empty\n"
    )
    assert done.stderr == expected


def test_config_show_masks_secrets_and_names_origins(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server:\n  admin_key: hunter2\n  port: 4242\n")
    environ = {
        "COMPACTION_PROXY__UPSTREAM__API_KEY": "hunter3",
        "COMPACTION_PROXY__MODELS": '{"m": {"summary": {"api_key": "hunter4"}}}',
    }
    done = run(["config", "show", "--origin"], tmp_path, **environ)
    lines = done.stdout.splitlines()
    assert "hunter" not in done.stdout
    assert [line for line in lines if not line.endswith("# default")] == [
        "server.port: 4242  # config.yaml:3",
        'server.admin_key: "********"  # config.yaml:2',
        'upstream.api_key: "********"  # environment COMPACTION_PROXY__UPSTREAM__API_KEY',
        'models: {"m": {"summary": {"api_key": "********"}}}  # environment COMPACTION_PROXY__MODELS',
    ]
    assert run(["config", "show"], tmp_path).stdout.splitlines()[0] == 'server.host: "127.0.0.1"'


def test_config_show_is_json_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server:\n  admin_key: hunter2\n  port: 4242\n")
    values = json.loads(run(["config", "show", "--json"], tmp_path).stdout)
    assert (values["server.port"], values["server.admin_key"]) == (4242, "********")
    with_origins = json.loads(run(["config", "show", "--json", "--origin"], tmp_path).stdout)
    assert with_origins["server.port"] == {"value": 4242, "origin": "config.yaml:3"}
    assert list(with_origins) == list(values)


def test_health_fails_where_nothing_listens(tmp_path: Path) -> None:
    done = run(["health", "--url", "http://127.0.0.1:1"], tmp_path)
    assert (done.returncode, done.stdout) == (
        1,
        "http://127.0.0.1:1: no server is running there; run `compaction-proxy serve`, or set `--url`\n",
    )


@pytest.mark.parametrize("url", ["nonsense", "http://[", "http://127.0.0.1:99999"])
def test_health_of_a_strange_url_fails_without_a_traceback(url: str, tmp_path: Path) -> None:
    done = run(["health", "--url", url], tmp_path)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sessions", "list", "--limit", "many"), "--limit"),
        (("sessions", "list", "--nonsense"), "--nonsense"),
        (("sessions", "show"), "'ID'"),
        (("sessions", "nonsense"), "nonsense"),
        (("version", "a\nb"), r"a\x0ab"),
        (("forget",), "--credential"),
        (("nonsense",), "nonsense"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_help(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run(arguments, tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert done.stderr.endswith(" --help`\n")
