"""Defines the errors that the proxy raises on purpose, as a tree, and formats them for clients.

The number in parentheses is the HTTP status of the response that the client receives for the error.

ProxyError
├── ConfigError                    the configuration cannot be used; the process ends with exit code 2
├── RequestRefusedError            the client's request is at fault (the error's own 4xx status)
├── OverloadedError                the proxy holds too many requests or request bytes (503)
├── UpstreamError                  the proxy got no response from the upstream (502 or 504)
├── InternalError                  a fault of the proxy made the request fail (500)
├── ReplayFailedError              the process that replays conversations failed (500)
└── CompactionError                a compaction failed; a client's request still goes upstream
    ├── UnreadableBodyError        the proxy cannot rewrite the body
    ├── SummaryError               the summary model returned no usable summary
    ├── StoreUnavailableError      the store cannot be read or written
    └── SearchUnavailableError     SQLite cannot search text (501 from the admin API)
"""

import errno
import json
from collections.abc import Sequence
from typing import Final

# What the system answers if no descriptor or memory is left. Python has no exception of its own for threads.
_SHORTAGE_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_NO_THREAD: Final = "can't start new thread"
# The reason of a compaction that failed because of such a shortage.
OUT_OF_RESOURCES: Final = "out-of-resources"


class ProxyError(Exception):
    """Base class of the errors that the proxy raises on purpose."""


class ConfigError(ProxyError):
    """Reports that the configuration cannot be used.

    The message has one line for each problem, and can be written to stderr as it is.
    """


class RequestRefusedError(ProxyError):
    """Reports that the client has to correct its request.

    `status` is the HTTP status of the response, `headers` are header fields that belong to this status, and
    `code` is the error code in the body.
    """

    def __init__(
        self, status: int, message: str, code: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


class OverloadedError(ProxyError):
    """Reports that the proxy has no room for a request now.

    `retry_after_s` is the number of seconds that the client should wait before it tries again.
    """

    status = 503
    code = "overloaded"

    def __init__(
        self, retry_after_s: int, message: str = "Too many requests are in progress. Try again later."
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamError(ProxyError):
    """Reports that the upstream cannot be reached (502) or does not respond in time (504)."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class InternalError(ProxyError):
    """Reports that a fault of the proxy made a request fail. The log names the cause."""

    status = 500
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The proxy failed to process this request.")


class ReplayFailedError(ProxyError):
    """Reports that the process that replays conversations ended without a result.

    The error's message quotes the last output of the process.
    """

    status = 500
    code = "rehearsal_failed"


def is_resource_shortage(error: BaseException) -> bool:
    """Returns whether an exception means that no memory, thread or descriptor is left for a request."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_resource_shortage, error.exceptions))
    if isinstance(error, OSError):
        return error.errno in _SHORTAGE_ERRNOS
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


def build_shortage_error() -> OverloadedError:
    """Returns the error for a request for which no memory, thread or descriptor is left."""
    return OverloadedError(
        5, "The proxy has no memory, thread or descriptor left for this request; try again."
    )


# Errors that the proxy sends to clients as responses. A response has the format of the wire that the client
# uses.
ClientFacingError = RequestRefusedError | OverloadedError | UpstreamError | InternalError | ReplayFailedError


class CompactionError(ProxyError):
    """Reports that a compaction failed.

    `reason` is a short word in kebab case, for headers, events and metrics.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class UnreadableBodyError(CompactionError):
    """Reports that the proxy cannot rewrite the body of a request. The proxy forwards the body unchanged."""


class SummaryError(CompactionError):
    """Reports that the summary model failed, or that its summary cannot be used.

    If the summary call itself was too long (reason `overflow`), `limit` is the largest number of input tokens
    that the summary model takes; None if unknown. `retry_after_s` is the number of seconds to wait before the
    next attempt; 0 if the provider named no time.
    """

    def __init__(
        self, reason: str, message: str = "", *, limit: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(reason, message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class StoreUnavailableError(CompactionError):
    """Reports that the store cannot be read or written at the moment."""


class SearchUnavailableError(CompactionError):
    """Reports that this installation cannot search removed messages. The message says why."""


def format_openai_error(error: ClientFacingError) -> bytes:
    """Formats an error as the JSON body of a response, in OpenAI's format."""
    kinds = {
        RequestRefusedError: "invalid_request_error",
        OverloadedError: "overloaded_error",
        InternalError: "server_error",
        ReplayFailedError: "server_error",
    }
    kind = kinds.get(type(error), "upstream_error")
    return json.dumps(
        {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
    ).encode()
