"""`serve`: builds the proxy, runs it in the foreground, and says how to reach it."""

import asyncio
import gc
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from compaction_proxy.cli.reload import ConfigReloader, ReadConfig
from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.types import mask_passwords
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.trigger import compute_min_trigger
from compaction_proxy.gateway import server as serving
from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

DEFAULT_WINDOW_TOKENS = 128_000
# How long load balancers need to see that we are ending, in seconds. Nobody waits for that on loopback.
ACCEPT_GRACE_S = 5
# The process ends this long after the server, in seconds, even if a thread hangs (a name look-up, a disk).
EXIT_S = 2.0
# A thread that works beside the loop lets it go on after this long, in seconds.
GIVING_WAY_S = 0.001
# How seldom the collector looks for cycles: it holds everybody up, for 0.1 s where much is remembered. Often
# among the few newest objects, up to 22,000 of them in 5 ms; among all of them once in 50 million.
COLLECTIONS = (2_000, 10, 2_500)
# File descriptors that a process takes if it may: a request needs two, and idle clients one each.
DESCRIPTORS = 65_536
# Settings of glibc's allocator by the variables that name them: the parameter of mallopt(3), and its value.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_MMAP_THRESHOLD_": (-3, 262_144),
    "MALLOC_TRIM_THRESHOLD_": (-1, 1_048_576),
}


def _describe_trigger(config: Config) -> str:
    """When a model compacts that no entry of `models` names, in words."""
    policy = resolve_policy(get_model_settings(config, ""))
    spending = compute_budget(DEFAULT_WINDOW_TOKENS, policy.reserves, None)
    tokens = compute_min_trigger(policy.trigger, spending)
    if tokens is None:
        return "never by itself"
    size = f"at {tokens:,} of {DEFAULT_WINDOW_TOKENS:,} tokens" if tokens else "by count"
    return f"{size}, unless the model's window is known to be another"


def format_banner(config: Config, url: str) -> Iterator[str]:
    """What a user needs to know at start-up, line by line."""
    compaction = config.compaction
    yield f"compaction-proxy listens on {url}"
    yield f"  upstream  {config.upstream.base_url}"
    yield f"  store     {mask_passwords(config.store.url or '')}"
    if compaction.mode == "bypass":
        yield "  strategy  none: compaction.mode is bypass"
    else:
        shadow = " (shadow: reported, not done)" if compaction.mode == "shadow" else ""
        yield f"  strategy  {compaction.strategy}, {_describe_trigger(config)}{shadow}"
    if config.models:
        yield f"  models    {', '.join(config.models)} have settings of their own"
    if config.server.workers > 1:
        yield f"  workers   {config.server.workers}"
    if config.server.unix_socket is None:
        yield f"  client    export OPENAI_BASE_URL={url}/v1"
    else:
        yield "  client    OPENAI_BASE_URL=http://localhost/v1 over this socket"


def get_drain_timeouts(server: ServerSection) -> serving.DrainTimeouts:
    """How long a server of this configuration waits when it is told to end."""
    grace_s = server.accept_grace_s
    if grace_s is None:
        grace_s = 0 if is_loopback(server.host) else ACCEPT_GRACE_S
    return serving.DrainTimeouts(grace_s, server.drain_s)


def get_deadlines(server: ServerSection) -> serving.Deadlines:
    """How long clients of a server of this configuration may take to send a request."""
    return serving.Deadlines(
        head_s=server.head_timeout_s, body_s=server.body_timeout_s, send_s=server.send_timeout_s
    )


def create_tls_context(server: ServerSection) -> ssl.SSLContext | None:
    """What serves TLS, if a server of this configuration does.

    Raises:
        ConfigError: Certificate and key are of no use.
    """
    certificate, key = server.tls_certificate, server.tls_key
    if certificate is None or key is None:
        return None
    return serving.build_tls_context(str(Path(certificate).expanduser()), str(Path(key).expanduser()))


def get_scheme(server: ServerSection) -> str:
    """What a server of this configuration speaks."""
    return "http" if server.tls_certificate is None else "https"


def open_listener(server: ServerSection) -> socket.socket:
    """The listening socket of a server of this configuration.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if server.unix_socket is not None:
        return serving.listen_on_unix_path(server.unix_socket)
    return serving.listen(server.host, server.port)


def announce_start(config: Config, url: str) -> None:
    """Say that requests are accepted: to whoever looks on, and in the log."""
    print("\n".join(format_banner(config, url)), flush=True)
    logs.get_logger(__name__).info(log_events.SERVING_STARTED, url=url, upstream=config.upstream.base_url)


def _schedule_exit() -> None:
    """End the process with 0 if it has not ended by itself soon; standard threads are joined without end."""
    timer = threading.Timer(EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as this process may, up to `DESCRIPTORS`; often it is 1,024."""
    if sys.platform == "win32":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def configure_allocator() -> None:
    """Have glibc keep free memory in one place, and give that of large bodies back to the system.

    Else each thread has an arena of its own, of 64 MB of address space, and what large bodies took stays with
    the process. Variables of the environment win. Elsewhere than on glibc nothing happens.
    """
    wanted = {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
    if not wanted or sys.platform != "linux":
        return
    try:
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    except (ImportError, OSError, MemoryError):  # such as where no memory may become executable
        return
    if mallopt is not None:
        for parameter, size in wanted.values():
            mallopt(parameter, size)


def tune_interpreter() -> None:
    """Set the interpreter up for a process that does nothing but answer requests from now on.

    Threads that read and count beside the loop give way to it soon; and what start-up has made stays until
    the end, so the collector need not look through it again and again. What requests leave behind is mostly
    freed without it.
    """
    sys.setswitchinterval(GIVING_WAY_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    _raise_descriptor_limit()


def _build_server(
    loaded: LoadedConfig,
    timeouts: serving.DrainTimeouts,
    on_stopping: Callable[[int], None],
    *,
    insistent: bool,
) -> tuple[serving.GracefulServer, ConfigReloader]:
    """The server of this configuration, and what gives the application in it another one."""
    from compaction_proxy.app import create_app  # the parent of workers has no use for it

    server = loaded.config.server
    context, late = create_tls_context(server), get_deadlines(server)
    app = create_app(loaded.config, loaded=loaded)
    running = serving.build_server(
        app, timeouts, on_stopping, force_on_second_signal=insistent, deadlines=late, ssl_context=context
    )
    return running, ConfigReloader(app, loaded)


def serve_proxy(
    bind: Callable[[], socket.socket],
    loaded: LoadedConfig,
    on_started: Callable[[socket.socket], None],
    *,
    on_ending: Callable[[], None] | None = None,
    worker: int | None = None,
    on_built: Callable[[serving.GracefulServer, ConfigReloader], None] | None = None,
    reread: ReadConfig | None = None,
) -> None:
    """Run the proxy in this process until it is told to end.

    Args:
        bind: Gives the listening socket, once the application is built.
        loaded: The configuration, and where it is from.
        on_started: Called with the socket once requests are accepted.
        on_ending: Called when the proxy begins to end.
        worker: Number of the worker that this process is; None if it is the only one.
        on_built: Given the server and what gives it another configuration, to be told by other means too.
        reread: Reads the configuration again, on SIGHUP; None: the signal is somebody else's.

    Raises:
        ConfigError: The address cannot be listened on, or the application refuses the configuration.
        ProxyError: The application did not start.
    """
    configure_allocator()
    log = logs.get_logger(__name__)
    named = {} if worker is None else {"worker": worker}
    timeouts = get_drain_timeouts(loaded.config.server)

    def on_stopping(requests: int) -> None:
        limits = {"accept_grace_s": timeouts.accept_s, "drain_s": timeouts.drain_s}
        log.info(log_events.SERVING_STOPPING, requests=requests, **limits, **named)
        if on_ending is not None:
            on_ending()

    def on_accepting() -> None:
        tune_interpreter()
        reloading.start(reread)
        on_started(bound)

    running, reloading = _build_server(loaded, timeouts, on_stopping, insistent=worker is None)
    if on_built is not None:
        on_built(running, reloading)
    bound = bind()
    with asyncio.Runner(loop_factory=running.config.get_loop_factory()) as runner:
        runner.run(serving.run_server(running, bound, on_accepting))
        came = running.drain_report
        counts = {"finished": came.finished, "dropped": came.dropped, "cut": came.cut}
        log.info(log_events.SERVING_STOPPED, **counts, **named)
        _schedule_exit()


def run_single_process(loaded: LoadedConfig, reread: ReadConfig) -> None:
    """Run in this process until SIGINT or SIGTERM; SIGHUP has the configuration read again.

    Raises:
        ConfigError: The address cannot be listened on, or the application refuses the configuration.
        ProxyError: The application did not start.
    """
    config = loaded.config
    with ExitStack() as stack:

        def open_socket() -> socket.socket:
            bound = open_listener(config.server)
            stack.enter_context(serving.remove_socket_on_exit(bound))
            return bound

        serve_proxy(
            open_socket,
            loaded,
            lambda bound: announce_start(config, serving.build_base_url(bound, get_scheme(config.server))),
            reread=reread,
        )
