"""The endpoint for requests that carry no conversation: it relays request and answer of any size unread."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.client_stream import read_body, stream_body, while_connected
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.headers import build_header_map, get_content_length, get_header
from compaction_proxy.gateway.upstream import (
    Upstream,
    build_request,
    find_wire_name,
    relay_response,
    send_request,
)

# A body of at most this many bytes is read as a whole, so that it can be sent again on another connection. A
# larger body is streamed.
REPLAYABLE_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class PassthroughEndpoint:
    """An ASGI endpoint that relays any request.

    Attributes:
        upstreams: The upstreams by the names of their wires.
        admission: Limits the number of concurrent requests; requests with conversations count, too.
    """

    upstreams: Mapping[str, Upstream]
    admission: ConcurrencyLimiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relays one request.

        Raises:
            OverloadedError: The proxy is serving too many requests, or too many bytes of them, at once.
            UpstreamError: The upstream gave no answer.
            ClientDisconnect: The client left, and the connection to the upstream was closed.
        """
        if not self.admission.try_acquire_slot():
            await self.admission.wait_for_slot()
        hold = self.admission.body_budget.open_hold()
        try:
            await self._relay_request(scope, receive, send, hold)
        finally:
            hold.release()
            self.admission.release_slot()

    async def _relay_request(self, scope: Scope, receive: Receive, send: Send, hold: BodyHold) -> None:
        upstream = self.upstreams[find_wire_name(scope["raw_path"], build_header_map(scope["headers"]))]
        length = get_content_length(scope["headers"])
        if length is None and get_header(scope["headers"], b"transfer-encoding") is None:
            length = 0
        if length is not None and length <= REPLAYABLE_BYTES:
            body = await read_body(scope, receive, REPLAYABLE_BYTES, hold, length) if length else b""
            request = build_request(upstream, scope, body)
        else:
            request = build_request(upstream, scope, stream_body(receive), length)
        with while_connected(scope):
            await relay_response(await send_request(upstream, request), send)
