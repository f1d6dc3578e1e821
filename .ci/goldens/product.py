"""The installed command under observation: what it answers, forwards, logs and counts."""

import contextlib
import csv
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from doubles import Provider, Received
from recording import Normalizer, is_chance

from tests.system.black_box import COMMAND, Proxy, run_proxy

LIMIT_S = 120.0
# The server looks around every 0.1 s, so it never rests for longer than that.
LONG_STILL_S = 0.04
# The prefix of the environment that the command stands in: it appears in tracebacks and in some messages.
PREFIX = str(Path(COMMAND).resolve().parents[1]) if "/" in COMMAND else "/nowhere"
SECRET = "golden-secret-of-thirty-two-bytes"
ADMIN_KEY = "golden-admin-key"
ADMIN = [("authorization", f"Bearer {ADMIN_KEY}")]

Headers = Sequence[tuple[str, str]]

# The name of a logger in a log for people: it is that of a module.
_LOGGER = re.compile(r"\[(?:\w+_)?proxy(?:\.\w+)*\]")
# The values of a chart of hours or days, as a page holds them.
_CHART = re.compile(r'data-chart="\{&#34;kind&#34;:&#34;period[^"]*"')
_PAGE_TIME = re.compile(r"<time .*?</time>|\b[\d.,]+ m?s\b")
# Families of metrics whose values are times or sizes of the process, or hold for 30 s.
_CHANCE_FAMILY = re.compile(
    r"^(process_|python_)|_seconds|_created$|sessions_active|inflight|_bytes|^circuit_breaker_state"
)


@dataclass(frozen=True)
class Answered:
    """An answer of the product."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The first value of a header, named in lower case; empty where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Product:
    """A running proxy before a provider.

    Attributes:
        proxy: The process.
        provider: What it relays to.
        responses: Label of a request -> what came back.
        forwarded: Label of a request -> what reached the provider.
    """

    proxy: Proxy
    provider: Provider
    responses: dict[str, Any] = field(default_factory=dict)
    forwarded: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    _connection: http.client.HTTPConnection | None = None

    def normalizer(self) -> Normalizer:
        """Returns a new normalizer that knows this process's address and folder."""
        address = urlsplit(self.proxy.url).netloc
        return Normalizer(
            {
                address: "<proxy>",
                str(self.proxy.folder): "<folder>",
                PREFIX: "<prefix>",
                f'"port": {address.rpartition(":")[2]}': '"port": <port>',
            }
        )

    def request(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        is_settled: bool = True,
    ) -> Answered:
        """Send a request with exactly these headers (and host and length), and return the answer.

        Args:
            method: The method.
            target: Path and query.
            headers: Headers, in their order.
            body: The body, or None.
            is_settled: Whether to wait until the product has come to rest behind it.
        """
        for attempt in range(2):
            connection = self._connection
            if connection is None:
                parts = urlsplit(self.proxy.url)
                connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
                self._connection = connection
            try:
                connection.putrequest(method, target, skip_accept_encoding=True)
                for name, value in headers:
                    connection.putheader(name, value)
                if body is not None and not any(name.lower() == "content-length" for name, _ in headers):
                    connection.putheader("content-length", str(len(body)))
                connection.endheaders(body)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.drop_connection()
                if attempt:
                    raise
                continue
            try:
                answer = response.read()
            except http.client.IncompleteRead as error:
                answer = error.partial + b"<cut>"
                self.drop_connection()
            if response.will_close:
                self.drop_connection()
            if is_settled:
                self.settle()
            return Answered(response.status, response.getheaders(), answer)
        raise AssertionError

    def settle(self, still_s: float = 0.002) -> None:
        """Wait until nothing is under way: all threads sleep, and none has run for a while.

        What the product learns from an answer it learns once the client has that. A thread that waits for a
        turn on a busy machine is not asleep, so this holds there as well.

        Args:
            still_s: For how long nothing may have run, in seconds.
        """
        deadline = time.monotonic() + LIMIT_S
        last = None
        while time.monotonic() < deadline:
            found = self._look_at_threads()
            is_still = found is not None and found == last
            if is_still and not self.provider.active and not self._has_children():
                # A thread that waited for a process wakes when that ends.
                if self._look_at_threads() == found:
                    return
                found = None
            last = found
            time.sleep(still_s)
        raise TimeoutError("the product does not come to rest")

    def _has_children(self) -> bool:
        """Whether the product has started a process that is there still, such as the table of prices."""
        parent = str(self.proxy.process.pid)
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if path.read_text().rpartition(")")[2].split()[1] == parent:
                    return True
        return False

    def _look_at_threads(self) -> list[str] | None:
        """How long each thread has run and how often; None while one runs or waits for a turn or the disk."""
        try:
            tasks = list(Path(f"/proc/{self.proxy.process.pid}/task").iterdir())
            if any((task / "stat").read_text().rpartition(")")[2].split()[0] != "S" for task in tasks):
                return None
            return [(task / "schedstat").read_text() for task in tasks]
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return None

    def settle_figures(self) -> None:
        """Wait until what is written once a second behind answers is written."""
        for _ in range(2):
            time.sleep(1.2)
            self.settle(LONG_STILL_S)

    def drop_connection(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def send_raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own, and return all that comes back until it is closed."""
        parts = urlsplit(self.proxy.url)
        with socket.create_connection((parts.hostname, parts.port), LIMIT_S) as connection:
            connection.sendall(data)
            if b"connection: close" not in data and b"HTTP/1.0" not in data:
                connection.shutdown(socket.SHUT_WR)  # a client that leaves may get no answer
            pieces = []
            while piece := connection.recv(65_536):
                pieces.append(piece)
        return b"".join(pieces)

    def ask(
        self,
        label: str,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        id_of_request: str | None = "golden-1",
        is_own: bool = False,
        normalizer: Normalizer | None = None,
        into: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> Answered:
        """Send a request, and record what came back and what was forwarded.

        Args:
            label: Names the request within its case.
            method: The method.
            target: Path and query.
            headers: Headers, in their order.
            body: The body, or None.
            id_of_request: Value of `x-request-id`; None: not sent.
            is_own: Whether the answer is JSON of the product, of which times are taken out by name.
            normalizer: Of the case; None: a new one.
            into: Where responses and forwarded requests go; None: into those of the process.
        """
        clean = normalizer or self.normalizer()
        sent = [*headers, *([("x-request-id", id_of_request)] if id_of_request else [])]
        before = len(self.provider.received)
        answer = self.request(method, target, sent, body)
        responses, forwarded = into or (self.responses, self.forwarded)
        if label in responses:
            raise ValueError(f"{label} stands in this case already")
        responses[label] = describe_answer(answer, clean, is_own=is_own)
        reached = [describe_request(each, clean, body) for each in self.provider.received[before:]]
        reached.sort(key=lambda each: each["body"])  # summaries of one round are asked for at the same time
        if reached:
            forwarded[label] = reached
        return answer

    def post(self, label: str, target: str, body: Any, headers: Headers = (), **options: Any) -> Answered:
        """Post JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask(
            label, "POST", target, [*KEY, ("content-type", "application/json"), *headers], data, **options
        )

    def get_admin(self, label: str, path: str, **options: Any) -> Answered:
        """Ask the admin API."""
        return self.ask(label, "GET", f"/admin/v1/{path}", ADMIN, is_own=True, **options)

    def read_metrics(self) -> list[str]:
        """Returns the lines of /metrics without those that hold times and sizes, once they stand still."""
        lines: list[str] = []
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._read_metrics()
            if found == lines or time.monotonic() > deadline:
                return found
            lines = found
            time.sleep(1.2)  # what is counted of requests arrives within a second

    def _read_metrics(self) -> list[str]:
        kept = []
        for line in self.request("GET", "/metrics").body.decode().splitlines():
            name = line.split()[2] if line.startswith("#") else re.split(r"[{ ]", line)[0]
            if _CHANCE_FAMILY.search(name) and not line.startswith("#"):
                continue
            # A sum of fractions ends in digits that depend on the order of its parts.
            kept.append(
                re.sub(r"(?<![\w.])\d+\.\d+(?![\w.])", lambda number: f"{float(number[0]):.6g}", line)
            )
        return sorted(kept)  # series stand in the order in which they were first counted

    def read_log(self) -> list[Any]:
        """Returns the lines of the log, without times, and without the names of loggers, which are modules."""
        clean = self.normalizer()
        lines: list[Any] = []
        for line in self.proxy.log_path.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                text = re.sub(r"\b([\w.]+)=([\d.]+)", _hide_time, clean.clean_text(line))
                lines.append(_LOGGER.sub("[<logger>]", text))
                continue
            fields = json.loads(line)
            fields["logger"] = "<logger>"
            if "exception" in fields:
                fields["exception"] = fields["exception"].strip().splitlines()[-1]
            lines.append(clean.clean(fields))
        return lines

    def stop(self) -> None:
        """Tell the process to end, as an orchestrator does, and wait for that."""
        self.drop_connection()
        if self.exit_code is None:
            self.proxy.process.send_signal(signal.SIGTERM)
            self.exit_code = self.proxy.process.wait(LIMIT_S)

    def finish(self, *, with_metrics: bool = True) -> dict[str, Any]:
        """Stop the process, and return the parts of its case."""
        parts: dict[str, Any] = {"responses": self.responses, "forwarded": self.forwarded}
        if with_metrics:
            self.settle(LONG_STILL_S)
            parts["metrics"] = self.normalizer().clean(self.read_metrics())
        self.stop()
        return {**parts, "log": self.read_log(), "exit": self.exit_code}


KEY: Headers = (("authorization", "Bearer sk-golden"),)


def describe_answer(answer: Answered, clean: Normalizer, *, is_own: bool = False) -> dict[str, Any]:
    """An answer without chance."""
    body: Any = clean.clean_body(answer.body)
    if is_own and answer.header("content-type").startswith("application/json"):
        body = clean.clean(json.loads(answer.body))
        # Its length depends on the times in it.
        headers = [(name, value) for name, value in answer.headers if name.lower() != "content-length"]
        return {"status": answer.status, "headers": _describe_headers(headers, clean), "body": body}
    headers = answer.headers
    if answer.header("content-type").startswith("text/csv"):
        head, *rows = csv.reader(answer.body.decode().splitlines())
        body = [
            head,
            *([clean.clean(each, name) for name, each in zip(head, row, strict=True)] for row in rows),
        ]
    if answer.header("content-type").startswith("text/html"):
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        body = _PAGE_TIME.sub("<time>", str(body))
        body = _CHART.sub(_hide_hours, body)
    return {"status": answer.status, "headers": _describe_headers(headers, clean), "body": body}


def _hide_hours(chart: re.Match[str]) -> str:
    """A chart without its hours, and without the values of those in which nothing happened."""
    text = re.sub(r"\[\d{10}[\d,]*\]", "<hours>", chart[0])
    return re.sub(r"\bnull,|,null\b", "", text)


def _hide_time(found: re.Match[str]) -> str:
    """A field of a line of the log for people, without the number where that is a time."""
    return f"{found[1]}=<number>" if is_chance(found[1]) else found[0]


def _describe_headers(headers: Headers, clean: Normalizer) -> list[list[str]]:
    return [
        [
            name,
            ", ".join(sorted(value.split(", ")))
            if name == "allow"
            else str(clean.clean(value, name.lower())),
        ]
        for name, value in headers
    ]


def describe_request(request: Received, clean: Normalizer, sent: bytes | None) -> dict[str, Any]:
    """A forwarded request without chance; a body that is the client's own is only said to be."""
    body = "<as sent>" if sent and request.body == sent else clean.clean_body(request.body)
    headers = [
        [name, "<mark>" if name == "x-compaction-hop" else str(clean.clean(value, name))]
        for name, value in request.headers
    ]
    return {
        "method": request.method,
        "target": clean.clean_text(request.target),
        "headers": headers,
        "body": body,
    }


@contextmanager
def run_product(
    provider: Provider,
    config: Mapping[str, Any] | None = None,
    *,
    upstream: str | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    command: str = COMMAND,
) -> Iterator[Product]:
    """Start the product before a provider; one process, a fixed secret and an admin key.

    Args:
        provider: The provider.
        config: Sections of the configuration, merged into those that all cases have.
        upstream: Base URL; None: the provider's.
        environ: More variables of the environment.
        folder: Home of the process; None: a new one.
        command: The installed command.
    """
    sections: dict[str, Any] = {
        "server": {"secret": SECRET, "admin_key": ADMIN_KEY},
        "store": {"url": "memory://"},
        "observability": {"log_format": "json"},
    }
    for name, section in (config or {}).items():
        sections[name] = {**sections.get(name, {}), **section}
    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        home = folder or Path(made)
        url = upstream or provider.origin + "/v1"
        with run_proxy(home, url, sections, environ=environ, command=command) as proxy:
            product = Product(proxy, provider)
            try:
                yield product
            finally:
                product.drop_connection()


def run_command(
    arguments: Sequence[str],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    *,
    given: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> tuple[int | None, str, str]:
    """Run a command to its end; returns its exit code, or None where it had to be killed, stdout and stderr.

    Args:
        arguments: What follows the name of the command.
        folder: Home and working directory.
        environ: More variables of the environment.
        given: Lines for its standard input, which is closed behind them. Each is answered by a line.
        limit_s: When it is killed, in seconds.
    """
    env = {
        "HOME": str(folder),
        "PATH": f"{PREFIX}/bin:{os.environ['PATH']}",
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        **(environ or {}),
    }
    process = subprocess.Popen(
        [COMMAND, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = ""
    for line in given:  # each is answered by a line, before the next
        process.stdin.write(line + "\n")
        process.stdin.flush()
        said += process.stdout.readline()
    try:
        out, err = process.communicate(timeout=limit_s)
        out = said + out
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return None, said + out, err
    return process.returncode, out, err


def record_command(
    arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Run a command, and return its exit code and output without chance."""
    texts = {str(folder): "<folder>", PREFIX: "<prefix>", **options.pop("texts", {})}
    clean = Normalizer(texts)
    code, out, err = run_command(arguments, folder, environ, **options)
    lines = [
        {**json.loads(line), "timestamp": 0, "logger": 0} if line.startswith('{"') else line
        for line in err.splitlines()
    ]
    shown: Any = clean.clean_text(out)
    if "--csv" in arguments:
        shown = [out.partition("\n")[0], *_clean_csv(out, clean)] if out else ""
    elif out.startswith("{"):
        with contextlib.suppress(ValueError):
            shown = clean.clean(json.loads(out))
    return {"exit": code, "stdout": shown, "stderr": clean.clean(lines)}


def _clean_csv(text: str, clean: Normalizer) -> list[Any]:
    """The rows of a table without chance; a column that holds times is known by its head."""
    head, *rows = csv.reader(text.splitlines())
    return [[clean.clean(each, name) for name, each in zip(head, row, strict=True)] for row in rows]
