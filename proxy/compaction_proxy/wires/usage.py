"""Reads the token usage of a response while the proxy forwards it, without delaying or changing it.

While the proxy forwards the bytes of a response, it only decompresses them and copies them into a buffer of
limited size. It parses the buffer when the response has ended. It reads the usage only from the JSON member
in which a provider reports it, never from a text of the model that mentions usage. The place of this member
in a response differs between wires, so each wire has its own `UsageFormat`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.json.values import JsonObject, as_object, parse_json

_MAX_KEPT_BYTES: Final = 65_536
_MAX_INFLATED_BYTES: Final = 32 * 1024 * 1024
_INFLATE_STEP_BYTES: Final = 4096  # small, because inflating may expand data a thousand times
_IMPLAUSIBLE_TOKENS: Final = 10**9
_MAX_CANDIDATES: Final = 8

_LINE_ENDS: Final = re.compile(rb"\r\n|\n|\r")
_USAGE: Final = re.compile(rb'"usage"\s*:')


class TokenUsage(NamedTuple):
    """The token counts of a response.

    Attributes:
        prompt_tokens: Tokens of the input, including cached tokens.
        completion_tokens: Tokens of the output; 0 if the response does not report them.
        cached_tokens: Tokens of the input that came from the provider's cache; 0 if the response does not
            report them.
        finish_reason: Why the response ended, in the provider's words; empty if the reason is unknown.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class UsageFormat(NamedTuple):
    """Describes where the responses of one wire report their usage.

    Attributes:
        parse_counts: Parses a `usage` object. Returns None if its numbers are not plausible.
        find_finish_reason: Returns the reason why a response ended; empty if the response has none.
        event_pattern: Matches the events of a stream that may contain usage or a finish reason.
        event_member: The name of the member of an event that has the form of a response. Empty if the event
            itself has this form.
        find_other_usage: Finds the usage in a response that has no member `usage`.
        parse_stream: Returns the usage, given the first bytes of a stream and its last lines. If this
            attribute is None, the last usage and the last finish reason in the stream count.
        head_bytes: Number of bytes at the beginning of a stream that `parse_stream` needs.
    """

    parse_counts: Callable[[object], TokenUsage | None]
    find_finish_reason: Callable[[JsonObject], str]
    event_pattern: re.Pattern[bytes]
    event_member: str = ""
    find_other_usage: Callable[[JsonObject], TokenUsage | None] | None = None
    parse_stream: Callable[[bytes, bytes], TokenUsage | None] | None = None
    head_bytes: int = 0

    def find_usage(self, answer: JsonObject) -> TokenUsage | None:
        """Returns the usage in a response, without a finish reason; None if there is no plausible usage."""
        usage = self.parse_counts(answer.get("usage"))
        return self.find_other_usage(answer) if usage is None and self.find_other_usage else usage

    def get_answer(self, event: JsonObject) -> JsonObject:
        """Returns the part of an event that has the form of a response; empty if there is none."""
        return as_object(event.get(self.event_member)) if self.event_member else event

    def parse_body(self, body: bytes, *, is_event: bool = False) -> TokenUsage | None:
        """Returns the usage in a JSON response, with the finish reason; None if there is no plausible usage.

        Args:
            body: A JSON object: a response, or the data of an event. Its first members may be missing.
            is_event: Whether `body` is the data of an event.
        """
        payload = as_object(parse_json(body))
        answer = self.get_answer(payload) if is_event else payload
        usage = self.find_usage(answer)
        return usage and TokenUsage(*usage[:3], self.find_finish_reason(answer))


def as_token_count(value: object) -> int | None:
    """Returns the value if it is an integer of at least 0 and below `_IMPLAUSIBLE_TOKENS`, else None."""
    return value if type(value) is int and 0 <= value < _IMPLAUSIBLE_TOKENS else None


def build_usage(prompt: object, completion: object, cached: object) -> TokenUsage | None:
    """Builds a `TokenUsage`. Returns None if `prompt` or `completion` is not a plausible number of tokens.

    If `completion` is None, it becomes 0. If `cached` is not a plausible number, it becomes 0. If it is more
    than `prompt`, it becomes `prompt`: otherwise the tokens that are not cached would have a negative cost.
    """
    asked, made = as_token_count(prompt), as_token_count(0 if completion is None else completion)
    if asked is None or made is None:
        return None
    return TokenUsage(asked, made, min(asked, as_token_count(cached) or 0))


def iter_payloads_backwards(tail: bytes, pattern: re.Pattern[bytes]) -> Iterator[JsonObject]:
    """Yields the decoded data of those events in `tail` that match `pattern`, the last event first.

    `tail` contains the last bytes of a stream, in which the data of each event must be one line. Yields an
    empty object for data that is not a JSON object.
    """
    for line in reversed(tail.replace(b"\r", b"\n").split(b"\n")):
        if line.startswith(b"data:") and pattern.search(line):
            yield as_object(parse_json(line[5:]))


def _parse_last_events(usage_format: UsageFormat, first: bytes, rest: bytes) -> TokenUsage | None:
    """Returns the last usage in a stream, with the last finish reason; None if there is no usage.

    Args:
        usage_format: The format of the wire.
        first: The end of a line whose beginning `UsageTap` has not kept; empty if it has kept the whole
            stream.
        rest: The part of the stream after `first`.
    """
    usage, reason = None, ""
    for payload in iter_payloads_backwards(rest, usage_format.event_pattern):
        answer = usage_format.get_answer(payload)
        usage = usage or usage_format.find_usage(answer)
        reason = reason or usage_format.find_finish_reason(answer)
        if usage and reason:
            break
    if usage is None and usage_format.event_member:
        return _find_usage_in_tail(usage_format, first, is_event=True)
    return usage and usage._replace(finish_reason=reason)


def _find_usage_in_tail(
    usage_format: UsageFormat, tail: bytes, *, is_event: bool = False
) -> TokenUsage | None:
    """Finds the usage among the last members of a body that is too large to keep.

    The text `"usage":` may also occur in the model's reply. To find out whether it is the real member, the
    function takes the bytes from `"usage":` to the end of the body, and puts the beginning of a body, such as
    `{`, before them. It is the real member only if the result is valid JSON.

    Args:
        usage_format: The format of the wire.
        tail: The last bytes of the body.
        is_event: Whether the body is the data of an event.
    """
    opening = b'{"%b":{' % usage_format.event_member.encode() if is_event else b"{"
    for match in [*_USAGE.finditer(tail)][: -_MAX_CANDIDATES - 1 : -1]:
        if usage := usage_format.parse_body(opening + tail[match.start() :], is_event=is_event):
            return usage
    return None


def _find_usage_in_head(
    head: bytes, parse_counts: Callable[[object], TokenUsage | None]
) -> TokenUsage | None:
    """Finds the usage among the first members of a body that is too large to keep.

    The text `"usage":` may also occur in the model's reply. It is the real member only if the bytes before it
    are the beginning of a JSON object and consist of complete members.
    """
    for match in list(_USAGE.finditer(head))[:_MAX_CANDIDATES]:
        if parse_json(head[: match.start()] + b'"usage":0}') is None:
            continue
        try:
            value, _ = DECODER.raw_decode(head[match.end() :].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            continue
        return parse_counts(value)
    return None


class UsageTap:
    """Reads the usage in one response body while the proxy forwards the body.

    Of a stream, it keeps the first bytes (`UsageFormat.head_bytes`) and the last 64 KiB. Of any other body,
    it keeps the first and the last 64 KiB.

    Args:
        usage_format: The format of the wire.
        content_type: The `content-type` of the response. With `text/event-stream`, the body is a stream.
        content_encoding: The `content-encoding` of the response. Codings other than gzip and deflate are not
            supported; `result` then returns None.
    """

    def __init__(self, usage_format: UsageFormat, content_type: str, content_encoding: str = "") -> None:
        self._format = usage_format
        self._is_stream = content_type.strip().lower().startswith("text/event-stream")
        self._head_bytes = usage_format.head_bytes if self._is_stream else _MAX_KEPT_BYTES
        plain = content_encoding.strip().lower() in IDENTITY
        self._inflater = None if plain else Inflater(content_encoding, _MAX_INFLATED_BYTES)
        self._head = bytearray()
        self._tail = bytearray()
        self._seen_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the body, as the upstream sent them.

        Copies the bytes into a buffer, and decompresses them first if the body is compressed. If they cannot
        be decompressed, `result` returns None.
        """
        if self._inflater is None:
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
        """Returns the usage; None if the response has no plausible counts.

        Call it when the response has ended or was cut off.
        """
        if self._inflater is not None and self._inflater.has_failed:
            return None
        head, tail = bytes(self._head), bytes(self._tail)
        whole = self._seen_bytes == len(head) + len(tail)
        if not self._is_stream:
            if whole:
                return self._format.parse_body(head + tail)
            usage = _find_usage_in_tail(self._format, tail)
            return usage or _find_usage_in_head(head, self._format.parse_counts)
        # `tail` may begin in the middle of a line. The rest of this line may look like a complete line, so it
        # must be separated from the lines after it.
        first, *lines = (b"", head + tail) if whole else _LINE_ENDS.split(tail, 1)
        rest = lines[0] if lines else b""
        if self._format.parse_stream:
            return self._format.parse_stream(head, rest)
        return _parse_last_events(self._format, first, rest)
