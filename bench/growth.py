"""What a turn costs while a conversation grows: the proxy's CPU at several lengths, warm and cold.

Warm is a turn of a conversation whose earlier messages the proxy has seen; cold is its first sight of it all.
A gated proxy relays the same bytes and decides nothing, so what it takes is taken off: what is left is the
decision.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conversations import growing
from load import LoadError
from targets import Target

_READ_BYTES = 65_536
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Grown:
    """A conversation of one length through one target.

    Attributes:
        round: Counted from 0.
        target: Its name.
        tokens: Length of the conversation, about.
        request_bytes: Body of the first request.
        cold_cpu_s: CPU time of the target for the first request, in seconds.
        warm_cpu_s: The same for each later one, on average.
    """

    round: int
    target: str
    tokens: int
    request_bytes: int
    cold_cpu_s: float
    warm_cpu_s: float


def _exchange(connection: socket.socket, request: Sequence[bytes]) -> None:
    """Send a request and read its answer, which declares its length."""
    connection.sendall(b"".join(request))
    read = b""
    while b"\r\n\r\n" not in read:
        read += connection.recv(_READ_BYTES) or _cut()
    head, _, body = read.lower().partition(b"\r\n\r\n")
    if not head.startswith(b"http/1.1 200"):
        raise LoadError(f"a growing conversation was answered {head[:30]!r}")
    missing = int(head.partition(b"content-length:")[2].split()[0]) - len(body)
    while missing > 0:
        missing -= len(connection.recv(_READ_BYTES) or _cut())


def _cut() -> bytes:
    raise LoadError("the connection ended before the answer did")


def measured(number: int, target: Target, *, tokens: int, turns: int) -> Grown:
    """Send a new conversation of such a length, and then so many turns of it.

    Raises:
        LoadError: An answer was an error or did not come.
    """
    session = f"growing {number} {tokens}"
    requests: Iterator[list[bytes]] = growing(
        session, target.headers, tokens=tokens, turns=turns + 1
    ).requests(number)
    program = target.program
    with socket.create_connection(program.address, PATIENCE_S) as connection:
        first = next(requests)
        program.settle(PATIENCE_S)
        began_s = program.cpu_s()
        _exchange(connection, first)
        program.settle(PATIENCE_S)
        seen_s = program.cpu_s()
        for _ in range(turns):
            _exchange(connection, next(requests))
        program.settle(PATIENCE_S)
        ended_s = program.cpu_s()
    return Grown(
        round=number,
        target=target.name,
        tokens=tokens,
        request_bytes=sum(map(len, first[1:])),
        cold_cpu_s=seen_s - began_s,
        warm_cpu_s=(ended_s - seen_s) / turns,
    )
