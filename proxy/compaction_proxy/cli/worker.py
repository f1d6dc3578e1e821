"""One of several workers: the process, which obeys its parent, and the place that its parent keeps for it."""

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

# What a worker says (anything else is why it refuses the configuration), and what it is told. Behind TAKE
# comes a configuration; REFUSED means that one could not be used.
STARTED, ENDING = b"started", b"ending"
STOP, STOP_NOW, TAKE, REFUSED = b"stop", b"now", b"take", b"refused"


def _execute_orders(orders: Connection, running: server.GracefulServer, reloading: ConfigReloader) -> None:
    """Do what the parent says; end when it is gone."""
    with suppress(EOFError, OSError, RuntimeError):  # the last: the loop has ended
        while True:
            order = orders.recv_bytes()
            if order in {TAKE, REFUSED}:
                reloading.apply_from_thread(orders.recv() if order == TAKE else None)
            else:
                running.stop(now=order == STOP_NOW)
    running.stop()


def run_worker(loaded: LoadedConfig, bound: socket, parent: Connection, number: int) -> None:
    """Be a worker: the main function of its process. Ends with 0, or 1 if the proxy did not start."""
    logs.configure_logging(loaded.config.observability.log_format)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent is told, too, and tells all

    def send_report(what: bytes) -> None:
        with suppress(OSError):  # a parent that is gone
            parent.send_bytes(what)

    def start_order_thread(running: server.GracefulServer, reloading: ConfigReloader) -> None:
        threading.Thread(target=_execute_orders, args=(parent, running, reloading), daemon=True).start()

    share_worker_metrics(number)
    try:
        serve_proxy(
            lambda: bound,
            loaded,
            lambda _: send_report(STARTED),
            on_ending=lambda: send_report(ENDING),
            worker=number,
            on_built=start_order_thread,
        )
    except ConfigError as error:
        send_report(str(error).encode())
        sys.exit(1)
    except ProxyError:
        sys.exit(1)


@dataclass(slots=True)
class WorkerSlot:
    """One place among the workers, and the process that fills it.

    Attributes:
        number: From 1.
        bound: Its listening socket; None while nobody can be expected to accept from it.
        process: None while it waits to be replaced, or has ended for good.
        pipe: To the process; None if that has closed its end.
        is_up: Whether the process accepts requests.
        refusal: Why the process refuses the configuration; empty if it does not.
        started_at: When the process was started, in monotonic seconds.
        deaths: How often it died in a row without having been sound.
        due_at: When it is to be replaced, in monotonic seconds; None: not.
    """

    number: int
    bound: socket | None = None
    process: SpawnProcess | None = None
    pipe: Connection | None = None
    is_up: bool = False
    refusal: str = ""
    started_at: float = 0.0
    deaths: int = 0
    due_at: float | None = None

    def send_order(self, order: bytes) -> None:
        """Send an order; a worker that is gone needs none."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(order)

    def send_config(self, found: LoadedConfig) -> None:
        """Have it go on with another configuration."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(TAKE)
                self.pipe.send(found)

    def read_reports(self) -> None:
        """Take in what the process says."""
        try:
            while self.pipe is not None and self.pipe.poll():
                said = self.pipe.recv_bytes()
                if said == STARTED:
                    self.is_up = True
                elif said == ENDING:
                    self.close_listener()
                else:
                    self.refusal = said.decode()
        except (EOFError, OSError):
            self.close()

    def close_listener(self) -> None:
        """Give up the listening socket, so that the others get the connections until there is a new one."""
        if self.bound is not None and server.is_spread(self.bound):
            self.bound.close()
            self.bound = None

    def close(self) -> None:
        """Hang up."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = None
