"""Clients that take too long to send a request or to take an answer: they would hold connections for ever.

Whoever serves looks over all connections at least once a second: that is cheaper than a timer for each, and
exact enough. What a client has been waiting for, such as a place or an answer, is never held against it.
A client that has left holds its connection for as long, where nothing is taken from the socket: the loop sees
the end only of what it reads. So who is not read is asked for here.
"""

import select
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.cycle import RequestResponseCycle

SWEEP_S = 1.0
# Of a body at least so many bytes a second come, over `body_s`; Apache asks for as many. Who sends a byte now
# and then is never silent, and would hold a place for as long as it likes.
BODY_BYTES_PER_S = 500
_BODY_TIMEOUT = RequestRefusedError(408, "The request body did not come in time.", "request_timeout")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long clients may take, in seconds.

    Attributes:
        head_s: From the connection, or the first byte of a further request, to the end of the head.
        body_s: Of silence, or next to it (`BODY_BYTES_PER_S`), while a body is on its way.
        idle_s: From an answer to the first byte of a further request.
        send_s: In which nothing of an answer is taken.
        linger_s: To read the last answer and close the connection themselves.
    """

    head_s: float = 15.0
    body_s: float = 30.0
    idle_s: float = 75.0
    send_s: float = 60.0
    linger_s: float = 2.0


def close_overdue_connections(connections: Iterable[object], deadlines: Deadlines, now: float) -> None:
    """End what is overdue at `now`, on the loop's clock, or left by its client."""
    for connection in list(connections):
        if not isinstance(connection, ServerConnection):
            continue
        closing = connection.transport.is_closing()
        if connection.measure_stuck_s(now) > deadlines.send_s or (
            not closing and _has_client_left(connection)
        ):
            connection.transport.abort()
        elif not closing:
            _close_if_overdue(connection, deadlines, now)


def _has_client_left(connection: ServerConnection) -> bool:
    """Whether nothing is taken from a socket, and its end has come (FIN or RST). Only Linux tells."""
    if not connection.paused or sys.platform != "linux":
        return False
    asked = select.poll()
    asked.register(connection.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(asked.poll(0))


def _close_if_overdue(connection: ServerConnection, deadlines: Deadlines, now: float) -> None:
    cycle = connection.cycle
    if connection.hung_up:
        overdue = now - connection.phase_started_at > deadlines.linger_s
    elif cycle is not None and not cycle.response_complete:
        _refuse_if_body_is_slow(connection, cycle, deadlines, now)
        return
    elif cycle is None or connection.is_reading_head:
        overdue = now - connection.phase_started_at > deadlines.head_s
    else:  # idle, unless what is left of a refused body comes
        overdue = now - connection.last_activity_at > (
            deadlines.body_s if cycle.more_body else deadlines.idle_s
        )
    if overdue:
        connection.transport.close()


def _refuse_if_body_is_slow(
    connection: ServerConnection, cycle: RequestResponseCycle, deadlines: Deadlines, now: float
) -> None:
    """Answer 408 where a body is missed; where its answer has begun already, just end it."""
    if not cycle.more_body:
        return
    if connection.paused or cycle.expects_continue:
        connection.last_activity_at, cycle.looked_on = now, None  # it is for us to go on
    elif now - connection.last_activity_at > deadlines.body_s or _is_trickling(cycle, deadlines.body_s, now):
        connection.refuse_request(_BODY_TIMEOUT)


def _is_trickling(cycle: RequestResponseCycle, span_s: float, now: float) -> bool:
    """Whether in the span that now ends too little of a body has come; the next one begins with its end."""
    begun, bytes_then = cycle.looked_on or (now, cycle.body_bytes)
    if cycle.looked_on is None or now - begun > span_s:
        cycle.looked_on = now, cycle.body_bytes
    return now - begun > span_s and cycle.body_bytes - bytes_then < BODY_BYTES_PER_S * span_s
