"""Checks access to the admin API and the admin pages, and limits the bodies of their requests.

Every client that sends the admin key has access. A browser has access to the pages with the cookie of a
session (`admin.browser_sessions`), or sends the key as a password, with any user name. Without a key, nobody
has access. But if the key is `none`, all clients on this machine have access, provided that the server
listens on a loopback address.

A web page of another site that is open in a browser on this machine must not get access. Therefore, the
`Origin` header of a request, if it has one, must name the same host and port as its `Host` header. A browser
also says in `Sec-Fetch-Site` whether another site caused a request: such a request must be a link that the
user follows. A request that changes something and shows only a cookie must have an `Origin`, because browsers
send a cookie with the requests of pages on other ports, too. If the admin key is `none`, the `Host` header
must also name this machine, because a site could point its own host name at this machine (DNS rebinding).
"""

import hmac
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compaction_proxy.admin.browser_sessions import DEFAULT_PORTS, SIGN_IN_PATH, has_session
from compaction_proxy.config.sections import NO_ADMIN_KEY
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.errors import RequestRefusedError, format_openai_error
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.support.net import parse_authority

# Maximum bytes of the body of a request to the admin API, except replay requests. A larger body gets status
# 413. The largest useful body contains a pin of 2,000 characters, each of which takes at most 12 bytes in
# JSON.
MAX_BODY_BYTES = 65_536
# Maximum bytes that `BodyBudgetMiddleware` reserves in the memory budget for the rest of an admin request's
# body. Further bytes count only when they arrive. The largest such body is a form with a pasted transcript.
MAX_FORM_BYTES = 24 * 1024 * 1024
# Maximum bytes of the body of a replay request, which contains a whole conversation. A larger body gets
# status 413. The command `compaction-proxy replay` accepts larger conversations.
MAX_REPLAY_BYTES = 8 * 1024 * 1024
REPLAY_PATH = "/admin/v1/replay"


@dataclass(frozen=True, slots=True)
class BodyLimitMiddleware:
    """ASGI middleware that refuses request bodies that are too large, with status 413.

    Starlette has such a limit, too. But a response that Starlette builds for it cannot have OpenAI's format.

    Attributes:
        app: Wrapped application. It must turn an `HTTPException` into a response.
        path: The middleware limits only the bodies of requests whose path begins with this text.
    """

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, and counts the bytes of the body that the application reads.

        When the application reads more than the limit, it gets an `HTTPException` with status 413.
        """
        path = scope.get("path", "")
        if not path.startswith(self.path):
            await self.app(scope, receive, send)
            return
        max_bytes = MAX_REPLAY_BYTES if path.endswith(REPLAY_PATH) else MAX_BODY_BYTES
        remaining_bytes = max_bytes

        async def receive_bounded() -> Message:
            nonlocal remaining_bytes
            message = await receive()
            remaining_bytes -= len(message.get("body", b""))
            if remaining_bytes < 0:
                raise HTTPException(413, f"The request body is larger than {max_bytes} bytes.")
            return message

        await self.app(scope, receive_bounded, send)


@dataclass(frozen=True, slots=True)
class BodyBudgetMiddleware:
    """ASGI middleware that limits the memory for the bodies of requests (`gateway.body_budget`).

    Attributes:
        app: Wrapped application. It must turn an `OverloadedError` into a response. The application gets this
            error when it reads a body and the memory budget does not have enough free bytes in time.
        budget: Memory budget, in bytes, which all bodies in this process share.
    """

    app: ASGIApp
    budget: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application. The body counts in the budget until the response has ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        hold = self.budget.open_hold()

        async def receive_counted() -> Message:
            message = await receive()
            if not hold.add_bytes(len(message.get("body", b""))):
                declared = Headers(scope=scope).get("content-length", "")
                whole = int(declared) if declared.isdecimal() else None
                if not message.get("more_body"):
                    whole = hold.size_bytes
                await hold.wait_for_rest(whole, MAX_FORM_BYTES)
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            hold.release()


# Header fields of every response of the admin API and the admin pages. With them, a browser does not let
# another site load the response as an image or a script, and does not guess its type.
RESPONSE_HEADERS = {"cross-origin-resource-policy": "same-origin", "x-content-type-options": "nosniff"}

BEARER = "Bearer"
BASIC = "Basic"
# Maps each authentication scheme to the header `WWW-Authenticate` of a response with status 401.
_CHALLENGES = {BEARER: "Bearer", BASIC: 'Basic realm="compaction-proxy", charset="UTF-8"'}
# Headers that other proxies add. If a request has one of these headers, it may have passed such a proxy, so
# the client may be on another machine even if the connection comes from this machine.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Rules for access to the admin API.

    Attributes:
        host: Address on which the server listens (`server.host`).
        key: Admin key. If it is empty, nobody has access. If it is `none`, clients on this machine need no
            key.
        is_generated: Whether the proxy has made the key. A browser is then not asked for it.
        closed_reason: Why the proxy could not make a key; empty if it made one or did not try.
    """

    host: str
    key: str = field(repr=False)
    is_generated: bool = False
    closed_reason: str = ""


def _build_forbidden_error(message: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(403, message, code)


def _is_same_origin(origin: str, host: str) -> bool:
    """Returns whether an `Origin` header and a `Host` header name the same host and port.

    Returns False if the origin has another scheme than http and https.
    """
    scheme, separator, rest = origin.lower().partition("://")
    if not separator or scheme not in DEFAULT_PORTS:
        return False
    ours = parse_authority(host.lower(), DEFAULT_PORTS[scheme])
    return ours is not None and ours == parse_authority(rest, DEFAULT_PORTS[scheme])


def is_cross_site(headers: Headers) -> bool:
    """Returns whether a page of another site caused a request. The browser then sends no cookie of a session.

    If the proxy allows such a request, the user has followed a link.
    """
    return headers.get("sec-fetch-site") == "cross-site"


def _is_foreign_fetch(method: str, headers: Headers) -> bool:
    """Returns whether a page of another site caused the request, other than by a link that the user follows.

    Other ports of this machine are other sites, too: browsers call them `same-site`.
    """
    if headers.get("sec-fetch-site", "none") in {"same-origin", "none"}:
        return False
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return not (is_link and method == "GET")


def _has_key(key: str, headers: Headers, scheme: str) -> bool:
    """Returns whether a request has `key` as a bearer token or, if `scheme` is `BASIC`, as a password."""
    named, _, credentials = headers.get("authorization", "").partition(" ")
    secret = credentials.strip().encode("latin-1")
    if scheme == BASIC and named.lower() == "basic":
        secret = _decode_password(secret)
    elif named.lower() != "bearer":
        return False
    return hmac.compare_digest(secret, key.encode())


def _decode_password(credentials: bytes) -> bytes:
    """Returns the password in Basic credentials. Returns empty bytes if the credentials have no password."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _check_local_request(
    policy: AccessPolicy, scope: Scope, headers: Headers, host: str
) -> RequestRefusedError | None:
    """Checks a request if the admin key is `none`. Returns the error that refuses it, or None.

    The request is allowed if three conditions are true: the server listens on a loopback address, the request
    comes directly from this machine, and its `Host` header names this machine.
    """
    peer = (scope.get("client") or ("",))[0]
    if not (is_loopback(policy.host) and is_loopback(peer)) or any(name in headers for name in _FORWARDED):
        return _build_forbidden_error(
            "Without server.admin_key, only clients on this machine have access.", "admin_key_required"
        )
    requested = parse_authority(host.lower())
    if requested is None or not (is_loopback(requested[0]) or requested[0] == policy.host.lower()):
        return _build_forbidden_error("The Host header names a different machine.", "host_not_allowed")
    return None


def check_access(policy: AccessPolicy, scope: Scope, scheme: str = BEARER) -> RequestRefusedError | None:
    """Checks a request. Returns the error that refuses it, or None if it is allowed.

    Args:
        policy: Rules for access.
        scope: ASGI scope of the request.
        scheme: `BEARER` accepts the key as a bearer token. `BASIC` also accepts it as a password, and the
            cookie of a session.
    """
    headers = Headers(scope=scope)
    return _check_source(scope, headers) or _check_key(policy, scope, headers, scheme)


def _check_key(
    policy: AccessPolicy, scope: Scope, headers: Headers, scheme: str
) -> RequestRefusedError | None:
    """Checks the key or the session that a request shows. Returns the error that refuses it, or None."""
    if not policy.key:
        why = f": {policy.closed_reason}" if policy.closed_reason else ""
        return _build_forbidden_error(
            f"To use the admin API, set server.admin_key{why}.", "admin_key_required"
        )
    if policy.key == NO_ADMIN_KEY:
        return _check_local_request(policy, scope, headers, headers["host"])
    if _has_key(policy.key, headers, scheme):
        return None
    if scheme == BASIC and has_session(policy.key, scope.get("scheme", "http"), headers):
        if scope["method"] in {"GET", "HEAD"} or "origin" in headers:
            return None
        return _build_forbidden_error("A form must be sent with an Origin header.", "origin_not_allowed")
    where = ", which the proxy keeps next to its store" if policy.is_generated else ""
    message = f"Send `Authorization: Bearer` and the admin key{where}."
    return RequestRefusedError(401, message, "invalid_admin_key")


def _check_source(scope: Scope, headers: Headers) -> RequestRefusedError | None:
    """Checks whether a web page of another site has caused a request. Returns the error that refuses it.

    Returns None if no page of another site has caused it.
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or parse_authority(hosts[0]) is None:
        return _build_forbidden_error("The request must have exactly one Host header.", "host_not_allowed")
    foreign = _is_foreign_fetch(scope["method"], headers)
    if foreign or not all(_is_same_origin(origin, hosts[0]) for origin in origins):
        return _build_forbidden_error(
            "Requests from pages of other origins are not allowed.", "origin_not_allowed"
        )
    return None


async def _build_json_refusal(_: Scope, refused: RequestRefusedError) -> Response:
    return Response(format_openai_error(refused), refused.status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class AccessMiddleware:
    """ASGI middleware that refuses requests that are not allowed, before it reads their bodies.

    Attributes:
        app: Wrapped application.
        policy: Rules for access.
        path: Path to protect. All paths below it are protected, too.
        scheme: `BEARER` accepts the key as a bearer token. `BASIC` also accepts the key as a password, and
            the cookie of a session. A response with status 401 asks for this scheme. But a browser is not
            asked for a password if the proxy has made the key, or if it may have a session whose cookie it
            has not sent (`is_cross_site`).
        build_refusal: Builds the response to a request that is refused.
    """

    app: ASGIApp
    policy: AccessPolicy
    path: str
    scheme: str = BEARER
    build_refusal: Callable[[Scope, RequestRefusedError], Awaitable[Response]] = _build_json_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, or responds with an error if the request is not allowed.

        A link to the admin pages needs no key, because the application checks its code.
        """
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{self.path}/"):
            await self.app(scope, receive, send)
            return
        refused = check_access(self.policy, scope, self.scheme)
        is_link = self.scheme == BASIC and scope["path"] == self.path + SIGN_IN_PATH
        if is_link and refused is not None and refused.status == HTTPStatus.UNAUTHORIZED:
            refused = None

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if refused is None:
            await self.app(scope, receive, send_protected)
            return
        answer = await self.build_refusal(scope, refused)
        if refused.status == HTTPStatus.UNAUTHORIZED:
            is_asked = not (self.policy.is_generated or is_cross_site(Headers(scope=scope)))
            scheme = self.scheme if is_asked else BEARER
            answer.headers["www-authenticate"] = _CHALLENGES[scheme]
        await answer(scope, receive, send_protected)
