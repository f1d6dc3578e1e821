"""Protocols for tracing requests across several services.

`telemetry.otel` implements the protocols. If tracing is off, there is no tracer, and the trace headers of
clients are forwarded unchanged.
"""

from collections.abc import Sequence
from typing import Protocol

from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange

Headers = list[tuple[bytes, bytes]]


class RequestTrace(Protocol):
    """Trace of one client request."""

    def start_upstream_call(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Records the start of an upstream call. Returns `headers` with the trace context of this call.

        Call it for each call of the upstream, also when a shortened request is sent again after a refusal.
        """
        ...

    def end_request(self, exchange: Exchange, conversation: str | None) -> None:
        """Ends the trace. Call it after the answer, or when it is certain that no answer will come."""
        ...


class Tracer(Protocol):
    """Traces requests and the decisions about them. No method blocks or raises."""

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> RequestTrace:
        """Starts the trace of a client request, given its headers and its id, which its events contain."""
        ...

    def on_event(self, tenant: str, event: Event) -> None:
        """Adds an event to the trace of its request (an `event_bus.EventListener`)."""
        ...

    def set_upstream(self, upstream: str) -> None:
        """Uses this base URL as the upstream of later requests."""
        ...

    async def close(self) -> None:
        """Sends the remaining traces. Takes a few seconds at most."""
        ...
