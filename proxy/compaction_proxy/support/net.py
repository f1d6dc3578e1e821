"""Parses the host and the optional port in the request headers `Host` and `Origin`."""

from urllib.parse import urlsplit


def parse_authority(value: str, default_port: int | None = None) -> tuple[str, int | None] | None:
    """Parses a text of the form `host[:port]`. Returns the host in lower case, and the port.

    If the text has no port, the returned port is `default_port`. If the text does not have this form, returns
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
