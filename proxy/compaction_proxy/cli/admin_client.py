"""Defines the HTTP client with which commands call a running proxy.

The client sends requests to the proxy's admin API, health check and MCP endpoint. Another program may listen
at the proxy's address. The callers therefore treat responses as untrusted data, and limit the bytes that they
read. Functions import `http.client` and the module `console` only when they need them, so that `--help` and
the health check are quick.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.support.formatting import escape_unprintable

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

    from compaction_proxy.cli.health import ServerAddress
    from compaction_proxy.config.sections import ServerSection

API_PATH = "/admin/v1"
TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # an export holds a whole conversation
MAX_HEALTH_BYTES = 4_096
MAX_LINE_BYTES = 1024 * 1024
MAX_SHOWN_CHARACTERS = 500
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
# Maps each listening address that means "all interfaces" to a loopback address at which this machine reaches
# the proxy.
LOOPBACK_BY_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared only, not bound
_KEY_VARIABLE = "COMPACTION_PROXY__SERVER__ADMIN_KEY"
_FULL_ID = re.compile("c_[0-9a-f]{24}")
_MAX_LISTED = 1_000


class AdminRefusedError(ProxyError):
    """Reports that a response has an error status, or that it is not JSON.

    Also reports that no conversation has an id, or that several have it.
    """


class AdminUnreachableError(ProxyError):
    """Reports that no proxy responds, that the connection broke, or that the response is too large.

    `__cause__` is the exception that the connection raised. It is None if the response is too large.
    """


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A client of a running proxy.

    Attributes:
        url: Base URL of the proxy.
        headers: Header fields that the client adds to every request, such as the one with the admin key.
        unix_socket: Path of the Unix socket to which the client connects. None connects to the URL's host and
            port.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    unix_socket: str | None = None

    def get(self, path: str, **query: object) -> Any:  # noqa: ANN401 - JSON
        """Sends a GET request for a path below `/admin/v1` and returns the decoded JSON response.

        Leaves out query parameters whose value is None.

        Raises:
            AdminRefusedError: If the response has a status of 400 or above, or is not JSON.
            AdminUnreachableError: If the proxy does not respond, if the connection breaks, or if the response
                has more than `MAX_ANSWER_BYTES` bytes.
        """
        parameters = {name: value for name, value in query.items() if value is not None}
        return self.send("GET", f"{path}{'?' if parameters else ''}{urlencode(parameters, errors='replace')}")

    def send(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401 - JSON
        """Sends a request for a path below `/admin/v1` and returns the decoded JSON response.

        Raises:
            AdminRefusedError: If the response has a status of 400 or above, or is not JSON.
            AdminUnreachableError: If the proxy does not respond, if the connection breaks, or if the response
                has more than `MAX_ANSWER_BYTES` bytes.
        """
        from compaction_proxy.cli.console import show_progress

        with (
            show_progress(f"waiting for {self.display_url}"),
            self.open_response(method, API_PATH + path, body) as answer,
        ):
            data = answer.read(MAX_ANSWER_BYTES + 1)
        if len(data) > MAX_ANSWER_BYTES:
            raise AdminUnreachableError(f"{self.display_url}: the response is too large")
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise self._build_refused_error(answer.status, data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            text = f"{self.display_url}: the server is not a compaction-proxy"
            raise AdminRefusedError(text) from None

    def stream_lines(self, path: str, headers: Mapping[str, str], silence_s: float) -> Iterator[str]:
        """Yields the lines of a streamed response as they arrive, without line endings.

        A line of more than `MAX_LINE_BYTES` bytes is yielded in several pieces.

        Args:
            path: Path below `/admin/v1`.
            headers: Header fields to add to those of the client. They replace fields of the same name.
            silence_s: Seconds without data after which the stream counts as broken.

        Raises:
            AdminRefusedError: If the status of the response is not 200.
            AdminUnreachableError: If the proxy does not respond, or if the stream breaks.
        """
        with self.open_response("GET", API_PATH + path, None, headers, silence_s) as answer:
            if answer.status != HTTPStatus.OK:
                raise self._build_refused_error(answer.status, answer.read(MAX_LINE_BYTES))
            while line := answer.readline(MAX_LINE_BYTES):
                yield line.decode("utf-8", "replace").rstrip("\r\n")

    def find_conversation_id(self, session: str) -> str:
        """Returns the id of a conversation.

        `session` is the client's own id of the conversation, or the beginning of the conversation's id. The
        beginning may omit the leading `c_`. If `session` is a full id, the method returns it unchanged,
        without a request to the proxy. Otherwise, the method searches for a beginning in the 1,000
        conversations that were used last.

        Raises:
            AdminRefusedError: If `session` is empty, if there is no such conversation, if there are several,
                or if the response has an error status or is not JSON.
            AdminUnreachableError: If the proxy does not respond.
        """
        if _FULL_ID.fullmatch(session):
            return session
        if not session.removeprefix("c_"):  # every id begins with that
            raise AdminRefusedError("ID: the conversation id is empty")
        recent = self._list_ids()
        matches = {each for each in recent if each.startswith((session, f"c_{session}"))}
        if not session.startswith("c_"):
            matches |= self._list_ids(session=session)
        if len(matches) == 1:
            return matches.pop()
        name = repr(escape_unprintable(session))
        if matches:
            raise AdminRefusedError(f"{len(matches)} conversations match {name}")
        raise AdminRefusedError(f"no conversation has the id, prefix or session id {name}")

    def _list_ids(self, **query: object) -> set[str]:
        from compaction_proxy.cli.console import read_rows

        rows = read_rows(self.get("/conversations", limit=_MAX_LISTED, **query), "conversations")
        return {each for row in rows if _FULL_ID.fullmatch(each := str(row.get("id")))}

    @property
    def display_url(self) -> str:
        """The address of the proxy, as error messages show it."""
        return self.url if self.unix_socket is None else f"unix:{self.unix_socket}"

    @contextmanager
    def open_response(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator["HTTPResponse"]:
        """Sends a request for a path below the base URL. Yields the response before its body is read.

        Does not follow redirects, so that credentials are never sent to another server.

        Raises:
            AdminUnreachableError: If the proxy does not respond, or if the connection breaks inside the
                caller's `with` block.
        """
        from http.client import HTTPException

        fields = {"accept": "application/json", "connection": "close", **self.headers, **(headers or {})}
        if body is not None:
            fields["content-type"] = "application/json"
        data = json.dumps(body) if body is not None else None
        try:
            target = f"{urlsplit(self.url).path.rstrip('/')}{path}"
            with closing(self._create_connection(timeout_s)) as connection:
                if self.unix_socket is not None:
                    connection.sock.connect(self.unix_socket)
                connection.request(method, target, data, fields)
                with connection.getresponse() as answer:
                    yield answer
        except (ConnectionRefusedError, FileNotFoundError) as error:
            advice = "run `compaction-proxy serve`, or set `--url`"
            text = f"{self.display_url}: no server is running there; {advice}"
            raise AdminUnreachableError(text) from error
        except TimeoutError as error:
            raise AdminUnreachableError(f"{self.display_url}: the server did not respond in time") from error
        except (OSError, ValueError, HTTPException) as error:
            text = f"{self.display_url}: unreachable: {_describe_connection_error(error)}"
            raise AdminUnreachableError(text) from error

    def _create_connection(self, timeout_s: float) -> "HTTPConnection":
        """Creates a connection object for one request to the proxy. The connection is not open yet.

        If the proxy has a loopback address, the connection does not verify the proxy's certificate, because
        the certificate is issued for the names by which other machines reach the proxy.
        """
        import http.client
        import socket
        import ssl

        if self.unix_socket is not None:
            connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout_s)
            return connection
        url = urlsplit(self.url)
        host = url.hostname or ""
        if url.scheme != "https":
            return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
        context = ssl.create_default_context()
        if host in LOOPBACK_HOSTS:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)

    def _build_refused_error(self, status: int, data: bytes) -> AdminRefusedError:
        """Builds the error for an error response.

        If the response has the proxy's error format, the error's message quotes the message in the response.
        Otherwise, it says that the server is not a compaction-proxy.
        """
        reason = parse_error_message(data)
        if reason is None:
            return AdminRefusedError(
                f"{self.display_url}: the server is not a compaction-proxy (status {status})"
            )
        message = escape_unprintable(reason)
        if status == HTTPStatus.UNAUTHORIZED:
            message = f"the proxy rejects the admin key; use --admin-key-file or {_KEY_VARIABLE} ({message})"
        return AdminRefusedError(message)


def _describe_connection_error(error: Exception) -> str:
    import socket

    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return "the server does not use HTTP"


def parse_error_message(data: bytes) -> str | None:
    """Returns the message in the body of an error response, cut to `MAX_SHOWN_CHARACTERS` characters.

    Returns None if the body does not have the proxy's error format.
    """
    try:
        return str(json.loads(data)["error"]["message"])[:MAX_SHOWN_CHARACTERS]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def check_ready(client: AdminClient) -> tuple[bool, str]:
    """Asks a proxy whether it is ready. Returns whether it is, and a line of text that reports the result."""
    try:
        with client.open_response("GET", "/readyz", timeout_s=HEALTH_TIMEOUT_S) as answer:
            is_ready = answer.status == HTTPStatus.OK
            state = _parse_state(answer.read(MAX_HEALTH_BYTES))
    except AdminUnreachableError as error:
        return False, str(error)
    if not is_ready:
        return False, f"{client.display_url}: answered {answer.status}"
    problems = escape_unprintable(" ".join(state.problems)) if state else ""
    return True, f"{client.display_url}: ready{f', but degraded: {problems}' if problems else ''}"


class ProxyState(NamedTuple):
    """What a proxy says of itself at `/readyz`: its version, and what degrades it, in sentences."""

    version: str
    problems: tuple[str, ...] = ()


def _parse_state(data: bytes) -> ProxyState | None:
    """Parses the body of a response to `/readyz`. Returns None if it is not that of a proxy."""
    try:
        fields = json.loads(data)
        problems = fields.get("problems", ())
        return ProxyState(str(fields["version"]), tuple(map(str, problems))) if "store" in fields else None
    except (ValueError, LookupError, RecursionError, TypeError, AttributeError):
        return None


def fetch_state(client: AdminClient) -> ProxyState | None:
    """Returns the state of the proxy. Returns None if no proxy responds or another program responds."""
    try:
        with client.open_response("GET", "/readyz", timeout_s=HEALTH_TIMEOUT_S) as answer:
            return _parse_state(answer.read(MAX_HEALTH_BYTES))
    except AdminUnreachableError:
        return None


def create_admin_client(url: str | None, key_file: Path | None, config: Path | None = None) -> AdminClient:
    """Creates a client of the admin API from command-line options.

    Without `url`, the address comes from the configuration. Without `key_file`, the key comes from the
    environment, else from the configuration, else from the file of the key that the proxy has made. The last
    is sent only to a loopback address. Loading the configuration takes a third of a second, so the function
    loads it only if the address or the key may come from it.

    Raises:
        ConfigError: If the URL, the key file or the configuration is not valid.
    """
    key = _read_key(key_file) if key_file else os.environ.get(_KEY_VARIABLE)
    variables = {f"{_KEY_VARIABLE}_FILE", "COMPACTION_PROXY_CONFIG"} & os.environ.keys()
    base_url = None if url is None else parse_base_url(url)
    is_local = base_url is None or urlsplit(base_url).hostname in LOOPBACK_HOSTS
    may_have_key = is_local or bool(config or variables or Path("config.yaml").exists())
    if base_url is None or (not key and may_have_key):
        from compaction_proxy.cli.admin_key import read_admin_key
        from compaction_proxy.config.loader import load_config

        settings = load_config(config, os.environ).config
        key = key or (read_admin_key(settings) if is_local else settings.server.admin_key.get_secret_value())
        if base_url is None:
            return create_local_client(settings.server, key)
    return AdminClient(base_url, _build_key_header(key))


def create_local_client(server: "ServerSection | ServerAddress", key: str = "") -> AdminClient:
    """Creates a client of the proxy that runs on this machine with the server settings `server`.

    The client sends the admin key `key` with each request, unless `key` is empty.
    """
    return AdminClient(build_local_url(server), _build_key_header(key), server.unix_socket)


def build_local_url(server: "ServerSection | ServerAddress") -> str:
    """Returns the URL, with base path, at which this machine reaches the proxy with the settings `server`.

    For a proxy on a Unix socket, the URL contains the host `localhost`, because the proxy accepts any host
    name. The caller must then connect to the socket.
    """
    if server.unix_socket is not None:
        return f"http://localhost{server.base_path}"
    host = LOOPBACK_BY_WILDCARD.get(server.host, server.host)
    scheme = "http" if server.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}{server.base_path}"


def parse_base_url(url: str) -> str:
    """Checks the base URL of a proxy. Returns the URL without a trailing slash and without `/v1`.

    Raises:
        ConfigError: If `url` does not begin with `http://` or `https://` and a host, or if it contains
            unprintable characters.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable():
        raise ConfigError(f"--url: {escape_unprintable(url)!r} is not a base URL (http://127.0.0.1:4141)")
    return url.rstrip("/").removesuffix("/v1")


def _build_key_header(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _read_key(path: Path) -> str:
    try:
        key = path.read_text("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file contains no key") from None
    if not key.isprintable() or not key:
        raise ConfigError(f"{path}: the file contains no key")
    return key
