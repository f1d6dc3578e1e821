"""The command `mcp`: the calls that it passes on, and what an agent is told where there is no answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from compaction_proxy.cli.admin_client import AdminClient
from compaction_proxy.cli.mcp import KEY_VARIABLES, _build_credential_header, _parse_ascii_header, call_tool
from compaction_proxy.gateway.mcp.tools import McpToolResult
from tests.helpers.scripted_admin import Scripted


def call(client: AdminClient, **arguments: Any) -> McpToolResult:
    return call_tool(client, "memory_search", arguments)


def answer(script: Scripted, body: object, status: int = 200) -> McpToolResult:
    """Returns the result of a call that the proxy answers like this."""
    script.answers["POST", "/mcp"] = (status, body)
    return call(AdminClient(script.url, {"authorization": "Bearer k"}), query="port")


@pytest.mark.parametrize("is_error", [True, False, None])
def test_a_call_is_passed_on_with_the_credential_and_its_result_comes_back(
    script: Scripted,
    is_error: bool | None,  # noqa: FBT001 - a case of the table
) -> None:
    flag = {} if is_error is None else {"isError": is_error}
    result = {"content": [{"type": "text", "text": "4141"}], **flag}
    told = answer(script, {"jsonrpc": "2.0", "id": 1, "result": result})
    assert told == McpToolResult("4141", is_error=bool(is_error))
    [(method, path, body, credential)] = script.asked
    assert (method, path, credential) == ("POST", "/mcp", "Bearer k")
    assert json.loads(body) == {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "memory_search", "arguments": {"query": "port"}},
    }


def test_a_refusal_is_told_with_its_reason(script: Scripted) -> None:
    told = answer(script, {"error": {"message": "Show a key.", "code": "invalid_api_key"}}, 401)
    assert told == McpToolResult(f"The proxy at {script.url} refused the request: Show a key.", is_error=True)


def test_a_socket_where_nobody_listens_is_told_of(tmp_path: Path) -> None:
    told = call(AdminClient("http://localhost", {}, str(tmp_path / "none")))
    where = f"The proxy at unix:{tmp_path}/none"
    assert told == McpToolResult(
        f"{where} does not answer (FileNotFoundError). Is it running?", is_error=True
    )


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (b"", "does not answer (RemoteDisconnected). Is it running?"),
        (b"SSH-2.0\r\n\r\n", "does not answer (BadStatusLine). Is it running?"),
        (
            b"HTTP/1.0 200 OK\r\n\r\n[]",
            "refused: the server is not a compaction-proxy (status 200)",
        ),
        (
            b'HTTP/1.0 500 Oh\r\n\r\n{"result": {"content": []}}',
            "refused: the server is not a compaction-proxy (status 500)",
        ),
    ],
)
async def test_another_program_on_the_port_is_told_of(answer: bytes, wanted: str) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        told = await asyncio.to_thread(call, AdminClient(url, {}))
    assert told == McpToolResult(f"The proxy at {url} {wanted}", is_error=True)


def test_a_header_that_names_a_session_is_ascii_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parse_ascii_header("X-Session-Id: 7") == {"x-session-id": "7"}
    for text in ("x-session-id: \u00e9", "x-session-id: a\nb: c"):
        with pytest.raises(typer.Exit) as ended:
            _parse_ascii_header(text)
        assert ended.value.exit_code == 1
    assert capsys.readouterr().err.count("write a header as 'name: value'") == 2


def test_the_credential_is_a_header_or_a_file_or_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert _build_credential_header(None) == {}
    monkeypatch.setenv(KEY_VARIABLES[1], "sk-2")
    assert _build_credential_header(None) == {"authorization": "Bearer sk-2"}
    monkeypatch.setenv(KEY_VARIABLES[0], "sk-1")
    assert _build_credential_header(None) == {"authorization": "Bearer sk-1"}
    (tmp_path / "key").write_text("api-key: sk-3\n")
    assert _build_credential_header(str(tmp_path / "key")) == {"api-key": "sk-3"}
    assert _build_credential_header("x-api-key: sk-4") == {"x-api-key": "sk-4"}
