"""Finds the route to an origin, directly or through a proxy. Encodes request lines and header fields."""

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote

import httpx

from compaction_proxy.gateway.client.proxies import ProxySettings
from compaction_proxy.gateway.client.types import HttpRequest

_DEFAULT_PORTS = {"http": 80, "https": 443}
_METHODS_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class Hop:
    """One server to connect to: an origin or a proxy.

    Attributes:
        host: Name (in ASCII) or address, without brackets.
        port: TCP port.
        uses_tls: Whether the connection to the server uses TLS.
    """

    host: str
    port: int
    uses_tls: bool


@dataclass(frozen=True, slots=True)
class OriginRoute:
    """The route to an origin.

    Attributes:
        origin: The server that answers the requests.
        authority: Value of the `host` field. It contains the port only if this is not the scheme's default.
        proxy: The proxy to connect to. If it is None, the client connects to the origin itself.
        proxy_credential: Value of `proxy-authorization`; empty if the proxy needs none.
        target_prefix: The text before the target in the request line: `http://host` if a proxy forwards the
            request; else empty.
        extra_header_lines: Header lines that are added to each request: the proxy's credential if a proxy
            forwards the request; else empty.
    """

    origin: Hop
    authority: bytes
    proxy: Hop | None = None
    proxy_credential: bytes = field(default=b"", repr=False)
    target_prefix: bytes = b""
    extra_header_lines: bytes = field(default=b"", repr=False)

    @property
    def connect_target(self) -> bytes:
        """The origin's host and port, in the form that a CONNECT request needs."""
        host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
        return f"{host}:{self.origin.port}".encode("ascii")


def _parse_url(url: str) -> tuple[httpx.URL, Hop]:
    parsed = httpx.URL(url)
    if parsed.scheme not in _DEFAULT_PORTS or not parsed.raw_host:
        raise ValueError(parsed.scheme)
    host = parsed.raw_host.decode("ascii").strip("[]")
    return parsed, Hop(host, parsed.port or _DEFAULT_PORTS[parsed.scheme], parsed.scheme == "https")


def resolve_route(origin: str, proxies: ProxySettings) -> OriginRoute:
    """Returns the route to an origin.

    Raises:
        httpx.UnsupportedProtocol: If `origin` is not a valid URL with the scheme http or https.
        httpx.ProxyError: If the URL of the proxy is not valid or has another scheme.
    """
    try:
        url, target = _parse_url(origin)
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.UnsupportedProtocol("not an origin of http or https") from error
    configured_proxy = proxies.get_proxy_url(url.scheme, target.host, target.port)
    if not configured_proxy:
        return OriginRoute(target, url.netloc)
    try:
        proxy_url, proxy = _parse_url(configured_proxy)
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.ProxyError("not a proxy of http or https") from error
    credential = _build_basic_credential(proxy_url)
    if target.uses_tls:
        return OriginRoute(target, url.netloc, proxy, credential)
    extra = b"proxy-authorization: %b\r\n" % credential if credential else b""
    return OriginRoute(target, url.netloc, proxy, credential, b"http://" + url.netloc, extra)


def _build_basic_credential(url: httpx.URL) -> bytes:
    if not url.userinfo:
        return b""
    user_and_password = f"{unquote(url.username)}:{unquote(url.password)}".encode()
    return b"Basic " + base64.b64encode(user_and_password)


def encode_request_head(request: HttpRequest, route: OriginRoute) -> bytes:
    """Returns the encoded request line and header fields of a request, with the empty line after them.

    Raises:
        httpx.LocalProtocolError: If a field, the target or the method contains a line break or a NUL, or the
            target or the method contains a space.
    """
    body = request.body
    if isinstance(body, bytes):
        has_length = body or request.method in _METHODS_WITH_LENGTH
        framing = b"content-length: %d\r\n" % len(body) if has_length else b""
    elif request.body_length is None:
        framing = b"transfer-encoding: chunked\r\n"
    else:
        framing = b"content-length: %d\r\n" % request.body_length
    fields = request.headers
    data = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b%b%b\r\n" % (
        request.method.encode("latin-1"),
        route.target_prefix,
        request.target,
        route.authority,
        route.extra_header_lines,
        b"\r\n".join(map(b": ".join, fields)),
        b"\r\n" if fields else b"",
        framing,
    )
    lines = 3 + len(fields) + bool(route.extra_header_lines) + bool(framing)
    is_intact = data.count(b"\n") == lines == data.count(b"\r") and data.find(b"\0") < 0
    if not is_intact or request.target.find(b" ") >= 0 or " " in request.method:
        raise httpx.LocalProtocolError("a header field contains a line break")
    return data
