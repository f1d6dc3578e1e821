"""The way to an origin, directly or through a proxy, and the head of a request that goes it."""

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote

import httpx

from compaction_proxy.gateway.client.proxies import ProxySettings
from compaction_proxy.gateway.client.types import HttpRequest

_PORTS = {"http": 80, "https": 443}
_METHODS_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class Hop:
    """One server to connect to.

    Attributes:
        host: Name (in ASCII) or address, without brackets.
        port: TCP port.
        tls: Whether TLS is spoken with it.
    """

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class OriginRoute:
    """The way to an origin.

    Attributes:
        origin: The server that is meant.
        authority: Value of the host field: the port only where it is not the scheme's own.
        proxy: The server that is connected to first, None for the origin itself.
        credential: Value of `proxy-authorization`, empty for none.
        prefix: What stands before the target in the request line: `http://host` where a proxy forwards.
        extra: Lines that a forwarding proxy wants in each head.
    """

    origin: Hop
    authority: bytes
    proxy: Hop | None = None
    credential: bytes = field(default=b"", repr=False)
    prefix: bytes = b""
    extra: bytes = field(default=b"", repr=False)

    @property
    def connect_target(self) -> bytes:
        """The origin as a proxy is asked for a tunnel to it, with its port."""
        host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
        return f"{host}:{self.origin.port}".encode("ascii")


def _parse_url(url: str) -> tuple[httpx.URL, Hop]:
    parsed = httpx.URL(url)
    if parsed.scheme not in _PORTS or not parsed.raw_host:
        raise ValueError(parsed.scheme)
    host = parsed.raw_host.decode("ascii").strip("[]")
    return parsed, Hop(host, parsed.port or _PORTS[parsed.scheme], parsed.scheme == "https")


def resolve_route(origin: str, proxies: ProxySettings) -> OriginRoute:
    """The way to an origin.

    Raises:
        httpx.UnsupportedProtocol: The origin is none of http or https.
        httpx.ProxyError: The environment names a proxy of another kind.
    """
    try:
        url, target = _parse_url(origin)
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.UnsupportedProtocol("not an origin of http or https") from error
    through = proxies.get_proxy_url(url.scheme, target.host, target.port)
    if not through:
        return OriginRoute(target, url.netloc)
    try:
        proxy_url, proxy = _parse_url(through)
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.ProxyError("not a proxy of http or https") from error
    credential = _build_basic_credential(proxy_url)
    if target.tls:
        return OriginRoute(target, url.netloc, proxy, credential)
    extra = b"proxy-authorization: %b\r\n" % credential if credential else b""
    return OriginRoute(target, url.netloc, proxy, credential, b"http://" + url.netloc, extra)


def _build_basic_credential(url: httpx.URL) -> bytes:
    if not url.userinfo:
        return b""
    user_and_password = f"{unquote(url.username)}:{unquote(url.password)}".encode()
    return b"Basic " + base64.b64encode(user_and_password)


def encode_request_head(request: HttpRequest, route: OriginRoute) -> bytes:
    """The head of a request, with the empty line behind it.

    Raises:
        httpx.LocalProtocolError: A field or the target would end its line early, or holds a NUL.
    """
    body = request.body
    if isinstance(body, bytes):
        framed = body or request.method in _METHODS_WITH_LENGTH
        framing = b"content-length: %d\r\n" % len(body) if framed else b""
    elif request.length is None:
        framing = b"transfer-encoding: chunked\r\n"
    else:
        framing = b"content-length: %d\r\n" % request.length
    fields = request.headers
    data = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b%b%b\r\n" % (
        request.method.encode("latin-1"),
        route.prefix,
        request.target,
        route.authority,
        route.extra,
        b"\r\n".join(map(b": ".join, fields)),
        b"\r\n" if fields else b"",
        framing,
    )
    lines = 3 + len(fields) + bool(route.extra) + bool(framing)
    whole = data.count(b"\n") == lines == data.count(b"\r") and b"\0" not in data
    if not whole or b" " in request.target or " " in request.method:
        raise httpx.LocalProtocolError("a field holds what would end its line")
    return data
