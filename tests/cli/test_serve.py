"""`serve` as a process: it says where it is, answers health checks, and ends when told to."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import compaction_proxy
from compaction_proxy.cli.serve import format_banner
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig

ROOT = Path(compaction_proxy.__file__).parents[2]


@contextmanager
def serving(
    folder: Path, *arguments: str, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A running proxy, and the lines it has printed once it accepts requests."""
    process = subprocess.Popen(
        [sys.executable, "-m", "compaction_proxy", "serve", "--port", "0", *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if "OPENAI_BASE_URL" in line:
                break
        yield process, lines
    finally:
        process.kill()
        process.communicate()


def test_it_says_where_it_listens_and_what_it_does(tmp_path: Path) -> None:
    with serving(tmp_path, "--upstream", "http://127.0.0.1:9/v1") as (_, lines):
        url = lines[0].rpartition(" ")[2]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    # On a busy machine, it may take longer to create the file of the store than the start waits.
    assert [line for line in lines if "does not answer in time" not in line] == [
        f"compaction-proxy listens on {url}",
        "  upstream  http://127.0.0.1:9/v1",
        f"  store     sqlite:///{tmp_path}/.local/share/compaction-proxy/state.db",
        "  strategy  anchored, compacts at 88,500 of 128,000 tokens (default window; adjusted per model)",
        f"  dashboard {url}/ui",
        f"  client    export OPENAI_BASE_URL={url}/v1",
    ]


def test_it_is_ready_and_health_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, COMPACTION_PROXY__STORE__URL="memory://") as (_, lines):
        url = lines[0].rpartition(" ")[2]
        with urllib.request.urlopen(f"{url}/livez", timeout=10) as answer:
            assert answer.status == 200
        health = subprocess.run(
            [sys.executable, "-m", "compaction_proxy", "health", "--url", url],
            env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (health.returncode, health.stdout) == (0, f"{url}: ready\n")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_a_traceback(sent: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path, COMPACTION_PROXY__STORE__URL="memory://") as (process, _):
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "compaction_proxy", "serve", "--port", str(port)],
            cwd=tmp_path, env={"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"server.port: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_name_that_a_client_has_chosen_adds_no_line_to_the_banner() -> None:
    notes = [("windows", "m\x1b[2J\n  dashboard https://evil.example 8,192 tokens")]
    lines = [*format_banner(LoadedConfig(Config(), {}, None, ()), "http://127.0.0.1:4141", notes)]
    assert all(line.isprintable() for line in lines)
    assert r"  windows   m\x1b[2J\n  dashboard https://evil.example 8,192 tokens" in lines
