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

from compaction_proxy.cli.reload import Reloading, Reread
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.config.config import Config, for_model
from compaction_proxy.config.loader import Loaded
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.types import without_passwords
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.budget import budget
from compaction_proxy.core.trigger import mark
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


def _trigger(config: Config) -> str:
    """When a model compacts that no entry of `models` names, in words."""
    policy = policy_for(for_model(config, ""))
    spending = budget(DEFAULT_WINDOW_TOKENS, policy.reserves, None)
    tokens = mark(policy.trigger, spending)
    if tokens is None:
        return "never by itself"
    size = f"at {tokens:,} of {DEFAULT_WINDOW_TOKENS:,} tokens" if tokens else "by count"
    return f"{size}, unless the model's window is known to be another"


def banner(config: Config, url: str) -> Iterator[str]:
    """What a user needs to know at start-up, line by line."""
    compaction = config.compaction
    yield f"compaction-proxy listens on {url}"
    yield f"  upstream  {config.upstream.base_url}"
    yield f"  store     {without_passwords(config.store.url or '')}"
    if compaction.mode == "bypass":
        yield "  strategy  none: compaction.mode is bypass"
    else:
        shadow = " (shadow: reported, not done)" if compaction.mode == "shadow" else ""
        yield f"  strategy  {compaction.strategy}, {_trigger(config)}{shadow}"
    if config.models:
        yield f"  models    {', '.join(config.models)} have settings of their own"
    if config.server.workers > 1:
        yield f"  workers   {config.server.workers}"
    if config.server.unix_socket is None:
        yield f"  client    export OPENAI_BASE_URL={url}/v1"
    else:
        yield "  client    OPENAI_BASE_URL=http://localhost/v1 over this socket"


def patience(server: ServerSection) -> serving.Patience:
    """How long a server of this configuration waits when it is told to end."""
    grace_s = server.accept_grace_s
    if grace_s is None:
        grace_s = 0 if is_loopback(server.host) else ACCEPT_GRACE_S
    return serving.Patience(grace_s, server.drain_s)


def deadlines(server: ServerSection) -> serving.Deadlines:
    """How long clients of a server of this configuration may take to send a request."""
    return serving.Deadlines(
        head_s=server.head_timeout_s, body_s=server.body_timeout_s, send_s=server.send_timeout_s
    )


def tls_context(server: ServerSection) -> ssl.SSLContext | None:
    """What serves TLS, if a server of this configuration does.

    Raises:
        ConfigError: Certificate and key are of no use.
    """
    certificate, key = server.tls_certificate, server.tls_key
    if certificate is None or key is None:
        return None
    return serving.tls_context(str(Path(certificate).expanduser()), str(Path(key).expanduser()))


def scheme(server: ServerSection) -> str:
    """What a server of this configuration speaks."""
    return "http" if server.tls_certificate is None else "https"


def listening(server: ServerSection) -> socket.socket:
    """The listening socket of a server of this configuration.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if server.unix_socket is not None:
        return serving.listen_on_path(server.unix_socket)
    return serving.listen(server.host, server.port)


def announce(config: Config, url: str) -> None:
    """Say that requests are accepted: to whoever looks on, and in the log."""
    print("\n".join(banner(config, url)), flush=True)
    logs.logger(__name__).info(log_events.SERVING_STARTED, url=url, upstream=config.upstream.base_url)


def _exit_soon() -> None:
    """End the process with 0 if it has not ended by itself soon; standard threads are joined without end."""
    timer = threading.Timer(EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _take_descriptors() -> None:
    """Raise the limit of open files as far as this process may, up to `DESCRIPTORS`; often it is 1,024."""
    if sys.platform == "win32":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def set_allocator() -> None:
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


def settle() -> None:
    """Set the interpreter up for a process that does nothing but answer requests from now on.

    Threads that read and count beside the loop give way to it soon; and what start-up has made stays until
    the end, so the collector need not look through it again and again. What requests leave behind is mostly
    freed without it.
    """
    sys.setswitchinterval(GIVING_WAY_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    _take_descriptors()


def _built(
    loaded: Loaded, waits: serving.Patience, told: Callable[[int], None], *, insistent: bool
) -> tuple[serving.Foreground, Reloading]:
    """The server of this configuration, and what gives the application in it another one."""
    from compaction_proxy.app import create_app  # the parent of workers has no use for it

    server = loaded.config.server
    context, late = tls_context(server), deadlines(server)
    app = create_app(loaded.config, loaded=loaded)
    running = serving.server(app, waits, told, insistent=insistent, deadlines=late, context=context)
    return running, Reloading(app, loaded)


def serve_on(
    bind: Callable[[], socket.socket],
    loaded: Loaded,
    started: Callable[[socket.socket], None],
    *,
    ending: Callable[[], None] | None = None,
    worker: int | None = None,
    obey: Callable[[serving.Foreground, Reloading], None] | None = None,
    reread: Reread | None = None,
) -> None:
    """Run the proxy in this process until it is told to end.

    Args:
        bind: Gives the listening socket, once the application is built.
        loaded: The configuration, and where it is from.
        started: Called with the socket once requests are accepted.
        ending: Called when the proxy begins to end.
        worker: Number of the worker that this process is; None if it is the only one.
        obey: Given the server and what gives it another configuration, to be told by other means too.
        reread: Reads the configuration again, on SIGHUP; None: the signal is somebody else's.

    Raises:
        ConfigError: The address cannot be listened on, or the application refuses the configuration.
        ProxyError: The application did not start.
    """
    set_allocator()
    log = logs.logger(__name__)
    named = {} if worker is None else {"worker": worker}
    waits = patience(loaded.config.server)

    def told(requests: int) -> None:
        limits = {"accept_grace_s": waits.accept_s, "drain_s": waits.drain_s}
        log.info(log_events.SERVING_STOPPING, requests=requests, **limits, **named)
        if ending is not None:
            ending()

    def accept() -> None:
        settle()
        reloading.begin(reread)
        started(bound)

    running, reloading = _built(loaded, waits, told, insistent=worker is None)
    if obey is not None:
        obey(running, reloading)
    bound = bind()
    with asyncio.Runner(loop_factory=running.config.get_loop_factory()) as runner:
        runner.run(serving.run(running, bound, accept))
        came = running.ending
        counts = {"finished": came.finished, "dropped": came.dropped, "cut": came.cut}
        log.info(log_events.SERVING_STOPPED, **counts, **named)
        _exit_soon()


def run_one(loaded: Loaded, reread: Reread) -> None:
    """Run in this process until SIGINT or SIGTERM; SIGHUP has the configuration read again.

    Raises:
        ConfigError: The address cannot be listened on, or the application refuses the configuration.
        ProxyError: The application did not start.
    """
    config = loaded.config
    with ExitStack() as stack:

        def bind() -> socket.socket:
            bound = listening(config.server)
            stack.enter_context(serving.removed_at_the_end(bound))
            return bound

        serve_on(
            bind,
            loaded,
            lambda bound: announce(config, serving.base_url(bound, scheme(config.server))),
            reread=reread,
        )
