"""The errors of our own, as a tree, and how a client sees them.

ProxyError
├── ConfigError               the configuration cannot be used; the process ends with exit code 2
├── RequestRefused            the one asking is at fault; answered with its own 4xx status
├── Overloaded                too many requests, or bytes of them, are held; answered with 503
├── UpstreamError             the relayed call failed; answered with 502 or 504
├── Crashed                   a fault of ours that nothing contained; answered with 500
├── RehearsalFailed           the process that plays strategies has failed; answered with 500
└── CompactionError           our own trouble: never reaches a client, the request goes on (fail-open)
    ├── Unreadable            the body is nothing we can rewrite
    ├── SummaryFailed         the summary model gave nothing usable
    ├── StoreUnavailable      the store cannot be read or written
    └── SearchUnavailable     SQLite cannot search text; where people asked, answered with 501
"""

import json


class ProxyError(Exception):
    """Anything we raise on purpose."""


class ConfigError(ProxyError):
    """The configuration cannot be used. The message is ready for stderr: one line for each problem."""


class RequestRefusedError(ProxyError):
    """The request cannot be served, and that is the client's to mend."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class OverloadedError(ProxyError):
    """There is no room for a request now; `retry_after_s` says when to come back."""

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
    """A request met a fault of ours. What it was is for the log."""

    status = 500
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The proxy failed at this request.")


class ReplayFailedError(ProxyError):
    """The process that plays strategies has ended without an answer; the message says what it said last."""

    status = 500
    code = "rehearsal_failed"


# Errors that clients are shown, in the shape of their wire.
ClientFacingError = RequestRefusedError | OverloadedError | UpstreamError | InternalError | ReplayFailedError


class CompactionError(ProxyError):
    """Compaction did not work out; `reason` is a short kebab-case word for headers, events and metrics."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class UnreadableBodyError(CompactionError):
    """The body is not a request that we could rewrite; the upstream judges it."""


class SummaryError(CompactionError):
    """The summary model failed, or what it wrote cannot be used.

    Where the call itself was too long (`overflow`), `limit` is what the model takes in tokens, if known.
    Where the provider said so, `retry_after_s` is when to ask again.
    """

    def __init__(
        self, reason: str, message: str = "", *, limit: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(reason, message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class StoreUnavailableError(CompactionError):
    """The store cannot be used right now."""


class SearchUnavailableError(CompactionError):
    """This installation cannot search what was removed; the message says why."""


def format_openai_error(error: ClientFacingError) -> bytes:
    """The error as a body in OpenAI's shape."""
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
