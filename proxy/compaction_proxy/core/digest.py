"""The canonical digest: what makes two messages, and two prefixes of a conversation, the same.

Identity only locates; the digest decides whether a stored summary stands for what the client sent. The
rules are DESIGN.md §5.3, version byte 1. A change here needs a new version byte, or stored summaries
would be applied to messages they do not stand for.
"""

import hashlib
import json
import re
from collections.abc import Iterable

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.core.message import Message, MessageToolCall

VERSION = b"\x01"
MAX_DEPTH = 100
MAX_CHARACTERS = 1_048_576
# A longer text is encoded in pieces of so many characters.
PIECE_CHARACTERS = 64 * 1024
_EMPTY = bytes(8)
_EXACT_INTEGER = 2**53
_EXACT_DIGITS = 15
_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]')


def _encode_field(value: str) -> bytes:
    """One length-prefixed field, so that no two different lists of fields share their bytes."""
    return _add_length_prefix(value.encode("utf-8", "surrogatepass")) if value else _EMPTY


def _add_length_prefix(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _build_unique_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate keys")
    return made


def _parse_fraction(text: str) -> int | str:
    """A number with a point or an exponent: `1.0` is 1, as in JavaScript; any other keeps all its digits."""
    value = float(text)
    if value.is_integer() and abs(value) <= _EXACT_INTEGER:
        return int(value)
    return "\0" + (repr(value) if len(text) <= _EXACT_DIGITS else text)


def _measure_depth(text: str) -> int:
    """How deep brackets nest outside strings."""
    depth = deepest = 0
    for found in _BRACKET.finditer(text):  # one at a time: all at once would hold the interpreter lock
        depth += (found[0] in "[{") - (found[0] in "]}")
        deepest = max(deepest, depth)
    return deepest


_TEXT = _encode_field("text")
_ROLES = {
    role: _encode_field(role) for role in ("system", "developer", "user", "assistant", "tool", "function")
}
# Made once: `json.loads` and `json.dumps` would make theirs for every call.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_unique_dict, parse_float=_parse_fraction, parse_constant="\0{}".format
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonicalize_arguments(arguments: str) -> str:
    """Tool-call arguments with key order and white space made canonical.

    They stay as they are if they do not parse, repeat a key, are longer than 1 Mi characters, are crowded
    (`json_bounds`), or nest more than 100 deep: how deep a decoder can go depends on its caller's stack, and
    the digest must not.
    """
    brackets = arguments.count("[") + arguments.count("{")
    if (
        len(arguments) > MAX_CHARACTERS
        or has_too_many_brackets(arguments)
        or (brackets > MAX_DEPTH and _measure_depth(arguments) > MAX_DEPTH)
    ):
        return arguments
    try:
        value = _DECODER.decode(arguments)
    except ValueError:
        return arguments
    if len(arguments) <= PIECE_CHARACTERS:
        return _ENCODER.encode(value)
    return "".join(_ENCODER.iterencode(value))  # the same, step by step


def _encode_content(message: Message) -> list[bytes]:
    """The text and the other parts in the order they stand."""
    if not message.parts:
        return _encode_text(message.text)
    content: list[bytes] = []
    start = 0
    for part in message.parts:
        content += (
            *_encode_text(message.text[start : part.at]),
            _encode_field(part.kind),
            _add_length_prefix(part.payload),
        )
        start = max(start, part.at)
    return content + _encode_text(message.text[start:])


def _encode_text(text: str) -> list[bytes]:
    if len(text) > PIECE_CHARACTERS:
        return [_TEXT, *_encode_long_text(text)]
    return [_TEXT, _encode_field(text)] if text else []


def _encode_long_text(text: str) -> list[bytes]:
    """A field in pieces: the interpreter lock is held while one is encoded."""
    places = range(0, len(text), PIECE_CHARACTERS)
    data = [text[at : at + PIECE_CHARACTERS].encode("utf-8", "surrogatepass") for at in places]
    return [sum(map(len, data)).to_bytes(8, "big"), *data]


def _encode_call(call: MessageToolCall) -> bytes:
    return (
        _encode_field(call.id)
        + _encode_field(call.name)
        + _encode_field(canonicalize_arguments(call.arguments))
    )


def _hash_message(message: Message, content: list[bytes], name: str) -> bytes:
    fields = (
        VERSION,
        _ROLES.get(message.role) or _encode_field(message.role),
        sum(map(len, content)).to_bytes(8, "big"),
        *content,
        _encode_field(message.refusal),
        _encode_field(name),
        _add_length_prefix(b"".join(map(_encode_call, message.calls))) if message.calls else _EMPTY,
        _add_length_prefix(b"".join(map(_encode_field, message.answers))) if message.answers else _EMPTY,
    )
    if len(message.text) <= PIECE_CHARACTERS:
        return hashlib.sha256(b"".join(fields)).digest()
    hasher = hashlib.sha256()
    for field in fields:
        hasher.update(field)
    return hasher.digest()


def compute_message_digest(message: Message) -> bytes:
    """SHA-256 over a message's canonical content, 32 bytes. `raw` and `tokens` do not take part."""
    return _hash_message(message, _encode_content(message), message.name)


def compute_outline_digest(message: Message) -> bytes:
    """The digest without the text of a tool result and without the message's name, 32 bytes.

    A client that clears or shortens old tool results, or names messages later, keeps the outline of its
    conversation, so stored checkpoints are found by it; `core.checkpoint` then decides message by message.
    """
    if message.answers:
        return _hash_message(message, [], "")
    if message.name:
        return _hash_message(message, _encode_content(message), "")
    return message.digest or compute_message_digest(message)


def compute_result_digest(message: Message) -> bytes:
    """The digest of a tool result without its text, 32 bytes; the outline with the name."""
    return _hash_message(message, [], message.name)


def chain_digests(digests: Iterable[bytes], last: bytes = VERSION) -> list[bytes]:
    """Prefix digests: entry `i` stands for the messages `[0..i]`; each is 32 bytes.

    Where a list goes on, `last` is the prefix digest of what came before.
    """
    prefixes: list[bytes] = []
    for digest in digests:
        last = hashlib.sha256(last + digest).digest()
        prefixes.append(last)
    return prefixes


def compute_prefix_digests(messages: Iterable[Message], last: bytes = VERSION) -> list[bytes]:
    """Prefix digests of the non-privileged messages given, by their outlines.

    `last` as in `chain_digests`.
    """
    return chain_digests(map(compute_outline_digest, messages), last)


def format_message_id(prefix: bytes) -> str:
    """The name of a message in events, handles and search: equal on every replica."""
    return "m_" + prefix.hex()[:12]
