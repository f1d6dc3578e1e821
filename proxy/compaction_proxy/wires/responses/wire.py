"""The Responses wire as a dialect."""

from typing import Final

import msgspec

from compaction_proxy.core.errors import openai_error
from compaction_proxy.wires.chat.continuation import without_choice
from compaction_proxy.wires.chat.summary_call import allowance_tokens
from compaction_proxy.wires.responses.intercept_response import ItemAnswer
from compaction_proxy.wires.responses.intercept_stream import ItemStream
from compaction_proxy.wires.responses.items import left, listed, pieces, unended, unsettles
from compaction_proxy.wires.responses.messages import compose, joined, message
from compaction_proxy.wires.responses.search_tool import TOOL_JSON, build_turn, continue_request, find_place
from compaction_proxy.wires.responses.shorten import shortened, with_parts
from compaction_proxy.wires.responses.summary_call import answer, own_members, request_body
from compaction_proxy.wires.responses.usage import usage_tap
from compaction_proxy.wires.responses.weights import part_tokens, weighed
from compaction_proxy.wires.sse import Events, data_of
from compaction_proxy.wires.wire import Asking, Dialect, Members, SearchTool

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
