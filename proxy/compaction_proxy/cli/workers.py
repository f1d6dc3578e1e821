"""Runs proxies in child processes: the workers of `serve --workers N`, and the proxy that `run` starts.

On Linux, the parent process opens a listening socket for each worker and keeps it open. The kernel then
spreads connections evenly over the workers. With a single socket, one worker would get most of the
connections that arrive at the same time. If a worker dies, the connections that wait at its socket go to the
worker that replaces it. On other systems, all workers share one socket.

The parent and each worker communicate over a pipe. They do not use signals, because a terminal or a service
manager may send the same signal to the parent and to its workers. If the parent dies, each worker notices the
end of its pipe and stops.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from compaction_proxy.cli.admin_key import add_admin_key
from compaction_proxy.cli.serve import (
    ConfigReloader,
    ReadConfig,
    build_url,
    create_tls_context,
    get_drain_timeouts,
    open_listener,
    reread_config,
    serve_proxy,
)
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server as serving
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy  # for types only: the parent of workers does not need it

# Seconds from the death of a worker's process to the start of its next process. The pause doubles with each
# further death of the same worker, up to `MAX_PAUSE_S`.
PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
# Seconds after which a running worker counts as stable. When a stable worker dies, the pause before its
# restart is `PAUSE_S` again.
STABLE_S = 60.0
# Seconds from the order to stop until the parent kills workers that still run. In a normal stop, the parent
# waits `STOP_EXTRA_S` longer than workers may need for requests in progress. In an immediate stop, it waits
# `STOP_NOW_S`.
STOP_EXTRA_S = 10.0
STOP_NOW_S = 3.0
# Longest time, in seconds, for which the parent waits for reports from workers before it handles signals and
# starts workers that are due.
POLL_S = 0.1
# Longest times, in seconds, for the start and the stop of the proxy that the command `run` starts. At the
# start, the proxy reads the tokenizer's vocabulary and opens the store. If this takes longer, `run` fails. A
# stop is quick, because no client sends requests any more. If it takes longer, the proxy is killed.
BACKGROUND_START_S = 30.0
BACKGROUND_STOP_S = 10.0

# The notes for the banner (`cli.serve.format_banner`). A worker reports them to the parent when it accepts
# requests.
StartNotes = list[tuple[str, str]]
# Report from a worker to the parent that it begins to stop. Any other text is the reason why the worker
# refuses the configuration.
ENDING = "ending"
# Orders from the parent to a worker: `STOP` lets the worker finish the requests in progress, `STOP_NOW` does
# not. An order can also be a new configuration, or None if a reload found no usable configuration. A worker
# that receives None keeps its configuration and records the failed reload in its metrics.
STOP, STOP_NOW = "stop", "now"
Order = LoadedConfig | str | None

HANGUP = getattr(signal, "SIGHUP", None)  # systems without it have no reload
# The environment variable with the path of the folder in which workers share their metrics. With this folder,
# each worker can report the metrics of all workers. The Prometheus library also reads the variable.
METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_spawn = get_context("spawn")


def run_worker(loaded: LoadedConfig, listener: socket, parent: Connection, number: int) -> None:
    """Runs a worker. This is the main function of the worker's process.

    If the proxy does not start, the process exits with 1. If the reason is the configuration, the worker
    first reports the problems to the parent.

    Args:
        loaded: The configuration and the sources of its values.
        listener: The socket on which the worker accepts requests.
        parent: The worker's end of the pipe to the parent process.
        number: Number of the worker, from 1.
    """
    from compaction_proxy.telemetry.metrics import use_shared_folder

    logs.configure_service_logging(loaded.config.observability)
    if HANGUP is not None:
        signal.signal(HANGUP, signal.SIG_IGN)  # the parent gets SIGHUP, too, and orders the reload
    if folder := os.environ.get(METRICS_FOLDER_VARIABLE):
        use_shared_folder(folder, number)

    def send_report(report: str | StartNotes) -> None:
        with suppress(OSError):  # the parent may be gone
            parent.send(report)

    def on_started(
        _: socket, running: serving.GracefulServer, app: "Proxy", reloader: ConfigReloader
    ) -> None:
        send_report(app.list_start_notes())
        arguments = parent, asyncio.get_running_loop(), running, reloader
        threading.Thread(target=_execute_orders, args=arguments, daemon=True).start()

    try:
        serve_proxy(
            lambda: listener,
            loaded,
            on_started,
            on_ending=lambda: send_report(ENDING),
            worker_number=number,
        )
    except ConfigError as error:
        send_report(str(error))
        sys.exit(1)
    except ProxyError:
        sys.exit(1)


def _execute_orders(
    orders: Connection,
    loop: asyncio.AbstractEventLoop,
    running: serving.GracefulServer,
    reloader: ConfigReloader,
) -> None:
    """Executes the parent process's orders. Stops the server when the parent closes the pipe or dies."""
    with suppress(EOFError, OSError, RuntimeError):  # RuntimeError: the event loop is closed
        while True:
            order: Order = orders.recv()
            if isinstance(order, str):
                running.stop(now=order == STOP_NOW)
            else:
                loop.call_soon_threadsafe(reloader.apply_config, order)
    running.stop()


@dataclass(slots=True)
class WorkerSlot:
    """A worker and its current process.

    When the process dies, the supervisor starts another one in the same slot.

    Attributes:
        number: Number of the worker, from 1.
        listener: The worker's listening socket. None while the socket is closed, so that new connections go
            to other workers.
        process: The worker's process. While no process runs, the last one that ran. Unset before the first
            start.
        pipe: The parent's end of the pipe to `process`. Unset before the first start.
        is_running: Whether the process runs.
        is_up: Whether the process accepts requests.
        started_at: When the process was started, in monotonic seconds.
        death_count: Number of deaths in a row of processes that were not stable (`STABLE_S`).
        start_due_at: Earliest time to start the next process, in monotonic seconds.
    """

    number: int
    listener: socket | None
    process: SpawnProcess = field(init=False, repr=False)
    pipe: Connection = field(init=False, repr=False)
    is_running: bool = False
    is_up: bool = False
    started_at: float = 0.0
    death_count: int = 0
    start_due_at: float = 0.0

    def send_order(self, order: Order) -> None:
        """Sends an order to the worker. Does nothing if the worker does not run."""
        if self.is_running:
            with suppress(OSError):  # it may be gone by now
                self.pipe.send(order)

    def close_listener(self) -> None:
        """Closes the listening socket, so that new connections go to other workers.

        Does nothing if all workers share one socket.
        """
        if self.listener is not None and serving.can_spread_connections(self.listener):
            self.listener.close()
            self.listener = None


@dataclass(slots=True)
class _WorkerSupervisor:
    """Starts the workers, replaces workers that die, and stops all workers when the proxy must stop.

    Attributes:
        loaded: The configuration and the sources of its values.
        read_config: Reads the configuration again.
        port: The port that the workers share. Without meaning if the workers share a Unix socket.
        workers: A slot for each worker.
        failure: The error that `run` raises because a worker did not start. None if there was no such error.
        has_started: Whether all workers have accepted requests at the same time.
        notes: The notes of the worker that started last.
        kill_at: When workers that still run are killed, in monotonic seconds. None until a stop is requested.
        signals: The numbers of the signals that were received and not yet handled.
    """

    loaded: LoadedConfig
    read_config: ReadConfig
    port: int
    workers: list[WorkerSlot]
    failure: ProxyError | None = None
    has_started: bool = False
    notes: StartNotes = field(default_factory=list)
    kill_at: float | None = None
    signals: list[int] = field(default_factory=list)

    def run(self, on_started: Callable[[StartNotes], None]) -> None:
        """Runs until all workers have stopped.

        Args:
            on_started: Called once with `notes`, when all workers accept requests. Not called if a stop is
                requested before.

        Raises:
            ConfigError: If a worker refused the configuration at its start.
            ProxyError: If a worker did not start.
        """
        while self.kill_at is None or any(worker.is_running for worker in self.workers):
            for worker in self.workers:
                self._start_or_kill(worker)
            if not self.has_started and self.kill_at is None and all(each.is_up for each in self.workers):
                self.has_started = True
                on_started(self.notes)
            self._read_reports()
            while self.signals:
                if self.signals.pop(0) == HANGUP:
                    self._reload_config()
                else:
                    self._stop(now=self.kill_at is not None)
        if self.failure is not None:
            raise self.failure

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature of a signal handler
        """Adds a signal to `signals`. `run` then stops the workers or reloads the configuration."""
        self.signals.append(number)

    def _start_or_kill(self, worker: WorkerSlot) -> None:
        """Starts a worker whose start is due, or kills a worker that has not stopped in time."""
        now = time.monotonic()
        if self.kill_at is None:
            if not worker.is_running and worker.start_due_at <= now:
                self._start_worker(worker)
        elif worker.is_running and self.kill_at <= now:
            worker.process.kill()

    def _start_worker(self, worker: WorkerSlot) -> None:
        if worker.listener is None:
            try:
                worker.listener = serving.listen(self.loaded.config.server.host, self.port, share_port=True)
            except ConfigError:  # another program took the port while no worker ran
                worker.start_due_at = time.monotonic() + MAX_PAUSE_S
                return
        worker.is_running, worker.is_up = True, False
        worker.started_at = time.monotonic()
        # SIGINT is ignored while the process is created. The new process inherits this setting, so that
        # Ctrl-C does not end it before it sets a handler of its own.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker.process, worker.pipe = _start_process(run_worker, self.loaded, worker.listener, worker.number)
        signal.signal(signal.SIGINT, previous)

    def _reload_config(self) -> None:
        """Reads the configuration again and sends it to the workers. Sends None if it is not valid."""
        loaded = reread_config(self.read_config, self.loaded)
        self.loaded = loaded or self.loaded
        for worker in self.workers:
            worker.send_order(loaded)

    def _read_reports(self) -> None:
        """Reads the reports of the workers. Waits at most `POLL_S` seconds for a report.

        If a pipe has reached its end, the worker's process has ended or is ending. `_record_exit` then waits
        for the end of the process.
        """
        running = [worker for worker in self.workers if worker.is_running]
        ready = wait([worker.pipe for worker in running], POLL_S)
        for worker in (each for each in running if each.pipe in ready):
            try:
                report = worker.pipe.recv()
            except (EOFError, OSError):
                self._record_exit(worker)
                continue
            if isinstance(report, list):
                worker.is_up, self.notes = True, report
            elif report == ENDING:
                worker.close_listener()
            elif not self.has_started:
                self.failure = ConfigError(report)

    def _record_exit(self, worker: WorkerSlot) -> None:
        worker.is_running = False
        worker.pipe.close()
        process = worker.process
        process.join()
        pause_s = None
        if self.kill_at is None and (self.has_started or worker.is_up):
            pause_s = self._schedule_restart(worker)
        elif self.kill_at is None:
            self.failure = self.failure or ProxyError("a worker did not start; see the log")
            self._stop(now=True)
        if self.kill_at is None or process.exitcode:
            level = logging.WARNING if process.exitcode else logging.INFO
            fields = {"worker": worker.number, "pid": process.pid, "code": process.exitcode}
            logs.get_logger(__name__).log(level, log_events.WORKER_ENDED, **fields, again_in_s=pause_s)

    def _schedule_restart(self, worker: WorkerSlot) -> float:
        """Schedules the restart of a worker that died, and removes its gauges from the workers' metrics.

        The pause before the restart doubles with each death in a row, up to `MAX_PAUSE_S`.

        Returns:
            The pause in seconds.
        """
        from compaction_proxy.telemetry.metrics import remove_worker_gauges

        if folder := os.environ.get(METRICS_FOLDER_VARIABLE):
            remove_worker_gauges(folder, worker.number)
        was_stable = worker.is_up and time.monotonic() - worker.started_at >= STABLE_S
        worker.death_count = 0 if was_stable else worker.death_count + 1
        pause_s: float = min(PAUSE_S * 2 ** max(worker.death_count - 1, 0), MAX_PAUSE_S)
        worker.start_due_at = time.monotonic() + pause_s
        if not worker.is_up:  # the next process may fail, too, so new connections go to others
            worker.close_listener()
        worker.is_up = False
        return round(pause_s, 1)

    def _stop(self, *, now: bool) -> None:
        """Orders all workers to stop. With `now`, the workers do not wait for requests in progress.

        Sets the time at which `run` kills workers that have not stopped.
        """
        if self.kill_at is None:
            running = sum(worker.is_running for worker in self.workers)
            logs.get_logger(__name__).info(log_events.SERVING_STOPPING, workers=running)
        waits = get_drain_timeouts(self.loaded.config.server)
        limit_s = STOP_NOW_S if now else waits.accept_s + waits.drain_s + STOP_EXTRA_S
        self.kill_at = time.monotonic() + limit_s
        for worker in self.workers:
            worker.send_order(STOP_NOW if now else STOP)
            if worker.listener is not None:
                # Only the parent's copy of the socket is closed here. The worker closes its own copy when it
                # no longer needs it.
                worker.listener.close()


def _start_process(
    target: Callable[..., None], loaded: LoadedConfig, listener: socket, argument: int | str
) -> tuple[SpawnProcess, Connection]:
    """Starts a process that runs a proxy. Returns the process and the parent's end of the pipe to it.

    `target` is the main function of the process. It gets the configuration, the listening socket, the child's
    end of the pipe, and `argument`.
    """
    parent_end, child_end = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(loaded, listener, child_end, argument), daemon=True)
    process.start()
    child_end.close()  # so that the parent notices when the process ends
    return process, parent_end


def run_workers(
    loaded: LoadedConfig, read_config: ReadConfig, on_started: Callable[[str, StartNotes], None]
) -> None:
    """Runs several proxies on one port until SIGINT or SIGTERM. SIGHUP reloads the configuration.

    Args:
        loaded: The configuration and the sources of its values.
        read_config: Reads the configuration again.
        on_started: Called with the URL of the proxy and the notes for the banner when all workers accept
            requests.

    Raises:
        ConfigError: If the proxy cannot listen on the address, or if a worker refuses the configuration.
        ProxyError: If a worker did not start.
    """
    server = loaded.config.server
    create_tls_context(server)  # so that a bad certificate is reported once, not by each worker
    listeners = _open_listeners(loaded)
    # The URL is built before the workers run, because `build_url` needs an open socket. The parent closes the
    # sockets when the workers must stop.
    url = build_url(listeners[0], server)
    workers = [WorkerSlot(number, listener) for number, listener in enumerate(listeners, 1)]
    supervisor = _WorkerSupervisor(loaded, read_config, listeners[0].getsockname()[1], workers)
    for number in filter(None, (signal.SIGINT, signal.SIGTERM, HANGUP)):
        signal.signal(number, supervisor.on_signal)
    with serving.remove_socket_on_exit(listeners[0]), _open_metrics_folder():
        supervisor.run(lambda notes: on_started(url, notes))
    logs.get_logger(__name__).info(log_events.SERVING_STOPPED, workers=server.workers)


def _open_listeners(loaded: LoadedConfig) -> list[socket]:
    """Opens a listening socket for each worker, or a single socket that all workers share."""
    server = loaded.config.server
    first = open_listener(server)  # does not share the port, so it fails if another program uses it
    if not serving.can_spread_connections(first):
        return [first] * server.workers
    port = first.getsockname()[1]
    first.close()
    return [serving.listen(server.host, port, share_port=True) for _ in range(server.workers)]


@contextmanager
def _open_metrics_folder() -> Iterator[None]:
    """Creates a private folder for the metrics of workers. The caller starts the workers in the `with` block.

    If no folder can be created, logs a warning. Each worker then reports only its own metrics.
    """
    os.environ.pop(METRICS_FOLDER_VARIABLE, None)
    try:
        folder = TemporaryDirectory(prefix="compaction-proxy-metrics-", ignore_cleanup_errors=True)
    except OSError as error:
        logs.get_logger(__name__).warning(log_events.METRICS_NOT_SHARED, reason=error.strerror or "")
        yield
        return
    with folder as os.environ[METRICS_FOLDER_VARIABLE]:
        yield
    del os.environ[METRICS_FOLDER_VARIABLE]


@contextmanager
def run_background_proxy(loaded: LoadedConfig, log_path: Path | None) -> Iterator[str]:
    """Runs a proxy in a child process until the caller's `with` block ends. Yields the URL of the proxy.

    The block begins when the proxy accepts requests.

    Args:
        loaded: The configuration. Its settings for address, TLS and workers are replaced, because another
            proxy may already use the same address.
        log_path: File to which the child's output is appended. None discards the output.

    Raises:
        ConfigError: If the proxy refuses the configuration.
        ProxyError: If the proxy does not start in time.
    """
    address = {"host": "127.0.0.1", "port": 0, "unix_socket": None, "tls_certificate": None, "tls_key": None}
    server = loaded.config.server.model_copy(update={**address, "workers": 1})
    local = add_admin_key(replace(loaded, config=loaded.config.model_copy(update={"server": server})))
    bound = serving.listen(server.host, server.port)
    process, parent_end = _start_process(_run_background_worker, local, bound, str(log_path or os.devnull))
    try:
        report = None
        with suppress(EOFError, OSError):
            report = parent_end.recv() if parent_end.poll(BACKGROUND_START_S) else None
        if report is None:
            raise ProxyError("the proxy did not start; run `compaction-proxy doctor`")
        if not isinstance(report, list):
            raise ConfigError(report)
        yield serving.build_base_url(bound, "http")
    finally:
        bound.close()
        with suppress(OSError):
            parent_end.send(STOP)
        process.join(BACKGROUND_STOP_S)
        if process.is_alive():
            process.kill()
        parent_end.close()


def _run_background_worker(loaded: LoadedConfig, listener: socket, parent: Connection, log_path: str) -> None:
    """Runs the proxy of `run_background_proxy`. This is the main function of the child process.

    The child process leaves the process session of its parent, so that it gets no signals from the terminal,
    such as the SIGINT of Ctrl-C. Its output is appended to the file `log_path`.
    """
    os.setsid()
    log_descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log_descriptor, stream)
    run_worker(loaded, listener, parent, 1)
