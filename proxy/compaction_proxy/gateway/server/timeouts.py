"""Closes connections whose clients take too long to send a request or to take a response.

Without this, such clients could keep connections open without end. The server checks all connections at least
once a second, which takes less processor time than a timer for each connection. The time in which a client
waits for the proxy, such as for a free request slot or a response, does not count.

The event loop notices that a client has left only while it reads from the client's socket. So this module
polls the sockets on which reading is paused.
"""

import select
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.cycle import RequestResponseCycle

SWEEP_INTERVAL_S = 1.0
# The minimum average rate, in bytes per second, at which a request body must arrive over each period of
# `ClientDeadlines.body_s` seconds. Below it, the request is refused with status 408. Otherwise a client that
# sends a byte now and then could occupy a request slot without end. Apache demands the same rate.
MIN_BODY_BYTES_PER_S = 500
_BODY_TIMEOUT = RequestRefusedError(408, "The request body did not arrive in time.", "request_timeout")


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How many seconds a client may take before the server closes its connection.

    Attributes:
        head_s: Seconds from the opening of the connection, or from the first byte of a further request, to
            the end of the request's header fields.
        body_s: Longest pause, in seconds, while the client sends a request body. This is also the period
            over which the average rate of a body must reach `MIN_BODY_BYTES_PER_S`.
        idle_s: Seconds from the end of a response to the first byte of a further request.
        send_s: Longest pause, in seconds, while the client reads a response that is ready to be sent.
        linger_s: Seconds that the client has to close the connection after the end of the last response.
    """

    head_s: float = 15.0
    body_s: float = 30.0
    idle_s: float = 75.0
    send_s: float = 60.0
    linger_s: float = 2.0


def close_overdue_connections(connections: Iterable[object], deadlines: ClientDeadlines, now: float) -> None:
    """Closes connections that exceed a deadline or whose clients have left.

    `now` is the time in seconds of the event loop's clock.
    """
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
    """Returns whether the client has closed a connection on which reading is paused (FIN or RST).

    Returns False if reading is not paused, and on systems other than Linux.
    """
    if not connection.is_reading_paused or sys.platform != "linux":
        return False
    poller = select.poll()
    poller.register(connection.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poller.poll(0))


def _close_if_overdue(connection: ServerConnection, deadlines: ClientDeadlines, now: float) -> None:
    cycle = connection.newest_cycle
    if connection.has_hung_up:
        overdue = now - connection.phase_started_at > deadlines.linger_s
    elif cycle is not None and not cycle.response_complete:
        _refuse_if_body_is_slow(connection, cycle, deadlines, now)
        return
    elif cycle is None or connection.is_reading_head:
        overdue = now - connection.phase_started_at > deadlines.head_s
    else:  # idle, unless the body of an answered request is still arriving
        overdue = now - connection.last_activity_at > (
            deadlines.body_s if cycle.more_body else deadlines.idle_s
        )
    if overdue:
        connection.transport.close()


def _refuse_if_body_is_slow(
    connection: ServerConnection, cycle: RequestResponseCycle, deadlines: ClientDeadlines, now: float
) -> None:
    """Refuses a request with status 408 if its body arrives too slowly, and ends the connection.

    If the response has begun, the client gets no error.
    """
    if not cycle.more_body:
        return
    if connection.is_reading_paused or cycle.expects_continue:
        connection.last_activity_at, cycle.last_pace_check = (
            now,
            None,
        )  # the proxy has to act next, not the client
    elif now - connection.last_activity_at > deadlines.body_s or _update_and_check_pace(
        cycle, deadlines.body_s, now
    ):
        connection.refuse_request(_BODY_TIMEOUT)


def _update_and_check_pace(cycle: RequestResponseCycle, span_s: float, now: float) -> bool:
    """Returns whether a period of `span_s` seconds has just ended in which the body arrived too slowly.

    "Too slowly" means fewer than `MIN_BODY_BYTES_PER_S` bytes per second on average. When a period has ended,
    the function starts the next one.
    """
    started_at, bytes_then = cycle.last_pace_check or (now, cycle.body_bytes)
    if cycle.last_pace_check is None or now - started_at > span_s:
        cycle.last_pace_check = now, cycle.body_bytes
    return now - started_at > span_s and cycle.body_bytes - bytes_then < MIN_BODY_BYTES_PER_S * span_s
