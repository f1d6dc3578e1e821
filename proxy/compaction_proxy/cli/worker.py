"""Defines what runs in a worker's process, and the slot in which the parent process tracks the worker."""

import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from socket import socket

from compaction_proxy.cli.reload import ConfigReloader
from compaction_proxy.cli.serve import serve_proxy
from compaction_proxy.cli.worker_metrics import share_worker_metrics
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server
from compaction_proxy.telemetry import logs

# Reports from a worker to the parent: the worker accepts requests, or it begins to end. Any other report is
# the reason why the worker refuses the configuration.
STARTED, ENDING = b"started", b"ending"
# Orders from the parent to a worker. After APPLY_CONFIG, the parent sends a new configuration. KEEP_CONFIG
# means that a reload found no usable configuration. The worker then keeps its own and records the failure in
# its metrics.
STOP, STOP_NOW, APPLY_CONFIG, KEEP_CONFIG = b"stop", b"now", b"take", b"refused"


def _execute_orders(orders: Connection, running: server.GracefulServer, reloader: ConfigReloader) -> None:
    """Executes the parent's orders. When the parent is gone, stops the server."""
    with suppress(EOFError, OSError, RuntimeError):  # RuntimeError: the event loop is closed
        while True:
            order = orders.recv_bytes()
            if order in {APPLY_CONFIG, KEEP_CONFIG}:
                reloader.apply_from_thread(orders.recv() if order == APPLY_CONFIG else None)
            else:
                running.stop(now=order == STOP_NOW)
    running.stop()


def run_worker(loaded: LoadedConfig, listener: socket, parent: Connection, number: int) -> None:
    """Runs a worker. This is the main function of its process, which exits with 1 if the proxy did not start.

    Args:
        loaded: The configuration and its origins.
        listener: The socket on which the worker accepts requests.
        parent: The worker's end of the pipe to the parent process.
        number: Number of the worker, from 1.
    """
    logs.configure_logging(loaded.config.observability.log_format)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent gets SIGHUP, too, and orders the reload

    def send_report(what: bytes) -> None:
        with suppress(OSError):  # the parent may be gone
            parent.send_bytes(what)

    def start_order_thread(running: server.GracefulServer, reloading: ConfigReloader) -> None:
        threading.Thread(target=_execute_orders, args=(parent, running, reloading), daemon=True).start()

    share_worker_metrics(number)
    try:
        serve_proxy(
            lambda: listener,
            loaded,
            lambda _: send_report(STARTED),
            on_ending=lambda: send_report(ENDING),
            worker_number=number,
            on_built=start_order_thread,
        )
    except ConfigError as error:
        send_report(str(error).encode())
        sys.exit(1)
    except ProxyError:
        sys.exit(1)


@dataclass(slots=True)
class WorkerSlot:
    """The place of one worker. When the worker's process dies, another process takes this place.

    Attributes:
        number: Number of the worker, from 1.
        listener: The worker's listening socket. None while it is closed, so that new connections go to other
            workers.
        process: The worker's process. None before a start or restart, and after the final end.
        pipe: Connection to the process. None once the process has closed its end.
        is_up: Whether the process accepts requests.
        refusal: The reason why the process refuses the configuration, or an empty text.
        started_at: When the process was started, in monotonic seconds.
        death_count: How often the process has died since the last stable run (see `workers.STABLE_S`).
        start_due_at: When the worker is to be started or restarted, in monotonic seconds. None if no start is
            due.
    """

    number: int
    listener: socket | None = None
    process: SpawnProcess | None = None
    pipe: Connection | None = None
    is_up: bool = False
    refusal: str = ""
    started_at: float = 0.0
    death_count: int = 0
    start_due_at: float | None = None

    def send_order(self, order: bytes) -> None:
        """Sends an order to the worker. Does nothing if the worker is gone."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(order)

    def send_config(self, loaded: LoadedConfig) -> None:
        """Sends a new configuration to the worker. Does nothing if the worker is gone."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(APPLY_CONFIG)
                self.pipe.send(loaded)

    def read_reports(self) -> None:
        """Updates the slot from the reports that the worker sent. Closes the pipe if the worker is gone."""
        try:
            while self.pipe is not None and self.pipe.poll():
                report = self.pipe.recv_bytes()
                if report == STARTED:
                    self.is_up = True
                elif report == ENDING:
                    self.close_listener()
                else:
                    self.refusal = report.decode()
        except (EOFError, OSError):
            self.close()

    def close_listener(self) -> None:
        """Closes the listening socket, so that new connections go to other workers.

        Does nothing if all workers share one socket.
        """
        if self.listener is not None and server.can_spread_connections(self.listener):
            self.listener.close()
            self.listener = None

    def close(self) -> None:
        """Closes the pipe to the worker. A worker that still runs then stops."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = None
