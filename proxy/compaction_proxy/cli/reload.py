"""Reloads the configuration on SIGHUP, if the new configuration can be used."""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from compaction_proxy.config.keys import compare_configs
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy  # for types only: the parent of workers does not need it

# A function that reads the configuration again from its original source.
ReadConfig = Callable[[], LoadedConfig]


def reread_config(read_config: ReadConfig, running: LoadedConfig) -> LoadedConfig | None:
    """Reads the configuration again and logs what changes.

    Returns:
        The configuration to run with, in which keys that need a restart keep their values. None if the new
        configuration cannot be used. In that case the problems are logged.
    """
    try:
        _refuse_pipe(running)
        loaded = read_config()
        _refuse_empty(loaded, running)
    except ConfigError as error:
        log_refusal(error)
        return None
    change = compare_configs(running.config, loaded.config)
    logs.get_logger(__name__).info(
        log_events.CONFIG_RELOADED,
        changed=change.changed,
        waiting_for_restart=change.waiting_for_restart,
        warnings=loaded.warnings,
    )
    return replace(loaded, config=change.config)


def _refuse_pipe(running: LoadedConfig) -> None:
    """Refuses to read a pipe, such as `--config <(…)`, again: a second read would block or find nothing.

    Raises:
        ConfigError: The configuration came from a pipe.
    """
    if running.path is not None and running.path.is_fifo():
        raise ConfigError(f"{running.path}: a pipe cannot be read again; use a file")


def _refuse_empty(loaded: LoadedConfig, running: LoadedConfig) -> None:
    """Refuses a missing or empty file if the running configuration came from a file with content.

    The file may be missing or empty by mistake. Applying it would remove the client keys, the limits and the
    upstream. At start-up, an empty file is accepted, because many users configure the proxy through the
    environment alone. A reload accepts such a file only if the file was already missing or empty.

    Raises:
        ConfigError: The file is gone or empty.
    """
    has_content = loaded.path is not None and not loaded.is_empty
    if has_content or running.path is None or running.is_empty:
        return
    problem = f"{running.path}: is gone" if loaded.path is None else f"{loaded.path}: is empty"
    raise ConfigError(f"{problem}; `{{}}` in it takes everything back to the defaults")


def log_refusal(error: ConfigError) -> None:
    """Logs why a new configuration is not applied, one entry per problem."""
    logs.get_logger(__name__).error(log_events.CONFIG_NOT_RELOADED, problems=str(error).splitlines())


class ConfigReloader:
    """Applies new configurations to a running proxy.

    Args:
        app: The proxy.
        running: The configuration that the proxy runs with.
    """

    def __init__(self, app: "Proxy", running: LoadedConfig) -> None:
        self._app = app
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._is_reread_needed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()

    def start(self, read_config: ReadConfig | None) -> None:
        """Remembers the current event loop, in which the proxy runs, and handles SIGHUP in it.

        Args:
            read_config: Called on SIGHUP to read the configuration again. None leaves SIGHUP alone.
        """
        self._loop = asyncio.get_running_loop()
        self._started.set()
        if read_config is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self._schedule_reload, read_config)

    def apply_from_thread(self, loaded: LoadedConfig | None) -> None:
        """Applies a configuration in the event loop. None only records that a reload has failed.

        May be called from any other thread. Waits until the proxy runs, but not until the configuration
        applies.
        """
        self._started.wait()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.apply_config, loaded)

    def apply_config(self, loaded: LoadedConfig | None) -> None:
        """Applies a configuration, and records in the metrics whether the reload succeeded.

        None only records that a reload has failed. If the proxy refuses the configuration, it keeps the
        current one, and the problems are logged.
        """
        try:
            if loaded is not None:
                self._app.reload(loaded)
                self._running = loaded
        except ConfigError as error:
            log_refusal(error)
            loaded = None
        self._app.record_reload(succeeded=loaded is not None)

    def _schedule_reload(self, read_config: ReadConfig) -> None:
        # A read that is in progress may have begun before the file changed, so another read follows it.
        self._is_reread_needed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_and_apply(read_config))

    async def _read_and_apply(self, read_config: ReadConfig) -> None:
        while self._is_reread_needed:
            self._is_reread_needed = False
            self.apply_config(await asyncio.to_thread(reread_config, read_config, self._running))
