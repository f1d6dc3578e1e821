"""Logs a line for each request, for operators who switch this on (`observability.access_log`)."""

import re
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compaction_proxy.core.errors import InternalError
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS
from compaction_proxy.gateway.client_stream import DEPARTURE, HAS_LEFT
from compaction_proxy.support.log_events import REQUEST_ANSWERED
from compaction_proxy.telemetry.logs import REQUEST_ID

# A line contains at most this many characters of the path.
MAX_PATH_CHARACTERS: Final = 1_000
# Matches a segment of a path that may be an id or a credential: it is long, and not only words in lower case.
_LONG_SEGMENT: Final = re.compile(r"(?<![^/])(?![a-z_-]*(?:/|$))[^/]{16,}")

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AccessLog:
    """An ASGI application that passes requests to another application, and logs a line after each response.

    A line has the method, the path without the query and without ids, the status, the number of body bytes
    that were sent, and the seconds from the HTTP head of the request to the end of the response. If the
    response did not reach its end, `end` says why: `client-left`, or `cut`. The status is missing if the
    client left before the response began. Lines of errors have the level `warning`, others have `info`.

    Attributes:
        app: The application.
        logged_requests: `all`, or `errors`: only responses with an error status, and responses that were cut.
    """

    app: ASGIApp
    logged_requests: Literal["errors", "all"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on one request, or the server's lifespan events."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        REQUEST_ID.set("")  # the task may have inherited the id of the connection's previous request
        started, status, sent_bytes, is_complete = time.perf_counter(), 0, 0, False

        async def send_and_count(message: Message) -> None:
            nonlocal status, sent_bytes, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not is_complete:
                sent_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if is_complete:  # now, because the application may go on to work after the response
                    self._log_request(scope, status, sent_bytes, time.perf_counter() - started)

        try:
            await self.app(scope, receive, send_and_count)
        finally:
            if not is_complete:
                end = "client-left" if _has_client_left(scope) else "cut"
                if end == "cut" and not status:
                    status = InternalError.status  # the server sends this where the application sends nothing
                self._log_request(scope, status, sent_bytes, time.perf_counter() - started, end)

    def _log_request(
        self, scope: Scope, status: int, sent_bytes: int, seconds: float, end: str | None = None
    ) -> None:
        is_error = status >= FIRST_ERROR_STATUS or end == "cut"
        if self.logged_requests == "errors" and not is_error:
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": _LONG_SEGMENT.sub("[id]", scope["raw_path"][:MAX_PATH_CHARACTERS].decode("latin-1")),
            "status": status or None,
            "bytes": sent_bytes,
            "seconds": round(seconds, 4),
            "end": end,
        }
        shown = {name: value for name, value in fields.items() if value is not None}
        (_log.warning if is_error else _log.info)(REQUEST_ANSWERED, **shown)


def _has_client_left(scope: Scope) -> bool:
    """Returns whether the client has disconnected. On other servers than the proxy's own, returns False."""
    extension = scope.get("extensions", {}).get(DEPARTURE)
    return extension is not None and extension[HAS_LEFT]()
