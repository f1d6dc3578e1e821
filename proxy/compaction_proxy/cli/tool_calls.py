"""Calls of tools at a running proxy's `/mcp`, for clients that cannot call it themselves.

What answers may be anything, such as another program on the port. The SDK's own client would not tell what
the proxy says where it refuses.
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
MAX_SAID_CHARACTERS = 500


class McpTarget(NamedTuple):
    """The proxy, and who asks it.

    Attributes:
        url: Its base URL.
        headers: The client's credential, and what names its conversation.
        unix_socket: Path of the socket that it is reached over; None: by the URL.
    """

    url: str
    headers: Mapping[str, str]
    unix_socket: str | None = None

    @property
    def display_url(self) -> str:
        """How the proxy is reached, for people."""
        return self.url if self.unix_socket is None else f"unix:{self.unix_socket}"


def call_tool(target: McpTarget, name: str, arguments: Mapping[str, Any]) -> McpToolResult:
    """What the proxy answers to a call of a tool; where it cannot be asked, a sentence that says why."""
    try:
        status, data = _post_call(target, name, arguments)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = f"The proxy at {target.display_url} does not answer ({type(error).__name__}). Is it running?"
        return McpToolResult(why, failed=True)
    try:
        told = json.loads(data)
        if status == http.client.OK and "result" in told:
            return McpToolResult(
                str(told["result"]["content"][0]["text"]), bool(told["result"].get("isError"))
            )
        said = str(told["error"]["message"])[:MAX_SAID_CHARACTERS]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        said = f"what answers there is no compaction-proxy (status {status})"
    return McpToolResult(f"The proxy at {target.display_url} refused: {said}", failed=True)


def _post_call(target: McpTarget, name: str, arguments: Mapping[str, Any]) -> tuple[int, bytes]:
    """Status and body of what is answered. Redirects are answers: the key goes to nobody else."""
    parts = urlsplit(target.url)
    socket = target.unix_socket
    line = create_connection(parts, TIMEOUT_S) if socket is None else connect_unix_socket(socket, TIMEOUT_S)
    call = {"name": name, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    sent = {"content-type": "application/json", "accept": "application/json", "connection": "close"}
    with closing(line):
        line.request("POST", f"{parts.path.rstrip('/')}/mcp", body, {**target.headers, **sent})
        answer = line.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES)
