"""TCP ports of the loopback address on which nobody listens, for servers that must be told their port.

The kernel gives the ports of the ephemeral range to every outgoing connection and to every server that
asks for port 0. A port of that range that is free now may be taken before the server of a test binds it.
These ports are below that range, and each worker of a test run has its own share of them.
"""

import itertools
import os
import socket

FIRST_PORT = 10_000
LAST_PORT = 32_767
WORKERS = 16
"""More workers than these share their ports again."""

_SHARE = (LAST_PORT + 1 - FIRST_PORT) // WORKERS
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
# The start depends on the process, so that a server that outlived an earlier run is not met first.
_OFFSETS = itertools.count(os.getpid() * 97)


def find_free_port() -> int:
    """A port that this process has not given before (until it has given all of its share)."""
    for _ in range(_SHARE):
        port = FIRST_PORT + _WORKER * _SHARE + next(_OFFSETS) % _SHARE
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError("no port of the tests is free")
