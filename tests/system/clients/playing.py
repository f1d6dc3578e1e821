"""Runs a client's driver, and keeps what it printed beside what the servers got meanwhile."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.system.clients.environments import ROOT
from tests.system.clients.stage import MODEL, Request, Stage, Way, stage

CONVERSATION = Path(__file__).parent / "conversation.json"
KEY = "sk-of-a-client"
# A machine of two cores that does other things as well gives the slowest client no more than this.
RUN_LIMIT_S = 240
# Whoever wants to tell somebody else about the run finds nobody there.
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the suite.

    Attributes:
        name: Of the driver and its environment.
        package: What the registry calls it.
        language: `python`, `node` or `cli`.
        version: Of the package.
        wires: What it speaks: `chat`, `responses`, `messages`.
        command: The command line of its driver; makes the environment first, or skips the test.
        variables: What its environment has besides what every driver gets.
        cases: Those of its driver that are run, by name; all if there are none.
    """

    name: str
    package: str
    language: str
    version: str
    wires: tuple[str, ...]
    command: Callable[[], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one run.

    Attributes:
        outcome: What the client made of it.
        sent: What reached the proxy; nothing in a direct run.
        received: What reached the provider, without requests for summaries.
    """

    outcome: Any
    sent: list[Request]
    received: list[Request]


def in_short(client: Client, wire: str, *whats: str) -> Client:
    """A client on one wire with some of its cases, under a name of its own."""
    cases = tuple(f"{wire}/{what}" for what in whats)
    return replace(client, name=f"{client.name} in short", wires=(wire,), cases=cases)


def _environment(client: Client, way: Way, url: str, home: str) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": home,
        "PYTHONPATH": str(ROOT),
        "BASE_URL": url,
        "KEY": KEY,
        "MODE": way.value,
        "MODEL": MODEL,
        "CONVERSATION": str(CONVERSATION),
        "CASES": " ".join(client.cases),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
        **client.variables,
    }


def _lines(command: list[str], environ: dict[str, str], folder: str) -> Iterator[str]:
    errors = Path(folder) / "stderr"
    with (
        errors.open("w") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        limit = threading.Timer(RUN_LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                yield line
                with contextlib.suppress(BrokenPipeError):  # the driver does not listen, or has ended
                    process.stdin.write("\n")
                    process.stdin.flush()
            assert process.wait() == 0, errors.read_text()
        finally:
            limit.cancel()
            process.kill()


def _cases(lines: Iterator[str], ready: Stage) -> Iterator[tuple[str, Case]]:
    """A case's requests are what came between the line before and its own."""
    sent = received = 0
    for line in lines:
        printed = json.loads(line)
        upto = len(ready.proxy), len(ready.provider)
        got = [request for request in ready.provider[received : upto[1]] if not request.summarises]
        yield printed["case"], Case(printed["outcome"], ready.proxy[sent : upto[0]], got)
        sent, received = upto


def play(client: Client, way: Way) -> dict[str, Case]:
    """The cases of a client's driver, run one way, by name in their order."""
    command = client.command()
    with tempfile.TemporaryDirectory() as folder, stage(way) as ready:
        lines = _lines(command, _environment(client, way, ready.url, folder), folder)
        return dict(_cases(lines, ready))
