"""Defines the classes and functions with which all wires convert JSON messages to `Message` objects.

The same content has the same digest on every wire.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import ContentPart, Message
from compaction_proxy.wires.json.values import JsonObject, TextCutter, as_string, decode_value, hash_base64

# `read_content` raises an error if a message or a tool result has more content parts than this, because no
# model could read so many.
MAX_PARTS: Final = 10_000
# The largest number of tokens that `estimate_unknown_part` returns for one content part.
UNKNOWN_PART_TOKENS: Final = 1_000

_Decoded = TypeVar("_Decoded")


class UncountedMessage(NamedTuple):
    """A message whose tokens are not counted yet.

    Attributes:
        record: The message. Its fields `digest` and `tokens` are not set.
        digest: The digest of the message.
        nontext_tokens: An estimate of the tokens of the content that is not text. It is not calibrated.
    """

    record: Message
    digest: bytes
    nontext_tokens: int


class PieceParser(NamedTuple, Generic[_Decoded]):
    """Parses the pieces of one wire. A piece is the JSON of one `Message` (see `Wire`).

    Attributes:
        decode: Decodes the JSON of a piece. Raises `UnreadableBodyError` if that is impossible.
        convert: Builds the `Message` from the bytes of a piece and their decoded form. Does not set the
            digest of the message. Raises `UnreadableBodyError` if that is impossible.
        has_nontext: Returns whether a message has content other than text.
        estimate: Estimates the tokens of the content that is not text, given a decoded piece and the model.
            The result is not calibrated.
    """

    decode: Callable[[bytes], _Decoded]
    convert: Callable[[bytes, _Decoded], Message]
    has_nontext: Callable[[Message], bool]
    estimate: Callable[[_Decoded, str], int]

    def parse_message(self, raw: bytes) -> Message:
        """Parses a piece, the JSON of one message. Returns the message with its digest. Its `tokens` are 0.

        Raises:
            UnreadableBodyError: If the bytes are not a valid piece.
        """
        record = self._build_record(raw, self.decode(raw))
        return record.with_digest_and_tokens(compute_message_digest(record), 0)

    def parse_uncounted(self, raw: bytes, model: str) -> UncountedMessage:
        """Parses a piece, the JSON of one message. Does not count the tokens of the message's text.

        Estimates the tokens of the content that is not text, as the model named `model` would count them.

        Raises:
            UnreadableBodyError: If the bytes are not a valid piece.
        """
        decoded = self.decode(raw)
        record = self._build_record(raw, decoded)
        tokens = self.estimate(decoded, model) if self.has_nontext(record) else 0
        return UncountedMessage(record, compute_message_digest(record), tokens)

    def estimate_nontext_tokens(self, raw: bytes, model: str) -> int:
        """Estimates the tokens of a message's content that is not text, such as images.

        `raw` is a piece, the JSON of one message. Returns 0 if it is not a valid piece.
        """
        try:
            return self.estimate(self.decode(raw), model)
        except UnreadableBodyError:
            return 0

    def _build_record(self, raw: bytes, decoded: _Decoded) -> Message:
        try:
            return self.convert(raw, decoded)
        except RecursionError:  # encoding JSON can exceed the recursion limit even if decoding it did not
            raise UnreadableBodyError("too-deep") from None


def decode_fields(raw: bytes) -> JsonObject:
    """Decodes a piece (the JSON of one message; see `Wire`) that is one object.

    Raises:
        UnreadableBodyError: With the reason `no-messages` if the piece is not an object. With the reason
            `not-json`, `too-many` or `too-deep` if it cannot be decoded.
    """
    value = decode_value(raw)
    if not isinstance(value, dict):
        raise UnreadableBodyError("no-messages")
    return value


def read_content(
    content: object,
    read_text: Callable[[Any], str | None],
    build_part: Callable[[Any, int], ContentPart | None],
) -> tuple[str, tuple[ContentPart, ...]]:
    """Splits the content of a message, or of a tool's result, into its text and its other parts.

    Args:
        content: A string or a list of parts. None gives an empty text, and any other value its JSON as text.
        read_text: Returns the text of a part; None if the part is not text.
        build_part: Builds the `ContentPart` of a part that is not text, given the part and the length of the
            text before it. Returns None if the result must not contain the part.

    Raises:
        UnreadableBodyError: With the reason `too-many` if the content has more than `MAX_PARTS` parts.
    """
    if not isinstance(content, list):
        plain = content is None or isinstance(content, str)
        return as_string(content) if plain else json.dumps(content, sort_keys=True), ()
    if len(content) > MAX_PARTS:
        raise UnreadableBodyError("too-many")
    text = ""
    parts: list[ContentPart] = []
    for each in content:
        part_text = read_text(each)
        if part_text is not None:
            text += part_text
        elif part := build_part(each, len(text)):
            parts.append(part)
    return text, tuple(parts)


def get_kind(part: object) -> str:
    """Returns the `type` of an element of a message's content; empty if it has none."""
    return as_string(part.get("type")) if isinstance(part, Mapping) else ""


def hash_text(text: str) -> bytes:
    """Returns the SHA-256 of a text, which may contain lone surrogates."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def hash_address(url: str) -> bytes:
    """Returns a SHA-256 that identifies the content to which a URL refers.

    For an HTTP URL, it is the SHA-256 of the URL without its query. For a base64 data URL, or for base64 data
    without `data:`, it is the SHA-256 of the decoded data. For any other URL, it is the SHA-256 of the URL.
    """
    if url.startswith(("http://", "https://")):
        return hash_text(url.partition("?")[0])
    head, comma, data = url.rpartition(",")
    if comma and not head.endswith(";base64"):
        return hash_text(url)
    try:
        return hash_base64(data)
    except ValueError:
        return hash_text(url)


def hash_part(part: Any) -> bytes:
    """Returns the SHA-256 of the JSON of a content part, without the part's `cache_control`."""
    plain = {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part
    return hash_text(json.dumps(plain, sort_keys=True, default=str))


def count_base64_bytes(data: str) -> int:
    """Returns the number of bytes that base64 text encodes."""
    return len(data) * 3 // 4  # four characters encode three bytes


def estimate_unknown_part(part: Any) -> int:
    """Estimates the tokens of a content part of unknown kind.

    The estimate never exceeds the number of bytes of the part's JSON, and is at most `UNKNOWN_PART_TOKENS`.
    The gate relies on this: it lets requests with few bytes pass unparsed.
    """
    # A client may write a float, such as 1e9, with fewer bytes than Python does. So the estimate counts each
    # float as one byte.
    shortest = json.loads(json.dumps(part), parse_float=lambda _: 0)
    text = json.dumps(shortest, ensure_ascii=False, separators=(",", ":"))
    return min(UNKNOWN_PART_TOKENS, len(text.encode("utf-8", "surrogatepass")))


def shorten_member(
    fields: JsonObject, name: str, cut: TextCutter, shorten_part: Callable[[Any], Any]
) -> JsonObject:
    """Returns the object with its member `name` shortened. All other members stay unchanged.

    If the member is a text, `cut` shortens it. If it is a list, `shorten_part` shortens each of its elements.
    If it is anything else or absent, returns the object itself.
    """
    content = fields.get(name)
    if isinstance(content, str):
        return {**fields, name: cut(content)}
    if isinstance(content, list):
        return {**fields, name: [shorten_part(each) for each in content]}
    return fields
