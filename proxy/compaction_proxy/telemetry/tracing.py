"""Traces: what is told, while it happens, to whoever follows a request through several services.

What is asked of a tracer stands here; `telemetry.otel` is one. Where nobody traces there is none, and the
header fields of clients that trace pass untouched.
"""

from collections.abc import Sequence
from typing import Protocol

from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange

Headers = list[tuple[bytes, bytes]]


class RequestTrace(Protocol):
    """One request of a client on its way."""

    def start_upstream_call(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """The upstream is asked now: the fields that it is asked with, ours of the trace among them.

        Called again for a request that is sent once more, such as a shorter one.
        """
        ...

    def end_request(self, exchange: Exchange, conversation: str | None) -> None:
        """The client has its answer, or will never have one."""
        ...


class Tracer(Protocol):
    """Follows requests, and what is decided about them. Nothing here waits, or raises."""

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], request: str) -> RequestTrace:
        """A request has come, with these fields; `request` is its id, by which events name it."""
        ...

    def on_event(self, tenant: str, event: Event) -> None:
        """Something was decided, or has failed (a listener of `EventBus`)."""
        ...

    def set_upstream(self, upstream: str) -> None:
        """Requests that come from now on go to the upstream with this base URL."""
        ...

    async def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        ...
