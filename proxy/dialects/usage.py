"""A look at a response in passing: what it says about tokens used, without delaying or altering a byte.

While bytes flow they are only copied into a bounded buffer; parsing waits for the end. Only JSON that really
stands where a provider puts its usage counts: text of the model that talks of usage does not.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from proxy.dialects.dialect import Usage
from proxy.dialects.inflate import IDENTITY, Inflater

_KEEP_BYTES: Final = 65_536
_MAX_INFLATED_BYTES: Final = 32 * 1024 * 1024
_INFLATE_STEP_BYTES: Final = 4096  # deflate makes at most a thousand times as much of it
_TOO_MANY_TOKENS: Final = 10**9
_MAX_CANDIDATES: Final = 8

_LINE_ENDS: Final = re.compile(rb"\r\n|\n|\r")
_USAGE: Final = re.compile(rb'"usage"\s*:')
_TELLING: Final = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"')
_DECODER: Final = json.JSONDecoder()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    prompt_cache_hit_tokens: int | None = None
    cached_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """An answer as nearly every provider writes it; nothing but this is built of it."""

    usage: _Counts
    choices: list[_Choice] = []


_USUAL: Final = msgspec.json.Decoder(_Answer)


def _usual(body: bytes) -> Usage | None:
    """What an answer of the usual shape says; None if it has another, or if its numbers cannot be true."""
    try:
        answer = _USUAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    used, details = answer.usage, answer.usage.prompt_tokens_details
    told = (details.cached_tokens if details else None, used.prompt_cache_hit_tokens, used.cached_tokens)
    cached = next((count for count in told if count is not None), 0)
    counts = (used.prompt_tokens, used.completion_tokens or 0, cached)
    if not all(0 <= count < _TOO_MANY_TOKENS for count in counts):
        return None
    return Usage(*counts, answer.choices[0].finish_reason or "" if answer.choices else "")


def _parsed(data: bytes) -> object:
    """The JSON that bytes hold, or None. What is not strictly JSON, such as NaN, is read as Python does."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _choice(payload: Mapping[str, object]) -> Mapping[str, object]:
    choices = payload.get("choices")
    return _mapping(choices[0]) if isinstance(choices, list) and choices else {}


def _tokens(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _TOO_MANY_TOKENS else None


def _counted(found: object) -> Usage | None:
    """The numbers of a `usage` object, or None if they cannot be true."""
    usage = _mapping(found)
    prompt = _tokens(usage.get("prompt_tokens"))
    told = usage.get("completion_tokens")
    completion = 0 if told is None else _tokens(told)
    if prompt is None or completion is None:
        return None
    for cached in (
        _mapping(usage.get("prompt_tokens_details")).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),  # DeepSeek
        usage.get("cached_tokens"),  # Kimi
    ):
        count = _tokens(cached)
        if count is not None:
            return Usage(prompt, completion, count)
    return Usage(prompt, completion)


def _usage(payload: Mapping[str, object]) -> Usage | None:
    """The usage in a response or a chunk, from the places where providers put it."""
    return (
        _counted(payload.get("usage"))
        or _counted(_choice(payload).get("usage"))  # Kimi, in streams
        or _counted(_mapping(payload.get("x_groq")).get("usage"))
    )


def _finish_reason(payload: Mapping[str, object]) -> str:
    reason = _choice(payload).get("finish_reason")
    return reason if isinstance(reason, str) else ""


def _with_reason(usage: Usage | None, reason: str) -> Usage | None:
    if usage is None:
        return None
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, reason)


def _events_backwards(tail: bytes) -> Iterator[Mapping[str, object]]:
    stop = len(tail)
    while stop > 0:
        start = max(tail.rfind(b"\n", 0, stop), tail.rfind(b"\r", 0, stop)) + 1
        line, stop = tail[start:stop], start - 1
        if line.startswith(b"data:") and _TELLING.search(line):
            yield _mapping(_parsed(line[5:]))


def _without_first_line(tail: bytes) -> bytes:
    """A tail whose first line has lost its beginning and so could pass for something else."""
    lines = _LINE_ENDS.split(tail, 1)
    return lines[1] if len(lines) > 1 else b""


def _of_stream(tail: bytes) -> Usage | None:
    """The last usage that a stream tells, with the last reason it gives for its end."""
    usage: Usage | None = None
    reason = ""
    for payload in _events_backwards(tail):
        usage = usage or _usage(payload)
        reason = reason or _finish_reason(payload)
        if usage and reason:
            break
    return _with_reason(usage, reason)


def _of_body(body: bytes) -> Usage | None:
    usual = _usual(body)
    if usual is not None:
        return usual
    payload = _mapping(_parsed(body))
    return _with_reason(_usage(payload), _finish_reason(payload))


def _of_tail(tail: bytes) -> Usage | None:
    """The usage among the last members of a body too large to keep.

    What follows a top-level member up to the end of the body closes exactly one object, so a member proves
    its place by parsing together with all that follows it.
    """
    places = [found.start() for found in _USAGE.finditer(tail)][-_MAX_CANDIDATES:]
    return next(filter(None, (_of_body(b"{" + tail[place:]) for place in reversed(places))), None)


def _of_head(head: bytes) -> Usage | None:
    """The usage among the first members: what comes before it must be whole members of one object."""
    for found in list(_USAGE.finditer(head))[:_MAX_CANDIDATES]:
        if _parsed(head[: found.start()] + b'"usage":0}') is None:
            continue
        try:
            value, _ = _DECODER.raw_decode(head[found.end() :].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            continue
        return _counted(value)
    return None


class UsageTap:
    """Watches one response body.

    Memory is bounded: the last 64 KiB of a stream, and of other bodies the first 64 KiB as well.

    Args:
        content_type: As sent; `text/event-stream` makes it a stream.
        content_encoding: As sent. Bodies that are neither plain, gzip nor deflate tell nothing.
    """

    __slots__ = ("_head", "_inflater", "_seen", "_stream", "_tail")

    def __init__(self, content_type: str, content_encoding: str = "") -> None:
        self._stream = content_type.strip().lower().startswith("text/event-stream")
        plain = content_encoding.strip().lower() in IDENTITY
        self._inflater = None if plain else Inflater(content_encoding, _MAX_INFLATED_BYTES)
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes as sent. Never fails, and costs no more than a copy or inflating."""
        if self._inflater is None:
            if self._stream:  # the usual way, so without a further call
                self._seen += len(chunk)
                self._tail += chunk
                if len(self._tail) > _KEEP_BYTES:
                    del self._tail[:-_KEEP_BYTES]
            else:
                self._note(chunk)
            return
        for start in range(0, len(chunk), _INFLATE_STEP_BYTES):
            self._note(self._inflater.feed(chunk[start : start + _INFLATE_STEP_BYTES]))

    def _note(self, data: bytes) -> None:
        self._seen += len(data)
        room = _KEEP_BYTES - len(self._head)
        if room > 0 and not self._stream:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-_KEEP_BYTES:]
        if len(self._tail) > _KEEP_BYTES:
            del self._tail[:-_KEEP_BYTES]

    def result(self) -> Usage | None:
        """What the response said, once it has ended or been cut; None if nothing that can be believed."""
        if self._inflater is not None and self._inflater.failed:
            return None
        if self._seen == len(self._head):  # small, and no stream
            return _of_body(bytes(self._head))
        head, tail = bytes(self._head), bytes(self._tail)
        whole = self._seen == len(head) + len(tail)
        if self._stream:
            return _of_stream(tail if whole else _without_first_line(tail))
        if whole:
            return _of_body(head + tail)
        return _of_tail(tail) or _of_head(head)
