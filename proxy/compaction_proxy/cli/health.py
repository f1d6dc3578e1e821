"""Checks whether a running proxy is ready, and connects to it.

Containers run the command `health` every few seconds, so this module imports little to start quickly.
"""

import http.client
import json
import socket
import ssl
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from compaction_proxy.config.sections import ServerSection

TIMEOUT_S = 5
MAX_ANSWER_BYTES = 4_096
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
# Maps addresses that mean all interfaces to the loopback address at which the proxy can be reached.
LOOPBACK_BY_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared only, not bound


def build_local_url(server: "ServerSection") -> str:
    """Returns the URL, with base path, at which the configured proxy answers on this machine.

    For a proxy on a Unix socket, the URL names `localhost`, because the proxy accepts any host name. The
    caller must connect to the socket.
    """
    if server.unix_socket is not None:
        return f"http://localhost{server.base_path}"
    host = LOOPBACK_BY_WILDCARD.get(server.host, server.host)
    scheme = "http" if server.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}{server.base_path}"


def create_connection(url: SplitResult, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """Creates a connection to the server of a base URL. The first request opens the connection.

    Certificates are not verified on loopback, because they are issued for the names by which other machines
    reach the proxy.
    """
    host = url.hostname or ""
    if url.scheme != "https":
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if host in LOOPBACK_HOSTS:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)


def connect_unix_socket(path: str, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """Opens a connection to a Unix socket and returns it.

    Raises:
        OSError: No connection can be made to the socket.
    """
    connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(timeout_s)
    try:
        connection.sock.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def check_ready(url: str, unix_socket: str | None = None) -> tuple[bool, str]:
    """Returns whether the proxy at a base URL is ready, and a line that reports the result.

    Args:
        url: Base URL of the proxy.
        unix_socket: Path of the Unix socket to connect to. None connects to the URL's host and port.
    """
    address = url if unix_socket is None else f"unix:{unix_socket}"
    try:
        parts = urlsplit(url)
        connection = create_connection(parts) if unix_socket is None else connect_unix_socket(unix_socket)
        connection.request("GET", f"{parts.path.rstrip('/')}/readyz")
        status = connection.getresponse().status
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return False, f"{address}: unreachable: {type(error).__name__}"
    state = "ready" if status == http.client.OK else f"answered {status}"
    return status == http.client.OK, f"{address}: {state}"


def fetch_version(url: str, unix_socket: str | None = None) -> str | None:
    """Returns the version of the compaction-proxy at a base URL, or None if no compaction-proxy answers."""
    try:
        parts = urlsplit(url)
        connection = create_connection(parts) if unix_socket is None else connect_unix_socket(unix_socket)
        connection.request("GET", f"{parts.path.rstrip('/')}/readyz", headers={"connection": "close"})
        with connection.getresponse() as answer:
            fields = json.loads(answer.read(MAX_ANSWER_BYTES))
        return str(fields["version"]) if "store" in fields else None
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
