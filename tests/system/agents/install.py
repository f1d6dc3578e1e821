"""Installs the programs of `versions.json`, each into a folder of its own outside the tree, once.

`COMPACTION_PROXY_AGENTS` names the folder for all of them; by default it is in the user's cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
UV = HERE.parents[2] / ".ci" / "uv"
VERSIONS: dict[str, Any] = json.loads((HERE / "versions.json").read_text())
INSTALL_LIMIT_S = 900.0


def find_cache() -> Path:
    """The folder that holds all programs."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(
        os.environ.get("COMPACTION_PROXY_AGENTS") or Path(caches) / "compaction-proxy-tests" / "agents"
    )


def install_program(name: str) -> Path:
    """Returns the folder that has a program's commands; skips the test where it cannot be installed."""
    entry = VERSIONS[name]
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:12]
    folder = find_cache() / f"{name}-{digest}"
    commands = folder / ("node_modules/.bin" if entry["registry"] == "npm" else "venv/bin")
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in _list_commands(entry, folder):
            _run_command(name, command, folder, entry.get("python", ""))
        (folder / "whole").touch()
    return commands


def _list_commands(entry: Any, folder: Path) -> list[list[str]]:
    if entry["registry"] == "npm":
        packages = [f"{package}@{version}" for package, version in entry["packages"].items()]
        return [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]]
    packages = [f"{package}=={version}" for package, version in entry["packages"].items()]
    python = entry.get("python", sys.executable)
    venv = [str(UV), "venv", "-q", "--python", python, str(folder / "venv")]
    interpreter = str(folder / "venv" / "bin" / "python")
    return [venv, [str(UV), "pip", "install", "-q", "--no-config", "--python", interpreter, *packages]]


def _run_command(name: str, command: list[str], folder: Path, python: str) -> None:
    environ = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    if python:
        environ["PYENV_VERSION"] = python  # pyenv, where there is one, hides other versions than its own
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{name} cannot be installed: {error}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        pytest.skip(f"{name} cannot be installed: {lines[-1]}")
