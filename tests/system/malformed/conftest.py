"""The proxy as a process between an upstream that writes everything down and a client that says anything."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Seconds of the processor that any one small input may take: ten times what it needs.
MOST_WORK_S = 2.5
# Only a hang takes as long.
PATIENCE_S = 60.0
SUMMARY_MODEL = "summary-small"
TOLD = "They spoke of the parts of the service, one after the other; each of them is well."
SAID = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": TOLD}}]}).encode()
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t \x21-\x7e\x80-\xff]*")
_FIRST = re.compile(rb"[A-Z-]+ /[\x21-\x7e\x80-\xff]* HTTP/1\.1")


class Came(NamedTuple):
    """A request as it stood on the wire."""

    first: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes


def answered(status: int, body: bytes, *fields: bytes) -> bytes:
    head = [b"HTTP/1.1 %d OK" % status, b"content-length: %d" % len(body), *fields, b"", body]
    return b"\r\n".join(head)


def _chunks(incoming: BinaryIO) -> bytes | None:
    """A chunked body; None if it is cut."""
    body = b""
    while size := incoming.readline():
        body += incoming.read(int(size, 16))
        if incoming.readline() == b"\r\n" and size == b"0\r\n":
            return body
    return None


@dataclass
class Recorder:
    """An upstream that reads strictly, so that whatever an attacker could make of a request is found.

    Attributes:
        answer: What it answers a request with; afterwards it closes the connection if that says so.
        came: The requests.
        wrong: What no request may hold.
    """

    answer: Callable[[Came], bytes] = lambda _: answered(200, SAID)
    came: list[Came] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with accepted, accepted.makefile("rb") as incoming:
            try:
                while (came := self._read(incoming)) is not None:
                    self.came.append(came)
                    answer = self.answer(came)
                    accepted.sendall(answer)
                    if b"connection: close" in answer:
                        return
            except OSError:
                return

    def _read(self, incoming: BinaryIO) -> Came | None:
        lines: list[bytes] = []
        while (line := incoming.readline()) != b"\r\n":
            if not line:
                return None
            if not (_FIELD if lines else _FIRST).fullmatch(line.removesuffix(b"\r\n")):
                self.wrong.append(f"the line {line!r}")
            lines.append(line.rstrip(b"\r\n"))
        fields = tuple((name, held) for name, _, held in (line.partition(b": ") for line in lines[1:]))
        lengths = [held for name, held in fields if name.lower() == b"content-length"]
        codings = [held for name, held in fields if name.lower() == b"transfer-encoding"]
        hosts = [held for name, held in fields if name.lower() == b"host"]
        if len(lengths) + len(codings) > 1 or codings not in ([], [b"chunked"]):
            self.wrong.append(f"framed by {lengths} and {codings}")
        if hosts != [b"127.0.0.1:%d" % self.port]:
            self.wrong.append(f"for the hosts {hosts}")
        length = int(lengths[0]) if lengths else 0
        body = _chunks(incoming) if codings else incoming.read(length)
        return Came(lines[0], fields, body) if body is not None and len(body) >= length else None

    def taken(self) -> list[Came]:
        """The requests since it was last asked."""
        came, self.came = self.came, []
        return came


def _length(came: bytes) -> int:
    """The content-length of an answer whose head is whole."""
    found = re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", came)
    assert found, came
    return int(found[1])


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        process: The process.
        port: Where it listens.
        recorder: Its upstream.
        errors: The file that its stderr goes to.
    """

    process: subprocess.Popen[str]
    port: int
    recorder: Recorder
    errors: Path
    seen: int = 0
    connection: socket.socket | None = None

    def post(self, path: str, body: bytes, *fields: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body of the answer, over one connection for as long as it lasts."""
        head = [
            b"POST %b HTTP/1.1" % path.encode(),
            b"host: 127.0.0.1",
            b"content-length: %d" % len(body),
            *fields,
        ]
        raw = b"\r\n".join([*head, b"", body])
        with self.limit_work(raw):
            answer, rest = self._post(raw)
        if b"connection: close" in answer:
            self.leave()
        return int(answer[9:12]), answer, rest

    def _post(self, raw: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer to a request."""
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        try:
            self.connection.sendall(raw)
            came = b""
            while b"\r\n\r\n" not in came or len(came.partition(b"\r\n\r\n")[2]) < _length(came):
                piece = self.connection.recv(65_536)
                assert piece, f"cut: {came!r} to {raw[:2_000]!r}"
                came += piece
        except TimeoutError:
            pytest.fail(f"no answer in {PATIENCE_S} s to {raw[:2_000]!r}")
        answer, _, rest = came.partition(b"\r\n\r\n")
        return answer, rest

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def limit_work(self, raw: bytes) -> Iterator[None]:
        """Fails where an input costs more of the processor than any small one may. Linux tells."""
        before_s = self.cpu_s if sys.platform == "linux" else 0.0
        yield
        work_s = self.cpu_s - before_s if sys.platform == "linux" else 0.0
        assert work_s < MOST_WORK_S, f"{work_s} s of the processor for {raw[:2_000]!r}"

    def leave(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def ask(self, raw: bytes, *, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
        """What comes back, up to the connection's end; fails where that takes too long."""
        came = b""
        with (
            self.limit_work(raw),
            socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection,
        ):
            try:
                connection.sendall(raw)
                while not until(came) and (piece := connection.recv(65_536)):
                    came += piece
            except ConnectionError:
                pass
            except TimeoutError:
                pytest.fail(f"no answer in {PATIENCE_S} s to {raw[:2_000]!r}, but {came[:500]!r}")
        return came

    def logged(self) -> list[dict[str, Any]]:
        """The lines of stderr since this was last asked, each of which is one object."""
        raw = self.errors.read_bytes()[self.seen :]
        self.seen += len(raw)
        assert raw.decode().splitlines() == raw.decode().split("\n")[:-1]  # no line of another kind
        lines = [json.loads(line) for line in raw.splitlines()]
        assert all(isinstance(line, dict) for line in lines)
        return lines

    def memory_kib(self, what: str) -> int:
        """`VmRSS`, or its highest since `forget_peak`: `VmHWM`."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition(f"{what}:")[2].split()[0])

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def is_well(self) -> None:
        """It lives, has logged no fault, and no request that went on held what none may hold."""
        assert self.process.poll() is None
        lines = self.logged()
        assert [line for line in lines if "exception" in line or line["level"] in {"error", "critical"}] == []
        assert self.recorder.wrong == []


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("malformed")
    recorder = Recorder()
    arguments = ["serve", "--port", "0", "--upstream", f"http://127.0.0.1:{recorder.port}/v1"]
    environ = {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "COMPACTION_PROXY__STORE__URL": f"sqlite:///{folder}/state.db",
        "COMPACTION_PROXY__SERVER__ADMIN_KEY": "none",
        "COMPACTION_PROXY__SUMMARY__TIMEOUT_S": "5",
    }
    errors = folder / "stderr"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "compaction_proxy", *arguments],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, errors.read_text()
        proxy = Proxy(process, int(line.rpartition(":")[2]), recorder, errors)
        started = time.monotonic()
        while errors.read_bytes().count(b"\n") < 2 or b"serving.started" not in errors.read_bytes():
            assert time.monotonic() - started < 60
            time.sleep(0.02)
        try:
            yield proxy
        finally:
            process.kill()
            recorder.listening.close()


@pytest.fixture
def proxy(running: Proxy) -> Iterator[Proxy]:
    """The proxy of this session, and that it is well afterwards."""
    running.recorder.answer = lambda _: answered(200, SAID)
    running.recorder.taken()
    running.logged()
    yield running
    running.leave()
    running.is_well()
