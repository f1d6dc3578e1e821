"""What an answer on the Messages wire says about tokens used.

A stream tells what it has read at its beginning and what it has written at its end, and some providers tell
all of it there. Tokens of the provider's cache, written or read, are not among its `input_tokens`.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from compaction_proxy.wires.usage import (
    Telling,
    UsageTap,
    believed,
    cut_first_line,
    decoded,
    mapping,
    parsed,
    payloads_backwards,
    tokens,
    with_reason,
)
from compaction_proxy.wires.wire import Usage

# Of a stream's beginning, in bytes; its first event holds no content.
_HEAD_BYTES: Final = 2_048
_TELLING: Final = re.compile(rb'"usage"\s*:\s*\{')


class _Counts(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    """An answer as nearly every provider writes it; nothing but this is built of it."""

    usage: _Counts
    stop_reason: str | None = None


_USUAL: Final = msgspec.json.Decoder(_Answer)


def _counted(found: object) -> Usage | None:
    usage = mapping(found)
    asked = tokens(usage.get("input_tokens"))
    written = tokens(usage.get("cache_creation_input_tokens")) or 0
    cached = tokens(usage.get("cache_read_input_tokens")) or 0
    total = None if asked is None else asked + written + cached
    return believed(total, usage.get("output_tokens"), cached)


def _reason(told: Mapping[str, object]) -> str:
    reason = told.get("stop_reason")
    return reason if isinstance(reason, str) else ""


def _of_body(body: bytes) -> Usage | None:
    answer = decoded(_USUAL, body)
    if answer is None:
        told = mapping(parsed(body))
        return with_reason(_counted(told.get("usage")), _reason(told))
    return with_reason(_counted(msgspec.structs.asdict(answer.usage)), answer.stop_reason or "")


def _of_stream(head: bytes, tail: bytes, whole: bool) -> Usage | None:  # noqa: FBT001 - by `Telling`
    """The usage of the first event, with whatever the last one that tells any says of it anew."""
    begun = next((each for each in payloads_backwards(head, _TELLING) if "message" in each), {})
    ended = next(payloads_backwards(tail if whole else cut_first_line(tail)[1], _TELLING), {})
    first = mapping(mapping(begun.get("message")).get("usage"))
    last = {name: count for name, count in mapping(ended.get("usage")).items() if count}
    return with_reason(_counted({**first, **last}), _reason(mapping(ended.get("delta"))))


_MESSAGES: Final = Telling(_counted, _of_body, _of_stream, _HEAD_BYTES)


def usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Watches one answer; see `UsageTap`."""
    return UsageTap(_MESSAGES, content_type, content_encoding)
