"""Parses the host and port that a request names in its header `Host` or as the origin of a web page."""

from urllib.parse import urlsplit


def parse_authority(value: str, default_port: int | None = None) -> tuple[str, int | None] | None:
    """Returns the host, in lower case, and the port of `host[:port]`; None if the text has another form."""
    try:
        parts = urlsplit("//" + value)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.netloc != value or "@" in value:
        return None
    return host.rstrip("."), default_port if port is None else port
