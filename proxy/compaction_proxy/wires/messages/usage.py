"""Parses the token usage in answers on the Messages wire.

A stream reports its input tokens at the beginning and its output tokens at the end; some providers report
both at the end. `input_tokens` does not include tokens that were written to the provider's cache or read from
it.
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
    decode_shape,
    iter_payloads_backwards,
    parse_json,
    split_first_line,
)
from compaction_proxy.wires.wire import TokenUsage

# How many of a stream's first bytes are kept. They hold the first event, which is short.
_HEAD_BYTES: Final = 2_048
_USAGE_PATTERN: Final = re.compile(rb'"usage"\s*:\s*\{')


class _MessagesTokenCounts(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _MessagesAnswer(msgspec.Struct):
    """The fields to decode of an answer in the shape that nearly every provider uses."""

    usage: _MessagesTokenCounts
    stop_reason: str | None = None


_USUAL: Final = msgspec.json.Decoder(_MessagesAnswer)


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_mapping(value)
    uncached = as_token_count(usage.get("input_tokens"))
    written = as_token_count(usage.get("cache_creation_input_tokens")) or 0
    cached = as_token_count(usage.get("cache_read_input_tokens")) or 0
    total = None if uncached is None else uncached + written + cached
    return build_usage(total, usage.get("output_tokens"), cached)


def _get_stop_reason(payload: Mapping[str, object]) -> str:
    reason = payload.get("stop_reason")
    return reason if isinstance(reason, str) else ""


def _parse_body(body: bytes) -> TokenUsage | None:
    answer = decode_shape(_USUAL, body)
    if answer is None:
        payload = as_mapping(parse_json(body))
        return add_finish_reason(_parse_counts(payload.get("usage")), _get_stop_reason(payload))
    return add_finish_reason(_parse_counts(msgspec.structs.asdict(answer.usage)), answer.stop_reason or "")


def _parse_stream(head: bytes, tail: bytes, whole: bool) -> TokenUsage | None:  # noqa: FBT001 - set by `UsageParser`
    """Returns the usage of the first event, updated by the counts of the last event that has usage."""
    first_event = next(
        (each for each in iter_payloads_backwards(head, _USAGE_PATTERN) if "message" in each), {}
    )
    last_event = next(
        iter_payloads_backwards(tail if whole else split_first_line(tail)[1], _USAGE_PATTERN), {}
    )
    first = as_mapping(as_mapping(first_event.get("message")).get("usage"))
    last = {name: count for name, count in as_mapping(last_event.get("usage")).items() if count}
    return add_finish_reason(
        _parse_counts({**first, **last}), _get_stop_reason(as_mapping(last_event.get("delta")))
    )


_MESSAGES: Final = UsageParser(_parse_counts, _parse_body, _parse_stream, _HEAD_BYTES)


def open_usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Returns a new `UsageTap`, which reads the usage in one answer as its bytes pass."""
    return UsageTap(_MESSAGES, content_type, content_encoding)
