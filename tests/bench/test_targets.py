"""What the smoke run does not start can be started: its configuration is sound."""

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    nginx = importlib.import_module("nginx")
    command = nginx.command("nginx", tmp_path, ("127.0.0.1", 9), 8)
    ended = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert "syntax is ok" in ended.stderr


@pytest.mark.parametrize("number", range(4))
def test_a_rival_is_told_where_to_listen_and_where_to_go(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    rival = importlib.import_module("rivals").RIVALS[number]
    command, settings = rival.configured(tmp_path, "http://127.0.0.1:9", 8_765)
    written = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    told = json.dumps([command, settings, written])
    assert "8765" in told
    assert "http://127.0.0.1:9" in told
    assert settings["HOME"] == str(tmp_path), "it must not touch the user's own configuration"


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/systemd/compaction-proxy.service"])
def test_the_allocator_is_told_the_same_wherever_the_proxy_runs(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    allocator = importlib.import_module("targets").ALLOCATOR
    told = " ".join(f"{name}={held}" for name, held in allocator.items())
    text = (BENCH.parent / file).read_text(encoding="utf-8")
    assert any(line in {f"ENV {told}", f"Environment={told}"} for line in text.splitlines())
