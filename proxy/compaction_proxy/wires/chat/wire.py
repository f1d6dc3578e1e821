"""The Chat Completions format as a `Wire`."""

from collections.abc import Mapping, Sequence

from compaction_proxy.core.digest import VERSION
from compaction_proxy.core.errors import UnreadableBodyError, format_openai_error
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import are_objects
from compaction_proxy.wires.chat.continuation import (
    TOOL_JSON,
    build_turn,
    continue_request,
    forbid_calls,
    inspect_tools,
)
from compaction_proxy.wires.chat.intercept_response import ChatAnswerJoiner
from compaction_proxy.wires.chat.intercept_stream import ChatStreamJoiner
from compaction_proxy.wires.chat.messages import (
    attach_parts,
    encode_message,
    estimate_part_tokens,
    parse_message,
    parse_uncounted,
    shorten_message,
)
from compaction_proxy.wires.chat.summary_call import (
    build_own_members,
    build_request_body,
    get_thinking_allowance,
    parse_answer,
)
from compaction_proxy.wires.chat.usage import open_usage_tap
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.project_instructions import join_sources
from compaction_proxy.wires.wire import CallFormat, MemberNames, SearchTool, Wire


def _parse_items(value: memoryview) -> tuple[bytes, ...]:
    elements = split_elements(value)
    if not are_objects(elements):
        raise UnreadableBodyError("no-messages")
    return elements


def _never_skip(_: Mapping[str, bytes]) -> str:
    return ""


def _to_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Returns the elements as they are, because every element is one message."""
    return elements


def _may_continue(_: bytes) -> bool:
    return False


def _join_messages(messages: Sequence[Message]) -> bytes:
    return b",".join([each.raw or encode_message(each) for each in join_sources(messages)])


def _may_hold_back(seen: bytes) -> bool:
    """Returns False once bytes have arrived: the first event is already part of the answer, or an error."""
    return not seen


CHAT = Wire(
    name="chat",
    path_suffix=b"/chat/completions",
    digest_seed=VERSION,
    member_names=MemberNames(
        messages="messages",
        output=("max_completion_tokens", "max_tokens"),
        prompt=("tools", "functions", "response_format"),
        thinking_budgets=(("thinking", "budget_tokens"), ("reasoning", "max_tokens")),
    ),
    parse_items=_parse_items,
    find_skip_reason=_never_skip,
    to_pieces=_to_pieces,
    may_continue=_may_continue,
    parse_uncounted=parse_uncounted,
    estimate_part_tokens=estimate_part_tokens,
    parse_message=parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=_join_messages,
    call_format=CallFormat(
        "/chat/completions", get_thinking_allowance, build_own_members, build_request_body, parse_answer
    ),
    open_tap=open_usage_tap,
    may_hold_back=_may_hold_back,
    encode_error=format_openai_error,
    search_tool=SearchTool(
        TOOL_JSON,
        inspect_tools,
        forbid_calls,
        continue_request,
        build_turn,
        ChatStreamJoiner,
        ChatAnswerJoiner,
    ),
)
