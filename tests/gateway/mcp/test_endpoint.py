"""`/mcp` as an HTTP endpoint: whom it answers, what it refuses, and what it costs where nobody asks."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.cli.admin_client import AdminClient
from compaction_proxy.cli.mcp import call_tool as called_by_command
from compaction_proxy.gateway.mcp.tools import McpToolResult
from tests.gateway.mcp.conftest import CODE, OURS, Stack, over_http, running, said

CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "memory_search", "arguments": {"query": CODE}},
}
ROOT = Path(__file__).resolve().parents[3]


async def asked(url: str, **headers: str) -> httpx.Response:
    """The answer to a call without a key."""
    fields = {
        "accept": "application/json",
        **{name.replace("_", "-"): headers[name] for name in headers},
    }
    async with httpx.AsyncClient(trust_env=False, timeout=100) as client:
        return await client.post(f"{url}/mcp", json=CALL, headers=fields)


def called(reached: AdminClient) -> McpToolResult:
    """What the command answers to a call."""
    return called_by_command(reached, "conversation_status", {})


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}]
)
async def test_pages_of_other_machines_are_refused(stack: Stack, headers: dict[str, str]) -> None:
    answer = await asked(stack.url, authorization=OURS, **headers)
    assert answer.status_code == 403
    assert code(answer) in {"origin_not_allowed", "host_not_allowed"}


async def test_what_is_no_call_is_refused(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as client:
        answers = [
            await client.get("/mcp", headers={"accept": "text/event-stream"}),
            await client.delete("/mcp"),
            await client.post("/mcp", json=CALL, headers={"content-encoding": "gzip"}),
            await client.post("/mcp/more", json=CALL),
        ]
    assert [(each.status_code, code(each)) for each in answers] == [
        (405, "method_not_allowed"),
        (405, "method_not_allowed"),
        (415, "encoded"),
        (404, "not_found"),
    ]
    assert [each.headers.get("allow") for each in answers] == ["POST", "POST", None, None]


@pytest.mark.parametrize("encoding", ["identity", "Identity", "IDENTITY"])
async def test_a_body_that_says_that_it_is_not_encoded_is_read(stack: Stack, encoding: str) -> None:
    assert (await asked(stack.url, authorization=OURS, content_encoding=encoding)).status_code == 200


async def test_a_body_that_is_too_large_is_not_read(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    writer.write(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1048577\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"413"
    writer.close()


async def test_where_keys_are_named_one_is_needed_and_the_path_moves_with_the_others() -> None:
    async with running(client_keys=["sk-known-client"], base_path="/own") as (url, _):
        stack = Stack(f"{url}/own")
        unknown = await asked(stack.url)
        assert (unknown.status_code, code(unknown)) == (401, "invalid_api_key")
        async with over_http(stack, "Bearer sk-known-client") as client:
            assert await said(client, "conversation_status") == "There are no conversations yet."
        refused = await asyncio.to_thread(
            called, AdminClient(stack.url, {"authorization": "Bearer sk-other"})
        )
        reason = "Send a client key of this proxy (server.client_keys)."
        told = f"The proxy at {stack.url} refused the request: {reason}"
        assert refused == McpToolResult(told, is_error=True)


def test_the_library_is_loaded_by_nobody_and_where_it_is_missing_both_ways_say_what_to_install() -> None:
    code = (
        "import asyncio, sys, httpx\n"
        "from compaction_proxy.app import create_app\nfrom compaction_proxy.cli.main import app as command\n"
        "from compaction_proxy.config.config import Config\n"
        "from compaction_proxy.gateway.server import serve_embedded\n"
        "async def main():\n"
        "    app = create_app(Config.model_validate({'store': {'url': 'memory://'}}))\n"
        "    async with serve_embedded(app) as url, httpx.AsyncClient(trust_env=False) as client:\n"
        "        print({'mcp', 'mcp_types', 'jsonschema', 'httpx2'} & set(sys.modules))\n"
        "        sys.modules['mcp'] = sys.modules['mcp_types'] = None\n"
        "        answer = await client.post(url + '/mcp', json={})\n"
        "        print(answer.status_code, answer.json()['error']['message'], flush=True)\n"
        "asyncio.run(main())\ncommand(['mcp'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    wanted = "MCP needs an optional package: pip install 'compaction-proxy[mcp]'"
    assert done.stdout.splitlines()[-2:] == ["set()", f"501 {wanted}"]
    assert (done.stderr.splitlines(), done.returncode) == ([wanted], 1)
