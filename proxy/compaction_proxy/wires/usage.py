"""A look at a response in passing: what it says about tokens used, without delaying or altering a byte.

While bytes flow they are only copied into a bounded buffer; parsing waits for the end. Only JSON that really
stands where a provider puts its usage counts: text of the model that talks of usage does not. Where that is
differs from wire to wire; each brings its own `UsageParser`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

from compaction_proxy.wires.decompress import IDENTITY, Inflater
from compaction_proxy.wires.wire import TokenUsage

_KEEP_BYTES: Final = 65_536
_MAX_INFLATED_BYTES: Final = 32 * 1024 * 1024
_INFLATE_STEP_BYTES: Final = 4096  # deflate makes at most a thousand times as much of it
_TOO_MANY_TOKENS: Final = 10**9
_MAX_CANDIDATES: Final = 8

_LINE_ENDS: Final = re.compile(rb"\r\n|\n|\r")
_USAGE: Final = re.compile(rb'"usage"\s*:')
_DECODER: Final = json.JSONDecoder()
_Answer = TypeVar("_Answer")


class UsageParser(NamedTuple):
    """Where the answers of a wire say what they used.

    Attributes:
        parse_counts: The numbers of a `usage` object; None if they cannot be true.
        parse_body: What a JSON answer says; also asked of an object of nothing but an answer's last members.
        parse_stream: What a stream says, given its first bytes, its last lines, and whether the first of
            these lines is whole.
        head_bytes: How many of a stream's first bytes that takes.
    """

    parse_counts: Callable[[object], TokenUsage | None]
    parse_body: Callable[[bytes], TokenUsage | None]
    parse_stream: Callable[[bytes, bytes, bool], TokenUsage | None]
    head_bytes: int = 0


def decode_shape(decoder: msgspec.json.Decoder[_Answer], body: bytes) -> _Answer | None:
    """An answer of the shape that a decoder takes; None if it has another."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_json(data: bytes) -> object:
    """The JSON that bytes hold, or None. What is not strictly JSON, such as NaN, is read as Python does."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_token_count(value: object) -> int | None:
    """A number of tokens; None if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _TOO_MANY_TOKENS else None


def build_usage(prompt: object, completion: object, cached: object, reason: str = "") -> TokenUsage | None:
    """A usage of these numbers; None if the first two cannot be true. What is absent (None) counts as 0."""
    asked, made = as_token_count(prompt), as_token_count(0 if completion is None else completion)
    return (
        None
        if asked is None or made is None
        else TokenUsage(asked, made, as_token_count(cached) or 0, reason)
    )


def add_finish_reason(usage: TokenUsage | None, reason: str) -> TokenUsage | None:
    """The usage with the reason for which the answer ended."""
    return usage and usage._replace(finish_reason=reason)


def iter_lines_backwards(tail: bytes) -> Iterator[bytes]:
    """The lines of a stream's end, the last one first, without their ends."""
    stop = len(tail)
    while stop > 0:
        start = max(tail.rfind(b"\n", 0, stop), tail.rfind(b"\r", 0, stop)) + 1
        yield tail[start:stop]
        stop = start - 1


def iter_payloads_backwards(tail: bytes, pattern: re.Pattern[bytes]) -> Iterator[Mapping[str, object]]:
    """What the events of a stream's end carry, the last one first, of those in which a pattern is found."""
    for line in iter_lines_backwards(tail):
        if line.startswith(b"data:") and pattern.search(line):
            yield as_mapping(parse_json(line[5:]))


def cut_first_line(tail: bytes) -> tuple[bytes, bytes]:
    """The first line, which has lost its beginning and so could pass for something else, and the rest."""
    first, *rest = _LINE_ENDS.split(tail, 1)
    return first, rest[0] if rest else b""


def find_usage_in_tail(
    tail: bytes, parse_body: Callable[[bytes], TokenUsage | None], opening: bytes = b"{"
) -> TokenUsage | None:
    """The usage among the last members of a body too large to keep.

    What follows a member up to the end of the body closes exactly the objects that it stands in, so a member
    proves its place by parsing together with all that follows it.

    Args:
        tail: The end of the body.
        parse_body: What such an object says.
        opening: Opens the objects that the member stands in.
    """
    places = [found.start() for found in _USAGE.finditer(tail)][-_MAX_CANDIDATES:]
    return next(filter(None, (parse_body(opening + tail[place:]) for place in reversed(places))), None)


def _find_usage_in_head(
    head: bytes, parse_counts: Callable[[object], TokenUsage | None]
) -> TokenUsage | None:
    """The usage among the first members: what comes before it must be whole members of one object."""
    for found in list(_USAGE.finditer(head))[:_MAX_CANDIDATES]:
        if parse_json(head[: found.start()] + b'"usage":0}') is None:
            continue
        try:
            value, _ = _DECODER.raw_decode(head[found.end() :].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            continue
        return parse_counts(value)
    return None


class UsageTap:
    """Watches one response body.

    Memory is bounded: the last 64 KiB of a stream, and of other bodies the first 64 KiB as well.

    Args:
        parser: The wire's ways.
        content_type: As sent; `text/event-stream` makes it a stream.
        content_encoding: As sent. Bodies that are neither plain, gzip nor deflate tell nothing.
    """

    __slots__ = ("_head", "_head_bytes", "_inflater", "_seen", "_stream", "_tail", "_telling")

    def __init__(self, parser: UsageParser, content_type: str, content_encoding: str = "") -> None:
        self._telling = parser
        self._stream = content_type.strip().lower().startswith("text/event-stream")
        self._head_bytes = parser.head_bytes if self._stream else _KEEP_BYTES
        plain = content_encoding.strip().lower() in IDENTITY
        self._inflater = None if plain else Inflater(content_encoding, _MAX_INFLATED_BYTES)
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes as sent. Never fails, and costs no more than a copy or inflating."""
        if self._inflater is None:
            if self._seen >= self._head_bytes:  # the usual way of streams, so without a further call
                self._seen += len(chunk)
                self._tail += chunk
                if len(self._tail) > _KEEP_BYTES:
                    del self._tail[:-_KEEP_BYTES]
            else:
                self._buffer_bytes(chunk)
            return
        for start in range(0, len(chunk), _INFLATE_STEP_BYTES):
            self._buffer_bytes(self._inflater.feed(chunk[start : start + _INFLATE_STEP_BYTES]))

    def _buffer_bytes(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-_KEEP_BYTES:]
        if len(self._tail) > _KEEP_BYTES:
            del self._tail[:-_KEEP_BYTES]

    def result(self) -> TokenUsage | None:
        """What the response said, once it has ended or been cut; None if nothing that can be believed."""
        if self._inflater is not None and self._inflater.failed:
            return None
        telling, head, tail = self._telling, bytes(self._head), bytes(self._tail)
        whole = self._seen == len(head) + len(tail)
        if self._stream:
            return telling.parse_stream(head, head + tail if whole else tail, whole)
        if whole:
            return telling.parse_body(head + tail)
        return find_usage_in_tail(tail, telling.parse_body) or _find_usage_in_head(head, telling.parse_counts)
