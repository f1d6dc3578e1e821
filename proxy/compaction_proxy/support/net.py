"""Parses a host with an optional port, as the request headers `Host` and `Origin` contain it."""

from urllib.parse import urlsplit


def parse_authority(value: str, default_port: int | None = None) -> tuple[str, int | None] | None:
    """Parses a text `host[:port]`. Returns the host in lower case, and the port.

    If the text has no port, the returned port is `default_port`. If the text has another form, the result is
    None.
    """
    try:
        parts = urlsplit("//" + value)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return None
    if not host or parts.netloc != value or "@" in value:
        return None
    return host, default_port if port is None else port
