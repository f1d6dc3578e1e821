"""A tool of ours in a request body, and a request that goes on where its answer has called it.

Bytes are put in, and none is changed: the same body always becomes the same bytes, and what a request begins
with stands at the beginning of the one that goes on, so that the provider's prompt cache keeps hitting.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from proxy.dialects.json_slices import Slice, members, skip
from proxy.errors import Unreadable

# With these a tool is not offered: the older form of tools, which cannot be mixed with the newer one, and
# answers that are sounds and could not be joined.
_OTHERWISE: Final = ("functions", "function_call", "audio")
_CHOICE_NONE: Final = b'"none"'


class Offering(NamedTuple):
    """A request body as it stands to tools.

    Attributes:
        raw: The body.
        places: Where its members stand.
        has_tools: Whether it brings tools.
        possible: Whether a tool of ours can be put among them, and its calls be answered.
    """

    raw: bytes
    places: Mapping[str, Slice]
    has_tools: bool
    possible: bool


def offering(raw: bytes, name: str) -> Offering:
    """How a body stands to a tool of this name.

    Where the client has a tool of that name itself, ours has no place. Nor has it where there are no tools
    and yet a choice among them: providers refuse that, and would not any more. Of several answers each could
    call it, and none could go on without the others. And an answer that must be JSON cannot be put together
    from what was said before a call and what comes after it.

    Raises:
        Unreadable: It is no request (see `json_slices.members`).
    """
    try:
        places = members(raw)
    except RecursionError:
        raise Unreadable("too-deep") from None
    tools = _told(raw, places, "tools")
    taken = b'"%b"' % name.encode() in tools
    otherwise = any(_told(raw, places, each) for each in _OTHERWISE)
    chosen = not tools and bool(_told(raw, places, "tool_choice"))
    listed = not tools or tools.startswith(b"[")
    free = _told(raw, places, "n") in {b"", b"1"} and b'"json' not in _told(raw, places, "response_format")
    return Offering(raw, places, bool(tools), listed and free and not (taken or otherwise or chosen))


def is_begun(last: bytes) -> bool:
    """Whether a request's last message is the beginning of the answer, which the model is to go on with.

    No message may come behind it then: providers refuse that, or begin anew.

    Args:
        last: The message's bytes.
    """
    if b'"assistant"' not in last:
        return False
    place = members(last).get("role")
    return place is not None and last[place.start : place.stop] == b'"assistant"'


def _told(raw: bytes, places: Mapping[str, Slice], name: str) -> bytes:
    """The value of a member; empty where it is absent, null or an empty array."""
    place = places.get(name)
    value = raw[place.start : place.stop] if place else b""
    empty = value == b"null" or (value.startswith(b"[") and skip(value, 1) == len(value) - 1)
    return b"" if empty else value


def with_tool(found: Offering, tool: bytes) -> bytes:
    """The body with this tool as its last one."""
    raw, place = found.raw, found.places.get("tools")
    if found.has_tools and place:
        stop = len(raw[: place.stop - 1].rstrip(b" \t\n\r"))
        return b"".join((raw[:stop], b",", tool, raw[stop:]))
    if place:
        return b"".join((raw[: place.start], b"[", tool, b"]", raw[place.stop :]))
    return _with_member(raw, b'"tools":[%b]' % tool)


def without_choice(raw: bytes) -> bytes:
    """A body without tool choice of its own, or with null for one, forbidding every call."""
    place = members(raw).get("tool_choice")
    if place is not None:
        return b"".join((raw[: place.start], _CHOICE_NONE, raw[place.stop :]))
    return _with_member(raw, b'"tool_choice":' + _CHOICE_NONE)


def _with_member(raw: bytes, member: bytes) -> bytes:
    stop = raw.rindex(b"}")
    return b"".join((raw[:stop], b",", member, raw[stop:]))


def gone_on(raw: bytes, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The body with more messages behind its own.

    Raises:
        Unreadable: It is no request with messages.
    """
    place = members(raw).get("messages")
    if place is None or raw[place.stop - 1 : place.stop] != b"]":
        raise Unreadable("no-messages")
    more = b",".join(dumped(each) for each in messages)
    stop = place.stop - 1
    return b"".join((raw[:stop], b",", more, raw[stop:]))


def dumped(value: object) -> bytes:
    """Compact JSON; in ASCII, so that no lone surrogate of a provider's breaks it."""
    return json.dumps(value, separators=(",", ":")).encode()
