"""Parses a host with an optional port, as in the request headers `Host` and `Origin`."""

from urllib.parse import urlsplit


def parse_authority(value: str, default_port: int | None = None) -> tuple[str, int | None] | None:
    """Returns the host, in lower case, and the port of a text `host[:port]`.

    Returns `default_port` if the text has no port, and None if it has another form.
    """
    try:
        parts = urlsplit("//" + value)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return None
    if not host or parts.netloc != value or "@" in value:
        return None
    return host, default_port if port is None else port
