"""Counts failures of upstreams by cause. A cause is a short word.

The words appear in log lines, metrics, the admin API and the dashboard. Each is one of `CAUSES`, or `http-`
and the status of the upstream's response. A cause never contains text of an exception or of a response. What
the upstream calls its error, such as `insufficient_quota`, is kept beside the cause.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from compaction_proxy.core.event import parse_integer, parse_number

# Causes of failures before a response began.
CONNECTION_REFUSED: Final = "connection-refused"
NAME_NOT_RESOLVED: Final = "name-not-resolved"
TLS_FAILED: Final = "tls-failed"
CONNECT_TIMEOUT: Final = "connect-timeout"
UNREACHABLE: Final = "unreachable"  # any other reason why there is no connection
PROXY_FAILED: Final = "proxy-failed"  # an HTTP proxy on the way to the upstream refused the connection
OUT_OF_SOCKETS: Final = "out-of-sockets"  # this machine has no file descriptor or port left
NOT_SENDABLE: Final = "not-sendable"  # the request cannot be written as HTTP
CONNECTION_RESET: Final = "connection-reset"
INVALID_ANSWER: Final = "invalid-answer"  # the connection ended without a valid response
ANSWER_TIMEOUT: Final = "answer-timeout"
# Causes of failures after a response had begun.
ANSWER_CUT: Final = "answer-cut"
ANSWER_STALLED: Final = "answer-stalled"

CAUSES: Final = frozenset({
    CONNECTION_REFUSED, NAME_NOT_RESOLVED, TLS_FAILED, CONNECT_TIMEOUT, UNREACHABLE, PROXY_FAILED,
    OUT_OF_SOCKETS, NOT_SENDABLE, CONNECTION_RESET, INVALID_ANSWER, ANSWER_TIMEOUT, ANSWER_CUT,
    ANSWER_STALLED,
})  # fmt: skip
# Failures with these causes are no failures of the upstream, because the proxy could not send the request.
LOCAL_CAUSES: Final = frozenset({OUT_OF_SOCKETS, NOT_SENDABLE})

_SERVER_ERROR: Final = 500
# Statuses below 500 that concern the provider, a key or an account, and not the request itself: unauthorized,
# payment required, forbidden, proxy authentication required, request timeout, too many requests.
_REFUSALS: Final = frozenset({401, 402, 403, 407, 408, 429})


def format_status_cause(status: int) -> str:
    """Returns the cause for a response with an error status, such as `http-503`."""
    return f"http-{status}"


def is_failure_status(status: int) -> bool:
    """Returns whether an error status concerns the provider, a key or an account, and not the request."""
    return is_server_error(status) or status in _REFUSALS


def is_server_error(status: int) -> bool:
    """Returns whether the status is a server error (500 or higher)."""
    return status >= _SERVER_ERROR


@dataclass(frozen=True, slots=True)
class UpstreamFailure:
    """The failures of one upstream that have the same cause.

    Attributes:
        target: Origin of the upstream, with its port and without credentials.
        cause: One of `CAUSES`, or `http-` and a status.
        count: Number of failures.
        last_at: Time of the last failure, in seconds since the epoch.
        errors: What the upstream calls these errors, the latest first; at most `MAX_DETAILS`.
        models: Models of the requests, as far as they are known, the latest first; at most `MAX_DETAILS`.
        conversation: Id of the conversation with the latest of them; empty if none is known.
    """

    target: str
    cause: str
    count: int
    last_at: float
    errors: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    conversation: str = ""


# The largest number of errors, and of models, that are kept with the failures of an upstream with one cause.
MAX_DETAILS: Final = 5

# Failures by the origin of the upstream and the cause.
UpstreamFailures = dict[tuple[str, str], UpstreamFailure]


def add_failures(failure_totals: UpstreamFailures, new_failures: Iterable[UpstreamFailure]) -> None:
    """Adds `new_failures` to `failure_totals` in place. Counts of the same target and cause are summed."""
    for failure in new_failures:
        key = failure.target, failure.cause
        earlier = failure_totals.get(key)
        if earlier is None:
            failure_totals[key] = failure
        else:
            old, new = sorted((earlier, failure), key=lambda each: each.last_at)
            failure_totals[key] = replace(
                new,
                count=old.count + new.count,
                errors=_join_latest(new.errors, old.errors),
                models=_join_latest(new.models, old.models),
                conversation=new.conversation or old.conversation,
            )


def _join_latest(new: tuple[str, ...], old: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*new, *old)))[:MAX_DETAILS]


def failures_to_fields(failures: Iterable[UpstreamFailure]) -> list[dict[str, Any]]:
    """Returns the failures as JSON objects."""
    return [asdict(each) for each in failures]


def parse_failures(rows: object) -> list[UpstreamFailure]:
    """Returns the failures in a list of JSON objects. Incomplete objects are left out."""
    items = rows if isinstance(rows, list) else ()
    parsed = (_parse_failure(row) for row in items if isinstance(row, Mapping))
    return [failure for failure in parsed if failure is not None]


def _parse_failure(row: Mapping[str, Any]) -> UpstreamFailure | None:
    target, cause = row.get("target"), row.get("cause")
    count, last_at = parse_integer(row.get("count")), parse_number(row.get("last_at"))
    if not isinstance(target, str) or not isinstance(cause, str) or count is None or last_at is None:
        return None
    errors, models = _parse_texts(row.get("errors")), _parse_texts(row.get("models"))
    conversation = row.get("conversation")
    return UpstreamFailure(
        target, cause, count, last_at, errors, models, conversation if isinstance(conversation, str) else ""
    )


def _parse_texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
