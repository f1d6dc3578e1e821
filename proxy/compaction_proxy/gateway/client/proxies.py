"""The proxies that the environment names: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY."""

import ipaddress
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The proxies that connections go through; none by default.

    Attributes:
        urls: By scheme of the origin, or `all`; under `no`, the origins that are reached directly: host names
            with all below them, addresses, networks such as `10.0.0.0/8`, each with `:port` or without, or
            `*`; between commas.
        loopback: Whether origins on this machine are reached through a proxy, too.
    """

    urls: Mapping[str, str] = field(default_factory=dict, repr=False)
    loopback: bool = False

    def get_proxy_url(self, scheme: str, host: str, port: int) -> str | None:
        """URL of the proxy for an origin, None where it is reached directly.

        Args:
            scheme: `http` or `https`.
            host: Name or address, without brackets.
            port: TCP port.
        """
        host = host.lower().rstrip(".")
        address = _parse_address(host)
        if _is_exempt(self.urls.get("no", ""), host, port, address):
            return None
        if not self.loopback and _is_loopback(host, address):
            return None
        return self.urls.get(scheme) or self.urls.get("all")


NO_PROXIES = ProxySettings()


def read_environment_proxies() -> ProxySettings:
    """What the environment says now, in names of lower case before those of upper case."""
    found = urllib.request.getproxies_environment()
    return ProxySettings({scheme: _add_default_scheme(scheme, url) for scheme, url in found.items()})


def _add_default_scheme(key: str, url: str) -> str:
    """A proxy's URL; `host:port` alone is one for HTTP."""
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
    """Whether one rule of NO_PROXY is about this origin."""
    if rule == "*":
        return True
    try:
        network = ipaddress.ip_network(rule.strip("[]"), strict=False)
    except ValueError:
        name, colon, given = rule.rpartition(":")
        if colon and given.isdigit():
            return int(given) == port and _matches_rule(name, host, port, address)
        name = rule.removeprefix("*").lstrip(".")
        return host == name or host.endswith("." + name)
    return address is not None and address in network
