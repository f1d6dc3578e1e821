import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.cli.serve import get_drain_timeouts
from compaction_proxy.config.sections import ServerSection

UNIT = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "compaction-proxy.service"
TEXT = UNIT.read_text(encoding="utf-8")
# After SIGTERM: the time in which requests are still accepted, and what running answers get, in seconds.
PATIENCE = get_drain_timeouts(ServerSection(host="0.0.0.0"))
TO_END_S = PATIENCE.accept_s + PATIENCE.drain_s
MOST_EXPOSURE = 20  # of 100, as systemd-analyze rates what a service could do


def values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", TEXT, re.MULTILINE)


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("needs systemd-analyze")
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there, whether the proxy is installed or not."""
    placed = tmp_path / UNIT.name
    placed.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", TEXT), encoding="utf-8")
    return placed


def test_systemd_understands_the_unit(analyze: str, unit: Path) -> None:
    checked = subprocess.run([analyze, "verify", unit], check=False, capture_output=True, text=True)
    complaints = [line for line in checked.stderr.splitlines() if unit.name in line]
    assert (checked.returncode, complaints) == (0, [])


def test_the_service_can_do_little_else_than_serve(analyze: str, unit: Path) -> None:
    command = [analyze, "security", "--offline=true", f"--threshold={MOST_EXPOSURE}", str(unit)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    if "--offline" in checked.stderr:
        pytest.skip("needs systemd-analyze security --offline")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_running_answers_may_end_before_the_service_is_killed() -> None:
    (stop,) = values("TimeoutStopSec")
    assert int(stop) > TO_END_S


def test_a_reload_is_the_signal_on_which_the_configuration_is_read_again() -> None:
    (reload,) = values("ExecReload")
    assert shlex.split(reload)[1:] == ["-HUP", "$MAINPID"]


def test_its_settings_are_ones_that_the_proxy_knows(configured: Any) -> None:
    lines = [line.removeprefix("#") for line in TEXT.splitlines()]
    environ = dict(
        line.removeprefix("Environment=").split("=", 1) for line in lines if line.startswith("Environment=")
    )
    assert environ["COMPACTION_PROXY__STORE__URL"] == "sqlite:///%S/compaction-proxy/state.db"
    assert configured(environ).server.admin_key.get_secret_value() == "secret"
