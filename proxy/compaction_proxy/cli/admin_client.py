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

from compaction_proxy.cli.health import connection, local_url, over_unix_socket
from compaction_proxy.cli.output import clean
from compaction_proxy.core.errors import ConfigError, ProxyError

PATH = "/admin/v1"
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # an export holds a whole conversation
MAX_LINE_BYTES = 1024 * 1024
MAX_SHOWN_CHARACTERS = 500
_KEY = "COMPACTION_PROXY__SERVER__ADMIN_KEY"
_ID_CHARACTERS = 26  # `c_` and 24 hex digits
_LISTED = 1_000


class AdminRefused(ProxyError):  # noqa: N818 - it names what happened
    """The admin API answered with an error; `status` is its code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ProxyError):  # noqa: N818
    """Nobody answers, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Admin:
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
            with self._asked(method, path, body, query or {}, {}, TIMEOUT_S) as answer:
                data = answer.read(MAX_ANSWER_BYTES + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._away(error) from None
        if len(data) > MAX_ANSWER_BYTES:
            raise Unreachable(f"{self.where}: the answer is too large")
        if answer.status >= http.client.BAD_REQUEST:
            raise _refused(self.where, answer.status, data)
        return _decoded(self.where, answer.status, data)

    def lines(self, path: str, headers: Mapping[str, str], silence_s: float) -> Iterator[str]:
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
            with self._asked("GET", path, None, {}, headers, silence_s) as answer:
                if answer.status != http.client.OK:
                    raise _refused(self.where, answer.status, answer.read(MAX_LINE_BYTES))
                while line := answer.readline(MAX_LINE_BYTES):
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._away(error) from None

    def conversation(self, given: str) -> str:
        """The id of the one conversation that begins with what is given.

        Raises:
            AdminRefused: None does, or several do.
        """
        if len(given) == _ID_CHARACTERS:
            return given
        listed = rows(self.get("/conversations", limit=_LISTED), "conversations")
        names = {str(row.get("id", "")) for row in listed}
        found = sorted(name for name in names if name.startswith((given, f"c_{given}")))
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} conversations begin" if found else "no conversation begins"
        raise AdminRefused(404, f"{what} with {clean(given)!r}")

    @property
    def where(self) -> str:
        """How the proxy is reached, for people."""
        return self.url if self.unix_socket is None else f"unix:{self.unix_socket}"

    def _asked(
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
        line = connection(parts, timeout_s) if self.unix_socket is None else self._local(timeout_s)
        told = {name: value for name, value in query.items() if value is not None}
        target = f"{parts.path.rstrip('/')}{PATH}{path}{'?' + urlencode(told) if told else ''}"
        sent = {"accept": "application/json", "connection": "close", **headers}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        if body is not None:
            sent["content-type"] = "application/json"
        line.request(method, target, json.dumps(body) if body is not None else None, sent)
        return line.getresponse()

    def _local(self, timeout_s: float) -> http.client.HTTPConnection:
        return over_unix_socket(self.unix_socket or "", timeout_s)

    def _away(self, error: Exception) -> Unreachable:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return Unreachable(f"{self.where}: nothing listens there; start it with `compaction-proxy serve`")
        if isinstance(error, TimeoutError):
            return Unreachable(f"{self.where}: no answer in time")
        return Unreachable(f"{self.where}: unreachable: {type(error).__name__}")


def segment(text: str) -> str:
    """A text as one segment of a path."""
    return quote(text, safe="")


def rows(answer: object, name: str) -> list[dict[str, Any]]:
    """The records that an answer lists under a name; what is none is passed over."""
    listed = answer.get(name) if isinstance(answer, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def admin(url: str | None, key_file: Path | None, config: Path | None = None) -> Admin:
    """The admin API that options name, and what they leave open the environment and the configuration.

    Raises:
        ConfigError: URL, key file or configuration cannot be used.
    """
    key = _read(key_file) if key_file else os.environ.get(_KEY)
    if url is not None and (key is not None or not (config or _may_be_configured())):
        return Admin(checked(url), key or "")
    from compaction_proxy.config.loader import load

    server = load(config, os.environ).config.server
    shown = server.admin_key.get_secret_value() if key is None else key
    if url is not None:
        return Admin(checked(url), shown)
    return Admin(local_url(server), shown, server.unix_socket)


def _may_be_configured() -> bool:
    """Whether there may be a key somewhere, which takes a third of a second to find out."""
    named = {f"{_KEY}_FILE", "COMPACTION_PROXY_CONFIG"} & os.environ.keys()
    return bool(named) or Path("config.yaml").exists()


def _read(path: Path) -> str:
    try:
        key = path.read_text("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: holds no key") from None
    if not key.isprintable() or not key:
        raise ConfigError(f"{path}: holds no key")
    return key


def checked(url: str) -> str:
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
        raise ConfigError(f"--url: {clean(url)!r} is no base URL, such as http://127.0.0.1:4141")
    return url.rstrip("/").removesuffix("/v1")


def _decoded(where: str, status: int, data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise AdminRefused(status, f"{where}: what answers there is no compaction-proxy") from None
    return answer


def _refused(where: str, status: int, data: bytes) -> AdminRefused:
    """What went wrong, in words; a server's own only where they have our shape."""
    try:
        told = json.loads(data)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return AdminRefused(status, f"{where}: what answers there is no compaction-proxy (status {status})")
    message = clean(told)[:MAX_SHOWN_CHARACTERS]
    if status == http.client.UNAUTHORIZED:
        message = f"the admin key is refused; give it with --admin-key-file or {_KEY} ({message})"
    return AdminRefused(status, message)
