"""Reads the token usage of a response as it passes, without delaying or changing a byte.

While bytes pass, they are only copied into a buffer of limited size. They are parsed when the response has
ended. Usage is read only from the JSON member in which a provider reports it, never from text in which the
model mentions usage. This member's place differs between wires, so each wire has its own `UsageParser`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.wire import TokenUsage

_MAX_KEPT_BYTES: Final = 65_536
_MAX_INFLATED_BYTES: Final = 32 * 1024 * 1024
_INFLATE_STEP_BYTES: Final = 4096  # small, because inflating may expand data a thousand times
_IMPLAUSIBLE_TOKENS: Final = 10**9
_MAX_CANDIDATES: Final = 8

_LINE_ENDS: Final = re.compile(rb"\r\n|\n|\r")
_USAGE: Final = re.compile(rb'"usage"\s*:')
_DECODER: Final = json.JSONDecoder()
_Answer = TypeVar("_Answer")


class UsageParser(NamedTuple):
    """Parses the usage in the answers of one wire.

    Attributes:
        parse_counts: Parses a `usage` object. Returns None if its numbers are not credible.
        parse_body: Parses a JSON answer, or an object that holds only the last members of an answer.
        parse_stream: Parses a stream, given its first bytes, its last lines, and whether the first of these
            lines is whole.
        head_bytes: How many of a stream's first bytes `parse_stream` needs.
    """

    parse_counts: Callable[[object], TokenUsage | None]
    parse_body: Callable[[bytes], TokenUsage | None]
    parse_stream: Callable[[bytes, bytes, bool], TokenUsage | None]
    head_bytes: int = 0


def decode_shape(decoder: msgspec.json.Decoder[_Answer], body: bytes) -> _Answer | None:
    """Decodes an answer. Returns None if the answer does not have the shape that the decoder expects."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_json(data: bytes) -> object:
    """Parses JSON; None if it is invalid. Values that only Python accepts, such as NaN, count as valid."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def as_mapping(value: object) -> Mapping[str, object]:
    """Returns the value if it is a JSON object, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def as_token_count(value: object) -> int | None:
    """Returns the value if it can be a number of tokens, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _IMPLAUSIBLE_TOKENS else None


def build_usage(prompt: object, completion: object, cached: object, reason: str = "") -> TokenUsage | None:
    """Builds a `TokenUsage`, or returns None if `prompt` or `completion` cannot be a number of tokens.

    None as `completion` counts as 0, and so does anything as `cached` that cannot be a number of tokens.
    """
    asked, made = as_token_count(prompt), as_token_count(0 if completion is None else completion)
    return (
        None
        if asked is None or made is None
        else TokenUsage(asked, made, as_token_count(cached) or 0, reason)
    )


def add_finish_reason(usage: TokenUsage | None, reason: str) -> TokenUsage | None:
    """Returns the usage with the reason why the answer ended; None if there is no usage."""
    return usage and usage._replace(finish_reason=reason)


def iter_lines_backwards(tail: bytes) -> Iterator[bytes]:
    """Yields the lines at the end of a stream without their line ends, the last line first."""
    stop = len(tail)
    while stop > 0:
        start = max(tail.rfind(b"\n", 0, stop), tail.rfind(b"\r", 0, stop)) + 1
        yield tail[start:stop]
        stop = start - 1


def iter_payloads_backwards(tail: bytes, pattern: re.Pattern[bytes]) -> Iterator[Mapping[str, object]]:
    """Yields the data of the events at the end of a stream that match a pattern, the last event first."""
    for line in iter_lines_backwards(tail):
        if line.startswith(b"data:") and pattern.search(line):
            yield as_mapping(parse_json(line[5:]))


def split_first_line(tail: bytes) -> tuple[bytes, bytes]:
    """Returns the first line and the bytes after it.

    Callers ignore the first line if its beginning was not kept, because the rest of a line may look like
    another line.
    """
    first, *rest = _LINE_ENDS.split(tail, 1)
    return first, rest[0] if rest else b""


def find_usage_in_tail(
    tail: bytes, parse_body: Callable[[bytes], TokenUsage | None], opening: bytes = b"{"
) -> TokenUsage | None:
    """Finds the usage among the last members of a body that is too large to keep.

    The bytes from a member to the end of the body close exactly the objects around the member. So a `usage`
    member is the provider's if `opening`, the member, and everything after it form valid JSON.

    Args:
        tail: The end of the body.
        parse_body: Parses the object that these bytes form.
        opening: The bytes that open the objects around the provider's `usage` member.
    """
    places = [match.start() for match in _USAGE.finditer(tail)][-_MAX_CANDIDATES:]
    return next(filter(None, (parse_body(opening + tail[place:]) for place in reversed(places))), None)


def _find_usage_in_head(
    head: bytes, parse_counts: Callable[[object], TokenUsage | None]
) -> TokenUsage | None:
    """Finds the usage among the first members of a body that is too large to keep.

    The bytes before the `usage` member must be whole members of one object.
    """
    for match in list(_USAGE.finditer(head))[:_MAX_CANDIDATES]:
        if parse_json(head[: match.start()] + b'"usage":0}') is None:
            continue
        try:
            value, _ = _DECODER.raw_decode(head[match.end() :].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            continue
        return parse_counts(value)
    return None


class UsageTap:
    """Reads the usage in one response body as its bytes pass.

    It keeps only the last 64 KiB of a stream and the first bytes that the parser needs (`head_bytes`), or the
    first and the last 64 KiB of any other body.

    Args:
        parser: The usage parser of the wire.
        content_type: The content type as sent. With `text/event-stream`, the body is a stream.
        content_encoding: The coding as sent. The result for a body that is not plain, gzip or deflate is
            None.
    """

    __slots__ = ("_head", "_head_bytes", "_inflater", "_is_stream", "_parser", "_seen_bytes", "_tail")

    def __init__(self, parser: UsageParser, content_type: str, content_encoding: str = "") -> None:
        self._parser = parser
        self._is_stream = content_type.strip().lower().startswith("text/event-stream")
        self._head_bytes = parser.head_bytes if self._is_stream else _MAX_KEPT_BYTES
        plain = content_encoding.strip().lower() in IDENTITY
        self._inflater = None if plain else Inflater(content_encoding, _MAX_INFLATED_BYTES)
        self._head = bytearray()
        self._tail = bytearray()
        self._seen_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Records the next bytes as sent. Never fails, and only copies or decompresses the bytes."""
        if self._inflater is None:
            if self._seen_bytes >= self._head_bytes:  # the usual case for streams, without another call
                self._seen_bytes += len(chunk)
                self._tail += chunk
                if len(self._tail) > _MAX_KEPT_BYTES:
                    del self._tail[:-_MAX_KEPT_BYTES]
            else:
                self._buffer_bytes(chunk)
            return
        for start in range(0, len(chunk), _INFLATE_STEP_BYTES):
            self._buffer_bytes(self._inflater.feed(chunk[start : start + _INFLATE_STEP_BYTES]))

    def _buffer_bytes(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-_MAX_KEPT_BYTES:]
        if len(self._tail) > _MAX_KEPT_BYTES:
            del self._tail[:-_MAX_KEPT_BYTES]

    def result(self) -> TokenUsage | None:
        """Returns the usage; None if the response has no credible counts.

        To be called when the response has ended or was cut off.
        """
        if self._inflater is not None and self._inflater.has_failed:
            return None
        parser, head, tail = self._parser, bytes(self._head), bytes(self._tail)
        whole = self._seen_bytes == len(head) + len(tail)
        if self._is_stream:
            return parser.parse_stream(head, head + tail if whole else tail, whole)
        if whole:
            return parser.parse_body(head + tail)
        return find_usage_in_tail(tail, parser.parse_body) or _find_usage_in_head(head, parser.parse_counts)
