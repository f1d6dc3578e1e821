"""Listening sockets: TCP ports, alone or shared, Unix paths, and TLS."""

import errno
import os
import socket
import ssl
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compaction_proxy.core.errors import ConfigError

MAX_PORT = 65_535
# By OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED, which Python does not name.
_DATE_ERRORS = {9: "is not valid yet", 10: "has expired"}


def _find_date_error(context: ssl.SSLContext, certificate: str) -> str | None:
    """Why a client would refuse a certificate for its dates; None if it would not.

    The library reads no dates, but whoever is shown a certificate does: so a handshake is made in memory,
    with a client that trusts exactly this certificate. What else clients find is for who issued it.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    asked, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(answered, asked)
    server = context.wrap_bio(asked, answered, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _DATE_ERRORS.get(error.verify_code)
    return None


def build_tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """What is needed to serve TLS (1.2 and up).

    Args:
        certificate: File of the certificate in PEM, and of those that lead to a known authority.
        key: File of its private key in PEM, without a password.

    Raises:
        ConfigError: They cannot be read or do not belong together, or the certificate's time is over.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        why = (error.reason or "unreadable").replace("_", " ").lower()
        raise ConfigError(
            f"server.tls_key: no key without a password to server.tls_certificate: {why}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"server.tls_certificate, server.tls_key: cannot be read: {error.strerror}"
        ) from None
    outdated = _find_date_error(context, certificate)
    if outdated is not None:
        raise ConfigError(f"server.tls_certificate: {certificate} {outdated}")
    return context


BACKLOG = 2_048
# Whether the kernel spreads connections over sockets that share a port. Others give all to one of them.
PORT_IS_SPREAD = sys.platform == "linux"
# Who owns a Unix socket, and the owner's group, may connect.
_UMASK = 0o117
_CONNECT_S = 1.0


def _bind_shared_port(family: int, address: tuple[str, int] | tuple[int, bytes]) -> socket.socket:
    """A socket on a port that others have, too, which does not listen yet."""
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return _disable_nagle(bound)


def _disable_nagle(listener: socket.socket) -> socket.socket:
    """The socket, whose connections send without waiting for acknowledgements (Nagle).

    asyncio, unlike uvloop, sees to that only where a socket names its protocol, which ours do not; on a
    connection that is used again an answer of two writes would take 40 ms.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listen(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        host: Address or name; empty: every address of this machine.
        port: TCP port.
        share_port: Share the port with other such sockets; the kernel spreads connections over those that
            listen, and this one does when it is served. Only where `PORT_IS_SPREAD`.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if not 0 <= port <= MAX_PORT:  # the resolver would take its last 16 bits
        raise ConfigError(f"server.port: cannot listen on {host}:{port}: ports end at {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if share_port:
            return _bind_shared_port(family, address[:2])
        return _disable_nagle(socket.create_server(address[:2], family=family, backlog=BACKLOG))
    except OSError as error:
        raise ConfigError(
            f"server.port: cannot listen on {host}:{port}: {_describe_os_error(error)}"
        ) from None


def is_spread(listener: socket.socket) -> bool:
    """Whether each of several sockets on the address of this one is given connections of its own."""
    return PORT_IS_SPREAD and listener.family != socket.AF_UNIX


def _describe_os_error(error: OSError) -> str:
    """The system's words. Python adds the address; the name service has negative numbers of its own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)


def _has_listener(path: str) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_CONNECT_S)
        try:
            asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:  # its queue is full
            return True
    return True


def _bind_path(listener: socket.socket, path: str) -> None:
    """Bind to a path, on which a dead process may have left its socket."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "")
        if _has_listener(path):
            raise OSError(errno.EADDRINUSE, "")
        Path(path).unlink()
    before = os.umask(_UMASK)  # there is no time at which more may connect
    try:
        listener.bind(path)
    finally:
        os.umask(before)


def listen_on_unix_path(path: str) -> socket.socket:
    """A listening Unix socket (mode 0660). A socket that a dead process left there is replaced.

    Raises:
        ConfigError: It cannot be listened on, such as because somebody does.
    """
    bound = socket.socket(socket.AF_UNIX)
    try:
        _bind_path(bound, path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"server.unix_socket: cannot listen on {path}: {_describe_os_error(error)}"
        ) from None
    return bound


def _read_file_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def remove_socket_on_exit(listener: socket.socket) -> Iterator[None]:
    """Remove a Unix socket's file once the block has closed it, unless another process has replaced it.

    Of a TCP socket there is none.
    """
    if listener.family != socket.AF_UNIX:
        yield
        return
    path: str = listener.getsockname()
    ours = _read_file_identity(path)
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be read-only by now, or gone
            # A number that has become free is given to the next file, so it alone tells nothing.
            if ours is not None and _read_file_identity(path) == ours and not _has_listener(path):
                Path(path).unlink()


def build_base_url(listener: socket.socket, scheme: str = "http") -> str:
    """Where a listening socket is reached from this machine: a URL, or `unix:` and a path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"
