"""What an answer on the Messages wire says about tokens used.

A stream tells what it has read at its beginning and what it has written at its end, and some providers tell
all of it there. Tokens of the provider's cache, written or read, are not among its `input_tokens`.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from compaction_proxy.wires.usage import (
    UsageParser,
    UsageTap,
    add_finish_reason,
    as_mapping,
    as_token_count,
    build_usage,
    cut_first_line,
    decode_shape,
    iter_payloads_backwards,
    parse_json,
)
from compaction_proxy.wires.wire import TokenUsage

# Of a stream's beginning, in bytes; its first event holds no content.
_HEAD_BYTES: Final = 2_048
_USAGE_PATTERN: Final = re.compile(rb'"usage"\s*:\s*\{')


class _MessagesTokenCounts(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _MessagesAnswer(msgspec.Struct):
    """An answer as nearly every provider writes it; nothing but this is built of it."""

    usage: _MessagesTokenCounts
    stop_reason: str | None = None


_USUAL: Final = msgspec.json.Decoder(_MessagesAnswer)


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_mapping(value)
    asked = as_token_count(usage.get("input_tokens"))
    written = as_token_count(usage.get("cache_creation_input_tokens")) or 0
    cached = as_token_count(usage.get("cache_read_input_tokens")) or 0
    total = None if asked is None else asked + written + cached
    return build_usage(total, usage.get("output_tokens"), cached)


def _get_stop_reason(payload: Mapping[str, object]) -> str:
    reason = payload.get("stop_reason")
    return reason if isinstance(reason, str) else ""


def _parse_body(body: bytes) -> TokenUsage | None:
    answer = decode_shape(_USUAL, body)
    if answer is None:
        told = as_mapping(parse_json(body))
        return add_finish_reason(_parse_counts(told.get("usage")), _get_stop_reason(told))
    return add_finish_reason(_parse_counts(msgspec.structs.asdict(answer.usage)), answer.stop_reason or "")


def _parse_stream(head: bytes, tail: bytes, whole: bool) -> TokenUsage | None:  # noqa: FBT001 - by `UsageParser`
    """The usage of the first event, with whatever the last one that tells any says of it anew."""
    begun = next((each for each in iter_payloads_backwards(head, _USAGE_PATTERN) if "message" in each), {})
    ended = next(iter_payloads_backwards(tail if whole else cut_first_line(tail)[1], _USAGE_PATTERN), {})
    first = as_mapping(as_mapping(begun.get("message")).get("usage"))
    last = {name: count for name, count in as_mapping(ended.get("usage")).items() if count}
    return add_finish_reason(
        _parse_counts({**first, **last}), _get_stop_reason(as_mapping(ended.get("delta")))
    )


_MESSAGES: Final = UsageParser(_parse_counts, _parse_body, _parse_stream, _HEAD_BYTES)


def open_usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Watches one answer; see `UsageTap`."""
    return UsageTap(_MESSAGES, content_type, content_encoding)
