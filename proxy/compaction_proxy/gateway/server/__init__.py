"""Runs an ASGI application on a listening socket.

`run_server` serves until somebody asks the server to stop, for example with a signal. Before a
`GracefulServer` stops, it completes the responses in progress. The demo and the tests use `serve_embedded`,
which runs a server inside their own process.
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
