"""The front door: pure ASGI, decides which handler answers a request, and turns errors into answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError, UpstreamError
from compaction_proxy.gateway.body_budget import OUT_OF_MEMORY, RETRY_AFTER_S
from compaction_proxy.gateway.client_auth import ALLOW_ALL_CLIENTS, ClientAuthenticator
from compaction_proxy.gateway.headers import HOP_HEADER, build_header_map, refuse_loop
from compaction_proxy.gateway.paths import COMPACT_PATH, MCP_PATH, is_own_path
from compaction_proxy.gateway.sse_keepalive import send_keepalives
from compaction_proxy.gateway.upstream import find_error_encoder, send_error
from compaction_proxy.wires.registry import find_wire

# What goes with 426 (RFC 9110 §15.5.22): the protocol to ask in. Clients of the Responses API go on over HTTP
# at once on this very status, and retry on others.
_ASK_IN_HTTP: Final = ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))
_WEBSOCKET: Final = RequestRefusedError(
    426, "WebSockets are not relayed; use HTTP.", "websocket_not_supported"
)


def _has_websocket_upgrade(upgrade: bytes) -> bool:
    return b"websocket" in (each.strip() for each in upgrade.lower().split(b","))


@dataclass(frozen=True, slots=True)
class RelayHandler:
    """An endpoint behind what holds for every request that is relayed. Pure ASGI.

    It checks the client's key, refuses loops and WebSockets, keeps silent event streams alive, and turns our
    errors into JSON. Errors are expected before the response has started; later there is nothing left to say.

    Attributes:
        endpoint: Answers the request.
        hop: The mark of this installation, 16 hex digits.
        clients: Who may have requests relayed.
        keep_alive_s: Seconds of silence after which an event stream gets a comment; 0: never.
    """

    endpoint: ASGIApp
    hop: str
    clients: ClientAuthenticator = ALLOW_ALL_CLIENTS
    keep_alive_s: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            first = build_header_map(scope["headers"])
            scope["headers"] = self.clients.authorize_request(scope["headers"], first)
            if HOP_HEADER in first:
                refuse_loop(scope["headers"], self.hop)
            if b"upgrade" in first and _has_websocket_upgrade(first[b"upgrade"]):
                await send_error(send, _WEBSOCKET, _ASK_IN_HTTP)
            elif self.keep_alive_s:
                with send_keepalives(send, self.keep_alive_s) as audible:
                    await self.endpoint(scope, receive, audible)
            else:
                await self.endpoint(scope, receive, send)
        except (RequestRefusedError, OverloadedError, UpstreamError) as error:
            await send_error(send, error, shape=find_error_encoder(scope))
        except MemoryError:
            await send_error(
                send, OverloadedError(RETRY_AFTER_S, OUT_OF_MEMORY), shape=find_error_encoder(scope)
            )
        except ClientDisconnect:
            return


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Hands each request to its handler.

    Attributes:
        admin: Answers our own paths, `base_path` included.
        wires: Answer the compacted paths, by the dialect's name.
        passthrough: Answers everything else.
        compact: Answers `/v1/compact` below `base_path`.
        posts: Answer other posts that are read, by how their paths end.
        mcp: Answers `/mcp` below `base_path`.
        base_path: Where our own paths live instead of the root.
        lifespan: Is given the server's lifespan events.
    """

    admin: ASGIApp
    wires: Mapping[str, ASGIApp]
    passthrough: ASGIApp
    compact: ASGIApp
    posts: Mapping[bytes, ASGIApp]
    mcp: ASGIApp
    base_path: str
    lifespan: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the server's life cycle."""
        if scope["type"] == "lifespan":
            await self.lifespan(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before accepting: the server answers 403
        elif not is_own_path(scope["path"], self.base_path):
            wire = find_wire(scope["method"], scope["raw_path"])
            handler = self._find_handler(scope) if wire is None else self.wires[wire.name]
            await handler(scope, receive, send)
        elif scope["path"] == self.base_path + COMPACT_PATH:
            await self.compact(scope, receive, send)
        elif scope["path"] == self.base_path + MCP_PATH:
            await self.mcp(scope, receive, send)
        else:
            await self.admin(scope, receive, send)

    def _find_handler(self, scope: Scope) -> ASGIApp:
        """Returns the handler of a request that is no conversation's."""
        if scope["method"] != "POST":
            return self.passthrough
        path = scope["raw_path"]
        return next((app for ending, app in self.posts.items() if path.endswith(ending)), self.passthrough)
