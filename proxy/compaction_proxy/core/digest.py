"""Computes canonical digests, which decide whether messages or prefixes of conversations are the same.

A conversation id only serves to find a conversation. The digests decide whether a stored summary may replace
the messages that the client sent. If the rules in this module change, `DIGEST_VERSION` must change as well.
Otherwise stored summaries would be applied to messages for which they were not made.
"""

import hashlib
import json
import re
from collections.abc import Iterable

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.core.message import Message, MessageToolCall

DIGEST_VERSION = b"\x01"
MAX_DEPTH = 100
MAX_CHARACTERS = 1_048_576
# A text with more characters than this is encoded in pieces of this size. A thread holds the interpreter lock
# while it encodes a piece. Between two pieces, other threads can run.
PIECE_CHARACTERS = 64 * 1024
_EMPTY = bytes(8)
_EXACT_INTEGER = 2**53
_EXACT_DIGITS = 15
_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]')


def _encode_field(value: str) -> bytes:
    """Encodes a field as UTF-8, preceded by its length as 8 bytes.

    Because of the lengths, two different lists of fields never give the same bytes.
    """
    return _add_length_prefix(value.encode("utf-8", "surrogatepass")) if value else _EMPTY


def _add_length_prefix(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _build_unique_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def _parse_json_float(text: str) -> int | str:
    """Parses a JSON number that has a point or an exponent.

    A whole number, such as `1.0`, becomes an integer, as in JavaScript. Any other number becomes a string: a
    NUL character, followed by the number as Python writes it, or as it was sent if it has more than 15
    characters. The NUL character distinguishes the number from a JSON string with the same text.
    """
    value = float(text)
    if value.is_integer() and abs(value) <= _EXACT_INTEGER:
        return int(value)
    return "\0" + (repr(value) if len(text) <= _EXACT_DIGITS else text)


def _measure_depth(text: str) -> int:
    """Returns how many levels deep the brackets of a JSON text nest. Brackets in strings do not count."""
    depth = deepest = 0
    # `finditer` finds one match at a time. Finding all at once would hold the interpreter lock for too long.
    for bracket in _BRACKET.finditer(text):
        depth += (bracket[0] in "[{") - (bracket[0] in "]}")
        deepest = max(deepest, depth)
    return deepest


_TEXT = _encode_field("text")
_ROLES = {
    role: _encode_field(role) for role in ("system", "developer", "user", "assistant", "tool", "function")
}
# The decoder and the encoder are created once, because `json.loads` and `json.dumps` would create new ones
# for every call.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_unique_dict, parse_float=_parse_json_float, parse_constant="\0{}".format
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonicalize_arguments(arguments: str) -> str:
    """Returns the JSON of tool-call arguments with sorted keys and without optional white space.

    Arguments stay as they are if they do not parse, repeat a key, are longer than 1,048,576 characters, have
    too many brackets (`json_bounds`), or nest more than 100 levels deep. The limit on levels is fixed,
    because the number of levels that the decoder can read varies with the depth of the call stack. The digest
    of a message must not depend on the call stack.
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
    return "".join(_ENCODER.iterencode(value))  # the same text, in steps between which other threads can run


def _encode_content(message: Message) -> list[bytes]:
    """Encodes the content of a message in its order: pieces of the text, and content that is not text."""
    if not message.parts:
        return _encode_text(message.text)
    content: list[bytes] = []
    start = 0
    for part in message.parts:
        content += (
            *_encode_text(message.text[start : part.text_offset]),
            _encode_field(part.kind),
            _add_length_prefix(part.payload_digest),
        )
        start = max(start, part.text_offset)
    return content + _encode_text(message.text[start:])


def _encode_text(text: str) -> list[bytes]:
    if len(text) > PIECE_CHARACTERS:
        return [_TEXT, *_encode_long_text(text)]
    return [_TEXT, _encode_field(text)] if text else []


def _encode_long_text(text: str) -> list[bytes]:
    """Encodes a text field in pieces.

    A thread holds the interpreter lock while it encodes a piece. Between two pieces, other threads can run.
    """
    starts = range(0, len(text), PIECE_CHARACTERS)
    data = [text[start : start + PIECE_CHARACTERS].encode("utf-8", "surrogatepass") for start in starts]
    return [sum(map(len, data)).to_bytes(8, "big"), *data]


def _encode_call(call: MessageToolCall) -> bytes:
    return (
        _encode_field(call.id)
        + _encode_field(call.name)
        + _encode_field(canonicalize_arguments(call.arguments))
    )


def _hash_message(message: Message, content: list[bytes], name: str) -> bytes:
    fields = (
        DIGEST_VERSION,
        _ROLES.get(message.role) or _encode_field(message.role),
        sum(map(len, content)).to_bytes(8, "big"),
        *content,
        _encode_field(message.refusal),
        _encode_field(name),
        _add_length_prefix(b"".join(map(_encode_call, message.calls))) if message.calls else _EMPTY,
        _add_length_prefix(b"".join(map(_encode_field, message.answered_call_ids)))
        if message.answered_call_ids
        else _EMPTY,
    )
    if len(message.text) <= PIECE_CHARACTERS:
        return hashlib.sha256(b"".join(fields)).digest()
    hasher = hashlib.sha256()
    for field in fields:
        hasher.update(field)
    return hasher.digest()


def compute_message_digest(message: Message) -> bytes:
    """Computes the digest of a message: a SHA-256 of 32 bytes.

    The digest covers the role, the content, the refusal, the name, the calls and the ids of answered calls.
    It covers no other field, such as `raw` and `tokens`.
    """
    return _hash_message(message, _encode_content(message), message.name)


def compute_outline_digest(message: Message) -> bytes:
    """Computes the outline digest of a message, 32 bytes.

    The outline digest does not cover the name of the message or, in a tool result, the content. A client may
    later clear or shorten old tool results, or give a message a name. The outline digest of such a message
    does not change, so stored checkpoints are still found. `core.checkpoint` then decides for each message
    whether the difference is allowed.
    """
    if message.answered_call_ids:
        return _hash_message(message, [], "")
    if message.name:
        return _hash_message(message, _encode_content(message), "")
    return message.digest or compute_message_digest(message)


def compute_textless_digest(message: Message) -> bytes:
    """Computes the digest of a tool result with its name but without its text and other content, 32 bytes."""
    return _hash_message(message, [], message.name)


def chain_digests(digests: Iterable[bytes], previous_digest: bytes = DIGEST_VERSION) -> list[bytes]:
    """Chains the digests of messages into prefix digests of 32 bytes.

    Entry `i` of the result covers the messages from the first to the one at index `i`. If the list continues
    an earlier list, `previous_digest` is the prefix digest of the earlier list.
    """
    prefixes: list[bytes] = []
    for digest in digests:
        previous_digest = hashlib.sha256(previous_digest + digest).digest()
        prefixes.append(previous_digest)
    return prefixes


def compute_prefix_digests(
    messages: Iterable[Message], previous_digest: bytes = DIGEST_VERSION
) -> list[bytes]:
    """Computes the prefix digests of messages that are not fixed, by chaining their outline digests.

    `compute_outline_digest` describes outline digests.

    If the list continues an earlier list, `previous_digest` is the prefix digest of the earlier list.
    """
    return chain_digests(map(compute_outline_digest, messages), previous_digest)


def format_message_id(prefix_digest: bytes) -> str:
    """Formats the id of a message, `m_…`, from the prefix digest that ends with this message.

    Events, masks and the search tool refer to a message by this id. It is the same on every replica of the
    proxy.
    """
    return "m_" + prefix_digest.hex()[:12]
