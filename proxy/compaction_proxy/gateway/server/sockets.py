"""Opens listening sockets on TCP ports and Unix paths. Builds TLS settings."""

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
# Texts for OpenSSL's error codes X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED. Python has no
# names for these codes.
_DATE_ERRORS = {9: "is not valid yet", 10: "has expired"}


def _find_date_error(context: ssl.SSLContext, certificate: str) -> str | None:
    """Returns a text such as "has expired" if the dates of a certificate are not valid; else None.

    Python's `ssl` module does not check the dates of a server's own certificate. So this function makes a
    handshake in memory, with a client that trusts exactly this certificate. It does not report other faults
    of the certificate.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certificate)
    client_output, server_output = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(server_output, client_output)
    server = context.wrap_bio(client_output, server_output, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _DATE_ERRORS.get(error.verify_code)
    return None


def build_tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Builds the TLS settings of a server. Clients must use TLS 1.2 or a later version.

    Args:
        certificate: PEM file with the certificate and the certificates that link it to a known authority.
        key: PEM file with the private key, without a password.

    Raises:
        ConfigError: If the files cannot be read or do not match, or the certificate has expired or is not
            valid yet.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # some Pythons leave it to OpenSSL
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        why = (error.reason or "unreadable").replace("_", " ").lower()
        raise ConfigError(
            f"server.tls_key: the key must match server.tls_certificate and have no password: {why}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"server.tls_certificate, server.tls_key: cannot read the file: {error.strerror}"
        ) from None
    outdated = _find_date_error(context, certificate)
    if outdated is not None:
        raise ConfigError(f"server.tls_certificate: {certificate} {outdated}")
    return context


BACKLOG = 2_048
# Whether the kernel distributes new connections over all sockets that listen on the same port. Systems other
# than Linux give all connections to one of the sockets.
PORT_IS_SPREAD = sys.platform == "linux"
# The umask while a Unix socket is created. With it, only the owner and the group of the file may connect.
_UMASK = 0o117
_CONNECT_S = 1.0


def _bind_shared_port(family: int, address: tuple[str, int] | tuple[int, bytes]) -> socket.socket:
    """Creates a socket and binds it to a port that other sockets may share. It does not listen yet."""
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return _disable_nagle(listener)


def _disable_nagle(listener: socket.socket) -> socket.socket:
    """Turns off Nagle's algorithm for the connections of a listening socket, and returns the socket.

    uvloop turns the algorithm off for all sockets. asyncio turns it off only for sockets that were created
    with a protocol number, and this module creates its sockets without one. With the algorithm, a response
    that is sent in two writes over a reused connection would take 40 ms.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listen(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """Opens a listening TCP socket.

    Args:
        host: Address or name. An empty string means every address of this machine.
        port: TCP port. With 0, the system chooses a free port.
        share_port: Whether other sockets may use the same port. The kernel then distributes new connections
            over the sockets that listen. The returned socket does not listen yet: a server that uses it makes
            it listen. Useful only if `PORT_IS_SPREAD` is true.

    Raises:
        ConfigError: If the address does not exist, is in use, or this process may not use it. Its cause is
            the `OSError`.
    """
    if not 0 <= port <= MAX_PORT:  # the resolver would use only the last 16 bits
        raise ConfigError(f"server.port: cannot listen on {host}:{port}: the largest port is {MAX_PORT}")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        if share_port:
            return _bind_shared_port(family, address[:2])
        return _disable_nagle(socket.create_server(address[:2], family=family, backlog=BACKLOG))
    except OSError as error:
        is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise ConfigError(
            f"server.{'host' if is_of_host else 'port'}: cannot listen on {host}:{port}: "
            f"{_describe_os_error(error)}"
        ) from error
    except UnicodeError:  # raised for a name with an empty or a long part, such as `127.0.0..1`
        raise ConfigError(f"server.host: cannot listen on {host}:{port}: this is not a host name") from None


def can_spread_connections(listener: socket.socket) -> bool:
    """Returns whether several sockets can share this socket's address.

    They can if the kernel distributes new connections over them (`PORT_IS_SPREAD`). Unix sockets cannot.
    """
    return PORT_IS_SPREAD and listener.family != socket.AF_UNIX


def _describe_os_error(error: OSError) -> str:
    """Returns the operating system's text for an error. Unlike Python's text, it contains no socket address.

    Errors of name resolution have negative numbers, for which the system has no text. For such an error, the
    result is the text that the exception contains.
    """
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)


def _has_listener(path: str) -> bool:
    """Returns whether a process listens on the Unix socket at this path."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:  # the listener's queue is full
            return True
    return True


def _bind_path(listener: socket.socket, path: str) -> None:
    """Binds a Unix socket to a path. Replaces a socket that a dead process has left there.

    Raises:
        OSError: If another file is there, or another process listens there.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "")
        if _has_listener(path):
            raise OSError(errno.EADDRINUSE, "")
        Path(path).unlink()
    previous_umask = os.umask(_UMASK)  # set before the bind, so that the socket is never open to others
    try:
        listener.bind(path)
    finally:
        os.umask(previous_umask)


def listen_on_unix_path(path: str) -> socket.socket:
    """Opens a listening Unix socket (mode 0660). Replaces a socket that a dead process has left there.

    Raises:
        ConfigError: If the socket cannot be opened, for example because another process listens there. Its
            cause is the `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        _bind_path(listener, path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.unix_socket: cannot listen on {path}: {_describe_os_error(error)}"
        ) from error
    return listener


def _read_file_identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def remove_socket_on_exit(listener: socket.socket) -> Iterator[None]:
    """Removes the file of a Unix socket when the block ends. The block must close the socket.

    If another process has replaced the file, the file stays. For a TCP socket, nothing happens.
    """
    if listener.family != socket.AF_UNIX:
        yield
        return
    path: str = listener.getsockname()
    identity = _read_file_identity(path)
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be read-only by now, or gone
            # A file that another process has created here may have the inode number of the deleted one. So
            # also check that no process listens.
            if identity is not None and _read_file_identity(path) == identity and not _has_listener(path):
                Path(path).unlink()


def build_base_url(listener: socket.socket, scheme: str = "http") -> str:
    """Returns the address at which clients on this machine reach a listening socket.

    This is a URL for a TCP socket, and `unix:` with the path for a Unix socket.
    """
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"
