"""nginx, Caddy and Traefik before the proxy, with the configurations that we ship."""

import asyncio
import json
import os
import re
import shutil
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.cli.demo.provider import AGENT_MODEL, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from tests.doubles.faulty_provider import FaultyProvider
from tests.doubles.word_counter import WordCounter
from tests.helpers.free_ports import find_free_port

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
CHUNK_S = 0.1
NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {ours}
}}
"""
# Traefik's listens in its static configuration, which are arguments here.
TRAEFIK = "{ours}"
CADDY = "{{\n\tadmin off\n\tauto_https off\n}}\n{ours}"


@dataclass(frozen=True, slots=True)
class Front:
    """A web server, the configuration that we ship for it, and how it is run with another one."""

    program: str
    shipped: Path
    wrapping: str
    command: Callable[[Path, int], list[str]]
    listens: str = r"(?m)(listen |^:)8080"


FRONTS = {
    "nginx": Front(
        "nginx",
        DEPLOY / "nginx" / "compaction-proxy.conf",
        NGINX,
        lambda file, _: ["-p", str(file.parent), "-c", str(file)],
    ),
    "caddy": Front(
        "caddy",
        DEPLOY / "caddy" / "Caddyfile",
        CADDY,
        lambda file, _: ["run", "--adapter", "caddyfile", "--config", str(file)],
    ),
    "traefik": Front(
        "traefik",
        DEPLOY / "traefik" / "compaction-proxy.yml",
        TRAEFIK,
        lambda file, port: [
            f"--entryPoints.web.address=127.0.0.1:{port}",
            "--entryPoints.web.transport.respondingTimeouts.readTimeout=0s",
            f"--providers.file.filename={file}",
            "--global.checkNewVersion=false",
            "--global.sendAnonymousUsage=false",
        ],
        r'(?m)(^# +address: ":)8080',
    ),
}


async def accepts(port: int, process: Process) -> None:
    """Wait until something listens."""
    async with asyncio.timeout(60):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
    raise AssertionError(f"ended with {process.returncode}")


async def leads_to_the_proxy(url: str) -> None:
    """Wait until the web server has read where to send requests; Traefik listens before it has."""
    async with asyncio.timeout(100), httpx.AsyncClient(base_url=url, timeout=100, trust_env=False) as client:
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - another process tells nothing
            await asyncio.sleep(0.05)


@asynccontextmanager
async def before(url: str, front: Front, folder: Path) -> AsyncIterator[str]:
    """The base URL of a web server before a proxy."""
    program = shutil.which(front.program, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"needs {front.program}")
    port = find_free_port()
    text = front.shipped.read_text(encoding="utf-8")
    ours, listens = re.subn(front.listens, rf"\g<1>{port}", text)
    ours, reaches = re.subn(r"127\.0\.0\.1:4141", url.removeprefix("http://"), ours)
    assert (listens, reaches) == (1, 1)
    file = folder / "config.yml"  # Traefik goes by the ending, the others take any name
    file.write_text(front.wrapping.format(folder=folder, ours=ours), encoding="utf-8")
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(
        program, *front.command(file, port), env=env, stderr=DEVNULL
    )
    try:
        await accepts(port, process)
        await leads_to_the_proxy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()  # Caddy would wait for its connections
        await process.wait()


@dataclass(frozen=True, slots=True)
class Chain:
    """A client of the web server before the proxy, and the provider behind it."""

    client: httpx.AsyncClient
    provider: FaultyProvider


@pytest.fixture(params=list(FRONTS))
async def chain(request: pytest.FixtureRequest, tmp_path: Path, proxied: Any) -> AsyncIterator[Chain]:
    provider = FaultyProvider(DemoProviderSettings(WordCounter(), window=10_000_000))
    async with (
        serve_embedded(provider) as upstream,
        proxied(upstream) as inner,
        before(str(inner.base_url).rstrip("/"), FRONTS[request.param], tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=100, trust_env=False) as client,
    ):
        yield Chain(client, provider)


def body(text: str, *, stream: bool) -> dict[str, Any]:
    return {"model": AGENT_MODEL, "stream": stream, "messages": [{"role": "user", "content": text}]}


SLOW = {"x-demo-fault": f"delay={CHUNK_S}"}
WORDS = "one two three four five six seven eight"


async def test_a_stream_arrives_as_it_is_made(chain: Chain) -> None:
    arrived: list[float] = []
    request = chain.client.stream("POST", "/v1/chat/completions", json=body(WORDS, stream=True), headers=SLOW)
    async with request as answer:
        data = b""
        async for part in answer.aiter_raw():
            arrived.append(time.monotonic())
            data += part
    events = [line for line in data.split(b"\n\n") if line]
    assert events[-1] == b"data: [DONE]"
    assert len(events) > 4
    # Held back by a buffer, all would come at once at the end.
    assert arrived[-1] - arrived[0] > CHUNK_S * (len(events) - 1) / 2


async def departs(chain: Chain) -> None:
    async with asyncio.timeout(100):
        while not chain.provider.departure_count:  # noqa: ASYNC110 - the provider keeps a count, no event
            await asyncio.sleep(0.02)


async def test_a_client_that_leaves_a_stream_ends_the_call_to_the_provider(chain: Chain) -> None:
    long = body(WORDS * 50, stream=True)
    async with chain.client.stream("POST", "/v1/chat/completions", json=long, headers=SLOW) as answer:
        await anext(answer.aiter_raw())
    await departs(chain)


async def test_a_client_that_leaves_before_the_answer_ends_the_call_to_the_provider(chain: Chain) -> None:
    asked = body(WORDS, stream=True)
    headers = {"x-demo-fault": "hang"}
    with pytest.raises(httpx.ReadTimeout):
        await chain.client.post("/v1/chat/completions", json=asked, headers=headers, timeout=2)
    await departs(chain)


async def test_headers_with_underscores_and_large_bodies_pass(chain: Chain) -> None:
    text = "word " * 600_000
    headers = {"session_id": "s-1", "authorization": "Bearer sk-front"}
    answer = await chain.client.post("/v1/chat/completions", json=body(text, stream=False), headers=headers)
    assert answer.status_code == 200, answer.text
    (seen,) = chain.provider.log
    assert json.loads(seen.body)["messages"][0]["content"] == text
    assert {("session_id", "s-1"), ("authorization", "Bearer sk-front")} <= set(seen.headers)


async def test_health_is_seen_from_outside_and_what_is_for_operators_is_not(chain: Chain) -> None:
    paths = ("/readyz", "/livez", "/admin", "/admin/v1/sessions", "/ui", "/metrics", "/mcp")
    statuses = [(await chain.client.get(path)).status_code for path in paths]
    assert statuses == [200, 200, 404, 404, 404, 404, 404]
