"""One of several workers: the process, which obeys its parent, and the place that its parent keeps for it."""

import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from socket import socket

from compaction_proxy.cli.reload import Reloading
from compaction_proxy.cli.serve import serve_on
from compaction_proxy.cli.worker_metrics import join_metrics
from compaction_proxy.config.loader import Loaded
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server
from compaction_proxy.telemetry import logs

# What a worker says (anything else is why it refuses the configuration), and what it is told. Behind TAKE
# comes a configuration; REFUSED means that one could not be used.
STARTED, ENDING = b"started", b"ending"
STOP, STOP_NOW, TAKE, REFUSED = b"stop", b"now", b"take", b"refused"


def _obey(orders: Connection, running: server.Foreground, reloading: Reloading) -> None:
    """Do what the parent says; end when it is gone."""
    with suppress(EOFError, OSError, RuntimeError):  # the last: the loop has ended
        while True:
            order = orders.recv_bytes()
            if order in {TAKE, REFUSED}:
                reloading.told(orders.recv() if order == TAKE else None)
            else:
                running.stop(now=order == STOP_NOW)
    running.stop()


def work(loaded: Loaded, bound: socket, parent: Connection, number: int) -> None:
    """Be a worker: the main function of its process. Ends with 0, or 1 if the proxy did not start."""
    logs.configure(loaded.config.observability.log_format)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent is told, too, and tells all

    def say(what: bytes) -> None:
        with suppress(OSError):  # a parent that is gone
            parent.send_bytes(what)

    def obey(running: server.Foreground, reloading: Reloading) -> None:
        threading.Thread(target=_obey, args=(parent, running, reloading), daemon=True).start()

    join_metrics(number)
    try:
        serve_on(
            lambda: bound,
            loaded,
            lambda _: say(STARTED),
            ending=lambda: say(ENDING),
            worker=number,
            obey=obey,
        )
    except ConfigError as error:
        say(str(error).encode())
        sys.exit(1)
    except ProxyError:
        sys.exit(1)


@dataclass(slots=True)
class Worker:
    """One place among the workers, and the process that fills it.

    Attributes:
        number: From 1.
        bound: Its listening socket; None while nobody can be expected to accept from it.
        process: None while it waits to be replaced, or has ended for good.
        pipe: To the process; None if that has closed its end.
        up: Whether the process accepts requests.
        refusal: Why the process refuses the configuration; empty if it does not.
        born: When the process was started, in monotonic seconds.
        deaths: How often it died in a row without having been sound.
        due: When it is to be replaced, in monotonic seconds; None: not.
    """

    number: int
    bound: socket | None = None
    process: SpawnProcess | None = None
    pipe: Connection | None = None
    up: bool = False
    refusal: str = ""
    born: float = 0.0
    deaths: int = 0
    due: float | None = None

    def tell(self, order: bytes) -> None:
        """Send an order; a worker that is gone needs none."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(order)

    def give(self, found: Loaded) -> None:
        """Have it go on with another configuration."""
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send_bytes(TAKE)
                self.pipe.send(found)

    def listen(self) -> None:
        """Take in what the process says."""
        try:
            while self.pipe is not None and self.pipe.poll():
                said = self.pipe.recv_bytes()
                if said == STARTED:
                    self.up = True
                elif said == ENDING:
                    self.retreat()
                else:
                    self.refusal = said.decode()
        except (EOFError, OSError):
            self.close()

    def retreat(self) -> None:
        """Give up the listening socket, so that the others get the connections until there is a new one."""
        if self.bound is not None and server.is_spread(self.bound):
            self.bound.close()
            self.bound = None

    def close(self) -> None:
        """Hang up."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = None
