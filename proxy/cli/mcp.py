"""`mcp`: the tools of a running proxy's `/mcp` for a client that speaks over stdin and stdout.

Each call is sent on by itself, so that the proxy may be restarted meanwhile. What answers may be anything,
such as another program on the port.
"""

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer

from proxy.cli.ending import FAILED, fail
from proxy.cli.options import ConfigOption, UrlOption
from proxy.cli.probe import connection, local_url, over_unix_socket

if TYPE_CHECKING:
    from proxy.mcp.tools import Answer

# In this order.
KEYS = ("COMPACTION_PROXY_KEY", "OPENAI_API_KEY")
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_SAID_CHARACTERS = 500
NOT_INSTALLED = "MCP needs an extra: pip install 'compaction-proxy[mcp]'"


class Reached(NamedTuple):
    """The proxy, and who asks it.

    Attributes:
        url: Its base URL.
        headers: The client's credential, and what names its conversation.
        unix_socket: Path of the socket that it is reached over; None: by the URL.
    """

    url: str
    headers: Mapping[str, str]
    unix_socket: str | None = None


def mcp(
    session: Annotated[
        str | None, typer.Option(help="Header that names one session, such as 'x-session-id: 7'.")
    ] = None,
    credential: Annotated[
        str | None,
        typer.Option(help=f"Header that the client shows, or a file that holds it; default: ${KEYS[0]}."),
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve agents over MCP, on stdin and stdout: search what was removed from your conversations."""
    import asyncio
    from functools import partial

    try:
        from proxy.mcp.stdio import run
    except ModuleNotFoundError:
        fail(NOT_INSTALLED, FAILED)
    headers = {**_shown(credential), **(_field(session) if session else {})}
    reached = _reached(url, config, headers)
    asyncio.run(run(lambda name, arguments: asyncio.to_thread(partial(asked, reached, name, arguments))))


def _shown(credential: str | None) -> dict[str, str]:
    """The credential as a header field; none where there is none."""
    if credential is not None:
        return _field(Path(credential).read_text("utf-8") if Path(credential).is_file() else credential)
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
    return {"authorization": f"Bearer {key}"} if key else {}


def _field(text: str) -> dict[str, str]:
    name, colon, value = text.strip().partition(":")
    if not colon or not text.isascii() or not text.strip().isprintable():
        fail("a header is written as 'name: value'", FAILED)
    return {name.strip().lower(): value.strip()}


def _reached(url: str | None, config: Path | None, headers: Mapping[str, str]) -> Reached:
    from proxy.cli.admin_client import checked
    from proxy.config.sources import load

    if url is not None:
        return Reached(checked(url), headers)
    server = load(config, os.environ).config.server
    return Reached(local_url(server), headers, server.unix_socket)


def asked(reached: Reached, name: str, arguments: Mapping[str, Any]) -> "Answer":
    """What the proxy answers to a call of a tool; where it cannot be asked, a sentence that says why."""
    from proxy.mcp.tools import Answer

    try:
        status, data = _posted(reached, name, arguments)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = f"The proxy at {reached.url} does not answer ({type(error).__name__}). Is it running?"
        return Answer(why, failed=True)
    try:
        told = json.loads(data)
        if status == http.client.OK and "result" in told:
            return Answer(str(told["result"]["content"][0]["text"]), bool(told["result"].get("isError")))
        said = str(told["error"]["message"])[:MAX_SAID_CHARACTERS]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        said = f"what answers there is no compaction-proxy (status {status})"
    return Answer(f"The proxy at {reached.url} refused: {said}", failed=True)


def _posted(reached: Reached, name: str, arguments: Mapping[str, Any]) -> tuple[int, bytes]:
    """Status and body of what is answered. Redirects are answers: the key goes to nobody else."""
    parts = urlsplit(reached.url)
    socket = reached.unix_socket
    line = connection(parts, TIMEOUT_S) if socket is None else over_unix_socket(socket, TIMEOUT_S)
    call = {"name": name, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    sent = {"content-type": "application/json", "accept": "application/json", "connection": "close"}
    line.request("POST", f"{parts.path.rstrip('/')}/mcp", body, {**reached.headers, **sent})
    with line.getresponse() as answer:
        return answer.status, answer.read(MAX_ANSWER_BYTES)
