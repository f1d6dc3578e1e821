"""Checks who may use the admin API and the pages, and bounds the bodies of their requests.

With an admin key, whoever shows it; browsers do, as the password of any user. Without one, whoever sits at
this machine, if the server listens on loopback only. A web page open on this machine does too; so the request
must be addressed to a name of this machine, or a page could point a name of its own at it (DNS rebinding),
and a request that a page has made must come from a page of ours.
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

# The largest is a pin: 2,000 characters, each of them at most 12 bytes where JSON escapes it.
MAX_BODY_BYTES = 65_536
# The largest body of all is a form with a pasted transcript. A body of no declared length may be as large.
LARGEST_BYTES = 24 * 1024 * 1024
# The end of a path that takes a whole conversation, and bounds what it reads by itself.
REPLAY = "/admin/v1/replay"


@dataclass(frozen=True, slots=True)
class BodyLimitMiddleware:
    """Refuses with 413 to read more than `MAX_BODY_BYTES` of a body below a path. Pure ASGI.

    Starlette has a limit of its own, whose answer cannot be given OpenAI's shape.

    Attributes:
        app: What is behind it; turns an HTTPException into an answer.
        path: Requests whose path does not begin so are not bounded.
    """

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what is not asked for is not read."""
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
    """Counts the bodies of requests in the budget of the process. Pure ASGI.

    Attributes:
        app: What is behind it; turns `OverloadedError` into an answer.
        bodies: The budget.
    """

    app: ASGIApp
    bodies: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body is counted as it is read, until the answer has ended."""
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
# What a client is asked for, by scheme.
_CHALLENGES = {BEARER: "Bearer", BASIC: 'Basic realm="compaction-proxy", charset="UTF-8"'}
_PORTS = {"http": 80, "https": 443}
# Signs that the request has come through another proxy, so that its peer says nothing of who asks.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Whom to let in.

    Attributes:
        host: The address that the server listens on, `server.host`.
        key: The admin key; empty: none.
    """

    host: str
    key: str = field(repr=False)


def _build_forbidden_error(why: str, code: str) -> RequestRefusedError:
    return RequestRefusedError(403, why, code)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin was served by the host that the request is addressed to."""
    scheme, separator, rest = origin.lower().partition("://")
    if not separator or scheme not in _PORTS:
        return False
    ours = parse_authority(host.lower(), _PORTS[scheme])
    return ours is not None and ours == parse_authority(rest, _PORTS[scheme])


def _has_key(key: str, headers: Headers, scheme: str) -> bool:
    """Whether a request has the key: as a bearer token, or as a password where the scheme is Basic."""
    named, _, shown = headers.get("authorization", "").partition(" ")
    given = shown.strip().encode("latin-1")
    if scheme == BASIC and named.lower() == "basic":
        given = _decode_password(given)
    elif named.lower() != "bearer":
        return False
    return hmac.compare_digest(given, key.encode())


def _decode_password(credentials: bytes) -> bytes:
    """The password in Basic credentials, whoever the user is; nothing where there is none."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _check_local_request(
    access: AccessPolicy, scope: Scope, headers: Headers, host: str
) -> RequestRefusedError | None:
    """Why a request without a key is refused; None if it is made at this machine, to this machine."""
    if not is_loopback(access.host):
        return _build_forbidden_error(
            "Set server.admin_key to use this from other machines.", "admin_key_required"
        )
    peer = (scope.get("client") or ("",))[0]
    if not is_loopback(peer) or any(name in headers for name in _FORWARDED):
        return _build_forbidden_error(
            "Without server.admin_key this machine only is answered.", "admin_key_required"
        )
    named = parse_authority(host.lower())
    if named is None or not (is_loopback(named[0]) or named[0] == access.host.lower()):
        return _build_forbidden_error("The Host header names another machine.", "host_not_allowed")
    return None


def check_access(access: AccessPolicy, scope: Scope, scheme: str = BEARER) -> RequestRefusedError | None:
    """Why a request is refused; None if it is not.

    Args:
        access: Whom to let in.
        scope: The request.
        scheme: How the key may be shown: as a bearer token, or with `BASIC` as a password, too.
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
    """Asks for access before anything of a request is read. Pure ASGI.

    Attributes:
        app: What is behind it.
        access: Whom to let in.
        path: Where access is needed, and below.
        scheme: How the key is asked for.
    """

    app: ASGIApp
    access: AccessPolicy
    path: str
    scheme: str = BEARER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        guarded = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self.path}/")
        refused = check_access(self.access, scope, self.scheme) if guarded else None
        if refused is None:
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": _CHALLENGES[self.scheme]} if refused.status == 401 else None
        answer = Response(format_openai_error(refused), refused.status, headers, "application/json")
        await answer(scope, receive, send)
