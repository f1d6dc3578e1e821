"""A tool of ours in a request body, and a request that goes on where its answer has called it.

Bytes are put in, and none is changed: the same body always becomes the same bytes, and what a request begins
with stands at the beginning of the one that goes on, so that the provider's prompt cache keeps hitting.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.json.slices import members, read_member
from compaction_proxy.wires.wire import Offering

TOOL_JSON: Final[bytes] = json.dumps(
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_DESCRIPTION,
            "parameters": dict(TOOL_PARAMETERS),
        },
    },
    separators=(",", ":"),
    ensure_ascii=False,
).encode()
# With these a tool is not offered: the older form of tools, which cannot be mixed with the newer one, and
# answers that are sounds and could not be joined.
_OTHERWISE: Final = ("functions", "function_call", "audio")
_CHOICE_NONE: Final = b'"none"'


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
    tools = read_member(raw, places, "tools")
    taken = b'"%b"' % name.encode() in tools
    otherwise = any(read_member(raw, places, each) for each in _OTHERWISE)
    chosen = not tools and bool(read_member(raw, places, "tool_choice"))
    listed = not tools or tools.startswith(b"[")
    free = read_member(raw, places, "n") in {b"", b"1"}
    free = free and b'"json' not in read_member(raw, places, "response_format")
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
