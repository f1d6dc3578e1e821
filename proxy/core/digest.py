"""The canonical digest: what makes two messages, and two prefixes of a conversation, the same.

Identity only locates; the digest decides whether a stored summary stands for what the client sent. The
rules are DESIGN.md §5.3, version byte 1. A change here needs a new version byte, or stored summaries
would be applied to messages they do not stand for.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

from proxy.core.message import Message

VERSION = b"\x01"


def _field(value: str | bytes) -> bytes:
    """One length-prefixed field, so that no two different lists of fields share their bytes."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return len(data).to_bytes(8, "big") + data


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _DuplicateKeyError
    return made


def canonical_arguments(arguments: str) -> str:
    """Tool-call arguments with key order and white space made canonical; as they are if they do not parse."""
    try:
        value = json.loads(arguments, object_pairs_hook=_unique)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _content(message: Message) -> Iterator[bytes]:
    """The text and the other parts in the order they stand."""
    start = 0
    for part in message.parts:
        if part.at > start:
            yield _field("text") + _field(message.text[start : part.at])
            start = part.at
        yield _field(part.kind) + _field(part.payload)
    if start < len(message.text):
        yield _field("text") + _field(message.text[start:])


def _digest(message: Message, content: Iterable[bytes]) -> bytes:
    calls = (
        _field(call.id) + _field(call.name) + _field(canonical_arguments(call.arguments))
        for call in message.calls
    )
    fields = (
        message.role,
        b"".join(content),
        message.refusal,
        message.name,
        b"".join(calls),
        b"".join(map(_field, message.answers)),
    )
    return hashlib.sha256(VERSION + b"".join([_field(field) for field in fields])).digest()


def message_digest(message: Message) -> bytes:
    """SHA-256 over a message's canonical content, 32 bytes. `raw` and `tokens` do not take part."""
    return _digest(message, _content(message))


def outline_digest(message: Message) -> bytes:
    """The digest without the text of a tool result, 32 bytes.

    A client that clears or shortens old tool results keeps the outline of its conversation, so stored
    checkpoints are found by it; `core.checkpoint` then decides message by message.
    """
    return _digest(message, ()) if message.answers else message.digest


def chain(digests: Iterable[bytes]) -> list[bytes]:
    """Prefix digests: entry `i` stands for the messages `[0..i]`; each is 32 bytes."""
    prefixes: list[bytes] = []
    last = VERSION
    for digest in digests:
        last = hashlib.sha256(last + digest).digest()
        prefixes.append(last)
    return prefixes


def prefix_digests(messages: Sequence[Message]) -> list[bytes]:
    """Prefix digests of the non-privileged messages given, by their outlines."""
    return chain(map(outline_digest, messages))


def message_id(prefix: bytes) -> str:
    """The name of a message in events, handles and search: equal on every replica."""
    return "m_" + prefix.hex()[:12]
