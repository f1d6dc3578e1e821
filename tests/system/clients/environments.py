"""An environment of its own for each client, outside the repository, made when first used.

What is installed is pinned to the last dependency by a lock (`python/locks/NAME.txt`, which `uv pip compile
--universal --python-version 3.11` makes of `NAME.in`). The folder's name carries the lock's digest, so
another lock is another folder and nothing is ever changed in place.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.openai_node import unavailable

ROOT = Path(__file__).resolve().parents[3]
LOCKS = Path(__file__).parent / "python" / "locks"
UV = ROOT / ".ci" / "uv"
INSTALL_TIMEOUT_S = 110
# What uv says when it is offline, by kind of trouble.
UNREACHABLE = (
    "dns error",
    "error sending request",
    "connection refused",
    "timed out",
    "client error (connect)",
)


def folder_of(name: str, *pinned: bytes) -> Path:
    """Where the environment of a client belongs; anything pinned otherwise is another folder."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(b"\0".join(pinned)).hexdigest()[:16]
    return root / "compaction-proxy-tests" / "clients" / f"{name}-{digest}"


def installed_once(into: Path, command: list[str]) -> None:
    """Let a command fill a folder that appears under its name only when it is whole, whoever else is at it.

    Args:
        into: The folder.
        command: Run in the folder while it has another name; `{}` stands for its path.
    """
    if into.is_dir():
        return
    into.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=into.parent) as made:
        whole = Path(made) / "whole"
        whole.mkdir()
        _run([part.replace("{}", str(whole)) for part in command], whole)
        try:
            os.rename(whole, into)  # noqa: PTH104 - the folder must not exist yet
        except OSError:
            assert into.is_dir()


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        unavailable("the package registry does not answer in time")
    if done.returncode and any(sign in done.stderr.lower() for sign in UNREACHABLE):
        unavailable("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr


def python_environment(name: str) -> Path:
    """The interpreter of a client's environment; skips the test where it cannot be had."""
    lock = LOCKS / f"{name}.txt"
    folder = folder_of(name, lock.read_bytes(), sys.version.encode())
    make = f'"{UV}" venv -q --relocatable --python "{sys.executable}" {{}}/venv'
    fill = f'"{UV}" pip install -q --no-config --python {{}}/venv/bin/python -r "{lock}"'
    shell = shutil.which("sh") or "/bin/sh"
    installed_once(folder, [shell, "-c", f"{make} && {fill}"])
    return folder / "venv" / "bin" / "python"


def locked_version(name: str, package: str) -> str:
    """The version of a package in a lock."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE)
    assert found, (name, package)
    return found[1]
