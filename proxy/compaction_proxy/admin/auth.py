"""Checks access to the admin API and the admin pages, and limits the bodies of their requests.

With an admin key, every client that presents the key has access. Browsers send it as the password of any
user. Without a key, only clients on this machine have access, and only if the server listens on loopback. A
web page that is open on this machine is such a client. Therefore the request must name this machine as its
host, because a page could point a host name of its own at this machine (DNS rebinding), and a request that a
page has made must come from the proxy's own pages.
"""

import hmac
from base64 import b64decode
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.status import HTTP_413_CONTENT_TOO_LARGE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.errors import RequestRefusedError, format_openai_error
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.support.net import parse_authority

# The largest body is a pin: 2,000 characters of at most 12 bytes each, if JSON escapes them.
MAX_BODY_BYTES = 65_536
# The largest body on any admin path is a form with a pasted transcript. Bodies without a declared length may
# be as large.
LARGEST_BYTES = 24 * 1024 * 1024
# End of the path that takes a whole conversation and limits its body itself.
REPLAY = "/admin/v1/replay"


@dataclass(frozen=True, slots=True)
class BodyLimitMiddleware:
    """Limits bodies below a path to `MAX_BODY_BYTES`, with a 413 for larger ones. Pure ASGI.

    Starlette has a limit of its own, but its response cannot have OpenAI's form.

    Attributes:
        app: Wrapped application. It turns an HTTPException into a response.
        path: Beginning of the limited paths.
    """

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request. A body that the application does not read is not read here either."""
        path = scope.get("path", "")
        if not path.startswith(self.path) or path.endswith(REPLAY):
            await self.app(scope, receive, send)
            return
        remaining_bytes = MAX_BODY_BYTES

        async def receive_bounded() -> Message:
            nonlocal remaining_bytes
            message = await receive()
            remaining_bytes -= len(message.get("body", b""))
            if remaining_bytes < 0:
                raise HTTPException(HTTP_413_CONTENT_TOO_LARGE)
            return message

        await self.app(scope, receive_bounded, send)


@dataclass(frozen=True, slots=True)
class BodyBudgetMiddleware:
    """Counts the bodies of requests against the memory budget of the process. Pure ASGI.

    Attributes:
        app: Wrapped application. It turns `OverloadedError` into a response.
        bodies: Memory budget for bodies.
    """

    app: ASGIApp
    bodies: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request. Counts its body while it is read, and releases it after the response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        hold = self.bodies.open_hold()

        async def receive_counted() -> Message:
            message = await receive()
            if not hold.add_bytes(len(message.get("body", b""))):
                declared = Headers(scope=scope).get("content-length", "")
                whole = int(declared) if declared.isdecimal() else None
                if not message.get("more_body"):
                    whole = hold.size_bytes
                await hold.wait_for_rest(whole, LARGEST_BYTES)
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            hold.release()


BEARER = "Bearer"
BASIC = "Basic"
# Value of `WWW-Authenticate`, by scheme.
_CHALLENGES = {BEARER: "Bearer", BASIC: 'Basic realm="compaction-proxy", charset="UTF-8"'}
_PORTS = {"http": 80, "https": 443}
# Headers that show that the request came through another proxy. Its peer address is then not the client's.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Rules for access to the admin API.

    Attributes:
        host: Address that the server listens on, `server.host`.
        key: Admin key; empty without one.
    """

    host: str
    key: str = field(repr=False)


def _build_forbidden_error(why: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(403, why, code)


def _is_same_origin(origin: str, host: str) -> bool:
    """Returns whether a page of this origin was served by the requested host."""
    scheme, separator, rest = origin.lower().partition("://")
    if not separator or scheme not in _PORTS:
        return False
    ours = parse_authority(host.lower(), _PORTS[scheme])
    return ours is not None and ours == parse_authority(rest, _PORTS[scheme])


def _has_key(key: str, headers: Headers, scheme: str) -> bool:
    """Returns whether a request has the key, as a bearer token or, if the scheme is Basic, as a password."""
    named, _, credentials = headers.get("authorization", "").partition(" ")
    secret = credentials.strip().encode("latin-1")
    if scheme == BASIC and named.lower() == "basic":
        secret = _decode_password(secret)
    elif named.lower() != "bearer":
        return False
    return hmac.compare_digest(secret, key.encode())


def _decode_password(credentials: bytes) -> bytes:
    """Decodes the password in Basic credentials of any user; empty if there is none."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _check_local_request(
    access: AccessPolicy, scope: Scope, headers: Headers, host: str
) -> RequestRefusedError | None:
    """Returns why a request without a key is refused; None if it comes from and names this machine."""
    if not is_loopback(access.host):
        return _build_forbidden_error(
            "Set server.admin_key to use this from other machines.", "admin_key_required"
        )
    peer = (scope.get("client") or ("",))[0]
    if not is_loopback(peer) or any(name in headers for name in _FORWARDED):
        return _build_forbidden_error(
            "Without server.admin_key this machine only is answered.", "admin_key_required"
        )
    requested = parse_authority(host.lower())
    if requested is None or not (is_loopback(requested[0]) or requested[0] == access.host.lower()):
        return _build_forbidden_error("The Host header names another machine.", "host_not_allowed")
    return None


def check_access(access: AccessPolicy, scope: Scope, scheme: str = BEARER) -> RequestRefusedError | None:
    """Returns why a request is refused, or None if it is allowed.

    Args:
        access: Rules for access.
        scope: ASGI scope of the request.
        scheme: `BEARER` accepts the key as a bearer token. `BASIC` also accepts it as a password.
    """
    headers = Headers(scope=scope)
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or parse_authority(hosts[0]) is None:
        return _build_forbidden_error("The request must have one Host header.", "host_not_allowed")
    if not all(_is_same_origin(origin, hosts[0]) for origin in origins):
        return _build_forbidden_error("Pages of other origins are not answered.", "origin_not_allowed")
    if not access.key:
        return _check_local_request(access, scope, headers, hosts[0])
    if not _has_key(access.key, headers, scheme):
        return RequestRefusedError(
            401, "Send `Authorization: Bearer` and the admin key.", "invalid_admin_key"
        )
    return None


@dataclass(frozen=True, slots=True)
class AccessMiddleware:
    """Checks access before anything of a request is read. Pure ASGI.

    Attributes:
        app: Wrapped application.
        access: Rules for access.
        path: Path that needs access, with all paths below it.
        scheme: Authentication scheme that a 401 response asks for.
    """

    app: ASGIApp
    access: AccessPolicy
    path: str
    scheme: str = BEARER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an allowed request on, or refuses it."""
        guarded = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self.path}/")
        refused = check_access(self.access, scope, self.scheme) if guarded else None
        if refused is None:
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": _CHALLENGES[self.scheme]} if refused.status == 401 else None
        answer = Response(format_openai_error(refused), refused.status, headers, "application/json")
        await answer(scope, receive, send)
