"""`health`: asks a running proxy whether it is ready. It starts every few seconds, so it imports little."""

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
LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognised, not bound


def build_local_url(server: "ServerSection") -> str:
    """Where the proxy of this configuration answers on this machine, its base path included.

    One that listens on a Unix socket takes any host's name, and is reached there only.
    """
    if server.unix_socket is not None:
        return f"http://localhost{server.base_path}"
    host = REACHED_AT.get(server.host, server.host)
    scheme = "http" if server.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}{server.base_path}"


def create_connection(url: SplitResult, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """A connection to a base URL. On this machine a certificate is for the names that others use."""
    host = url.hostname or ""
    if url.scheme != "https":
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if host in LOCAL:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)


def connect_unix_socket(path: str, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """A connection over a Unix socket."""
    line = http.client.HTTPConnection("localhost", timeout=timeout_s)
    line.sock = socket.socket(socket.AF_UNIX)
    line.sock.settimeout(timeout_s)
    try:
        line.sock.connect(path)
    except OSError:
        line.close()
        raise
    return line


def check_ready(url: str, unix_socket: str | None = None) -> tuple[bool, str]:
    """Whether the proxy at a base URL is ready, and a line that says so.

    Args:
        url: Its base URL.
        unix_socket: Path of the socket that it is asked over.
    """
    asked = url if unix_socket is None else f"unix:{unix_socket}"
    try:
        parts = urlsplit(url)
        line = create_connection(parts) if unix_socket is None else connect_unix_socket(unix_socket)
        line.request("GET", f"{parts.path.rstrip('/')}/readyz")
        status = line.getresponse().status
        line.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return False, f"{asked}: unreachable: {type(error).__name__}"
    said = "ready" if status == http.client.OK else f"answered {status}"
    return status == http.client.OK, f"{asked}: {said}"


def fetch_version(url: str, unix_socket: str | None = None) -> str | None:
    """The version of the proxy of ours that answers at a base URL; None if none does."""
    try:
        parts = urlsplit(url)
        line = create_connection(parts) if unix_socket is None else connect_unix_socket(unix_socket)
        line.request("GET", f"{parts.path.rstrip('/')}/readyz", headers={"connection": "close"})
        with line.getresponse() as answer:
            told = json.loads(answer.read(MAX_ANSWER_BYTES))
        return str(told["version"]) if "store" in told else None
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
