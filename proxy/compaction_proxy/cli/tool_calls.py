"""Calls the tools at `/mcp` of a running proxy, for MCP clients that cannot send HTTP requests themselves.

A program other than the proxy may answer on the port, so answers are treated as untrusted. The client of the
MCP SDK is not used, because it hides the reason that the proxy gives when it refuses a call.
"""

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from compaction_proxy.cli.health import connect_unix_socket, create_connection
from compaction_proxy.gateway.mcp.tools import McpToolResult

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_REASON_CHARACTERS = 500


class McpTarget(NamedTuple):
    """The proxy to call, and the header fields that identify the client.

    Attributes:
        url: Base URL of the proxy.
        headers: The client's credential and the header that names its conversation.
        unix_socket: Path of the Unix socket to connect to. None connects to the URL's host and port.
    """

    url: str
    headers: Mapping[str, str]
    unix_socket: str | None = None

    @property
    def display_url(self) -> str:
        """The address of the proxy as shown to users."""
        return self.url if self.unix_socket is None else f"unix:{self.unix_socket}"


def call_tool(target: McpTarget, name: str, arguments: Mapping[str, Any]) -> McpToolResult:
    """Calls a tool of the proxy and returns the result. If the call fails, the result says why."""
    try:
        status, data = _post_call(target, name, arguments)
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = f"The proxy at {target.display_url} does not answer ({type(error).__name__}). Is it running?"
        return McpToolResult(text, is_error=True)
    try:
        answer = json.loads(data)
        if status == http.client.OK and "result" in answer:
            return McpToolResult(
                str(answer["result"]["content"][0]["text"]), bool(answer["result"].get("isError"))
            )
        reason = str(answer["error"]["message"])[:MAX_REASON_CHARACTERS]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reason = f"what answers there is no compaction-proxy (status {status})"
    return McpToolResult(f"The proxy at {target.display_url} refused: {reason}", is_error=True)


def _post_call(target: McpTarget, name: str, arguments: Mapping[str, Any]) -> tuple[int, bytes]:
    """Sends the call and returns the status code and the body of the answer.

    Redirects are not followed, so that the client's credential is never sent to another server.
    """
    parts = urlsplit(target.url)
    socket = target.unix_socket
    connection = (
        create_connection(parts, TIMEOUT_S) if socket is None else connect_unix_socket(socket, TIMEOUT_S)
    )
    call = {"name": name, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    fields = {"content-type": "application/json", "accept": "application/json", "connection": "close"}
    with closing(connection):
        connection.request("POST", f"{parts.path.rstrip('/')}/mcp", body, {**target.headers, **fields})
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES)
