"""Speaks to the admin API of a running proxy.

What answers may be anything, such as another program on the port: its texts are data, and are bounded.
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

PATH = "/admin/v1"
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # an export holds a whole conversation
MAX_LINE_BYTES = 1024 * 1024
MAX_SHOWN_CHARACTERS = 500
_KEY = "COMPACTION_PROXY__SERVER__ADMIN_KEY"
_ID_CHARACTERS = 26  # `c_` and 24 hex digits
_LISTED = 1_000


class AdminRefusedError(ProxyError):
    """The admin API answered with an error; `status` is its code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminUnreachableError(ProxyError):
    """Nobody answers, or the connection broke."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A running proxy's admin API.

    Attributes:
        url: Base URL of the proxy.
        key: The admin key; empty: none is shown.
        unix_socket: Path of the socket that it is reached over; None: by the URL.
    """

    url: str
    key: str = field(default="", repr=False)
    unix_socket: str | None = None

    def get(self, path: str, **query: object) -> Any:  # noqa: ANN401 - JSON
        """What stands at a path, below `/admin/v1`; a query's None is left out.

        Raises:
            AdminRefused: It answered with an error.
            Unreachable: It did not answer.
        """
        return self.send("GET", path, query=query)

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """What is answered to a request, as JSON values.

        Raises:
            AdminRefused: It answered with an error.
            Unreachable: It did not answer.
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
        """The lines of a stream, as they come, without their ends.

        Args:
            path: Below `/admin/v1`.
            headers: Beside the usual ones.
            silence_s: How long nothing may come before the connection is taken for dead.

        Raises:
            AdminRefused: It answered with an error.
            Unreachable: It did not answer, or the stream broke.
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
        """The id of the one conversation that begins with what is given.

        Raises:
            AdminRefused: None does, or several do.
        """
        if len(prefix) == _ID_CHARACTERS:
            return prefix
        listed = read_rows(self.get("/conversations", limit=_LISTED), "conversations")
        names = {str(row.get("id", "")) for row in listed}
        found = sorted(name for name in names if name.startswith((prefix, f"c_{prefix}")))
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} conversations begin" if found else "no conversation begins"
        raise AdminRefusedError(404, f"{what} with {escape_unprintable(prefix)!r}")

    @property
    def display_url(self) -> str:
        """How the proxy is reached, for people."""
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
        """The answer, unread. Redirects are answers: the key goes to nobody else."""
        parts = urlsplit(self.url)
        line = (
            create_connection(parts, timeout_s)
            if self.unix_socket is None
            else self._connect_unix_socket(timeout_s)
        )
        told = {name: value for name, value in query.items() if value is not None}
        target = f"{parts.path.rstrip('/')}{PATH}{path}{'?' + urlencode(told) if told else ''}"
        sent = {"accept": "application/json", "connection": "close", **headers}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        if body is not None:
            sent["content-type"] = "application/json"
        line.request(method, target, json.dumps(body) if body is not None else None, sent)
        return line.getresponse()

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
    """A text as one segment of a path."""
    return quote(text, safe="")


def read_rows(answer: object, name: str) -> list[dict[str, Any]]:
    """The records that an answer lists under a name; what is none is passed over."""
    listed = answer.get(name) if isinstance(answer, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def create_admin_client(url: str | None, key_file: Path | None, config: Path | None = None) -> AdminClient:
    """The admin API that options name, and what they leave open the environment and the configuration.

    Raises:
        ConfigError: URL, key file or configuration cannot be used.
    """
    key = _read_key(key_file) if key_file else os.environ.get(_KEY)
    if url is not None and (key is not None or not (config or _has_config_source())):
        return AdminClient(parse_base_url(url), key or "")
    from compaction_proxy.config.loader import load_config

    server = load_config(config, os.environ).config.server
    shown = server.admin_key.get_secret_value() if key is None else key
    if url is not None:
        return AdminClient(parse_base_url(url), shown)
    return AdminClient(build_local_url(server), shown, server.unix_socket)


def _has_config_source() -> bool:
    """Whether there may be a key somewhere, which takes a third of a second to find out."""
    named = {f"{_KEY}_FILE", "COMPACTION_PROXY_CONFIG"} & os.environ.keys()
    return bool(named) or Path("config.yaml").exists()


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
    """A base URL that can be asked, without `/v1`.

    Raises:
        ConfigError: It is none.
    """
    try:
        parts: SplitResult | None = urlsplit(url)
        usable = bool(parts and parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0)
    except ValueError:
        usable = False
    if not usable or not url.isprintable():
        raise ConfigError(f"--url: {escape_unprintable(url)!r} is no base URL, such as http://127.0.0.1:4141")
    return url.rstrip("/").removesuffix("/v1")


def _decode_json(where: str, status: int, data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise AdminRefusedError(status, f"{where}: what answers there is no compaction-proxy") from None
    return answer


def _build_refused_error(where: str, status: int, data: bytes) -> AdminRefusedError:
    """What went wrong, in words; a server's own only where they have our shape."""
    try:
        told = json.loads(data)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return AdminRefusedError(
            status, f"{where}: what answers there is no compaction-proxy (status {status})"
        )
    message = escape_unprintable(told)[:MAX_SHOWN_CHARACTERS]
    if status == http.client.UNAUTHORIZED:
        message = f"the admin key is refused; give it with --admin-key-file or {_KEY} ({message})"
    return AdminRefusedError(status, message)
