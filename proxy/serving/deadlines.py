"""Clients that take too long to send a request, which would hold their connections for ever.

Whoever serves looks over all connections once a second: that is cheaper than a timer for each, and exact
enough. What a client has been waiting for, such as a place or an answer, is never held against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.errors import RequestRefused, openai_error
from proxy.serving.connection import Connection

SWEEP_S = 1.0
_TOO_LATE = RequestRefused(408, "The request body did not come in time.", "request_timeout")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long clients may take, in seconds.

    Attributes:
        head_s: From the connection, or the first byte of a further request, to the end of the head.
        body_s: Of silence while a body is on its way.
    """

    head_s: float = 15.0
    body_s: float = 30.0


def sweep(connections: Iterable[object], deadlines: Deadlines, now: float) -> None:
    """End what is overdue at `now`, on the loop's clock."""
    for connection in list(connections):
        if isinstance(connection, Connection) and not connection.transport.is_closing():
            _look_at(connection, deadlines, now)


def _look_at(connection: Connection, deadlines: Deadlines, now: float) -> None:
    cycle = connection.cycle
    if cycle is None:
        overdue = now - connection.begun > deadlines.head_s
    elif not cycle.response_complete:
        _look_at_body(connection, deadlines, now)
        return
    elif connection.scope is not cycle.scope:  # the next head has begun
        overdue = now - connection.begun > deadlines.head_s
    else:  # idle, which uvicorn limits, unless what is left of a refused body comes
        overdue = connection.timeout_keep_alive_task is None and now - connection.heard > deadlines.body_s
    if overdue:
        connection.transport.close()


def _look_at_body(connection: Connection, deadlines: Deadlines, now: float) -> None:
    """Answer 408 where a body is missed; where its answer has begun already, just end it."""
    cycle = connection.cycle
    if not cycle.more_body:
        return
    if connection.flow.read_paused or cycle.waiting_for_100_continue:
        connection.heard = now  # it is for us to go on
    elif now - connection.heard > deadlines.body_s:
        if not cycle.response_started:
            connection.transport.write(_refusal(connection))
        cycle.disconnected = True  # nothing may follow
        cycle.message_event.set()
        connection.transport.close()


def _refusal(connection: Connection) -> bytes:
    body = openai_error(_TOO_LATE)
    fields = [
        *connection.server_state.default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    lines = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"HTTP/1.1 408 Request Timeout\r\n" + lines + b"\r\n" + body
