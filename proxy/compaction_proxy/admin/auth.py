"""Checks access to the admin API and the admin pages, and limits the bodies of their requests.

If an admin key is configured, every client that sends the key has access. A browser sends the key as a
password, with any user name. If no admin key is configured, only clients on this machine have access, and
only if the server listens on a loopback address.

A web page of another site that is open in a browser on this machine must not get access. Therefore, the
`Origin` header of a request, if it has one, must name the same host and port as its `Host` header. A browser
also says in `Sec-Fetch-Site` whether another site caused a request: such a request must be a link that the
user follows. If no admin key is configured, the `Host` header must also name this machine, because a site
could point its own host name at this machine (DNS rebinding).
"""

import hmac
from base64 import b64decode
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
# Maps each URL scheme to its default port.
_PORTS = {"http": 80, "https": 443}
# Headers that other proxies add. If a request has one of these headers, it may have passed such a proxy, so
# the client may be on another machine even if the connection comes from this machine.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Rules for access to the admin API.

    Attributes:
        host: Address on which the server listens (`server.host`).
        key: Admin key (`server.admin_key`); empty if none is configured.
    """

    host: str
    key: str = field(repr=False)


def _build_forbidden_error(message: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(403, message, code)


def _is_same_origin(origin: str, host: str) -> bool:
    """Returns whether an `Origin` header and a `Host` header name the same host and port.

    Returns False if the origin has another scheme than http and https.
    """
    scheme, separator, rest = origin.lower().partition("://")
    if not separator or scheme not in _PORTS:
        return False
    ours = parse_authority(host.lower(), _PORTS[scheme])
    return ours is not None and ours == parse_authority(rest, _PORTS[scheme])


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
    """Checks a request if no admin key is configured. Returns the error that refuses it, or None.

    The request is allowed if three conditions are true: the server listens on a loopback address, the request
    comes directly from this machine, and its `Host` header names this machine.
    """
    if not is_loopback(policy.host):
        return _build_forbidden_error(
            "Set server.admin_key to use this from other machines.", "admin_key_required"
        )
    peer = (scope.get("client") or ("",))[0]
    if not is_loopback(peer) or any(name in headers for name in _FORWARDED):
        return _build_forbidden_error(
            "Without server.admin_key this machine only is answered.", "admin_key_required"
        )
    requested = parse_authority(host.lower())
    if requested is None or not (is_loopback(requested[0]) or requested[0] == policy.host.lower()):
        return _build_forbidden_error("The Host header names another machine.", "host_not_allowed")
    return None


def check_access(policy: AccessPolicy, scope: Scope, scheme: str = BEARER) -> RequestRefusedError | None:
    """Checks a request. Returns the error that refuses it, or None if it is allowed.

    Args:
        policy: Rules for access.
        scope: ASGI scope of the request.
        scheme: `BEARER` accepts the key as a bearer token. `BASIC` also accepts it as a password.
    """
    headers = Headers(scope=scope)
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or parse_authority(hosts[0]) is None:
        return _build_forbidden_error("The request must have one Host header.", "host_not_allowed")
    foreign = _is_foreign_fetch(scope["method"], headers)
    if foreign or not all(_is_same_origin(origin, hosts[0]) for origin in origins):
        return _build_forbidden_error("Pages of other origins are not answered.", "origin_not_allowed")
    if not policy.key:
        return _check_local_request(policy, scope, headers, hosts[0])
    if not _has_key(policy.key, headers, scheme):
        return RequestRefusedError(
            401, "Send `Authorization: Bearer` and the admin key.", "invalid_admin_key"
        )
    return None


@dataclass(frozen=True, slots=True)
class AccessMiddleware:
    """ASGI middleware that refuses requests that are not allowed, before it reads their bodies.

    Attributes:
        app: Wrapped application.
        policy: Rules for access.
        path: Path to protect. All paths below it are protected, too.
        scheme: `BEARER` accepts the key as a bearer token. `BASIC` also accepts the key as a password. A
            response with status 401 asks for this scheme.
    """

    app: ASGIApp
    policy: AccessPolicy
    path: str
    scheme: str = BEARER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, or responds with an error if the request is not allowed."""
        guarded = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self.path}/")
        refused = check_access(self.policy, scope, self.scheme) if guarded else None
        if not guarded:
            await self.app(scope, receive, send)
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if refused is None:
            await self.app(scope, receive, send_protected)
            return
        headers = {"www-authenticate": _CHALLENGES[self.scheme]} if refused.status == 401 else None
        answer = Response(format_openai_error(refused), refused.status, headers, "application/json")
        await answer(scope, receive, send_protected)
