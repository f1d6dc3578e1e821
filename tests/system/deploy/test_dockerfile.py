"""The image's promises, read off the Dockerfile; and its very steps, run without Docker.

The steps are run as they stand. Only the places are others: each folder of the image lies below a temporary
one, and a bare copy of the Python that runs the tests stands in for the base image's.
"""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.helpers.free_ports import find_free_port

ROOT = Path(__file__).resolve().parents[3]
UID = 10001
# How a machine gets to its package registry; apart from these the environment is empty.
NETWORK = re.compile(r"(?i)(https?|no|all)_proxy|ssl_cert_(file|dir)|pip_(cert|index_url)|uv_default_index")
TO_START_S = 60


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: `COPY`, its `--options`, and its words; the exec form's for RUN, CMD and the like."""

    name: str
    options: dict[str, str]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The steps between one FROM and the next."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, name: str) -> list[Step]:
        return [step for step in self.steps if step.name == name]

    def only(self, name: str) -> Step:
        (step,) = self.all(name)
        return step


def read_step(line: str) -> Step:
    """One instruction on one line. Only what our Dockerfile uses is understood; a shell form is not."""
    name, _, rest = line.partition(" ")
    options = {}
    while found := re.match(r"--([a-z-]+)=(\S+)\s+", rest):
        options[found[1]] = found[2]
        rest = rest[found.end() :]
    if name in {"RUN", "CMD", "ENTRYPOINT", "VOLUME"}:
        return Step(name, options, tuple(json.loads(rest)))
    if name == "HEALTHCHECK":
        return Step(name, options, tuple(json.loads(rest.removeprefix("CMD "))))
    assert name in {"FROM", "ARG", "ENV", "COPY", "WORKDIR", "USER", "EXPOSE", "STOPSIGNAL", "LABEL"}, line
    return Step(name, options, tuple(shlex.split(rest)))


def read_dockerfile(text: str) -> list[Stage]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = [line for line in re.sub(r"\s*\\\n\s*", " ", kept).splitlines() if line]
    stages: list[Stage] = []
    for step in map(read_step, lines):
        if step.name == "FROM":
            stages.append(Stage(step.words[0], step.words[2] if len(step.words) > 2 else ""))
        elif stages:
            stages[-1].steps.append(step)
    return stages


STAGES = read_dockerfile((ROOT / "Dockerfile").read_text(encoding="utf-8"))
BASE, BUILD, FINAL = STAGES


def environment(stage: Stage) -> dict[str, str]:
    return dict(word.split("=", 1) for step in stage.all("ENV") for word in step.words)


def sources(stage: Stage) -> list[str]:
    """What a stage copies out of the repository."""
    return [word for step in stage.all("COPY") if "from" not in step.options for word in step.words[:-1]]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert [rule[1:] for rule in rules if rule.startswith("!")] == sources(BUILD)
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__", "**/*.pyc"]
    assert [name for name in sources(BUILD) if not (ROOT / name).exists()] == []


def test_both_stages_start_from_one_slim_base_that_a_digest_fixes() -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", BASE.base)
    assert (BASE.name, BASE.steps) == ("base", [])
    assert [BUILD.base, FINAL.base] == ["base"] * 2


def test_everything_installed_is_locked_by_hash() -> None:
    pip, *syncs = BUILD.all("RUN")
    assert "--require-hashes" in pip.words
    assert [sync.words[:4] for sync in syncs] == [("uv", "sync", "--frozen", "--no-dev")] * 2
    assert not [step for step in FINAL.all("RUN") if "install" in step.words[:4] and "-m" in step.words]


def test_the_image_runs_unprivileged_and_ends_on_sigterm() -> None:
    assert FINAL.only("USER").words == (f"{UID}:{UID}",)
    assert FINAL.only("STOPSIGNAL").words == ("SIGTERM",)
    assert FINAL.only("ENTRYPOINT").words + FINAL.only("CMD").words == ("compaction-proxy", "serve")
    assert FINAL.only("HEALTHCHECK").words == ("compaction-proxy", "health")
    assert FINAL.only("VOLUME").words == ("/data",)


def test_the_labels_name_the_version_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version is not None
    assert (f"VERSION={version[1]}",) in [step.words for step in FINAL.all("ARG")]


class Ground:
    """A folder that stands in for the root of a file system.

    Args:
        root: The folder.
        owner: The user that the server runs as.
    """

    def __init__(self, root: Path, owner: int) -> None:
        self.root = root
        self.owner = owner
        self.env: dict[str, str] = {}
        self.folder = root

    def placed(self, word: str) -> str:
        """A word with the image's folders where they lie here, and its user replaced."""
        if self.owner != UID:
            word = word.replace(f"--owner={UID}", f"--owner={self.owner}")
            word = word.replace(f"--group={UID}", f"--group={os.getgid()}")
        return re.sub(r"(?<![\w.])/(?=(app|config|data|src)\b)", f"{self.root}/", word)

    def start(self) -> None:
        """Begin a stage: nothing but Python."""
        self.env = {
            "PATH": f"{self.root}/python/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{self.root}/python/lib",
        }
        self.folder = self.root
        lay_python(self.root / "python")

    def run(self, stage: Stage, earlier: Path | None) -> None:
        """Carry out the steps of a stage."""
        for step in stage.steps:
            words = [self.placed(word) for word in step.words]
            match step.name:
                case "ENV":
                    pairs = dict(word.split("=", 1) for word in words)
                    self.env |= {
                        name: value.replace("$PATH", self.env["PATH"]) for name, value in pairs.items()
                    }
                case "WORKDIR":
                    self.folder = Path(words[0])
                    self.folder.mkdir(exist_ok=True)
                case "COPY":
                    self.copy(words, step, earlier)
                case "RUN":
                    self.command(words)

    def copy(self, words: list[str], step: Step, earlier: Path | None) -> None:
        source = ROOT
        if "from" in step.options:
            assert earlier is not None
            source, words = earlier, [str(Path(words[0]).relative_to(self.root)), words[1]]
        *names, target = words
        for name in names:
            here = self.folder / target
            if (source / name).is_dir():
                skipped = shutil.ignore_patterns("__pycache__") if source == ROOT else None
                shutil.copytree(source / name, here, symlinks=True, ignore=skipped)
            else:
                shutil.copy2(source / name, here)

    def command(self, words: list[str]) -> None:
        """Run to the end; the environment holds what the stage sets, and how to reach the registry."""
        network = {name: value for name, value in os.environ.items() if NETWORK.fullmatch(name)}
        ended = subprocess.run(
            [shutil.which(words[0], path=self.env["PATH"]) or words[0], *words[1:]],
            cwd=self.folder,
            env=network | self.env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"


def lay_python(target: Path) -> None:
    """A Python like the base image's: interpreter, standard library without bytecode, pip; nothing else."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test", "config-*")
    shutil.copytree(library, target / "lib" / library.name, ignore=skipped, symlinks=True)
    (target / "lib" / library.name / "site-packages").mkdir()
    (target / "bin").mkdir()
    executable = target / "bin" / library.name
    shutil.copy2(Path(sys._base_executable).resolve(), executable)  # type: ignore[attr-defined]
    (target / "bin" / "python").symlink_to(executable.name)
    (target / "bin" / "python3").symlink_to(executable.name)
    for shared in Path(sysconfig.get_config_var("LIBDIR") or "/nowhere").glob("libpython3*.so*"):
        shutil.copy2(shared, target / "lib")
    subprocess.run(
        [executable, "-m", "ensurepip"],
        env={"LD_LIBRARY_PATH": str(target / "lib"), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
    )


def make_read_only(root: Path, data: Path) -> None:
    for folder, _, files in os.walk(root):
        if not Path(folder).is_relative_to(data):
            for path in [Path(folder), *(Path(folder) / name for name in files)]:
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


@pytest.fixture(scope="module")
def built() -> Iterator[Ground]:
    """The root of the image, built by the Dockerfile's steps."""
    pytest.importorskip("ensurepip", reason="needs a Python with ensurepip")
    # Not below pytest's folder: that is closed to other users.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        root, earlier = Path(folder) / "root", Path(folder) / "earlier"
        ground = Ground(root, UID if os.getuid() == 0 else os.getuid())
        root.mkdir()
        ground.start()
        ground.run(BUILD, None)
        root.rename(earlier)
        root.mkdir()
        ground.start()
        ground.run(FINAL, earlier)
        shutil.rmtree(earlier)
        make_read_only(root, root / "data")
        yield ground
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def command_line(ground: Ground, *arguments: str) -> list[str]:
    """The image's entry point, as the image's user."""
    command = [shutil.which(FINAL.only("ENTRYPOINT").words[0], path=ground.env["PATH"]) or "", *arguments]
    if os.getuid() == ground.owner:
        return command
    user = [f"--reuid={ground.owner}", f"--regid={ground.owner}", "--clear-groups", "--no-new-privs"]
    return ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", *command]


@contextmanager
def serving(ground: Ground, port: int, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """The image's server. HOME is not set, and the root cannot be written to."""
    with subprocess.Popen(
        command_line(ground, *FINAL.only("CMD").words),
        cwd=ground.folder,
        env=ground.env | {"COMPACTION_PROXY__SERVER__PORT": str(port), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> float:
    """Seconds until `/readyz` answers 200."""
    began = time.monotonic()
    while time.monotonic() - began < TO_START_S:
        assert process.poll() is None, process.stdout and process.stdout.read()
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return time.monotonic() - began
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"not ready after {TO_START_S} s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_steps_end_in_a_server_that_runs_unprivileged_on_a_read_only_root(built: Ground) -> None:
    port = find_free_port()
    scratch = Path(tempfile.mkdtemp())
    os.chown(scratch, built.owner, -1)
    with serving(built, port, scratch) as process:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        assert Path(f"/proc/{process.pid}").stat().st_uid == built.owner
        env = built.env | {"COMPACTION_PROXY__SERVER__PORT": str(port)}
        command = command_line(built, *FINAL.only("HEALTHCHECK").words[1:])
        health = subprocess.run(
            command, env=env, cwd=built.folder, capture_output=True, text=True, check=True
        )
        assert health.stdout == f"http://127.0.0.1:{port}: ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 0
    assert sorted(path.name for path in (built.root / "data").iterdir()) == ["state.db", "state.db.secret"]
    assert list(scratch.iterdir()) == []  # it needs no /tmp
    scratch.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_image_holds_compiled_code_and_nothing_that_builds_or_tests(built: Ground) -> None:
    (packages,) = (built.root / "app" / "lib").glob("python3*/site-packages")
    names = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    assert names & {"pip", "uv", "setuptools", "wheel", "pytest", "mypy", "ruff"} == set()
    assert {"compaction_proxy", "redis", "cryptography", "toktok_rs"} <= names
    found = {path.name for path in built.root.rglob("*") if path.name in {"pip", "uv", "ensurepip", "gcc"}}
    assert found == set()
    modules = {path.stem for path in (packages / "compaction_proxy").glob("*.py")}
    compiled = {
        path.name.partition(".")[0] for path in (packages / "compaction_proxy" / "__pycache__").glob("*.pyc")
    }
    assert modules <= compiled
    assert not (packages / "compaction_proxy").is_symlink()
