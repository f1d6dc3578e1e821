"""`serve --workers N`: proxies on one port, and their parent, who replaces one that dies and ends with them.

On Linux each worker has a listening socket of its own, made and held by the parent: the kernel spreads
connections evenly (one socket for all would give most of a burst to one worker), and those that wait for a
worker which has just died are taken by the one that follows it. Elsewhere all share one socket. Parent and
workers talk over a pipe: signals may reach both of them (a terminal, a service manager), and a worker whose
parent is gone sees the pipe end.
"""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from socket import socket
from types import FrameType

from compaction_proxy.cli.reload import ReadConfig, reread_config
from compaction_proxy.cli.serve import create_tls_context, get_drain_timeouts, get_scheme, open_listener
from compaction_proxy.cli.worker import REFUSED, STOP, STOP_NOW, WorkerSlot, run_worker
from compaction_proxy.cli.worker_metrics import drop_worker_metrics, open_metrics_folder
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server as serving
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

# A worker that dies is replaced after this long, in seconds; twice as long each time it dies again.
PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
# One that lived as long as this, in seconds, was sound.
SOUND_S = 60.0
# Workers get this long, in seconds, beyond their own time to end; then they are killed.
STOP_EXTRA_S = 10.0
STOP_NOW_S = 3.0

# What signals tell the parent; on a system without SIGHUP nothing does.
END, RELOAD = b"end", b"reload"
HANGUP = getattr(signal, "SIGHUP", None)

_spawn = get_context("spawn")


def _open_listeners(loaded: LoadedConfig) -> list[socket]:
    """Listening sockets on one address: one for each worker, or the same for all."""
    server = loaded.config.server
    first = open_listener(server)  # not shared: another proxy there is an error
    if not serving.is_spread(first):
        return [first] * server.workers
    port = first.getsockname()[1]
    first.close()
    return [serving.listen(server.host, port, share_port=True) for _ in range(server.workers)]


@dataclass(slots=True)
class _WorkerSupervisor:
    """Starts workers, replaces them, and ends with them.

    Attributes:
        loaded: The configuration, and where it is from.
        reread: Reads it again.
        port: The port that the workers share; of no meaning if they share a Unix socket.
        workers: A place for each.
        failure: Why no worker can be started.
        started: Whether all have been up at one time.
        end_by: Told to end, when workers are killed, in monotonic seconds; None: not told.
    """

    loaded: LoadedConfig
    reread: ReadConfig
    port: int
    workers: list[WorkerSlot]
    failure: ProxyError | None = None
    started: bool = False
    end_by: float | None = None
    signals: tuple[Connection, Connection] = field(default_factory=lambda: _spawn.Pipe(duplex=False))

    def run(self, started: Callable[[], None]) -> None:
        """Run until told to end and all have ended; `started` is called if all are up before that."""
        while self._has_workers():
            self._start_due_workers()
            ready = wait(self._list_waitables(), self._get_timeout_s())
            if self.signals[0] in ready:
                self._execute_order(self.signals[0].recv_bytes())
            for worker in self.workers:
                worker.read_reports()
                if worker.process is not None and worker.process.sentinel in ready:
                    self._record_exit(worker, worker.process)
            if not self.started and self.end_by is None and all(worker.is_up for worker in self.workers):
                self.started = True
                started()
            self._kill_overdue()
        if self.failure is not None:
            raise self.failure

    def _execute_order(self, what: bytes) -> None:
        if what == RELOAD:
            self._reload_config()
        else:
            self.stop(now=self.end_by is not None)

    def _reload_config(self) -> None:
        """Read the configuration again; workers that start later have it, too."""
        found = reread_config(self.reread, self.loaded)
        if found is not None:
            self.loaded = found
        for worker in self.workers:
            worker.send_config(found) if found is not None else worker.send_order(REFUSED)

    def stop(self, *, now: bool = False) -> None:
        """Tell all workers to end; with `now`, at once."""
        waits = get_drain_timeouts(self.loaded.config.server)
        if self.end_by is None:
            running = sum(worker.process is not None for worker in self.workers)
            logs.get_logger(__name__).info(log_events.SERVING_STOPPING, workers=running)
        self.end_by = time.monotonic() + (
            STOP_NOW_S if now else waits.accept_s + waits.drain_s + STOP_EXTRA_S
        )
        for worker in self.workers:
            worker.send_order(STOP_NOW if now else STOP)
            worker.due_at = None
            if worker.bound is not None:
                worker.bound.close()  # the workers decide how long the port stays open

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's
        """Wake `run` up, wherever it is."""
        self.signals[1].send_bytes(END if number != HANGUP else RELOAD)

    def _has_workers(self) -> bool:
        return any(worker.process is not None or worker.due_at is not None for worker in self.workers)

    def _list_waitables(self) -> list[Connection | int]:
        pipes = [worker.pipe for worker in self.workers if worker.pipe is not None]
        sentinels = [worker.process.sentinel for worker in self.workers if worker.process is not None]
        return [self.signals[0], *pipes, *sentinels]

    def _get_timeout_s(self) -> float | None:
        times = [due for due in (self.end_by, *(each.due_at for each in self.workers)) if due is not None]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _start_due_workers(self) -> None:
        for worker in self.workers:
            if worker.due_at is not None and worker.due_at <= time.monotonic():
                self._start_worker(worker)

    def _start_worker(self, worker: WorkerSlot) -> None:
        if worker.bound is None:
            try:
                worker.bound = serving.listen(self.loaded.config.server.host, self.port, share_port=True)
            except ConfigError:  # no worker was left, and somebody else took the port
                worker.due_at = time.monotonic() + MAX_PAUSE_S
                return
        worker.pipe, theirs = _spawn.Pipe()
        given = self.loaded, worker.bound, theirs, worker.number
        worker.process = _spawn.Process(target=run_worker, args=given, daemon=True)
        worker.is_up, worker.refusal, worker.due_at, worker.started_at = False, "", None, time.monotonic()
        # A process inherits that SIGINT is ignored, and keeps to it until it has a handler of its own.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker.process.start()
        signal.signal(signal.SIGINT, previous)
        theirs.close()

    def _record_exit(self, worker: WorkerSlot, process: SpawnProcess) -> None:
        process.join()
        worker.close()
        worker.process = None
        if self.end_by is None and not self.started:
            text = "a worker did not start; the log says why"
            self.failure = ConfigError(worker.refusal) if worker.refusal else ProxyError(text)
            self.stop(now=True)
        elif self.end_by is None:
            self._schedule_restart(worker)
        if self.end_by is None or process.exitcode:
            again = None if worker.due_at is None else round(worker.due_at - time.monotonic(), 1)
            level = logging.WARNING if process.exitcode else logging.INFO
            fields = {"worker": worker.number, "pid": process.pid, "code": process.exitcode}
            logs.get_logger(__name__).log(level, log_events.WORKER_ENDED, **fields, again_in_s=again)

    def _schedule_restart(self, worker: WorkerSlot) -> None:
        """Decide when a worker is replaced."""
        drop_worker_metrics(worker.number)
        sound = worker.is_up and time.monotonic() - worker.started_at >= SOUND_S
        worker.deaths = 0 if sound else worker.deaths + 1
        worker.due_at = time.monotonic() + min(PAUSE_S * 2 ** max(worker.deaths - 1, 0), MAX_PAUSE_S)
        if not worker.is_up:  # the next may not come up either
            worker.close_listener()

    def _kill_overdue(self) -> None:
        if self.end_by is not None and time.monotonic() >= self.end_by:
            for worker in self.workers:
                if worker.process is not None:
                    worker.process.kill()


def run_workers(loaded: LoadedConfig, reread: ReadConfig, started: Callable[[str], None]) -> None:
    """Run several proxies on one port until SIGINT or SIGTERM; SIGHUP has the configuration read again.

    Args:
        loaded: The configuration.
        reread: Reads it again.
        started: Called with the URL once all of them accept requests.

    Raises:
        ConfigError: The address cannot be listened on, or the configuration is refused.
        ProxyError: A worker did not start.
    """
    server = loaded.config.server
    if loaded.config.store.url == "memory://":
        raise ConfigError("server.workers: several workers need a store that they can share, not memory://")
    create_tls_context(server)  # said once, and not by each worker
    bound = _open_listeners(loaded)
    url = serving.build_base_url(bound[0], get_scheme(server))  # a worker that ends gives its socket up
    workers = [WorkerSlot(number, held, due_at=time.monotonic()) for number, held in enumerate(bound, 1)]
    parent = _WorkerSupervisor(loaded, reread, bound[0].getsockname()[1], workers)
    for number in filter(None, (signal.SIGINT, signal.SIGTERM, HANGUP)):
        signal.signal(number, parent.on_signal)
    with serving.remove_socket_on_exit(bound[0]), open_metrics_folder():
        try:
            parent.run(lambda: started(url))
        finally:
            for worker in workers:
                worker.close()  # those still there end by themselves
    logs.get_logger(__name__).info(log_events.SERVING_STOPPED, workers=server.workers)
