"""Runs an ASGI application on a real socket.

`serve` runs it in the foreground, where it ends without cutting anybody's answer; the demo and tests run it
in the middle of something else.
"""

from compaction_proxy.gateway.server.run import run, served, server
from compaction_proxy.gateway.server.shutdown import Ending, Foreground, Patience
from compaction_proxy.gateway.server.sockets import (
    PORT_IS_SPREAD,
    base_url,
    is_spread,
    listen,
    listen_on_path,
    removed_at_the_end,
    tls_context,
)
from compaction_proxy.gateway.server.timeouts import Deadlines

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
