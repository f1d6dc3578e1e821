"""Reports failures of upstreams to the log, to the metrics and to the statistics."""

import errno
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence

import httpx
import structlog

from compaction_proxy.core import upstream_failure as causes
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS
from compaction_proxy.core.problem import Problem
from compaction_proxy.core.upstream_failure import format_status_cause, is_failure_status, is_server_error
from compaction_proxy.storage.resilient import ReportThrottle
from compaction_proxy.support.log_events import UPSTREAM_FAILED, UPSTREAM_RECOVERED

# The monitor logs each pair of a target (an upstream's origin) and a cause at most once a minute. For this,
# it remembers at most this many pairs. A pair that it has forgotten may be logged again earlier.
MAX_PAIRS = 500

# The proxy is degraded after this many failures in a row of one upstream. A single one may be an accident.
PROBLEM_FAILURES = 3

# Functions that are called on the event loop with the target (an upstream's origin) and the cause of an
# error. A `FailureListener` also gets what the upstream calls the error; empty if unknown. They must not
# block.
ErrorListener = Callable[[str, str], None]
FailureListener = Callable[[str, str, str], None]

_log = structlog.get_logger()

# The causes of errors that occur before a response comes. The first row whose class fits the error decides.
_BEFORE_AN_ANSWER: tuple[tuple[type[httpx.TransportError], str], ...] = (
    (httpx.ConnectTimeout, causes.CONNECT_TIMEOUT),
    (httpx.TimeoutException, causes.ANSWER_TIMEOUT),
    (httpx.ProxyError, causes.PROXY_FAILED),
    (httpx.UnsupportedProtocol, causes.NOT_SENDABLE),
    (httpx.LocalProtocolError, causes.NOT_SENDABLE),
    (httpx.RemoteProtocolError, causes.INVALID_ANSWER),
)
_CONNECT_ERRNOS = {
    errno.ECONNREFUSED: causes.CONNECTION_REFUSED,
    errno.ECONNRESET: causes.CONNECTION_RESET,
    # The errors of a system that has no file descriptor, port or buffer left for a connection.
    errno.EMFILE: causes.OUT_OF_SOCKETS,
    errno.ENFILE: causes.OUT_OF_SOCKETS,
    errno.EADDRNOTAVAIL: causes.OUT_OF_SOCKETS,
    errno.ENOBUFS: causes.OUT_OF_SOCKETS,
}


def find_cause(error: httpx.TransportError, *, has_head: bool = False) -> str:
    """Returns the cause of an error that the HTTP engine raised. `core.upstream_failure` lists the causes.

    Args:
        error: The error.
        has_head: Whether the status and the header fields of the response had arrived before the error.
    """
    if has_head:
        is_timeout = isinstance(error, httpx.TimeoutException)
        return causes.ANSWER_STALLED if is_timeout else causes.ANSWER_CUT
    if isinstance(error, httpx.ConnectError):
        return _find_connect_cause(error)
    matching = (cause for kind, cause in _BEFORE_AN_ANSWER if isinstance(error, kind))
    return next(matching, causes.CONNECTION_RESET)


def _find_connect_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ssl.SSLError):
        return causes.TLS_FAILED
    if isinstance(error, socket.gaierror | ValueError):  # ValueError: not a possible host name
        return causes.NAME_NOT_RESOLVED
    number = error.errno if isinstance(error, OSError) else None
    return _CONNECT_ERRNOS.get(number or 0, causes.UNREACHABLE)


class UpstreamMonitor:
    """Reports failures of all upstreams of a process.

    A target is the origin of an upstream. The monitor logs each pair of target and cause at most once a
    minute. A target is failing if its last response did not come or had status 5xx. When a failing target
    responds with another status, the monitor logs the recovery. After a response without an error, callers
    need to call the monitor only if `failure_counts` is not empty.

    Args:
        error_listeners: Called for every failure, and for every other response with an error status. They
            update the metrics.
        failure_listeners: Called for failures only: a missing or cut response, or a status that
            `is_failure_status` names. They update the statistics and the live feed.
        clock: Returns monotonic seconds.

    Attributes:
        failure_counts: For each failing target, how many times in a row no response came or the status of the
            response was 5xx.
    """

    def __init__(
        self,
        error_listeners: Sequence[ErrorListener] = (),
        failure_listeners: Sequence[FailureListener] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._error_listeners = error_listeners
        self._failure_listeners = failure_listeners
        self._throttle = ReportThrottle[tuple[str, str]](max_keys=MAX_PAIRS, clock=clock)
        self._logged: set[str] = set()  # failing targets whose failure was logged
        self.failure_counts: dict[str, int] = {}

    def record_missing_answer(self, target: str, error: httpx.TransportError) -> str:
        """Reports that no response came. Returns the cause.

        If the proxy or its machine is the cause (`LOCAL_CAUSES`), the target does not become failing.
        """
        cause = find_cause(error)
        self._record_failure(target, cause, is_failing=cause not in causes.LOCAL_CAUSES)
        return cause

    def record_invalid_status(self, target: str) -> None:
        """Reports that a response had an invalid status."""
        self._record_failure(target, causes.INVALID_ANSWER, is_failing=True)

    def record_cut(self, target: str, error: httpx.TransportError) -> None:
        """Reports that the connection failed after the header fields of a response had arrived."""
        self._record_failure(target, find_cause(error, has_head=True))

    def record_status(self, target: str, status: int, error: str = "") -> None:
        """Reports the status of a response to the listeners and the log, if it is an error status.

        `error` is what the upstream calls the error, such as `insufficient_quota`; empty if unknown.

        If the target was failing and the status is not 5xx, the target has recovered. The method then logs
        the recovery, if it has logged the failure.
        """
        is_failing = is_server_error(status)
        if not is_failing and target in self.failure_counts:
            failures = self.failure_counts.pop(target)
            if target in self._logged:  # else alternating failures and successes would log many recoveries
                self._logged.discard(target)
                _log.info(UPSTREAM_RECOVERED, target=target, failures=failures)
        if is_failure_status(status):
            self._record_failure(target, format_status_cause(status), error, is_failing=is_failing)
        elif status >= FIRST_ERROR_STATUS:
            for listener in self._error_listeners:
                listener(target, format_status_cause(status))

    def forget_other_targets(self, targets: Collection[str]) -> None:
        """Forgets all failing targets except `targets`. Called when a new configuration is applied."""
        for target in self.failure_counts.keys() - targets:
            del self.failure_counts[target]
            self._logged.discard(target)

    def list_problems(self) -> list[Problem]:
        """Returns a problem for each target with at least `PROBLEM_FAILURES` failures in a row."""
        return [
            Problem(
                "A provider does not answer, or answers with server errors.",
                f"{count:,} requests in a row to {target} failed. "
                "The page Failures and the log show the causes.",
            )
            for target, count in self.failure_counts.items()
            if count >= PROBLEM_FAILURES
        ]

    def _record_failure(self, target: str, cause: str, error: str = "", *, is_failing: bool = False) -> None:
        """Passes a failure to all listeners, and logs it.

        Does not log it if the same target and cause were logged in the last minute.

        `is_failing` says whether the failure makes the target a failing one.
        """
        if is_failing:
            self.failure_counts[target] = self.failure_counts.get(target, 0) + 1
        for listener in self._error_listeners:
            listener(target, cause)
        for report in self._failure_listeners:
            report(target, cause, error)
        suppressed = self._throttle.admit_report((target, cause))
        if suppressed is not None:
            known = {"error": error, "suppressed": suppressed}
            details = {name: value for name, value in known.items() if value}
            _log.warning(UPSTREAM_FAILED, target=target, cause=cause, **details)
            if is_failing:
                self._logged.add(target)
