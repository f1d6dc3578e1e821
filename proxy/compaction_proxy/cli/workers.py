"""Runs `serve --workers N`: several proxies on one port, and a parent that replaces the workers that die.

On Linux the parent opens a listening socket for each worker and keeps it open. The kernel then spreads
connections evenly. With a single socket, one worker would get most connections of a burst. If a worker dies,
the connections that wait at its socket go to the worker that replaces it. On other systems all workers share
one socket. The parent and each worker communicate over a pipe rather than by signals, because a terminal or a
service manager may send a signal to both. If the parent dies, each worker notices the end of its pipe and
stops.
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
from compaction_proxy.cli.worker import KEEP_CONFIG, STOP, STOP_NOW, WorkerSlot, run_worker
from compaction_proxy.cli.worker_metrics import drop_worker_metrics, open_metrics_folder
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server as serving
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

# Seconds until a dead worker is replaced. The pause doubles with each further death, up to the maximum.
PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
# Seconds that a worker must live to count as stable. After a stable run, the pause is short again.
STABLE_S = 60.0
# Seconds until workers that still run are killed. STOP_EXTRA_S is counted from the end of the time that
# workers may take to end, and STOP_NOW_S from the order to stop at once.
STOP_EXTRA_S = 10.0
STOP_NOW_S = 3.0

# Orders that the signal handler sends to the parent's loop. Systems without SIGHUP have no reload.
STOP_ORDER, RELOAD_ORDER = b"end", b"reload"
HANGUP = getattr(signal, "SIGHUP", None)

_spawn = get_context("spawn")


def _open_listeners(loaded: LoadedConfig) -> list[socket]:
    """Opens listening sockets on one address: one for each worker, or a single one for all."""
    server = loaded.config.server
    first = open_listener(server)  # does not share the port, so it fails if another program uses it
    if not serving.can_spread_connections(first):
        return [first] * server.workers
    port = first.getsockname()[1]
    first.close()
    return [serving.listen(server.host, port, share_port=True) for _ in range(server.workers)]


@dataclass(slots=True)
class _WorkerSupervisor:
    """Starts the workers, replaces workers that die, and stops them when the proxy is to end.

    Attributes:
        loaded: The configuration and its origins.
        read_config: Reads the configuration again.
        port: The port that the workers share. Meaningless if they share a Unix socket.
        workers: A slot for each worker.
        failure: The error that ends the run because a worker did not start.
        has_started: Whether all workers have been up at the same time.
        kill_at: When remaining workers are killed, in monotonic seconds. None until an end is requested.
        signal_pipe: A pipe by which signal handlers wake the loop: the reading end and the writing end.
    """

    loaded: LoadedConfig
    read_config: ReadConfig
    port: int
    workers: list[WorkerSlot]
    failure: ProxyError | None = None
    has_started: bool = False
    kill_at: float | None = None
    signal_pipe: tuple[Connection, Connection] = field(default_factory=lambda: _spawn.Pipe(duplex=False))

    def run(self, on_started: Callable[[], None]) -> None:
        """Runs until all workers have ended.

        Args:
            on_started: Called once all workers are up. Not called if the end is requested before that.

        Raises:
            ConfigError: A worker refused the configuration at the start.
            ProxyError: A worker did not start.
        """
        while self._has_workers():
            self._start_due_workers()
            ready = wait(self._list_waitables(), self._get_seconds_until_due())
            if self.signal_pipe[0] in ready:
                self._execute_order(self.signal_pipe[0].recv_bytes())
            for worker in self.workers:
                worker.read_reports()
                if worker.process is not None and worker.process.sentinel in ready:
                    self._record_exit(worker, worker.process)
            if not self.has_started and self.kill_at is None and all(worker.is_up for worker in self.workers):
                self.has_started = True
                on_started()
            self._kill_overdue()
        if self.failure is not None:
            raise self.failure

    def _execute_order(self, order: bytes) -> None:
        if order == RELOAD_ORDER:
            self._reload_config()
        else:
            self.stop(now=self.kill_at is not None)

    def _reload_config(self) -> None:
        """Reads the configuration again and sends it to the workers. Workers that start later use it, too.

        If the new configuration cannot be used, sends an order to keep the current one.
        """
        loaded = reread_config(self.read_config, self.loaded)
        if loaded is not None:
            self.loaded = loaded
        for worker in self.workers:
            worker.send_config(loaded) if loaded is not None else worker.send_order(KEEP_CONFIG)

    def stop(self, *, now: bool = False) -> None:
        """Orders all workers to end. With `now`, the workers do not wait for requests in progress.

        Workers that do not end in time are killed later.
        """
        waits = get_drain_timeouts(self.loaded.config.server)
        if self.kill_at is None:
            running = sum(worker.process is not None for worker in self.workers)
            logs.get_logger(__name__).info(log_events.SERVING_STOPPING, workers=running)
        self.kill_at = time.monotonic() + (
            STOP_NOW_S if now else waits.accept_s + waits.drain_s + STOP_EXTRA_S
        )
        for worker in self.workers:
            worker.send_order(STOP_NOW if now else STOP)
            worker.start_due_at = None
            if worker.listener is not None:
                # The worker has its own copy of the socket and closes it when it no longer needs it.
                worker.listener.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature of a signal handler
        """Handles a signal: wakes `run` with an order to end or to reload."""
        self.signal_pipe[1].send_bytes(STOP_ORDER if number != HANGUP else RELOAD_ORDER)

    def _has_workers(self) -> bool:
        return any(worker.process is not None or worker.start_due_at is not None for worker in self.workers)

    def _list_waitables(self) -> list[Connection | int]:
        pipes = [worker.pipe for worker in self.workers if worker.pipe is not None]
        sentinels = [worker.process.sentinel for worker in self.workers if worker.process is not None]
        return [self.signal_pipe[0], *pipes, *sentinels]

    def _get_seconds_until_due(self) -> float | None:
        times = [
            due for due in (self.kill_at, *(each.start_due_at for each in self.workers)) if due is not None
        ]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _start_due_workers(self) -> None:
        for worker in self.workers:
            if worker.start_due_at is not None and worker.start_due_at <= time.monotonic():
                self._start_worker(worker)

    def _start_worker(self, worker: WorkerSlot) -> None:
        if worker.listener is None:
            try:
                worker.listener = serving.listen(self.loaded.config.server.host, self.port, share_port=True)
            except ConfigError:  # another program took the port while no worker ran
                worker.start_due_at = time.monotonic() + MAX_PAUSE_S
                return
        worker.pipe, child_end = _spawn.Pipe()
        arguments = self.loaded, worker.listener, child_end, worker.number
        worker.process = _spawn.Process(target=run_worker, args=arguments, daemon=True)
        worker.is_up, worker.refusal, worker.start_due_at, worker.started_at = (
            False,
            "",
            None,
            time.monotonic(),
        )
        # The new process inherits the ignored SIGINT, and so ignores Ctrl-C until it sets its own handler.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker.process.start()
        signal.signal(signal.SIGINT, previous)
        child_end.close()

    def _record_exit(self, worker: WorkerSlot, process: SpawnProcess) -> None:
        process.join()
        worker.close()
        worker.process = None
        if self.kill_at is None and not self.has_started:
            text = "a worker did not start; the log says why"
            self.failure = ConfigError(worker.refusal) if worker.refusal else ProxyError(text)
            self.stop(now=True)
        elif self.kill_at is None:
            self._schedule_restart(worker)
        if self.kill_at is None or process.exitcode:
            restart_in_s = (
                None if worker.start_due_at is None else round(worker.start_due_at - time.monotonic(), 1)
            )
            level = logging.WARNING if process.exitcode else logging.INFO
            fields = {"worker": worker.number, "pid": process.pid, "code": process.exitcode}
            logs.get_logger(__name__).log(level, log_events.WORKER_ENDED, **fields, again_in_s=restart_in_s)

    def _schedule_restart(self, worker: WorkerSlot) -> None:
        """Schedules the restart of a worker that died, with a longer pause after each death in a row."""
        drop_worker_metrics(worker.number)
        was_stable = worker.is_up and time.monotonic() - worker.started_at >= STABLE_S
        worker.death_count = 0 if was_stable else worker.death_count + 1
        worker.start_due_at = time.monotonic() + min(
            PAUSE_S * 2 ** max(worker.death_count - 1, 0), MAX_PAUSE_S
        )
        if not worker.is_up:  # the next process may fail, too, so new connections go to others
            worker.close_listener()

    def _kill_overdue(self) -> None:
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            for worker in self.workers:
                if worker.process is not None:
                    worker.process.kill()


def run_workers(loaded: LoadedConfig, read_config: ReadConfig, on_started: Callable[[str], None]) -> None:
    """Runs several proxies on one port until SIGINT or SIGTERM. SIGHUP reloads the configuration.

    Args:
        loaded: The configuration and its origins.
        read_config: Reads the configuration again.
        on_started: Called with the URL once all workers accept requests.

    Raises:
        ConfigError: The proxy cannot listen on the address, or the configuration is refused.
        ProxyError: A worker did not start.
    """
    server = loaded.config.server
    if loaded.config.store.url == "memory://":
        raise ConfigError("server.workers: several workers need a store that they can share, not memory://")
    create_tls_context(server)  # so that a bad certificate is reported once, not by each worker
    listeners = _open_listeners(loaded)
    # The URL is built now, because the sockets are closed when workers end.
    url = serving.build_base_url(listeners[0], get_scheme(server))
    workers = [
        WorkerSlot(number, listener, start_due_at=time.monotonic())
        for number, listener in enumerate(listeners, 1)
    ]
    supervisor = _WorkerSupervisor(loaded, read_config, listeners[0].getsockname()[1], workers)
    for number in filter(None, (signal.SIGINT, signal.SIGTERM, HANGUP)):
        signal.signal(number, supervisor.on_signal)
    with serving.remove_socket_on_exit(listeners[0]), open_metrics_folder():
        try:
            supervisor.run(lambda: on_started(url))
        finally:
            for worker in workers:
                worker.close()  # a worker that still runs ends when its pipe is closed
    logs.get_logger(__name__).info(log_events.SERVING_STOPPED, workers=server.workers)
