"""Serves `/mcp`, where agents call the proxy's tools with MCP over streamable HTTP.

The client's credential identifies the tenant, as in a relayed request. An agent sees only what is stored for
its tenant. The MCP library is an optional dependency and takes memory. So the proxy imports it only when the
first request arrives, and does so in a thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.client_auth import ClientAuthenticator
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.headers import build_header_map
from compaction_proxy.gateway.identity import IdentityResolver
from compaction_proxy.gateway.mcp.tools import NOT_INSTALLED, McpToolResult, McpToolRunner
from compaction_proxy.recall.tool import RecallContext
from compaction_proxy.support.log_events import AGENT_NOT_ANSWERED
from compaction_proxy.support.offload import WORK_OWNER
from compaction_proxy.telemetry.logs import suppress_and_log

# The module that uses the MCP library to answer requests.
SERVER = "compaction_proxy.gateway.mcp.server"
# The most bytes that a request body may have. The proxy refuses a larger one with status 413. A call of a
# tool is much shorter.
MAX_BODY_BYTES = 1024 * 1024
SOURCE = "mcp"
CRASH_MESSAGE = "The proxy failed to process this call."


class McpEndpoint:
    """An ASGI endpoint at which agents call the proxy's MCP tools.

    Args:
        config: The configuration.
        origin: The upstream's origin, which is part of the identity of a tenant.
        tools: Runs the tools.
        secret: Returns the secret key of the digests that identify tenants.
        admission: Limits the number of concurrent requests; relayed requests count, too.
        clients: Checks client keys.
    """

    def __init__(
        self,
        config: Config,
        origin: str,
        *,
        tools: McpToolRunner,
        secret: Callable[[], bytes],
        admission: ConcurrencyLimiter,
        clients: ClientAuthenticator,
    ) -> None:
        self._tools = tools
        self._admission = admission
        self._clients = clients
        self._most_bytes = min(config.server.max_body_bytes, MAX_BODY_BYTES)
        self._identity_resolver = IdentityResolver(config, origin, secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            RequestRefusedError: If the request is not a valid call, or the client is not allowed to make it.
                Status 501 means that the MCP library is not installed.
            OverloadedError: If too many requests are in progress.
            ClientDisconnect: If the client left.
        """
        headers = self._clients.authorize_request(scope["headers"], build_header_map(scope["headers"]))
        if scope["method"] != "POST":
            raise RequestRefusedError(
                405,
                "Only POST is allowed, because the server keeps no sessions.",
                "method_not_allowed",
                ((b"allow", b"POST"),),
            )
        identity = self._identity_resolver.identify_client(headers)
        WORK_OWNER.set(identity.tenant)
        async with self._admission.admit_request() as hold:
            header_map = build_header_map(headers)
            if header_map.get(b"content-encoding", b"identity").strip().lower() != b"identity":
                raise RequestRefusedError(415, "The request body must not be compressed.", "encoded")
            body = await read_body(scope, receive, self._most_bytes, hold)
            try:
                server = await asyncio.to_thread(import_module, SERVER)
            except ModuleNotFoundError:  # the MCP library, or a module that it needs, is missing
                raise RequestRefusedError(501, NOT_INSTALLED, "mcp_not_installed") from None
            context = RecallContext(identity.tenant, identity.conversation, source=SOURCE)
            call = partial(self._call_tool, context)
            with while_connected(scope):
                await server.serve(call, {**scope, "headers": headers}, _replay_body(body), send)

    async def _call_tool(
        self, context: RecallContext, name: str, arguments: Mapping[str, Any]
    ) -> McpToolResult:
        with suppress_and_log(AGENT_NOT_ANSWERED):
            return await self._tools.call_tool(context, name, arguments)
        return McpToolResult(CRASH_MESSAGE, is_error=True)


def _replay_body(body: bytes) -> Receive:
    """Returns an ASGI receive channel whose first message holds `body`. Further calls of it never return."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # `while_connected` notices that the client leaves
        return messages.pop()

    return receive
