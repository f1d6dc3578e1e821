"""SIGHUP: the configuration is read again, and takes the place of the one in force if it can be used."""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compaction_proxy.config.loader import Loaded
from compaction_proxy.config.reload import change
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy  # the parent of workers has no use for it

# What reads the configuration again, from where it was read at the start.
Reread = Callable[[], Loaded]


def reread(read: Reread, running: Loaded) -> Loaded | None:
    """What to go on with, or None if it cannot be used. The log says what changes, or what is wrong."""
    try:
        _refuse_pipe(running.path)
        found = read()
        _refuse_empty(found, running)
    except ConfigError as error:
        refused(error)
        return None
    step = change(running.config, found.config)
    logs.logger(__name__).info(
        log_events.CONFIG_RELOADED,
        changed=step.changed,
        waiting_for_restart=step.waiting,
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


def _refuse_empty(found: Loaded, running: Loaded) -> None:
    """A file that is cut off or gone says nothing, which would take keys, limits and the upstream away.

    At a start it may: many configure by the environment alone. And so it may here, if it said nothing before.

    Raises:
        ConfigError: What runs was read from a file that said something.
    """
    if running.path is None or running.empty:
        return
    if found.path is None:
        raise ConfigError(f"{running.path}: is gone; `{{}}` in it takes everything back to the defaults")
    if found.empty:
        raise ConfigError(f"{found.path}: is empty; `{{}}` in it takes everything back to the defaults")


def refused(error: ConfigError) -> None:
    """Log what is wrong with a configuration."""
    logs.logger(__name__).error(log_events.CONFIG_NOT_RELOADED, problems=str(error).splitlines())


class Reloading:
    """Has a proxy go on with another configuration.

    Args:
        app: The proxy.
        running: The configuration it has.
    """

    def __init__(self, app: "Proxy", running: Loaded) -> None:
        self._app = app
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._again = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()

    def begin(self, read: Reread | None) -> None:
        """The proxy runs, in this event loop; on SIGHUP its configuration is read again by `read`, if any."""
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        if read is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self._read_beside, read)

    def told(self, found: Loaded | None) -> None:
        """`take` or, without a configuration, `refuse`, from another thread; waits until the proxy runs."""
        self._begun.wait()
        if self._loop is not None:
            call = self.refuse if found is None else partial(self.take, found)
            self._loop.call_soon_threadsafe(call)

    def take(self, found: Loaded) -> None:
        """Go on with a configuration that was read."""
        try:
            self._app.reload(found)
        except ConfigError as error:
            refused(error)
            self.refuse()
        else:
            self._running = found
            self._app.reloaded(taken=True)

    def refuse(self) -> None:
        """Go on as before: what was read could not be used."""
        self._app.reloaded(taken=False)

    def _read_beside(self, read: Reread) -> None:
        self._again = True  # what is being read may be older than what this signal tells of
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read(read))

    async def _read(self, read: Reread) -> None:
        while self._again:
            self._again = False
            found = await asyncio.to_thread(reread, read, self._running)
            if found is None:
                self.refuse()
            else:
                self.take(found)
