"""An app beside the proxy, as in docker-compose.yml's profile `demo`, without Docker."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.gateway.server import serve_embedded

ROOT = Path(__file__).resolve().parents[3]
APP = ROOT / "deploy" / "examples" / "app" / "app.py"


@pytest.fixture
def services(documents: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = documents("docker-compose.yml")[0]["services"]
    return found


@asynccontextmanager
async def demo_provider(command: list[str]) -> AsyncIterator[str]:
    """The demo provider, run by the compose file's command on a free port; its base URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "compaction_proxy", *command, "--port", "0"),
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, stdout=PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        printed: list[str] = []
        while not (printed and printed[-1].startswith("demo provider listens on")):
            printed.append((await asyncio.wait_for(process.stdout.readline(), 30)).decode())
        assert any("DEMO PROVIDER" in line and "no model" in line for line in printed)
        found = re.search(r"http://[\d.:]+", printed[-1])
        assert found is not None
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_app(environ: dict[str, str]) -> str:
    """What the example app prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-B", APP, env={"PATH": os.environ["PATH"], **environ}, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_an_app_that_only_knows_a_base_url_talks_through_the_proxy(
    services: dict[str, dict[str, Any]], configured: Any
) -> None:
    environ = services["demo-proxy"]["environment"]
    app = services["demo-app"]["environment"]
    async with demo_provider(services["demo-provider"]["command"]) as upstream:
        pointed = environ["COMPACTION_PROXY__UPSTREAM__BASE_URL"].replace(
            "http://demo-provider:4140", upstream
        )
        config = configured(environ | {"COMPACTION_PROXY__UPSTREAM__BASE_URL": pointed})
        async with serve_embedded(create_app(config)) as url:
            assert app["OPENAI_BASE_URL"] == "http://demo-proxy:4141/v1"
            printed = await run_app(app | {"OPENAI_BASE_URL": f"{url}/v1"})
        async with httpx.AsyncClient(base_url=upstream, trust_env=False) as client:
            log = (await client.get("/__log")).json()
    questions = re.findall(r"^> (.+)\n(?=.+)", printed, re.MULTILINE)
    assert questions == ["My order is A-4711.", "Which colours are there?", "What was my order number?"]
    assert [(seen["model"], seen["status"]) for seen in log] == [("demo-agent", 200)] * 3


def test_a_demo_provider_without_a_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [
            sys.executable,
            "-m",
            "compaction_proxy",
            "demo-provider",
            "--port",
            str(taken.getsockname()[1]),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_demo_provider_refuses_a_port_that_cannot_be() -> None:
    command = [sys.executable, "-m", "compaction_proxy", "demo-provider", "--port", "99999"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert done.stderr == "server.port: cannot listen on 127.0.0.1:99999: the largest port is 65535\n"


def test_the_app_and_its_image_have_the_same_sdk() -> None:
    text = (APP.parent / "Dockerfile").read_text(encoding="utf-8")
    pinned = re.search(r'"openai==(\d+)\.\d+\.\d+"', text)
    locked = re.search(r'name = "openai"\nversion = "(\d+)\.', (ROOT / "uv.lock").read_text(encoding="utf-8"))
    assert pinned is not None
    assert locked is not None
    assert pinned[1] == locked[1]
