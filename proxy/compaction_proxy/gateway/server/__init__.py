"""Runs an ASGI application on a real socket.

`run_server` serves until the server is asked to stop. A `GracefulServer` then completes the responses in
progress first. The demo and the tests use `serve_embedded`, which serves inside a running process.
"""

from compaction_proxy.gateway.server.run import build_server, run_server, serve_embedded
from compaction_proxy.gateway.server.shutdown import DrainReport, DrainTimeouts, GracefulServer
from compaction_proxy.gateway.server.sockets import (
    PORT_IS_SPREAD,
    build_base_url,
    build_tls_context,
    can_spread_connections,
    listen,
    listen_on_unix_path,
    remove_socket_on_exit,
)
from compaction_proxy.gateway.server.timeouts import ClientDeadlines

__all__ = [
    "PORT_IS_SPREAD",
    "ClientDeadlines",
    "DrainReport",
    "DrainTimeouts",
    "GracefulServer",
    "build_base_url",
    "build_server",
    "build_tls_context",
    "can_spread_connections",
    "listen",
    "listen_on_unix_path",
    "remove_socket_on_exit",
    "run_server",
    "serve_embedded",
]
