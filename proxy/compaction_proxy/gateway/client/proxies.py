"""Finds the proxy through which an origin is reached.

The proxies are read from the environment variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.
"""

import ipaddress
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The proxies through which connections go; none by default.

    Attributes:
        urls: The URL of the proxy for each scheme of origins; the key `all` is for every other scheme. The
            value of the key `no` lists the origins that are reached directly, separated by commas. An entry
            is a host name (which includes all its subdomains), an address, a network such as `10.0.0.0/8`,
            or `*`. Each entry may end in `:port`.
        is_loopback_proxied: Whether origins at loopback addresses are reached through a proxy, too.
    """

    urls: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_loopback_proxied: bool = False

    def get_proxy_url(self, scheme: str, host: str, port: int) -> str | None:
        """Returns the URL of the proxy for an origin, or None if the origin is reached directly.

        Args:
            scheme: `http` or `https`.
            host: Name or address, without brackets.
            port: TCP port.
        """
        host = host.lower().rstrip(".")
        address = _parse_address(host)
        if _is_exempt(self.urls.get("no", ""), host, port, address):
            return None
        if not self.is_loopback_proxied and _is_loopback(host, address):
            return None
        return self.urls.get(scheme) or self.urls.get("all")


NO_PROXIES = ProxySettings()


def read_environment_proxies() -> ProxySettings:
    """Reads the proxies from the environment. Variables with lower-case names have precedence."""
    urls = urllib.request.getproxies_environment()
    return ProxySettings({scheme: _add_default_scheme(scheme, url) for scheme, url in urls.items()})


def _add_default_scheme(key: str, url: str) -> str:
    """Returns a proxy's URL. If `url` is a plain `host:port`, it gets the scheme `http`.

    The value of the key `no` is returned unchanged, because it is a list of origins.
    """
    return url if key == "no" or "://" in url or not url else f"http://{url}"


def _parse_address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str, address: _Address | None) -> bool:
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _is_exempt(rules: str, host: str, port: int, address: _Address | None) -> bool:
    return any(
        _matches_rule(rule, host, port, address) for rule in map(str.strip, rules.lower().split(",")) if rule
    )


def _matches_rule(rule: str, host: str, port: int, address: _Address | None) -> bool:
    """Returns whether one entry of NO_PROXY matches an origin. `address` is None if `host` is a name."""
    if rule == "*":
        return True
    try:
        network = ipaddress.ip_network(rule.strip("[]"), strict=False)
    except ValueError:
        name, colon, rule_port = rule.rpartition(":")
        if colon and rule_port.isdigit():
            return int(rule_port) == port and _matches_rule(name, host, port, address)
        name = rule.removeprefix("*").lstrip(".")
        return host == name or host.endswith("." + name)
    return address is not None and address in network
