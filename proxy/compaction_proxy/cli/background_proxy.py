"""A proxy beside this process, for as long as this process needs it: it ends with whoever started it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket

from compaction_proxy.cli.worker import STARTED, STOP, run_worker
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.gateway import server

# Start-up reads a vocabulary and opens the store; then something is wrong, in seconds.
START_S = 30.0
# Nobody asks it any more when it is told to end; what it still keeps takes moments, in seconds.
END_S = 10.0

_spawn = get_context("spawn")


def run_child_proxy(loaded: LoadedConfig, bound: socket, parent: Connection, log: str) -> None:
    """Be the proxy: the main function of its process, away from the terminal and its signals."""
    os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    run_worker(loaded, bound, parent, 1)


def localize_config(config: Config) -> Config:
    """The configuration of a proxy on a free port of this machine, in one process and without TLS."""
    here = {
        "host": "127.0.0.1",
        "port": 0,
        "unix_socket": None,
        "tls_certificate": None,
        "tls_key": None,
        "workers": 1,
    }
    return config.model_copy(update={"server": config.server.model_copy(update=here)})


@contextmanager
def run_background_proxy(loaded: LoadedConfig, log: Path | None) -> Iterator[str]:
    """Run a proxy in a process of its own; gives its URL once it accepts requests.

    Args:
        loaded: The configuration of a proxy that may be running elsewhere, too; address, TLS and workers
            are replaced.
        log: Where its log goes; None: nowhere.

    Raises:
        ConfigError: It refuses the configuration.
        ProxyError: It does not start.
    """
    mine = replace(loaded, config=localize_config(loaded.config))
    bound = server.listen(mine.config.server.host, mine.config.server.port)
    ours, theirs = _spawn.Pipe()
    given = mine, bound, theirs, str(log or os.devnull)
    process = _spawn.Process(target=run_child_proxy, args=given, daemon=True)
    process.start()
    theirs.close()
    try:
        _await_start(ours)
        yield server.build_base_url(bound, "http")
    finally:
        bound.close()
        with suppress(OSError):
            ours.send_bytes(STOP)
        process.join(END_S)
        if process.is_alive():
            process.kill()
        ours.close()


def _await_start(pipe: Connection) -> None:
    said = b""
    with suppress(EOFError, OSError):
        said = pipe.recv_bytes() if pipe.poll(START_S) else b""
    if said != STARTED:
        text = "the proxy did not start; run `compaction-proxy doctor`"
        raise ConfigError(said.decode()) if said else ProxyError(text)
