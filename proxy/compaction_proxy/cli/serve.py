"""Runs the proxy in this process, prints how clients can reach the proxy, and reloads its configuration."""

import asyncio
import errno
import gc
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compaction_proxy.admin.browser_sessions import LINK_TTL_S, build_link
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.config.config import Config, compare_configs, get_model_settings
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import NO_ADMIN_KEY, ServerSection
from compaction_proxy.config.types import mask_passwords
from compaction_proxy.config.validation import MEMORY, is_loopback
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.core.trigger import compute_min_trigger
from compaction_proxy.gateway import server as serving
from compaction_proxy.gateway.paths import DASHBOARD_PATH
from compaction_proxy.support import log_events
from compaction_proxy.support.formatting import escape_unprintable
from compaction_proxy.telemetry import logs

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy  # for types only: the parent of workers does not need it

DEFAULT_WINDOW_TOKENS = 128_000
# Seconds for which a stopping proxy still accepts requests, unless `server.accept_grace_s` is set. In this
# time, load balancers notice that the proxy is stopping. On a loopback address there are no load balancers,
# so the time is 0.
ACCEPT_GRACE_S = 5
# Longest time, in seconds, from the end of the server to the exit of the process. After this time, the
# process exits even if a thread still waits for DNS or a disk.
EXIT_DELAY_S = 2.0
# If the event loop waits for the interpreter lock, the interpreter asks the thread that holds the lock to
# release it after this many seconds.
THREAD_SWITCH_S = 0.001
# Thresholds of the garbage collector (`gc.set_threshold`). A full collection stops all requests, for 0.1 s if
# many objects are cached. With these thresholds, a full collection is due only after 50 million allocations.
# Collections of newer objects are frequent, but each covers at most 22,000 objects and takes at most 5 ms.
GC_THRESHOLDS = (2_000, 10, 2_500)
# The proxy raises its limit of open files to at most this number. A request needs two open files (a
# connection to the client and one to the upstream), and an idle client needs one.
MAX_DESCRIPTORS = 65_536
# Settings of glibc's memory allocator. Maps the environment variable of each setting to two numbers: the
# number of the setting in mallopt(3), and the value that the proxy sets.
ALLOCATOR_SETTINGS = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_MMAP_THRESHOLD_": (-3, 262_144),
    "MALLOC_TRIM_THRESHOLD_": (-1, 1_048_576),
}
# A function that reads the configuration again from its original sources.
ReadConfig = Callable[[], LoadedConfig]


def _describe_trigger(config: Config) -> str:
    """Returns a text that says when conversations are compacted if their model has no entry in `models`."""
    policy = resolve_policy(get_model_settings(config, ""))
    spending = compute_budget(DEFAULT_WINDOW_TOKENS, policy.reserves, None)
    tokens = compute_min_trigger(policy.trigger, spending)
    if tokens is None:
        return "no automatic compaction"
    if not tokens:
        return "compacts by number of messages"
    return f"compacts at {tokens:,} of {DEFAULT_WINDOW_TOKENS:,} tokens (default window; adjusted per model)"


def describe_dashboard(loaded: LoadedConfig, url: str) -> str:
    """Returns the URL of the dashboard, or a text that says why it is closed.

    On a terminal, the URL is a link that opens the dashboard. Other outputs may be stored as logs, which must
    not contain such a link.
    """
    server, key = loaded.config.server, loaded.config.server.admin_key.get_secret_value()
    path = server.base_path + DASHBOARD_PATH
    if not key:
        why = f": {loaded.admin_key_problem}" if loaded.admin_key_problem else ""
        return f"closed until you set server.admin_key{why}"
    if server.unix_socket is not None:
        return f"http://localhost{path} through this socket"
    if key == NO_ADMIN_KEY or not sys.stdout.isatty():
        return url + path
    return f"{build_link(url + path, key)} (works once, for {LINK_TTL_S} s)"


def format_banner(loaded: LoadedConfig, url: str, notes: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
    """Yields the lines that the proxy prints when it starts. They show the main settings.

    `notes` are further lines: the label and the text of each. Unprintable characters in texts are escaped.
    """
    config, compaction = loaded.config, loaded.config.compaction
    yield f"compaction-proxy listens on {url}"
    yield f"  upstream  {config.upstream.base_url}"
    yield f"  store     {mask_passwords(config.store.url or '')}"
    if compaction.mode == "bypass":
        yield "  strategy  none, because compaction.mode is bypass"
    else:
        shadow = " (shadow: only reported)" if compaction.mode == "shadow" else ""
        yield f"  strategy  {compaction.strategy}, {_describe_trigger(config)}{shadow}"
    if config.models:
        yield f"  models    own settings for {', '.join(config.models)}"
    if config.server.workers > 1:
        yield f"  workers   {config.server.workers}"
    for label, text in notes:
        yield f"  {label:9} {escape_unprintable(text)}"  # it may contain names that clients have chosen
    yield f"  dashboard {describe_dashboard(loaded, url)}"
    if config.server.unix_socket is None:
        yield f"  client    export OPENAI_BASE_URL={url}/v1"
    else:
        yield "  client    OPENAI_BASE_URL=http://localhost/v1 through this socket"


def get_drain_timeouts(server: ServerSection) -> serving.DrainTimeouts:
    """Returns how long, in seconds, a stopping server accepts requests and then waits for them to end."""
    grace_s = server.accept_grace_s
    if grace_s is None:
        grace_s = 0 if is_loopback(server.host) else ACCEPT_GRACE_S
    return serving.DrainTimeouts(grace_s, server.drain_s)


def create_tls_context(server: ServerSection) -> ssl.SSLContext | None:
    """Creates the TLS context, or returns None if the server does not use TLS.

    Raises:
        ConfigError: If the certificate or the key cannot be used.
    """
    certificate, key = server.tls_certificate, server.tls_key
    if certificate is None or key is None:
        return None
    return serving.build_tls_context(str(Path(certificate).expanduser()), str(Path(key).expanduser()))


def build_url(bound: socket.socket, server: ServerSection) -> str:
    """Returns the URL at which clients can reach the proxy that listens on the socket `bound`."""
    return serving.build_base_url(bound, "http" if server.tls_certificate is None else "https")


def open_listener(server: ServerSection) -> socket.socket:
    """Opens the listening socket of the server.

    Raises:
        ConfigError: If the server cannot listen on the address.
    """
    if server.unix_socket is not None:
        return serving.listen_on_unix_path(server.unix_socket)
    return serving.listen(server.host, server.port)


def announce_start(loaded: LoadedConfig, url: str, notes: Iterable[tuple[str, str]] = ()) -> None:
    """Prints the banner, and logs that the proxy accepts requests and where its own admin key is.

    `notes` are those of `format_banner`.
    """
    print("\n".join(format_banner(loaded, url, notes)), flush=True)
    log = logs.get_logger(__name__)
    log.info(log_events.SERVING_STARTED, url=url, upstream=loaded.config.upstream.base_url)
    if loaded.admin_key_path is not None:
        log.info(log_events.ADMIN_KEY_MADE, file=str(loaded.admin_key_path))
    elif loaded.admin_key_problem:
        log.warning(log_events.ADMIN_CLOSED, reason=loaded.admin_key_problem)


def check_start(config: Config) -> None:
    """Checks whether the proxy would start with a configuration, without starting it.

    Opens no store and sends nothing. Accepts an address that is in use, because the proxy that uses it may be
    the one that the configuration is for.

    Raises:
        ConfigError: If the proxy would refuse the configuration. The message has one line for each problem.
    """
    from compaction_proxy.runtime import create_tracer, open_configured_store

    problems: list[str] = []
    for check in (
        partial(open_configured_store, config, config.store.url or MEMORY),
        partial(create_tracer, config),
        partial(create_tls_context, config.server),
        partial(_check_address, config.server),
    ):
        try:
            check()
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(problems))


def _check_address(server: ServerSection) -> None:
    try:
        bound = open_listener(server)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
    else:
        with serving.remove_socket_on_exit(bound):
            bound.close()


def _raise_descriptor_limit() -> None:
    """Raises the limit of open files, which is often 1,024, to `MAX_DESCRIPTORS`.

    If the hard limit is lower, raises the limit to the hard limit.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def configure_allocator() -> None:
    """Configures glibc to use one memory arena, and to return freed memory of large objects to the system.

    By default, each thread has a memory arena of its own with 64 MB of address space, and the process keeps
    memory that large request bodies have used. The function does not change a setting whose environment
    variable is set. On systems without glibc, the function has no effect.
    """
    settings = {name: value for name, value in ALLOCATOR_SETTINGS.items() if name not in os.environ}
    if not settings or sys.platform != "linux":
        return
    try:
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    except (ImportError, OSError, MemoryError):  # for example if executable memory is forbidden
        return
    if mallopt is not None:
        for parameter, size in settings.values():
            mallopt(parameter, size)


def tune_interpreter() -> None:
    """Tunes the interpreter when start-up is complete and the process begins to serve requests.

    - Other threads release the interpreter lock sooner, so that the event loop can continue.
    - The garbage collector skips objects from start-up, because they live until the process exits. There is
      no collection before that, because it would take long and find hardly any garbage.
    - The garbage collector runs less often, because reference counting frees most objects of requests.
    - The limit of open files is raised.
    """
    sys.setswitchinterval(THREAD_SWITCH_S)
    gc.freeze()
    gc.enable()
    gc.set_threshold(*GC_THRESHOLDS)
    _raise_descriptor_limit()


def reread_config(read_config: ReadConfig, running: LoadedConfig) -> LoadedConfig | None:
    """Reads the configuration again and logs what changes.

    Returns:
        The new configuration, in which keys that need a restart keep their current values. None if the new
        configuration is not valid. Its problems are then logged.
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
    """Refuses to read a pipe, such as `--config <(…)`, again: a second read would block or give no data.

    Raises:
        ConfigError: If the running configuration came from a pipe.
    """
    if running.path is not None and running.path.is_fifo():
        raise ConfigError(f"{running.path}: the proxy cannot read a pipe again; use a file")


def _refuse_empty(loaded: LoadedConfig, running: LoadedConfig) -> None:
    """Refuses a missing or empty file if the running configuration came from a file with content.

    The file may be missing or empty by mistake. If the reload applied it, the client keys, the limits and the
    upstream would be lost. At start-up, an empty file is accepted, because many users configure the proxy
    only through the environment. A reload accepts such a file only if the running configuration also came
    from a missing or empty file.

    Raises:
        ConfigError: If the file is now missing or empty.
    """
    has_content = loaded.path is not None and not loaded.is_empty
    if has_content or running.path is None or running.is_empty:
        return
    problem = (
        f"{running.path}: the file is missing" if loaded.path is None else f"{loaded.path}: the file is empty"
    )
    raise ConfigError(f"{problem}; to reset everything to the defaults, write `{{}}` into it")


def log_refusal(error: ConfigError) -> None:
    """Logs why a new configuration is not applied. The log event lists all problems."""
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

    def start(self, read_config: ReadConfig) -> None:
        """Installs a handler for SIGHUP in the current event loop, which must be the event loop of the proxy.

        Args:
            read_config: Called on SIGHUP to read the configuration again.
        """
        if hasattr(signal, "SIGHUP"):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._schedule_reload, read_config)

    def apply_config(self, loaded: LoadedConfig | None) -> None:
        """Applies a configuration, and records in the metrics whether the reload succeeded.

        If `loaded` is None, only records that a reload has failed. If the proxy refuses the configuration,
        logs the problems and keeps the current configuration.
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
        # A read that is in progress may have begun before the file changed. Therefore, another read must
        # follow that read.
        self._is_reread_needed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_and_apply(read_config))

    async def _read_and_apply(self, read_config: ReadConfig) -> None:
        while self._is_reread_needed:
            self._is_reread_needed = False
            self.apply_config(await asyncio.to_thread(reread_config, read_config, self._running))


def serve_proxy(
    open_socket: Callable[[], socket.socket],
    loaded: LoadedConfig,
    on_started: Callable[[socket.socket, serving.GracefulServer, "Proxy", ConfigReloader], None],
    *,
    on_ending: Callable[[], None] | None = None,
    worker_number: int | None = None,
) -> None:
    """Runs the proxy in this process until a signal or a call of `GracefulServer.stop` stops it.

    Args:
        open_socket: Opens the listening socket. It is called after the application has been built.
        loaded: The configuration and the sources of its values.
        on_started: Called in the event loop when the proxy accepts requests. Gets the socket, the server, the
            application and the reloader, so that the caller can stop the server or reload the configuration.
        on_ending: Called when the proxy begins to stop.
        worker_number: Number of this worker, from 1. None if the proxy has no workers.

    Raises:
        ConfigError: If the proxy cannot listen on the address, or if the application refuses the
            configuration.
        ProxyError: If the application did not start.
    """
    from compaction_proxy.app import create_app  # not at the top: the parent of workers never needs it

    configure_allocator()
    server = loaded.config.server
    context = create_tls_context(server)
    log = logs.get_logger(__name__)
    log_fields = {} if worker_number is None else {"worker": worker_number}
    timeouts = get_drain_timeouts(server)

    def on_stopping(requests: int) -> None:
        limits = {"accept_grace_s": timeouts.accept_s, "drain_s": timeouts.drain_s}
        log.info(log_events.SERVING_STOPPING, requests=requests, **limits, **log_fields)
        if on_ending is not None:
            on_ending()

    def on_accepting() -> None:
        tune_interpreter()
        on_started(bound, running, app, ConfigReloader(app, loaded))

    app = create_app(loaded.config, loaded_config=loaded)
    running = serving.build_server(
        app,
        timeouts,
        on_stopping,
        # In a proxy without workers, a second signal stops the server immediately. In a proxy with workers,
        # the parent process receives the signals and orders the workers to stop.
        force_on_second_signal=worker_number is None,
        deadlines=serving.ClientDeadlines(
            head_s=server.head_timeout_s, body_s=server.body_timeout_s, send_s=server.send_timeout_s
        ),
        ssl_context=context,
    )
    bound = open_socket()
    with asyncio.Runner(loop_factory=running.config.get_loop_factory()) as runner:
        runner.run(serving.run_server(running, bound, on_accepting))
        report = running.drain_report
        counts = {"finished": report.finished, "dropped": report.dropped, "cut": report.cut}
        log.info(log_events.SERVING_STOPPED, **counts, **log_fields)
        # A thread that hangs would keep the process from exiting. The timer therefore ends the process after
        # a delay.
        timer = threading.Timer(EXIT_DELAY_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


def run_single_process(loaded: LoadedConfig, read_config: ReadConfig) -> None:
    """Runs the proxy in this process until SIGINT or SIGTERM. SIGHUP reloads the configuration.

    Raises:
        ConfigError: If the proxy cannot listen on the address, or the application refuses the configuration.
        ProxyError: If the application did not start.
    """
    config = loaded.config
    with ExitStack() as stack:

        def open_socket() -> socket.socket:
            bound = open_listener(config.server)
            stack.enter_context(serving.remove_socket_on_exit(bound))
            return bound

        def on_started(
            bound: socket.socket, _: serving.GracefulServer, app: "Proxy", reloader: ConfigReloader
        ) -> None:
            reloader.start(read_config)
            announce_start(loaded, build_url(bound, config.server), app.list_start_notes())

        serve_proxy(open_socket, loaded, on_started)
