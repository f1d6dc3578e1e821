"""Runs a proxy in a child process, which ends when its parent process ends."""

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

# Seconds that the proxy may take to read the tokenizer's vocabulary and open the store. If it takes longer,
# the start has failed.
START_TIMEOUT_S = 30.0
# Seconds that the proxy may take to end before it is killed. Clients send no requests by then, and pending
# writes take only moments.
STOP_TIMEOUT_S = 10.0

_spawn = get_context("spawn")


def run_child_proxy(loaded: LoadedConfig, listener: socket, parent: Connection, log_path: str) -> None:
    """Runs the proxy as the main function of the child process.

    The child process starts a session of its own, so that signals from the terminal, such as Ctrl-C, do not
    reach it. Its output is appended to the file `log_path`.
    """
    os.setsid()
    log_descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log_descriptor, stream)
    run_worker(loaded, listener, parent, 1)


def localize_config(config: Config) -> Config:
    """Returns the configuration, changed to a free port on loopback, one worker and no TLS."""
    overrides = {
        "host": "127.0.0.1",
        "port": 0,
        "unix_socket": None,
        "tls_certificate": None,
        "tls_key": None,
        "workers": 1,
    }
    return config.model_copy(update={"server": config.server.model_copy(update=overrides)})


@contextmanager
def run_background_proxy(loaded: LoadedConfig, log_path: Path | None) -> Iterator[str]:
    """Runs a proxy in a child process and yields the proxy's URL once the proxy accepts requests.

    The proxy ends when the block ends.

    Args:
        loaded: The configuration. Its settings for address, TLS and workers are replaced, because another
            proxy may already use the same address.
        log_path: File to which the child's output is appended. None discards the output.

    Raises:
        ConfigError: The proxy refuses the configuration.
        ProxyError: The proxy does not start.
    """
    local = replace(loaded, config=localize_config(loaded.config))
    bound = server.listen(local.config.server.host, local.config.server.port)
    parent_end, child_end = _spawn.Pipe()
    arguments = local, bound, child_end, str(log_path or os.devnull)
    process = _spawn.Process(target=run_child_proxy, args=arguments, daemon=True)
    process.start()
    child_end.close()
    try:
        _await_start(parent_end)
        yield server.build_base_url(bound, "http")
    finally:
        bound.close()
        with suppress(OSError):
            parent_end.send_bytes(STOP)
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
        parent_end.close()


def _await_start(pipe: Connection) -> None:
    report = b""
    with suppress(EOFError, OSError):
        report = pipe.recv_bytes() if pipe.poll(START_TIMEOUT_S) else b""
    if report != STARTED:
        text = "the proxy did not start; run `compaction-proxy doctor`"
        raise ConfigError(report.decode()) if report else ProxyError(text)
