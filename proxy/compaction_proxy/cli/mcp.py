"""Defines the command `mcp`, an MCP server on stdin and stdout. Its tools are those of a running proxy.

The command sends each tool call to the proxy's MCP endpoint `/mcp` as a separate request, so that the proxy
can be restarted between two calls. The command does not use the client of the MCP SDK, because that client
hides the reason that the proxy gives when it refuses a call.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction_proxy.cli.admin_client import (
    AdminClient,
    AdminUnreachableError,
    create_local_client,
    parse_base_url,
    parse_error_message,
)
from compaction_proxy.cli.console import (
    FAILED,
    HEADER_FORMAT,
    ConfigOption,
    UrlOption,
    exit_with_error,
    parse_header,
)

if TYPE_CHECKING:
    from compaction_proxy.gateway.mcp.tools import McpToolResult

# Environment variables that may contain the client's key. The command uses the first one that is not empty.
KEY_VARIABLES = ("COMPACTION_PROXY_KEY", "OPENAI_API_KEY")
MAX_ANSWER_BYTES = 1024 * 1024


def mcp(
    session: Annotated[
        str | None, typer.Option(help="Header that identifies one session, such as 'x-session-id: 7'.")
    ] = None,
    credential: Annotated[
        str | None,
        typer.Option(
            help="Header with the client's credential, or a file that contains it. "
            f"Default: ${' or $'.join(KEY_VARIABLES)}."
        ),
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve MCP on stdin and stdout, so that agents can search what compactions have removed."""
    import asyncio
    from functools import partial

    from compaction_proxy.config.loader import load_config
    from compaction_proxy.gateway.mcp.tools import NOT_INSTALLED

    try:
        from compaction_proxy.gateway.mcp.server import run_stdio
    except ModuleNotFoundError:
        exit_with_error(NOT_INSTALLED, FAILED)
    headers = {**_build_credential_header(credential), **(_parse_ascii_header(session) if session else {})}
    if url is not None:
        client = AdminClient(parse_base_url(url), headers)
    else:
        local = create_local_client(load_config(config, os.environ).config.server)
        client = replace(local, headers=headers)
    asyncio.run(
        run_stdio(lambda name, arguments: asyncio.to_thread(partial(call_tool, client, name, arguments)))
    )


def call_tool(client: AdminClient, name: str, arguments: Mapping[str, Any]) -> "McpToolResult":
    """Calls a tool of the proxy and returns the result. If the call fails, the result contains the reason.

    Args:
        client: Sends the request to the proxy. `client.headers` must contain the credential that identifies
            the tenant and, to name a conversation, the session header.
        name: Name of the tool.
        arguments: Arguments of the tool.
    """
    from compaction_proxy.gateway.mcp.tools import McpToolResult

    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    try:
        with client.open_response("POST", "/mcp", body) as response:
            data = response.read(MAX_ANSWER_BYTES)
    except AdminUnreachableError as error:
        cause = type(error.__cause__).__name__
        text = f"The proxy at {client.display_url} does not answer ({cause}). Is it running?"
        return McpToolResult(text, is_error=True)
    try:
        result = json.loads(data)["result"]
        return McpToolResult(str(result["content"][0]["text"]), bool(result.get("isError")))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        unknown = f"the server is not a compaction-proxy (status {response.status})"
        reason = parse_error_message(data) or unknown
    return McpToolResult(f"The proxy at {client.display_url} refused the request: {reason}", is_error=True)


def _build_credential_header(credential: str | None) -> dict[str, str]:
    """Returns the header field with the client's credential. Returns an empty dict if there is no credential.

    `credential` is a header `name: value`, or the path of a file that contains such a header. If `credential`
    is None, the function takes the key from the environment (`KEY_VARIABLES`).
    """
    if credential is not None:
        return _parse_ascii_header(credential)
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    return {"authorization": f"Bearer {key}"} if key else {}


def _parse_ascii_header(text: str) -> dict[str, str]:
    name, value = parse_header(text)
    if not (name + value).isascii() or not (name + value).isprintable():
        exit_with_error(HEADER_FORMAT, FAILED)
    return {name: value}
