"""The Redis of the manifests and of the chart: its very command and its probes, run here."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.helpers.free_ports import find_free_port
from tests.helpers.redis_servers import executable
from tests.system.deploy.test_helm import HELM, rendered
from tests.system.deploy.test_kubernetes import one

PASSWORD = "a-password-of-letters"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def read_container(source: str) -> dict[str, Any]:
    """The container of the StatefulSet that the manifests have, or that the chart renders."""
    if source == "manifests":
        stateful = one("standalone", "StatefulSet", "compaction-proxy-redis")
    elif HELM:
        [stateful] = [each for each in rendered("standalone") if each["kind"] == "StatefulSet"]
    else:
        pytest.skip("needs helm on the PATH, or $HELM")
    container: dict[str, Any] = stateful["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.fixture(params=["manifests", "chart"])
def container(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_container(request.param)


def place_programs(folder: Path, port: int) -> Path:
    """`valkey-server` and `valkey-cli` as in the image, but on a port of this test's own."""
    programs = folder / "bin"
    programs.mkdir()
    server = programs / "valkey-server"
    server.write_text(f'#!/bin/sh\nexec {executable()} "$@" --port {port}\n', encoding="utf-8")
    server.chmod(0o755)
    client = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if client is not None:
        placed = programs / "valkey-cli"
        placed.write_text(f'#!/bin/sh\nexec {client} -p {port} "$@"\n', encoding="utf-8")
        placed.chmod(0o755)
    return programs


@contextmanager
def running(container: dict[str, Any], folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    programs = place_programs(folder, port)
    [variable] = [each["name"] for each in container["env"]]
    env = {"PATH": f"{programs}:{os.environ['PATH']}", variable: PASSWORD}
    arguments = [each.replace("/data", str(folder)) for each in container["args"]]
    with subprocess.Popen([*container["command"], *arguments], env=env, stdout=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(port=port, password=PASSWORD, socket_timeout=100) as client:
                wait_until_it_answers(client, process)
            yield process
        finally:
            process.kill()


def wait_until_it_answers(client: Any, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1_000):
        assert process.poll() is None
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("it never answers")


def test_only_the_password_opens_it_and_no_argument_shows_it(
    container: dict[str, Any], tmp_path: Path
) -> None:
    port = find_free_port()
    with running(container, tmp_path, port) as process:
        stranger = redis.Redis(port=port, socket_timeout=100)
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert PASSWORD.encode() not in arguments
        assert b"valkey-server" in arguments or b"redis-server" in arguments
        with redis.Redis(port=port, password=PASSWORD, socket_timeout=100) as client:
            settings = client.config_get()
        told = {name: settings[name] for name in ("appendonly", "save", "maxmemory", "maxmemory-policy")}
        assert told == {
            "appendonly": "yes", "save": "", "maxmemory": str(512 << 20), "maxmemory-policy": "volatile-lru",
        }  # fmt: skip
        process.terminate()
        assert process.wait(timeout=100) == 0  # the signal reaches the server, and no shell in between


def test_probes_ask_it_with_the_password_of_the_environment(
    container: dict[str, Any], tmp_path: Path
) -> None:
    port = find_free_port()
    commands = [container[name]["exec"]["command"] for name in PROBES]
    assert commands == [["valkey-cli", "-e", "ping"]] * 3
    if not (shutil.which("valkey-cli") or shutil.which("redis-cli")):
        pytest.skip("needs valkey-cli or redis-cli")
    with running(container, tmp_path, port):
        [variable] = [each["name"] for each in container["env"]]
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        answers = [
            subprocess.run(
                commands[0], env={"PATH": path, **env}, capture_output=True, text=True, check=False
            )
            for env in ({variable: PASSWORD}, {variable: "another"}, {})
        ]
    assert answers[0].returncode == 0
    assert answers[0].stdout.strip() == "PONG"
    assert [each.returncode == 0 for each in answers[1:]] == [False, False]
