"""The Responses format as a `Wire`."""

from typing import Final

import msgspec

from compaction_proxy.core.errors import format_openai_error
from compaction_proxy.wires.chat.continuation import forbid_calls
from compaction_proxy.wires.chat.summary_call import get_thinking_allowance
from compaction_proxy.wires.responses.intercept_response import ResponsesAnswerJoiner
from compaction_proxy.wires.responses.intercept_stream import ResponsesStreamJoiner
from compaction_proxy.wires.responses.items import (
    find_skip_reason,
    group_into_pieces,
    may_continue_piece,
    regroups_previous,
    split_message_list,
)
from compaction_proxy.wires.responses.messages import encode_message, join_messages, parse_message
from compaction_proxy.wires.responses.search_tool import (
    TOOL_JSON,
    build_turn,
    continue_request,
    inspect_tool_support,
)
from compaction_proxy.wires.responses.shorten import attach_parts, shorten_message
from compaction_proxy.wires.responses.summary_call import build_own_members, build_request_body, parse_answer
from compaction_proxy.wires.responses.usage import open_usage_tap
from compaction_proxy.wires.responses.weights import estimate_nontext_tokens, parse_uncounted
from compaction_proxy.wires.sse import EventSplitter, read_data
from compaction_proxy.wires.wire import MemberNames, SearchTool, SummaryCallFormat, Wire

# Types of events that come before any content of the answer.
_OPENING_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})


class _ResponseEvent(msgspec.Struct, gc=False):
    type: str = ""


_RESPONSE_EVENT: Final = msgspec.json.Decoder(_ResponseEvent)


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns whether the bytes of a stream so far hold only comments and events in `_OPENING_EVENTS`."""
    return all(map(_is_opening_event, map(read_data, EventSplitter().feed(seen))))


def _is_opening_event(data: bytes) -> bool:
    try:
        return not data or _RESPONSE_EVENT.decode(data).type in _OPENING_EVENTS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


RESPONSES = Wire(
    name="responses",
    path_suffix=b"/responses",
    digest_seed=b"\x01responses",
    member_names=MemberNames(
        messages="input",
        output_limits=("max_output_tokens",),
        prompt_members=("instructions", "tools", "text"),
        skip_indicators=("previous_response_id", "conversation", "context_management"),
        thinking_budgets=(("reasoning", "max_tokens"),),
    ),
    split_message_list=split_message_list,
    find_skip_reason=find_skip_reason,
    group_into_pieces=group_into_pieces,
    may_continue_piece=may_continue_piece,
    regroups_previous=regroups_previous,
    parse_uncounted=parse_uncounted,
    estimate_nontext_tokens=estimate_nontext_tokens,
    parse_message=parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=join_messages,
    summary_call_format=SummaryCallFormat(
        "/responses", get_thinking_allowance, build_own_members, build_request_body, parse_answer
    ),
    open_tap=open_usage_tap,
    may_hold_back_stream=_may_hold_back_stream,
    encode_error=format_openai_error,
    search_tool=SearchTool(
        TOOL_JSON,
        inspect_tool_support,
        forbid_calls,
        continue_request,
        build_turn,
        ResponsesStreamJoiner,
        ResponsesAnswerJoiner,
    ),
)
