"""What an answer on the chat completions wire says about tokens used."""

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

_TELLING: Final = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"')


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
    answer = decoded(_USUAL, body)
    if answer is None:
        return None
    used, details = answer.usage, answer.usage.prompt_tokens_details
    told = (details.cached_tokens if details else None, used.prompt_cache_hit_tokens, used.cached_tokens)
    cached = next((count for count in told if count is not None), 0)
    if tokens(cached) is None:
        return None
    reason = answer.choices[0].finish_reason or "" if answer.choices else ""
    return believed(used.prompt_tokens, used.completion_tokens, cached, reason)


def _choice(payload: Mapping[str, object]) -> Mapping[str, object]:
    choices = payload.get("choices")
    return mapping(choices[0]) if isinstance(choices, list) and choices else {}


def _counted(found: object) -> Usage | None:
    usage = mapping(found)
    told = (
        mapping(usage.get("prompt_tokens_details")).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),  # DeepSeek
        usage.get("cached_tokens"),  # Kimi
    )
    cached = next((count for count in map(tokens, told) if count is not None), 0)
    return believed(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _usage(payload: Mapping[str, object]) -> Usage | None:
    """The usage in a response or a chunk, from the places where providers put it."""
    return (
        _counted(payload.get("usage"))
        or _counted(_choice(payload).get("usage"))  # Kimi, in streams
        or _counted(mapping(payload.get("x_groq")).get("usage"))
    )


def _finish_reason(payload: Mapping[str, object]) -> str:
    reason = _choice(payload).get("finish_reason")
    return reason if isinstance(reason, str) else ""


def _of_body(body: bytes) -> Usage | None:
    usual = _usual(body)
    if usual is not None:
        return usual
    payload = mapping(parsed(body))
    return with_reason(_usage(payload), _finish_reason(payload))


def _of_stream(_: bytes, tail: bytes, whole: bool) -> Usage | None:  # noqa: FBT001 - by `Telling`
    """The last usage that a stream tells, with the last reason it gives for its end."""
    usage: Usage | None = None
    reason = ""
    for payload in payloads_backwards(tail if whole else cut_first_line(tail)[1], _TELLING):
        usage = usage or _usage(payload)
        reason = reason or _finish_reason(payload)
        if usage and reason:
            break
    return with_reason(usage, reason)


_CHAT: Final = Telling(_counted, _of_body, _of_stream)


def usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Watches one chat completion; see `UsageTap`."""
    return UsageTap(_CHAT, content_type, content_encoding)
