"""The requests of the bench: conversations whose every request says something new.

A conversation is kept as pieces, so that any generator can put its requests together cheaply, and a long one
is not copied to be sent. What a proxy keeps of a conversation helps it with the messages it has seen, as in
real use; the new ones it must read.
"""

import functools
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Bodies in bytes: of a small request, of one message of a large one, and of the turn that each request adds.
SMALL_BYTES = 2_500
SMALL_TURNS = 6
LARGE_BYTES = 853_000
LARGE_MESSAGES = 400
TURN_MESSAGE_BYTES = 1_000
# Turns that a large conversation grows by before it is taken up again where it was before them.
TURNS = 20
# Bytes of JSON in a token of o200k_base, for `varied`: how far a conversation of so many tokens reaches.
BYTES_PER_TOKEN = 4.2

# The window of their models, and a header that closes the proxy's gate and does no more: what it names is
# never reached, and below the trigger of that window.
WINDOW_TOKENS = 2_000_000
GATE_OFF = ("x-compaction-trigger-tokens: 1000000",)

# Where a turn holds the number of its request, in as many digits.
MARK = b"##########"
_WORDS = (
    "the deploy of service {n} failed because the readiness probe timed out after {n} seconds; logs show "
    "connection_pool exhausted (max=64) in src/storage/pool_{n}.py:118, retry with backoff=0.25 did not "
    "help, so the plan is to raise the limit, add a metric and write a test that holds {n} connections open. "
)
_SYLLABLES = (
    "ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wa", "xe", "yi",
    "zo", "char", "ment", "tion", "able", "ing", "ous", "pre", "con",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """The requests of one session: each repeats the one before and adds a turn, which has a number in it.

    Attributes:
        head: Request line and headers, without `content-length` and the empty line.
        start: The body up to the turns.
        turns: What is added by one request after the other, each with `MARK` in it; after the last, the
            next request begins anew, with turns of another number.
        end: The body after the turns.
    """

    head: bytes
    start: bytes
    turns: tuple[bytes, ...]
    end: bytes

    def requests(self, first: int = 0) -> Iterator[list[bytes]]:
        """Requests without end, as buffers to be written; numbers count from `first`."""
        for number in itertools.count(first):
            digits = b"%0*d" % (len(MARK), number)
            grown: list[bytes] = []
            for turn in self.turns:
                grown.append(turn.replace(MARK, digits))
                length = len(self.start) + sum(map(len, grown)) + len(self.end)
                yield [self.head_for(length), self.start, *grown, self.end]

    def head_for(self, length: int) -> bytes:
        """The whole head of a request whose body has `length` bytes."""
        return self.head + b"content-length: %d\r\n\r\n" % length


def _text(length: int, number: int) -> str:
    sentence = _WORDS.format(n=number)
    return (sentence * (length // len(sentence) + 1))[:length]


def _message(role: str, text: str) -> bytes:
    return json.dumps({"role": role, "content": text}, separators=(",", ":")).encode()


def _head(session: str, extra: Sequence[str]) -> bytes:
    fields = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "authorization: Bearer sk-bench",
        "content-type: application/json",
        "user-agent: OpenAI/Python 3.50.0",
        f"x-session-id: {session}",
        *extra,
        "",
    ]
    return "\r\n".join(fields).encode()


def small(session: str, extra: Sequence[str], *, stream: bool = False) -> Conversation:
    """Requests of `SMALL_BYTES` on average: each repeats the one before and adds an answer and a question."""
    known = [_message("system", _text(600, 1)), _message("user", f"{session}: " + _text(300, 2))]
    start = b'{"model":"bench-small","messages":[' + b",".join(known)
    end = b'],"temperature":0.2,"stream":%s}' % (b"true" if stream else b"false")
    turn_bytes = 2 * (SMALL_BYTES - len(start) - len(end)) // (SMALL_TURNS + 1)
    room = (turn_bytes - len(_said(0, ""))) // 2
    turns = tuple(_said(turn, _text(room, turn)) for turn in range(SMALL_TURNS))
    return Conversation(_head(session, extra), start, turns, end)


def _said(number: int, text: str) -> bytes:
    """An answer and a question, with a comma before each."""
    said = f"{MARK.decode()}.{number} " + text
    return b"," + _message("assistant", said) + b"," + _message("user", said)


def streamed(session: str, extra: Sequence[str]) -> Conversation:
    """The small requests, each asking for an event stream."""
    return small(session, [*extra, "accept: text/event-stream"], stream=True)


@functools.lru_cache
def _history(session: str) -> bytes:
    """The `LARGE_MESSAGES` with which a large conversation begins."""
    room = LARGE_BYTES // LARGE_MESSAGES - len(_message("assistant", "")) - 1
    roles = itertools.cycle(("user", "assistant"))
    said = (f"{session} {number} " for number in range(LARGE_MESSAGES))
    texts = (start + _text(room - len(start), number) for number, start in enumerate(said))
    return b",".join(map(_message, roles, texts))


def _turn(number: int, text: str) -> bytes:
    """A question and an answer, with a comma before each."""
    said = f"{MARK.decode()}.{number} " + text
    return b"," + _message("user", said) + b"," + _message("assistant", said)


def large(session: str, extra: Sequence[str]) -> Conversation:
    """Requests of `LARGE_BYTES` and more."""
    start = b'{"model":"bench-large","messages":[' + _history(session)
    turns = tuple(_turn(turn, _text(TURN_MESSAGE_BYTES, turn)) for turn in range(TURNS))
    return Conversation(_head(session, extra), start, turns, b'],"temperature":0.2,"stream":false}')


@functools.lru_cache
def _vocabulary() -> tuple[str, ...]:
    chosen = random.Random(0)
    made = ("".join(chosen.choices(_SYLLABLES, k=chosen.randint(1, 3))) for _ in range(4_000))
    return (*made, *_WORDS.split(), *(str(number) for number in range(100, 1_000)))


def varied(seed: str, length: int) -> str:
    """Text of `length` characters that hardly repeats itself, so that no tokenizer's cache knows it."""
    words = random.Random(seed).choices(_vocabulary(), k=length // 2)
    return " ".join(words)[:length]


def growing(session: str, extra: Sequence[str], *, tokens: int, turns: int) -> Conversation:
    """A conversation that holds about so many tokens before its first turn."""
    messages = max(2, round(tokens * BYTES_PER_TOKEN / TURN_MESSAGE_BYTES))
    room = TURN_MESSAGE_BYTES - len(_message("assistant", "")) - 1
    roles = itertools.cycle(("user", "assistant"))
    texts = (varied(f"{session} {number}", room) for number in range(messages))
    start = b'{"model":"bench-growing","messages":[' + b",".join(map(_message, roles, texts))
    added = tuple(_turn(turn, varied(f"{session} t{turn}", TURN_MESSAGE_BYTES)) for turn in range(turns))
    return Conversation(_head(session, extra), start, added, b'],"temperature":0.2,"stream":false}')
