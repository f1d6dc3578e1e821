"""The outermost ASGI application: routes each request to its handler, and turns errors into responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError, UpstreamError
from compaction_proxy.gateway.client_auth import ALLOW_ALL_CLIENTS, ClientAuthenticator
from compaction_proxy.gateway.headers import HOP_HEADER, build_header_map, refuse_loop
from compaction_proxy.gateway.paths import DASHBOARD_PATH, is_own_path, is_start_page_visit
from compaction_proxy.gateway.sse_keepalive import KeepaliveChannel
from compaction_proxy.gateway.upstream import find_error_encoder, send_error
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.wires.registry import find_wire

# Header fields of the response to a request for a WebSocket. The response has status 426, and these fields
# name the protocol to use instead (RFC 9110 §15.5.22). After this status, clients of the Responses API change
# from WebSockets to HTTP. After other statuses, they try WebSockets again.
_ASK_IN_HTTP: Final = ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))
_WEBSOCKET: Final = RequestRefusedError(
    426, "WebSockets are not supported. Use HTTP.", "websocket_not_supported", _ASK_IN_HTTP
)
# Header fields of the redirect from the start page to the dashboard. The redirect depends on `Accept`, and a
# cached one would survive a change of `server.base_path`.
_REDIRECT_FIELDS: Final = {"vary": "accept", "cache-control": "no-store"}
# The response to TRACE contains the request, with the provider key that the proxy has added. CONNECT opens
# tunnels.
_UNRELAYED_METHODS: Final = frozenset({"TRACE", "CONNECT"})
_METHOD_REFUSED: Final = RequestRefusedError(
    405,
    "The proxy does not relay this method.",
    "method_not_allowed",
    ((b"allow", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),),
)


@dataclass(frozen=True, slots=True)
class RelayHandler:
    """An ASGI application that checks relayed requests, passes them to an endpoint, and handles its errors.

    The handler checks the client's key, and refuses requests for WebSockets, the methods `TRACE` and
    `CONNECT`, and requests that this installation has already forwarded. It sends comments in an event
    stream that is silent. It sends the proxy's own errors to the client as JSON. The endpoint may raise
    these errors only before the response starts, because after that no error can be sent to the client.

    Attributes:
        endpoint: The endpoint that answers the request.
        hop_mark: The id of this installation, 16 hex digits. The header field `x-compaction-hop` holds it.
        authenticator: Checks client keys.
        keep_alive_s: Seconds of silence in an event stream after which the proxy sends a comment; 0 disables
            comments.
    """

    endpoint: ASGIApp
    hop_mark: str
    authenticator: ClientAuthenticator = ALLOW_ALL_CLIENTS
    keep_alive_s: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["method"] in _UNRELAYED_METHODS:
            await send_error(send, _METHOD_REFUSED, encode_error=find_error_encoder(scope))
            return
        try:
            first = build_header_map(scope["headers"])
            scope["headers"] = self.authenticator.authorize_request(scope["headers"], first)
            if HOP_HEADER in first:
                refuse_loop(scope["headers"], self.hop_mark)
            protocols = first.get(b"upgrade", b"").lower().split(b",")
            if b"websocket" in [protocol.strip() for protocol in protocols]:
                await send_error(send, _WEBSOCKET, encode_error=find_error_encoder(scope))
            elif self.keep_alive_s:
                with KeepaliveChannel(send, self.keep_alive_s) as channel:
                    await self.endpoint(scope, receive, channel)
            else:
                await self.endpoint(scope, receive, send)
        except (RequestRefusedError, OverloadedError, UpstreamError) as error:
            await send_error(send, error, encode_error=find_error_encoder(scope))
        except ClientDisconnect:
            return


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Hands each request to its handler.

    Attributes:
        wire_endpoints: The handlers of requests with the messages of a conversation, by the name of the wire.
        post_endpoints: The handlers of other POST requests whose bodies the proxy reads, by the ending of the
            path.
        passthrough: The handler of all other requests that are relayed.
        own_endpoints: The handlers of some of the proxy's own paths, by the whole path. Requests for these
            paths need a client key whenever relayed requests need one.
        admin: The handler of all other paths of the proxy's own.
        base_path: The path with which all of the proxy's own paths begin; empty for the root.
        lifespan: The application that handles the server's lifespan events (start and end).
        deletion_fence: Prevents a request from storing data again that was deleted after the request began.
    """

    wire_endpoints: Mapping[str, ASGIApp]
    post_endpoints: Mapping[bytes, ASGIApp]
    passthrough: ASGIApp
    own_endpoints: Mapping[str, ASGIApp]
    admin: ASGIApp
    base_path: str
    lifespan: ASGIApp
    deletion_fence: DeletionFence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to its handler, or the server's lifespan events to `lifespan`.

        Redirects a browser that visits the start page to the dashboard. Refuses a WebSocket, because the
        proxy relays only HTTP.
        """
        if scope["type"] == "lifespan":
            await self.lifespan(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # closed before it is accepted, so the server answers 403
            return
        self.deletion_fence.set_start_mark()
        if is_own_path(scope["path"], self.base_path):
            handler = self.own_endpoints.get(scope["path"], self.admin)
        elif is_start_page_visit(scope, self.base_path):
            handler = RedirectResponse(self.base_path + DASHBOARD_PATH, 302, _REDIRECT_FIELDS)
        else:
            handler = self._find_relay_handler(scope["method"], scope["raw_path"])
        await handler(scope, receive, send)

    def _find_relay_handler(self, method: str, raw_path: bytes) -> ASGIApp:
        wire = find_wire(method, raw_path)
        if wire is not None:
            return self.wire_endpoints[wire.name]
        if method == "POST":
            for ending, endpoint in self.post_endpoints.items():
                if raw_path.endswith(ending):
                    return endpoint
        return self.passthrough
