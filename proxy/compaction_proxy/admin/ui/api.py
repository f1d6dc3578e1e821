"""Asking the admin API as any client would, without a socket between.

Requests go through its guard and its checks, so that the pages have no way around either.
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
# What is answered where the store cannot be reached.
_STORE_UNAVAILABLE = 503


class PageError(Exception):
    """The API has not answered as asked; `status` as it said it, and its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _AdminResponse(NamedTuple):
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class InProcessAdminClient:
    """The admin API.

    Attributes:
        app: What answers it.
        key: The admin key that it asks for; empty: none.
        base_path: What its paths stand under.
    """

    app: ASGIApp
    key: str = field(repr=False)
    base_path: str = ""

    async def get(self, page: Request, *path: str, **query: str | int | None) -> Mapping[str, Any]:
        """What a GET answers; path segments and query values are quoted here, empty ones left out.

        Args:
            page: The request for the page; who asks, and under which name, is taken from it.
            path: Segments behind `/admin/v1`.
            query: Of the URL.

        Raises:
            Refused: The answer is not of 2xx, or no JSON object.
        """
        asked = urlencode({name: value for name, value in query.items() if value not in (None, "")})
        return await asyncio.to_thread(
            _decode_response, await self._send_request(page, "GET", path, asked, b"")
        )

    async def get_or_none(
        self, page: Request, *path: str, **query: str | int | None
    ) -> Mapping[str, Any] | None:
        """What a GET answers, likewise; None where the store cannot be reached."""
        try:
            return await self.get(page, *path, **query)
        except PageError as error:
            if error.status != _STORE_UNAVAILABLE:
                raise
            return None

    async def post(self, page: Request, *path: str, body: bytes = b"") -> Mapping[str, Any]:
        """What a POST of JSON answers, likewise."""
        return _decode_response(await self._send_request(page, "POST", path, "", body))

    async def delete(self, page: Request, *path: str) -> Mapping[str, Any]:
        """What a DELETE answers, likewise."""
        return _decode_response(await self._send_request(page, "DELETE", path, "", b""))

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
    """A request from whoever asked for the page."""
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
    """Ask, and take the whole answer. When the page's client leaves, the API hears of it."""
    parts: list[bytes] = []
    status = 500
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
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
        told = json.loads(answer.body)
    except ValueError as error:
        raise PageError(502, "The admin API has answered something that is no JSON.") from error
    if not isinstance(told, dict):
        raise PageError(502, "The admin API has answered something that is no JSON object.")
    if answer.status >= 300:
        said = told.get("error")
        message = said.get("message") if isinstance(said, dict) else None
        raise PageError(answer.status, str(message or "The admin API has refused this."))
    return told
