"""The Responses wire as a dialect."""

from typing import Final

import msgspec

from proxy.dialects.chat.completion import allowance_tokens
from proxy.dialects.chat.tools import without_choice
from proxy.dialects.dialect import Asking, Dialect, Members, SearchTool
from proxy.dialects.event_stream import Events, data_of
from proxy.dialects.responses.completion import answer, own_members, request_body
from proxy.dialects.responses.item_answer import ItemAnswer
from proxy.dialects.responses.item_stream import ItemStream
from proxy.dialects.responses.items import left, listed, pieces, unended, unsettles
from proxy.dialects.responses.message import compose, joined, message
from proxy.dialects.responses.parts import part_tokens, weighed
from proxy.dialects.responses.search_tool import (
    TOOL_JSON,
    build_turn,
    continue_request,
    find_place,
)
from proxy.dialects.responses.shorter import shortened, with_parts
from proxy.dialects.responses.usage import usage_tap
from proxy.errors import openai_error

# Events that come before anything of the answer does.
_OPENING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})


class _Event(msgspec.Struct, gc=False):
    type: str = ""


_EVENT: Final = msgspec.json.Decoder(_Event)


def _opening(seen: bytes) -> bool:
    """Only such events, comments, and perhaps the beginning of a further event."""
    return all(map(_opens, map(data_of, Events().feed(seen))))


def _opens(data: bytes) -> bool:
    try:
        return not data or _EVENT.decode(data).type in _OPENING
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


RESPONSES = Dialect(
    name="responses",
    ending=b"/responses",
    seed=b"\x01responses",
    members=Members(
        messages="input",
        output=("max_output_tokens",),
        prompt=("instructions", "tools", "text"),
        telling=("previous_response_id", "conversation", "context_management"),
        thinking=(("reasoning", "max_tokens"),),
    ),
    listed=listed,
    left=left,
    pieces=pieces,
    unended=unended,
    unsettles=unsettles,
    weighed=weighed,
    part_tokens=part_tokens,
    message=message,
    compose=compose,
    with_parts=with_parts,
    shortened=shortened,
    joined=joined,
    asking=Asking("/responses", allowance_tokens, own_members, request_body, answer),
    tap=usage_tap,
    opening=_opening,
    error=openai_error,
    search_tool=SearchTool(
        TOOL_JSON, find_place, without_choice, continue_request, build_turn, ItemStream, ItemAnswer
    ),
)
