"""What an answer on the Responses wire says about tokens used.

A stream ends in one event that repeats the whole answer, its tools and its instructions, and may be of
megabytes: then only its end is kept, and that is where the usage stands.
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
    lines_backwards,
    mapping,
    of_tail,
    parsed,
    with_reason,
)
from compaction_proxy.wires.wire import Usage

_TELLING: Final = re.compile(rb'"usage"\s*:\s*\{')
# Of an event whose beginning is lost: what its usage stands in.
_OPENING: Final = b'{"response":{'


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """An answer as nearly every provider writes it; nothing but this is built of it."""

    usage: _Counts
    status: str | None = None


_USUAL: Final = msgspec.json.Decoder(_Answer)


def _counted(found: object) -> Usage | None:
    usage = mapping(found)
    cached = mapping(usage.get("input_tokens_details")).get("cached_tokens")
    return believed(usage.get("input_tokens"), usage.get("output_tokens"), cached)


def _of_response(response: Mapping[str, object]) -> Usage | None:
    status = response.get("status")
    return with_reason(_counted(response.get("usage")), status if isinstance(status, str) else "")


def _of_body(body: bytes) -> Usage | None:
    answer = decoded(_USUAL, body)
    if answer is None:
        return _of_response(mapping(parsed(body)))
    used, details = answer.usage, answer.usage.input_tokens_details
    cached = details.cached_tokens if details else 0
    return believed(used.input_tokens, used.output_tokens, cached, answer.status or "")


def _of_event(data: bytes) -> Usage | None:
    return _of_response(mapping(mapping(parsed(data)).get("response")))


def _of_stream(_: bytes, tail: bytes, whole: bool) -> Usage | None:  # noqa: FBT001 - by `Telling`
    """The usage of the last event that tells one."""
    first, rest = (b"", tail) if whole else cut_first_line(tail)
    for line in lines_backwards(rest):
        if line.startswith(b"data:") and _TELLING.search(line) and (usage := _of_event(line[5:])):
            return usage
    return of_tail(first, _of_event, _OPENING)


_RESPONSES: Final = Telling(_counted, _of_body, _of_stream)


def usage_tap(content_type: str, content_encoding: str = "") -> UsageTap:
    """Watches one answer; see `UsageTap`. Its `finish_reason` is the answer's status."""
    return UsageTap(_RESPONSES, content_type, content_encoding)
