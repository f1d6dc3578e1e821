"""Parses the token usage in answers on the Chat Completions wire."""

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

_USAGE_PATTERN: Final = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"')


class _ChatTokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ChatTokenCounts(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _ChatTokenDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    cached_tokens: int | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    """The fields to decode of an answer in the shape that nearly every provider uses."""

    usage: _ChatTokenCounts
    choices: list[_ChatChoice] = []


_USUAL: Final = msgspec.json.Decoder(_ChatCompletion)


def _parse_usual(body: bytes) -> TokenUsage | None:
    """Returns the usage in an answer of the usual shape; None for other shapes and implausible numbers."""
    answer = decode_shape(_USUAL, body)
    if answer is None:
        return None
    used, details = answer.usage, answer.usage.prompt_tokens_details
    counts = (details.cached_tokens if details else None, used.prompt_cache_hit_tokens, used.cached_tokens)
    cached = next((count for count in counts if count is not None), 0)
    if as_token_count(cached) is None:
        return None
    reason = answer.choices[0].finish_reason or "" if answer.choices else ""
    return build_usage(used.prompt_tokens, used.completion_tokens, cached, reason)


def _get_choice(payload: Mapping[str, object]) -> Mapping[str, object]:
    choices = payload.get("choices")
    return as_mapping(choices[0]) if isinstance(choices, list) and choices else {}


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_mapping(value)
    counts = (
        as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),  # DeepSeek
        usage.get("cached_tokens"),  # Kimi
    )
    cached = next((count for count in map(as_token_count, counts) if count is not None), 0)
    return build_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _find_usage(payload: Mapping[str, object]) -> TokenUsage | None:
    """Returns the usage in an answer or in an event of a stream, from any place where a provider puts it."""
    return (
        _parse_counts(payload.get("usage"))
        or _parse_counts(_get_choice(payload).get("usage"))  # Kimi, in streams
        or _parse_counts(as_mapping(payload.get("x_groq")).get("usage"))
    )


def _get_finish_reason(payload: Mapping[str, object]) -> str:
    reason = _get_choice(payload).get("finish_reason")
    return reason if isinstance(reason, str) else ""


def _parse_body(body: bytes) -> TokenUsage | None:
    usual = _parse_usual(body)
    if usual is not None:
        return usual
    payload = as_mapping(parse_json(body))
    return add_finish_reason(_find_usage(payload), _get_finish_reason(payload))


def _parse_stream(_: bytes, tail: bytes, whole: bool) -> TokenUsage | None:  # noqa: FBT001 - set by `UsageParser`
    """Returns the last usage in a stream, with the last finish reason; None if there is no usage."""
    usage: TokenUsage | None = None
    reason = ""
    for payload in iter_payloads_backwards(tail if whole else split_first_line(tail)[1], _USAGE_PATTERN):
        usage = usage or _find_usage(payload)
        reason = reason or _get_finish_reason(payload)
        if usage and reason:
            break
    return add_finish_reason(usage, reason)


_CHAT: Final = UsageParser(_parse_counts, _parse_body, _parse_stream)


def open_usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Returns a new `UsageTap`, which reads the usage in one chat completion as its bytes pass."""
    return UsageTap(_CHAT, content_type, content_encoding)
