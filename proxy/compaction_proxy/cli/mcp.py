"""Holds the command `mcp`, an MCP server on stdin and stdout with the tools of a running proxy's `/mcp`.

The command sends each tool call to the proxy as a separate request, so that the proxy can be restarted
between calls.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compaction_proxy.cli.exit import FAILED, exit_with_error
from compaction_proxy.cli.options import ConfigOption, UrlOption

if TYPE_CHECKING:
    from compaction_proxy.cli.tool_calls import McpTarget

# Environment variables that may hold the client's key. The first one that is set is used.
KEY_VARIABLES = ("COMPACTION_PROXY_KEY", "OPENAI_API_KEY")


def mcp(
    session: Annotated[
        str | None, typer.Option(help="Header that names one session, such as 'x-session-id: 7'.")
    ] = None,
    credential: Annotated[
        str | None,
        typer.Option(
            help="Header that the client shows, or a file that holds it; "
            f"default: ${', else $'.join(KEY_VARIABLES)}."
        ),
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve agents over MCP, on stdin and stdout: search what was removed from your conversations."""
    import asyncio
    from functools import partial

    from compaction_proxy.cli.tool_calls import call_tool
    from compaction_proxy.gateway.mcp.tools import NOT_INSTALLED

    try:
        from compaction_proxy.gateway.mcp.server import run_stdio
    except ModuleNotFoundError:
        exit_with_error(NOT_INSTALLED, FAILED)
    headers = {**_build_credential_header(credential), **(_parse_header(session) if session else {})}
    target = _resolve_target(url, config, headers)
    asyncio.run(
        run_stdio(lambda name, arguments: asyncio.to_thread(partial(call_tool, target, name, arguments)))
    )


def _build_credential_header(credential: str | None) -> dict[str, str]:
    """Returns the header field with the client's credential, or no field if there is no credential.

    `credential` is a header `name: value`, or the path of a file that holds one. If it is None, an
    environment variable supplies the key.
    """
    if credential is not None:
        return _parse_header(
            Path(credential).read_text("utf-8") if Path(credential).is_file() else credential
        )
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    return {"authorization": f"Bearer {key}"} if key else {}


def _parse_header(text: str) -> dict[str, str]:
    name, colon, value = text.strip().partition(":")
    if not colon or not text.isascii() or not text.strip().isprintable():
        exit_with_error("a header is written as 'name: value'", FAILED)
    return {name.strip().lower(): value.strip()}


def _resolve_target(url: str | None, config: Path | None, headers: Mapping[str, str]) -> "McpTarget":
    from compaction_proxy.cli.admin_client import parse_base_url
    from compaction_proxy.cli.health import build_local_url
    from compaction_proxy.cli.tool_calls import McpTarget
    from compaction_proxy.config.loader import load_config

    if url is not None:
        return McpTarget(parse_base_url(url), headers)
    server = load_config(config, os.environ).config.server
    return McpTarget(build_local_url(server), headers, server.unix_socket)
