"""Installs the wheel and the sdist of a folder as a stranger would, and has each play the demo and chat.

    python .ci/try_dist.py dist

Each goes into a new virtual environment of the Python that runs this script. The environment variables are
PATH, a new HOME, and those that lead to the package registry. Prints the
packages and bytes that an install brings.
"""

# ruff: noqa: INP001 - a script, not a package

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

NETWORK = re.compile(r"(?i)(https?|no|all)_proxy|ssl_cert_(file|dir)|pip_\w+")
CHAT = {"model": "demo-agent", "messages": [{"role": "user", "content": "Hello"}]}


def install(package: Path, folder: Path, environ: dict[str, str]) -> Path:
    """Installs a package into a new environment, prints the size of the install, and returns the command."""
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, env=environ)  # noqa: S603
    (libraries,) = environment.glob("lib/python*/site-packages")
    before = set(libraries.iterdir())
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", package.resolve()]
    subprocess.run(pip, check=True, env=environ, cwd=folder)  # noqa: S603
    new = [each for entry in set(libraries.iterdir()) - before for each in (entry, *entry.rglob("*"))]
    packages = sum(each.suffix == ".dist-info" for each in new)
    size = sum(each.stat().st_size for each in new if each.is_file() and each.suffix != ".pyc")
    print(f"{package.name}: {packages} packages, {size:,} bytes without bytecode", flush=True)  # noqa: T201
    return environment / "bin" / "compaction-proxy"


def play(command: Path, folder: Path, environ: dict[str, str]) -> bool:
    """Plays the demo and sends one chat through its proxy; returns whether both pass."""
    demo = [command, "demo", "--keep"]
    answer = ""
    with subprocess.Popen(demo, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        for line in process.stdout or ():
            if line.startswith("proxy: "):
                answer = send_chat(line.split()[1])
                process.send_signal(signal.SIGINT)
    return bool(answer) and process.returncode == 0  # as without --keep: 1 if a check of the demo has failed


def send_chat(base_url: str) -> str:
    """Returns the text of the answer to one chat."""
    request = urllib.request.Request(  # noqa: S310 - our own proxy
        f"{base_url}/chat/completions", json.dumps(CHAT).encode(),
        {"content-type": "application/json", "authorization": "Bearer demo"},
    )  # fmt: skip
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def main(dist: Path) -> int:
    """Exit code 1 if anything is wrong."""
    passes = []
    for package in (*dist.glob("*.whl"), *dist.glob("*.tar.gz")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            environ = {key: value for key, value in os.environ.items() if NETWORK.fullmatch(key)}
            environ |= {"PATH": os.defpath, "HOME": name}
            command = install(package, folder, environ)
            passes.append(play(command, folder, environ))
        print(f"{package.name}: demo and chat {'pass' if passes[-1] else 'fail'}", flush=True)  # noqa: T201
    return 0 if passes and all(passes) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
