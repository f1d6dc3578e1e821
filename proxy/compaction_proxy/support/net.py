"""Parses hosts as requests name them: in `Host`, and in the origins of web pages."""

from urllib.parse import urlsplit


def parse_authority(value: str, default_port: int | None = None) -> tuple[str, int | None] | None:
    """Returns host in lower case and port of `host[:port]`, or None if the text has another form."""
    try:
        parts = urlsplit("//" + value)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.netloc != value or "@" in value:
        return None
    return host.rstrip("."), default_port if port is None else port
