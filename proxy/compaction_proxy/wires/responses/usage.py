"""Parses the token usage in answers on the Responses wire.

A stream ends with an event that repeats the whole answer, including the request's tools and instructions.
This event may be megabytes long. Of a long event, only the end is kept, which holds the usage.
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
    build_usage,
    decode_shape,
    find_usage_in_tail,
    iter_lines_backwards,
    parse_json,
    split_first_line,
)
from compaction_proxy.wires.wire import TokenUsage

_USAGE_PATTERN: Final = re.compile(rb'"usage"\s*:\s*\{')
# Opens the objects around the `usage` of an event. Put before the end of an event whose beginning was not
# kept, it makes this end valid JSON.
_OPENING: Final = b'{"response":{'


class _ResponsesTokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponsesTokenCounts(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: _ResponsesTokenDetails | None = None


class _ResponsesAnswer(msgspec.Struct):
    """The fields to decode of an answer in the shape that nearly every provider uses."""

    usage: _ResponsesTokenCounts
    status: str | None = None


_USUAL: Final = msgspec.json.Decoder(_ResponsesAnswer)


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_mapping(value)
    cached = as_mapping(usage.get("input_tokens_details")).get("cached_tokens")
    return build_usage(usage.get("input_tokens"), usage.get("output_tokens"), cached)


def _parse_response(response: Mapping[str, object]) -> TokenUsage | None:
    status = response.get("status")
    return add_finish_reason(_parse_counts(response.get("usage")), status if isinstance(status, str) else "")


def _parse_body(body: bytes) -> TokenUsage | None:
    answer = decode_shape(_USUAL, body)
    if answer is None:
        return _parse_response(as_mapping(parse_json(body)))
    used, details = answer.usage, answer.usage.input_tokens_details
    cached = details.cached_tokens if details else 0
    return build_usage(used.input_tokens, used.output_tokens, cached, answer.status or "")


def _parse_event(data: bytes) -> TokenUsage | None:
    return _parse_response(as_mapping(as_mapping(parse_json(data)).get("response")))


def _parse_stream(_: bytes, tail: bytes, whole: bool) -> TokenUsage | None:  # noqa: FBT001 - set by `UsageParser`
    """Returns the usage of the last event in a stream that reports it; None if there is none."""
    first, rest = (b"", tail) if whole else split_first_line(tail)
    for line in iter_lines_backwards(rest):
        if line.startswith(b"data:") and _USAGE_PATTERN.search(line) and (usage := _parse_event(line[5:])):
            return usage
    return find_usage_in_tail(first, _parse_event, _OPENING)


_RESPONSES: Final = UsageParser(_parse_counts, _parse_body, _parse_stream)


def open_usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Returns a new `UsageTap`, which reads the usage in one answer as its bytes pass.

    The `finish_reason` of the usage is the answer's status.
    """
    return UsageTap(_RESPONSES, content_type, content_encoding)
