"""A forked proxy behaves as one that was started: its command line, its environment, its streams, its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fork_server import ForkedProcess, fork_proxy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the sockets")


def start(folder: Path, *arguments: str, **environ: str) -> tuple[ForkedProcess, Path]:
    log = folder / "stderr"
    with log.open("wb") as stderr:
        return fork_proxy(arguments, folder, {"HOME": str(folder), **environ}, stderr), log


def serve(folder: Path) -> ForkedProcess:
    """A proxy that accepts requests."""
    process, log = start(folder, "serve", "--port", "0", COMPACTION_PROXY__STORE__URL="memory://")
    assert any(b"listens on" in line for line in process.stdout), log.read_text()
    return process


def test_a_command_that_ends_gives_its_output_and_its_exit_code(tmp_path: Path) -> None:
    process, log = start(tmp_path, "--help")
    output, _ = process.communicate()
    assert b"Usage: compaction-proxy " in output, log.read_text()
    assert process.returncode == 0


def test_a_refusal_goes_to_stderr_and_only_the_given_environment_counts(tmp_path: Path) -> None:
    os.environ["COMPACTION_PROXY__SERVER__PORT"] = "nonsense"
    try:
        process, log = start(tmp_path, "serve", COMPACTION_PROXY__SERVER__WORKERS="many")
        assert process.wait(60) == 2
    finally:
        del os.environ["COMPACTION_PROXY__SERVER__PORT"]
    process.communicate()
    assert "WORKERS" in log.read_text().upper()
    assert "PORT" not in log.read_text().upper()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_ends_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = serve(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == code
    process.kill()  # has ended already
    process.communicate()
