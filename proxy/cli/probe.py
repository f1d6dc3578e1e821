"""`health`: asks a running proxy whether it is ready. It starts every few seconds, so it imports little."""

import http.client
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from proxy.config.sections import ServerSection

TIMEOUT_S = 5
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognised, not bound


def local_url(server: "ServerSection") -> str:
    """Where the proxy of this configuration answers on this machine, its base path included."""
    host = REACHED_AT.get(server.host, server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}{server.base_path}"


def is_ready(url: str) -> tuple[bool, str]:
    """Whether the proxy at a base URL is ready, and a line that says so."""
    try:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        connection.request("GET", f"{parts.path.rstrip('/')}/readyz")
        status = connection.getresponse().status
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return False, f"{url}: unreachable: {type(error).__name__}"
    return status == http.client.OK, f"{url}: {'ready' if status == http.client.OK else f'answered {status}'}"
