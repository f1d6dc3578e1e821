"""SIGHUP: the configuration is read again, and takes the place of the one in force if it can be used."""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.reload import compare_configs
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy  # the parent of workers has no use for it

# What reads the configuration again, from where it was read at the start.
ReadConfig = Callable[[], LoadedConfig]


def reread_config(read: ReadConfig, running: LoadedConfig) -> LoadedConfig | None:
    """What to go on with, or None if it cannot be used. The log says what changes, or what is wrong."""
    try:
        _refuse_pipe(running.path)
        found = read()
        _refuse_empty(found, running)
    except ConfigError as error:
        log_refusal(error)
        return None
    step = compare_configs(running.config, found.config)
    logs.get_logger(__name__).info(
        log_events.CONFIG_RELOADED,
        changed=step.changed,
        waiting_for_restart=step.waiting_for_restart,
        warnings=found.warnings,
    )
    return replace(found, config=step.config)


def _refuse_pipe(path: Path | None) -> None:
    """A pipe gives what it holds once: read again it would be empty, so that no key was asked for, or block.

    Raises:
        ConfigError: The configuration is one, such as `--config <(…)`.
    """
    if path is not None and path.is_fifo():
        raise ConfigError(f"{path}: a pipe cannot be read again; use a file")


def _refuse_empty(found: LoadedConfig, running: LoadedConfig) -> None:
    """A file that is cut off or gone says nothing, which would take keys, limits and the upstream away.

    At a start it may: many configure by the environment alone. And so it may here, if it said nothing before.

    Raises:
        ConfigError: What runs was read from a file that said something.
    """
    if running.path is None or running.is_empty:
        return
    if found.path is None:
        raise ConfigError(f"{running.path}: is gone; `{{}}` in it takes everything back to the defaults")
    if found.is_empty:
        raise ConfigError(f"{found.path}: is empty; `{{}}` in it takes everything back to the defaults")


def log_refusal(error: ConfigError) -> None:
    """Log what is wrong with a configuration."""
    logs.get_logger(__name__).error(log_events.CONFIG_NOT_RELOADED, problems=str(error).splitlines())


class ConfigReloader:
    """Has a proxy go on with another configuration.

    Args:
        app: The proxy.
        running: The configuration it has.
    """

    def __init__(self, app: "Proxy", running: LoadedConfig) -> None:
        self._app = app
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._again = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()

    def start(self, read: ReadConfig | None) -> None:
        """The proxy runs, in this event loop; on SIGHUP its configuration is read again by `read`, if any."""
        self._loop = asyncio.get_running_loop()
        self._started.set()
        if read is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self._schedule_read, read)

    def apply_from_thread(self, found: LoadedConfig | None) -> None:
        """`apply_config` or, without a configuration, `keep_config`, from another thread.

        Waits until the proxy runs.
        """
        self._started.wait()
        if self._loop is not None:
            call = self.keep_config if found is None else partial(self.apply_config, found)
            self._loop.call_soon_threadsafe(call)

    def apply_config(self, found: LoadedConfig) -> None:
        """Go on with a configuration that was read."""
        try:
            self._app.reload(found)
        except ConfigError as error:
            log_refusal(error)
            self.keep_config()
        else:
            self._running = found
            self._app.record_reload(taken=True)

    def keep_config(self) -> None:
        """Go on as before: what was read could not be used."""
        self._app.record_reload(taken=False)

    def _schedule_read(self, read: ReadConfig) -> None:
        self._again = True  # what is being read may be older than what this signal tells of
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_and_apply(read))

    async def _read_and_apply(self, read: ReadConfig) -> None:
        while self._again:
            self._again = False
            found = await asyncio.to_thread(reread_config, read, self._running)
            if found is None:
                self.keep_config()
            else:
                self.apply_config(found)
