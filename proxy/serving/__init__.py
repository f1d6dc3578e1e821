"""Runs an ASGI application on a real socket.

`serve` runs it in the foreground, where it ends without cutting anybody's answer; the demo and tests run it
in the middle of something else.
"""

from proxy.serving.deadlines import Deadlines
from proxy.serving.graceful import Ending, Foreground, Patience
from proxy.serving.listening import (
    PORT_IS_SPREAD,
    base_url,
    is_spread,
    listen,
    listen_on_path,
    removed_at_the_end,
)
from proxy.serving.running import run, served, server
from proxy.serving.tls import tls_context

__all__ = [
    "PORT_IS_SPREAD",
    "Deadlines",
    "Ending",
    "Foreground",
    "Patience",
    "base_url",
    "is_spread",
    "listen",
    "listen_on_path",
    "removed_at_the_end",
    "run",
    "served",
    "server",
    "tls_context",
]
