"""The Chat Completions format as a `Wire`."""

from collections.abc import Mapping, Sequence

from compaction_proxy.core.digest import DIGEST_VERSION
from compaction_proxy.core.errors import UnreadableBodyError, format_openai_error
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import are_objects
from compaction_proxy.wires.chat.continuation import (
    TOOL_JSON,
    build_turn,
    continue_request,
    forbid_calls,
    inspect_tool_support,
)
from compaction_proxy.wires.chat.intercept_response import ChatAnswerJoiner
from compaction_proxy.wires.chat.intercept_stream import ChatStreamJoiner
from compaction_proxy.wires.chat.messages import (
    attach_parts,
    encode_message,
    estimate_nontext_tokens,
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
from compaction_proxy.wires.project_instructions import rejoin_divided_messages
from compaction_proxy.wires.wire import MemberNames, SearchTool, SummaryCallFormat, Wire


def _parse_items(value: memoryview) -> tuple[bytes, ...]:
    elements = split_elements(value)
    if not are_objects(elements):
        raise UnreadableBodyError("no-messages")
    return elements


def _never_skip(_: Mapping[str, bytes]) -> str:
    return ""


def _keep_elements_as_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Returns the elements unchanged, because every element is one message."""
    return elements


def _may_continue_piece(_: bytes) -> bool:
    return False


def _join_messages(messages: Sequence[Message]) -> bytes:
    return b",".join([each.raw or encode_message(each) for each in rejoin_divided_messages(messages)])


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns False once bytes have arrived: the first event is already an error or a part of the answer."""
    return not seen


CHAT = Wire(
    name="chat",
    path_suffix=b"/chat/completions",
    digest_seed=DIGEST_VERSION,
    member_names=MemberNames(
        messages="messages",
        output_limits=("max_completion_tokens", "max_tokens"),
        prompt_members=("tools", "functions", "response_format"),
        thinking_budgets=(("thinking", "budget_tokens"), ("reasoning", "max_tokens")),
    ),
    split_message_list=_parse_items,
    find_skip_reason=_never_skip,
    group_into_pieces=_keep_elements_as_pieces,
    may_continue_piece=_may_continue_piece,
    parse_uncounted=parse_uncounted,
    estimate_nontext_tokens=estimate_nontext_tokens,
    parse_message=parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=_join_messages,
    summary_call_format=SummaryCallFormat(
        "/chat/completions", get_thinking_allowance, build_own_members, build_request_body, parse_answer
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
        ChatStreamJoiner,
        ChatAnswerJoiner,
    ),
)
