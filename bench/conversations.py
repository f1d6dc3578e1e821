"""The requests of the bench: conversations whose every request says something new.

A request is a list of buffers, so that a long conversation is not copied to be sent. What a proxy keeps of a
conversation helps it with the messages it has seen, as in real use; the new ones it must read.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence

# Bodies in bytes: of a small request, of one message of a large one, and of the turn that each request adds.
SMALL_BYTES = 2_500
LARGE_BYTES = 853_000
LARGE_MESSAGES = 400
TURN_MESSAGE_BYTES = 1_000
# Turns that a large conversation grows by before it is taken up again where it was before them.
TURNS = 20

_WORDS = (
    "the deploy of service {n} failed because the readiness probe timed out after {n} seconds; logs show "
    "connection_pool exhausted (max=64) in src/storage/pool_{n}.py:118, retry with backoff=0.25 did not "
    "help, so the plan is to raise the limit, add a metric and write a test that holds {n} connections open. "
)


def _text(length: int, number: int) -> str:
    sentence = _WORDS.format(n=number)
    return (sentence * (length // len(sentence) + 1))[:length]


def _message(role: str, text: str) -> bytes:
    return json.dumps({"role": role, "content": text}, separators=(",", ":")).encode()


def _head(session: str, extra: Sequence[str], length: int) -> bytes:
    fields = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: bench.invalid",
        "authorization: Bearer sk-bench",
        "content-type: application/json",
        "user-agent: OpenAI/Python 3.50.0",
        f"x-session-id: {session}",
        *extra,
        f"content-length: {length}",
    ]
    return "\r\n".join([*fields, "", ""]).encode()


def _request(session: str, extra: Sequence[str], body: Sequence[bytes]) -> list[bytes]:
    return [_head(session, extra, sum(map(len, body))), *body]


def small(session: str, extra: Sequence[str]) -> Iterator[list[bytes]]:
    """Requests of `SMALL_BYTES`: four messages known from before, and a new one at the end."""
    known = [
        _message("system", _text(600, 1)),
        _message("user", f"{session}: " + _text(300, 2)),
        _message("assistant", _text(500, 3)),
        _message("user", _text(300, 4)),
    ]
    start = b'{"model":"bench-small","messages":[' + b",".join(known) + b","
    end = b'],"temperature":0.2,"stream":false}'
    room = SMALL_BYTES - len(start) - len(end) - len(_message("user", f"{0:08d} "))
    for number in itertools.count():
        yield _request(session, extra, [start + _message("user", f"{number:08d} " + _text(room, 5)) + end])


def streamed(session: str, extra: Sequence[str]) -> Iterator[list[bytes]]:
    """The small requests, each asking for an event stream."""
    return small(session, [*extra, "accept: text/event-stream"])


@functools.lru_cache
def _history(session: str) -> bytes:
    """The `LARGE_MESSAGES` with which a large conversation begins."""
    room = LARGE_BYTES // LARGE_MESSAGES - len(_message("assistant", "")) - 1
    roles = itertools.cycle(("user", "assistant"))
    said = (f"{session} {number} " for number in range(LARGE_MESSAGES))
    texts = (start + _text(room - len(start), number) for number, start in enumerate(said))
    return b",".join(map(_message, roles, texts))


def large(session: str, extra: Sequence[str]) -> Iterator[list[bytes]]:
    """Requests of `LARGE_BYTES` and more: each repeats the one before and adds a turn of two messages."""
    start = b'{"model":"bench-large","messages":[' + _history(session)
    end = b'],"temperature":0.2,"stream":false}'
    for branch in itertools.count():
        turns: list[bytes] = []
        for turn in range(TURNS):
            text = f"{branch}.{turn} " + _text(TURN_MESSAGE_BYTES, turn)
            turns.append(b"," + _message("user", text) + b"," + _message("assistant", text))
            yield _request(session, extra, [start, *turns, end])
