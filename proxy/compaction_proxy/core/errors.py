"""The proxy's own errors, as a tree, and how a client sees them.

ProxyError
├── ConfigError                    the configuration cannot be used; the process ends with exit code 2
├── RequestRefusedError            the client is at fault; answered with the error's own 4xx status
├── OverloadedError                the proxy holds too many requests or request bytes; answered with 503
├── UpstreamError                  the forwarded call failed; answered with 502 or 504
├── InternalError                  a fault of the proxy made the request fail; answered with 500
├── ReplayFailedError              the process that replays conversations has failed; answered with 500
└── CompactionError                compaction failed: no client sees it, the request goes upstream (fail-open)
    ├── UnreadableBodyError        the proxy cannot rewrite the body
    ├── SummaryError               the summary model returned nothing usable
    ├── StoreUnavailableError      the store cannot be read or written
    └── SearchUnavailableError     SQLite cannot search text; the admin API answers with 501
"""

import json


class ProxyError(Exception):
    """Base class of the errors that the proxy raises on purpose."""


class ConfigError(ProxyError):
    """The configuration cannot be used. The message has one line for each problem, ready for stderr."""


class RequestRefusedError(ProxyError):
    """The request cannot be served, and the client has to correct it."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class OverloadedError(ProxyError):
    """The proxy has no room for a request now. `retry_after_s` is the number of seconds to wait."""

    status = 503
    code = "overloaded"

    def __init__(
        self, retry_after_s: int, message: str = "The proxy has too many requests under way; try again."
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamError(ProxyError):
    """The upstream could not be reached (502) or did not answer in time (504)."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class InternalError(ProxyError):
    """A fault of the proxy made a request fail. The log names the cause."""

    status = 500
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The proxy failed at this request.")


class ReplayFailedError(ProxyError):
    """The replay process ended without an answer. The message quotes its last output."""

    status = 500
    code = "rehearsal_failed"


# Errors that clients see, in the format of their wire.
ClientFacingError = RequestRefusedError | OverloadedError | UpstreamError | InternalError | ReplayFailedError


class CompactionError(ProxyError):
    """Compaction failed. `reason` is a short word in kebab case for headers, events and metrics."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class UnreadableBodyError(CompactionError):
    """The proxy cannot rewrite the body. It forwards the body unchanged."""


class SummaryError(CompactionError):
    """The summary model failed, or its answer cannot be used.

    If the summary call itself was too long (reason `overflow`), `limit` is the number of tokens that the
    model takes; None if unknown. `retry_after_s` is the number of seconds to wait before the next attempt; 0
    if the provider named none.
    """

    def __init__(
        self, reason: str, message: str = "", *, limit: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(reason, message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class StoreUnavailableError(CompactionError):
    """The store cannot be used at the moment."""


class SearchUnavailableError(CompactionError):
    """This installation cannot search removed messages; the message of the error says why."""


def format_openai_error(error: ClientFacingError) -> bytes:
    """Formats an error as a response body in OpenAI's format."""
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
