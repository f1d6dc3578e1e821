"""Protocols for tracing requests across several services.

`telemetry.otel` implements them. Without tracing there is no tracer, and the trace headers of clients are
forwarded unchanged.
"""

from collections.abc import Sequence
from typing import Protocol

from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange

Headers = list[tuple[bytes, bytes]]


class RequestTrace(Protocol):
    """Trace of one client request."""

    def start_upstream_call(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Records the start of an upstream call. Returns the headers to send, with our trace context.

        Call it again for each repeated call, for example when a shortened request is sent after a refusal.
        """
        ...

    def end_request(self, exchange: Exchange, conversation: str | None) -> None:
        """Ends the trace. Call it after the answer, or when it is certain that no answer will come."""
        ...


class Tracer(Protocol):
    """Traces requests and the decisions about them. No method blocks or raises."""

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> RequestTrace:
        """Starts the trace of a request with these headers. `request_id` is its id, which events refer to."""
        ...

    def on_event(self, tenant: str, event: Event) -> None:
        """Records a decision or a failure (an `event_bus.EventListener`)."""
        ...

    def set_upstream(self, upstream: str) -> None:
        """Uses this base URL as the upstream of later requests."""
        ...

    async def close(self) -> None:
        """Sends the remaining traces. Takes a few seconds at most."""
        ...
