"""The route to an origin, directly or through a proxy, and the head of a request on this route."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.gateway.client.proxies import NO_PROXIES, ProxySettings
from compaction_proxy.gateway.client.route import Hop, encode_request_head, resolve_route
from compaction_proxy.gateway.client.types import HttpRequest

PROXY = ProxySettings({"all": "http://u:p%40s@proxy.example:3128"})
CREDENTIAL = b"Basic dTpwQHM="  # u:p@s


async def stream() -> AsyncIterator[bytes]:
    yield b""


def head(
    origin: str = "http://up.example", proxies: ProxySettings = NO_PROXIES, **members: Any
) -> list[bytes]:
    """Returns the lines of a head."""
    request = HttpRequest("GET", origin, b"/x?y", [], b"")._replace(**members)
    *lines, empty, rest = encode_request_head(request, resolve_route(origin, proxies)).split(b"\r\n")
    assert (empty, rest) == (b"", b"")
    return lines


@pytest.mark.parametrize(
    ("origin", "hop", "authority", "connect_target"),
    [
        ("http://up.example", Hop("up.example", 80, uses_tls=False), b"up.example", b"up.example:80"),
        ("https://up.example", Hop("up.example", 443, uses_tls=True), b"up.example", b"up.example:443"),
        ("https://up.example:80", Hop("up.example", 80, uses_tls=True), b"up.example:80", b"up.example:80"),
        ("http://[fd00::1]:8080", Hop("fd00::1", 8080, uses_tls=False), b"[fd00::1]:8080", b"[fd00::1]:8080"),
        ("http://b\u00fccher.example", Hop("xn--bcher-kva.example", 80, uses_tls=False),
         b"xn--bcher-kva.example", b"xn--bcher-kva.example:80"),
    ],
)  # fmt: skip
def test_an_origin_is_reached_directly(
    origin: str, hop: Hop, authority: bytes, connect_target: bytes
) -> None:
    route = resolve_route(origin, NO_PROXIES)
    assert (route.origin, route.authority, route.connect_target) == (hop, authority, connect_target)
    assert (route.proxy, route.proxy_credential, route.target_prefix, route.extra_header_lines) == (
        None, b"", b"", b"",
    )  # fmt: skip


def test_a_proxy_forwards_http_and_gets_the_whole_address_and_its_credential() -> None:
    assert resolve_route("http://up.example", PROXY).proxy == Hop("proxy.example", 3128, uses_tls=False)
    assert head("http://up.example:81", PROXY) == [
        b"GET http://up.example:81/x?y HTTP/1.1",
        b"host: up.example:81",
        b"proxy-authorization: " + CREDENTIAL,
    ]


def test_the_credential_of_a_proxy_is_no_field_of_a_request_through_a_tunnel() -> None:
    route = resolve_route("https://up.example", PROXY)
    assert (route.proxy_credential, route.target_prefix, route.extra_header_lines) == (CREDENTIAL, b"", b"")
    assert head("https://up.example", PROXY) == [b"GET /x?y HTTP/1.1", b"host: up.example"]


def test_a_route_shows_no_credential() -> None:
    shown = repr(resolve_route("http://up.example", PROXY))
    assert "proxy.example" in shown
    assert CREDENTIAL.decode() not in shown


@pytest.mark.parametrize("origin", ["ftp://up.example", "up.example", "http://", "http://[::1"])
def test_an_origin_of_another_protocol_is_refused(origin: str) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        resolve_route(origin, NO_PROXIES)


def test_a_proxy_of_another_protocol_is_an_error_of_the_proxy() -> None:
    with pytest.raises(httpx.ProxyError):
        resolve_route("http://up.example", ProxySettings({"all": "socks5://proxy.example"}))


def test_fields_keep_their_order_and_their_bytes() -> None:
    fields = [(b"X-Case", b"A b"), (b"accept", b"a"), (b"accept", "\u017e".encode())]
    assert head(headers=fields)[2:] == [b"X-Case: A b", b"accept: a", "accept: \u017e".encode()]


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ({"method": "POST"}, [b"content-length: 0"]),
        ({"method": "GET"}, []),
        ({"method": "DELETE", "body": b"ab"}, [b"content-length: 2"]),
        ({"method": "POST", "body": stream()}, [b"transfer-encoding: chunked"]),
        ({"method": "POST", "body": stream(), "body_length": 7}, [b"content-length: 7"]),
    ],
    ids=["empty", "none expected", "bytes", "a stream", "a stream of known length"],
)
def test_a_head_says_where_its_body_ends(members: dict[str, Any], line: list[bytes]) -> None:
    assert head(**members)[2:] == line


@given(
    st.sampled_from(["\r", "\n", "\0"]), st.text(st.characters(codec="ascii"), max_size=5), st.integers(0, 3)
)
def test_nothing_that_would_end_a_line_is_sent(end: str, text: str, place: int) -> None:
    value = (text + end + text).encode()
    members: list[dict[str, Any]] = [
        {"headers": [(b"x", value)]},
        {"headers": [(value, b"x")]},
        {"target": b"/" + value},
        {"method": value.decode()},
    ]
    with pytest.raises(httpx.LocalProtocolError):
        head(**members[place])


@pytest.mark.parametrize("members", [{"target": b"/a b"}, {"method": "GET /"}])
def test_a_space_in_the_request_line_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(httpx.LocalProtocolError):
        head(**members)
