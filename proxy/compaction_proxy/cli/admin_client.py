"""Defines the client with which commands call the admin API of a running proxy.

A program other than the proxy may answer on the port. The client therefore treats answers as untrusted data
and limits their size.
"""

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from compaction_proxy.cli.health import build_local_url, connect_unix_socket, create_connection
from compaction_proxy.cli.output import escape_unprintable
from compaction_proxy.core.errors import ConfigError, ProxyError

API_PATH = "/admin/v1"
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # an export holds a whole conversation
MAX_LINE_BYTES = 1024 * 1024
MAX_SHOWN_CHARACTERS = 500
_KEY_VARIABLE = "COMPACTION_PROXY__SERVER__ADMIN_KEY"
_ID_CHARACTERS = 26  # `c_` and 24 hex digits
_MAX_LISTED = 1_000


class AdminRefusedError(ProxyError):
    """Reports an error answer, an answer that is not JSON, or an id prefix without exactly one match.

    Attributes:
        status: The HTTP status code of the answer, or 404 if the id prefix is the problem.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminUnreachableError(ProxyError):
    """Reports that no proxy answers, that the connection broke or that the answer is too large."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls the admin API of a running proxy.

    Attributes:
        url: Base URL of the proxy.
        key: The admin key. If it is empty, requests carry no key.
        unix_socket: Path of the Unix socket to connect to. None connects to the URL's host and port.
    """

    url: str
    key: str = field(default="", repr=False)
    unix_socket: str | None = None

    def get(self, path: str, **query: object) -> Any:  # noqa: ANN401 - JSON
        """Sends a GET request for a path below `/admin/v1` and returns the JSON answer.

        Query parameters that are None are left out.

        Raises:
            AdminRefusedError: The API answered with an error, or not with JSON.
            AdminUnreachableError: The API did not answer, or the answer is too large.
        """
        return self.send("GET", path, query=query)

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """Sends a request for a path below `/admin/v1` and returns the JSON answer.

        Raises:
            AdminRefusedError: The API answered with an error, or not with JSON.
            AdminUnreachableError: The API did not answer, or the answer is too large.
        """
        try:
            with self._send_request(method, path, body, query or {}, {}, TIMEOUT_S) as answer:
                data = answer.read(MAX_ANSWER_BYTES + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._build_unreachable_error(error) from None
        if len(data) > MAX_ANSWER_BYTES:
            raise AdminUnreachableError(f"{self.display_url}: the answer is too large")
        if answer.status >= http.client.BAD_REQUEST:
            raise _build_refused_error(self.display_url, answer.status, data)
        return _decode_json(self.display_url, answer.status, data)

    def stream_lines(self, path: str, headers: Mapping[str, str], silence_s: float) -> Iterator[str]:
        """Yields the lines of a streamed answer as they arrive, without line endings.

        Args:
            path: Path below `/admin/v1`.
            headers: Header fields to add to the usual ones. They replace usual fields of the same name.
            silence_s: Seconds without data after which the stream counts as broken.

        Raises:
            AdminRefusedError: The API answered with an error.
            AdminUnreachableError: The API did not answer, or the stream broke.
        """
        try:
            with self._send_request("GET", path, None, {}, headers, silence_s) as answer:
                if answer.status != http.client.OK:
                    raise _build_refused_error(self.display_url, answer.status, answer.read(MAX_LINE_BYTES))
                while line := answer.readline(MAX_LINE_BYTES):
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._build_unreachable_error(error) from None

    def find_conversation_id(self, prefix: str) -> str:
        """Returns the id of the only conversation whose id begins with a prefix.

        The prefix may omit the leading `c_`. If the prefix is as long as a full id, the method returns it
        without asking the proxy. Otherwise, it searches at most 1,000 conversations.

        Raises:
            AdminRefusedError: No conversation id begins with the prefix, or several do.
            AdminUnreachableError: The API did not answer.
        """
        if len(prefix) == _ID_CHARACTERS:
            return prefix
        rows = read_rows(self.get("/conversations", limit=_MAX_LISTED), "conversations")
        names = {str(row.get("id", "")) for row in rows}
        matches = sorted(name for name in names if name.startswith((prefix, f"c_{prefix}")))
        if len(matches) == 1:
            return matches[0]
        problem = f"{len(matches)} conversations begin" if matches else "no conversation begins"
        raise AdminRefusedError(404, f"{problem} with {escape_unprintable(prefix)!r}")

    @property
    def display_url(self) -> str:
        """The address of the proxy as shown to users."""
        return self.url if self.unix_socket is None else f"unix:{self.unix_socket}"

    def _send_request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, object],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> http.client.HTTPResponse:
        """Sends a request and returns the response, whose body is still unread.

        Redirects are not followed, so that the admin key is never sent to another server.
        """
        parts = urlsplit(self.url)
        connection = (
            create_connection(parts, timeout_s)
            if self.unix_socket is None
            else self._connect_unix_socket(timeout_s)
        )
        parameters = {name: value for name, value in query.items() if value is not None}
        target = (
            f"{parts.path.rstrip('/')}{API_PATH}{path}{'?' + urlencode(parameters) if parameters else ''}"
        )
        fields = {"accept": "application/json", "connection": "close", **headers}
        if self.key:
            fields["authorization"] = f"Bearer {self.key}"
        if body is not None:
            fields["content-type"] = "application/json"
        connection.request(method, target, json.dumps(body) if body is not None else None, fields)
        return connection.getresponse()

    def _connect_unix_socket(self, timeout_s: float) -> http.client.HTTPConnection:
        return connect_unix_socket(self.unix_socket or "", timeout_s)

    def _build_unreachable_error(self, error: Exception) -> AdminUnreachableError:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return AdminUnreachableError(
                f"{self.display_url}: nothing listens there; start it with `compaction-proxy serve`"
            )
        if isinstance(error, TimeoutError):
            return AdminUnreachableError(f"{self.display_url}: no answer in time")
        return AdminUnreachableError(f"{self.display_url}: unreachable: {type(error).__name__}")


def quote_segment(text: str) -> str:
    """Percent-encodes a text as one segment of a URL path."""
    return quote(text, safe="")


def read_rows(answer: object, name: str) -> list[dict[str, Any]]:
    """Returns the objects in the list `name` of a JSON answer, or an empty list if there is no such list.

    Elements of the list that are not objects are skipped.
    """
    values = answer.get(name) if isinstance(answer, dict) else None
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def create_admin_client(url: str | None, key_file: Path | None, config: Path | None = None) -> AdminClient:
    """Creates a client of the admin API from command-line options.

    Without `url`, the configuration supplies the address. Without `key_file`, the environment or else the
    configuration supplies the key.

    Raises:
        ConfigError: The URL, the key file or the configuration cannot be used.
    """
    key = _read_key(key_file) if key_file else os.environ.get(_KEY_VARIABLE)
    if url is not None and (key is not None or not (config or _has_config_source())):
        return AdminClient(parse_base_url(url), key or "")
    from compaction_proxy.config.loader import load_config

    server = load_config(config, os.environ).config.server
    admin_key = server.admin_key.get_secret_value() if key is None else key
    if url is not None:
        return AdminClient(parse_base_url(url), admin_key)
    return AdminClient(build_local_url(server), admin_key, server.unix_socket)


def _has_config_source() -> bool:
    """Returns whether there is a configuration that may supply the admin key.

    If there is none, the caller need not load the configuration, which takes a third of a second.
    """
    variables = {f"{_KEY_VARIABLE}_FILE", "COMPACTION_PROXY_CONFIG"} & os.environ.keys()
    return bool(variables) or Path("config.yaml").exists()


def _read_key(path: Path) -> str:
    try:
        key = path.read_text("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: holds no key") from None
    if not key.isprintable() or not key:
        raise ConfigError(f"{path}: holds no key")
    return key


def parse_base_url(url: str) -> str:
    """Returns the proxy's base URL without a trailing slash and without `/v1`.

    Raises:
        ConfigError: The text is not an HTTP base URL.
    """
    try:
        parts: SplitResult | None = urlsplit(url)
        usable = bool(parts and parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0)
    except ValueError:
        usable = False
    if not usable or not url.isprintable():
        raise ConfigError(f"--url: {escape_unprintable(url)!r} is no base URL, such as http://127.0.0.1:4141")
    return url.rstrip("/").removesuffix("/v1")


def _decode_json(display_url: str, status: int, data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise AdminRefusedError(status, f"{display_url}: what answers there is no compaction-proxy") from None
    return answer


def _build_refused_error(display_url: str, status: int, data: bytes) -> AdminRefusedError:
    """Builds the error for a refused request.

    The message quotes the server's text only if the body has the proxy's error format. Otherwise, the message
    says that the server is not a compaction-proxy.
    """
    try:
        text = json.loads(data)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return AdminRefusedError(
            status, f"{display_url}: what answers there is no compaction-proxy (status {status})"
        )
    message = escape_unprintable(text)[:MAX_SHOWN_CHARACTERS]
    if status == http.client.UNAUTHORIZED:
        message = f"the admin key is refused; give it with --admin-key-file or {_KEY_VARIABLE} ({message})"
    return AdminRefusedError(status, message)
