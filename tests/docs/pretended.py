"""Stands in for a program that a page calls and a test must not: `pretended.py NAME ARGUMENT…`.

It looks at what it is asked for: files, targets, services, charts, extras. Exit code 1: one is not there.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def paths(words: list[str]) -> Iterator[str]:
    """What is wrong with the files of the repository that are named."""
    for word in words:
        if word.startswith(("deploy/", "bench/", "docs/", ".ci/")) and not (ROOT / word).exists():
            yield f"no such file: {word}"


def make(words: list[str]) -> Iterator[str]:
    """`make TARGET NAME=VALUE`."""
    text = (ROOT / "Makefile").read_text("utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        wanted = rf"^{name} \?=" if equals else rf"^{name}:"
        if not re.search(wanted, text, re.MULTILINE):
            yield f"the Makefile has no {name}"


def pip(words: list[str]) -> Iterator[str]:
    """`pip install .`, `pip install '.[EXTRA]'`, `pip install dist/*.whl`."""
    if words == ["install", "dist/*.whl"]:
        return
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    name, _, extras = words[-1].rstrip("]").partition("[")
    if words[:-1] != ["install"] or name != ".":
        yield "it is neither the clone nor its wheel that is installed"
    unknown = set(filter(None, extras.split(","))) - set(extra)
    yield from (f"no such extra: {extra}" for extra in unknown)


def docker(words: list[str]) -> Iterator[str]:
    """`docker compose --profile NAME up --build`, `docker compose kill -s SIGNAL SERVICE`."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    profiles = {each for service in services.values() for each in service.get("profiles", ())}
    match words:
        case ["compose", "up", "--build"]:
            return
        case ["compose", "--profile", name, "up", *_] if name in profiles:
            return
        case ["compose", "kill", "-s", "SIGHUP", name] if name in services:
            return
        case ["build", "-t", _, "."] if (ROOT / "Dockerfile").is_file():
            return
    yield f"docker-compose.yml has no such profile or service, or this is something else: {words}"


def helm(words: list[str]) -> Iterator[str]:
    """`helm install NAME CHART -f VALUES`."""
    match words:
        case ["install", _, chart, "-f", values]:
            if not (ROOT / chart / "Chart.yaml").is_file():
                yield f"no chart: {chart}"
            known = yaml.safe_load((ROOT / chart / "values.yaml").read_text("utf-8"))
            given = yaml.safe_load((ROOT / values).read_text("utf-8"))
            yield from (f"{values}: no such value: {name}" for name in set(given) - set(known))
        case _:
            yield f"not understood: {words}"


def uv(words: list[str]) -> Iterator[str]:
    """`uv run python FILE`, `uv tool install .`."""
    match words:
        case ["tool", "install", target]:
            yield from pip(["install", target])
        case ["run", "python", file, *options]:
            text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
            unknown = (each for each in options if each.startswith("--") and each not in text)
            yield from (f"{file}: no {each}" for each in unknown)
        case _:
            yield f"not understood: {words}"


def uvx(words: list[str]) -> Iterator[str]:
    """`uvx --from . compaction-proxy …`."""
    match words:
        case ["--from", ".", "compaction-proxy", *rest]:
            done = subprocess.run(["compaction-proxy", *rest], check=False)
            if done.returncode:
                yield f"ended with {done.returncode}"
        case _:
            yield f"not understood: {words}"


def nothing(_words: list[str]) -> Iterator[str]:
    """Of a program of the system there is no more to say than that its files are there."""
    return iter(())


PROGRAMS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "make": make, "pip": pip, "docker": docker, "helm": helm, "uv": uv, "uvx": uvx,
    "systemctl": nothing,
}  # fmt: skip


def main(name: str, *words: str) -> int:
    """Exit code 1 if anything is wrong."""
    wrong = [*paths(list(words)), *PROGRAMS[name](list(words))]
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
