"""Calls the admin API for the pages, within the process and without a socket.

The admin API checks the access and the parameters of these calls like those of any other request.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

PATH = "/admin/v1"
_FORWARDED_HEADERS = frozenset({b"host", b"origin", b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"})
# Status with which the admin API responds if the store cannot be reached.
_STORE_UNAVAILABLE = 503


class PageError(Exception):
    """An error that a page shows, such as a refusal by the admin API, with its status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _AdminResponse(NamedTuple):
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class InProcessAdminClient:
    """Client that calls the admin API of the same process.

    Attributes:
        app: Application that serves the admin API.
        key: Admin key; empty without one.
        base_path: Path before `/admin/v1`.
    """

    app: ASGIApp
    key: str = field(repr=False)
    base_path: str = ""

    async def get(self, page_request: Request, *path: str, **query: str | int | None) -> Mapping[str, Any]:
        """Sends a GET request and returns the JSON object in the response.

        Args:
            page_request: Request for the page. The call has the same client address and host.
            path: Path segments after `/admin/v1`, not encoded.
            query: Query parameters, not encoded. Empty ones are left out.

        Raises:
            PageError: The status is not 2xx, or the body is not a JSON object.
        """
        query_string = urlencode({name: value for name, value in query.items() if value not in (None, "")})
        return await asyncio.to_thread(
            _decode_response, await self._send_request(page_request, "GET", path, query_string, b"")
        )

    async def get_or_none(
        self, page_request: Request, *path: str, **query: str | int | None
    ) -> Mapping[str, Any] | None:
        """Does the same as `get`, but returns None if the store cannot be reached."""
        try:
            return await self.get(page_request, *path, **query)
        except PageError as error:
            if error.status != _STORE_UNAVAILABLE:
                raise
            return None

    async def post(self, page_request: Request, *path: str, body: bytes = b"") -> Mapping[str, Any]:
        """Sends a POST request with a JSON body, and returns the JSON object in the response."""
        return _decode_response(await self._send_request(page_request, "POST", path, "", body))

    async def delete(self, page_request: Request, *path: str) -> Mapping[str, Any]:
        """Sends a DELETE request and returns the JSON object in the response."""
        return _decode_response(await self._send_request(page_request, "DELETE", path, "", b""))

    async def _send_request(
        self, page: Request, method: str, path: tuple[str, ...], query: str, body: bytes
    ) -> _AdminResponse:
        raw = f"{self.base_path}{PATH}/{'/'.join(quote(each, safe='') for each in path)}"
        plain = f"{self.base_path}{PATH}/{'/'.join(path)}"
        headers = [(name, value) for name, value in page.headers.raw if name in _FORWARDED_HEADERS]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.key:
            headers.append((b"authorization", b"Bearer " + self.key.encode()))
        scope = _build_scope(page, method, plain, raw, query, headers)
        return await _call_app(self.app, scope, page, body)


def _build_scope(
    page: Request, method: str, path: str, raw: str, query: str, headers: list[tuple[bytes, bytes]]
) -> Scope:
    """Builds the ASGI scope of a request, with the client address of the page's request."""
    scope = {name: page.scope[name] for name in ("client", "server", "scheme") if name in page.scope}
    return scope | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": raw.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": headers,
        "state": {},
    }


async def _call_app(app: ASGIApp, scope: Scope, page: Request, body: bytes) -> _AdminResponse:
    """Calls the application and collects its response.

    If the browser that requested the page disconnects, the application receives `http.disconnect`.
    """
    parts: list[bytes] = []
    status = 500
    already_sent = False

    async def receive() -> Message:
        nonlocal already_sent
        if not already_sent:
            already_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await page.receive()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return _AdminResponse(status, b"".join(parts))


def _decode_response(answer: _AdminResponse) -> Mapping[str, Any]:
    try:
        content = json.loads(answer.body)
    except ValueError as error:
        raise PageError(502, "The admin API has answered something that is no JSON.") from error
    if not isinstance(content, dict):
        raise PageError(502, "The admin API has answered something that is no JSON object.")
    if answer.status >= 300:
        details = content.get("error")
        message = details.get("message") if isinstance(details, dict) else None
        raise PageError(answer.status, str(message or "The admin API has refused this."))
    return content
