"""Defines `RESPONSES`, the `Wire` of the Responses format.

It also contains the functions with which this wire reads the token usage and makes summary calls.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from compaction_proxy.core.errors import SummaryError, format_openai_error
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.wires.json.values import JsonObject, as_object, as_string, parse_json
from compaction_proxy.wires.responses.messages import (
    OUTPUT_TYPES_BY_CALL,
    PARSER,
    attach_parts,
    encode_message,
    find_skip_reason,
    get_item_kind,
    group_into_pieces,
    join_messages,
    may_continue_piece,
    regroups_previous,
    shorten_message,
    split_message_list,
)
from compaction_proxy.wires.responses.search_tool import SEARCH_TOOL
from compaction_proxy.wires.sse import has_only_events
from compaction_proxy.wires.summary_call import (
    SummaryCallFormat,
    append_prompt,
    build_summary_answer,
    continue_client_body,
    get_thinking_allowance,
    has_tools,
    is_reasoning_model,
    read_client_members,
)
from compaction_proxy.wires.usage import TokenUsage, UsageFormat, build_usage
from compaction_proxy.wires.wire import MemberNames, Wire

# The reasoning effort that summary calls request. It is the lowest one that all reasoning models accept:
# newer models refuse `minimal`, and older ones refuse `none`.
REASONING_EFFORT: Final = "low"

# A summary call that continues the client's conversation does not copy these members of the client's request.
# They affect only the response to that request, or what the provider stores, except for `input`, which the
# call replaces.
_ANSWER_MEMBERS: Final = frozenset(
    {"stream", "stream_options", "max_output_tokens", "max_tool_calls", "text", "top_logprobs", "include"}
    | {"temperature", "top_p", "tool_choice", "metadata", "store", "background", "background_options"}
    | {"truncation", "input", "previous_response_id", "conversation", "context_management", "moderation"}
)
# Maps the reasons why a response is incomplete to the finish reasons that the proxy uses for all wires.
_FINISH_REASONS: Final[Mapping[str, str]] = {
    "max_output_tokens": "length",
    "content_filter": "content_filter",
}


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_object(value)
    cached = as_object(usage.get("input_tokens_details")).get("cached_tokens")
    return build_usage(usage.get("input_tokens"), usage.get("output_tokens"), cached)


def _get_status(answer: JsonObject) -> str:
    return as_string(answer.get("status"))


# The last event of a stream contains the whole response as its member `response`, including the usage.
_USAGE_FORMAT: Final = UsageFormat(
    _parse_counts, _get_status, re.compile(rb'"usage"\s*:\s*\{'), event_member="response"
)


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds the members of a summary call that some providers refuse.

    Args:
        call: The summary call.
        refused: The names of members that this provider has already refused. The result lacks them.
    """
    reasoning = is_reasoning_model(call.model)
    limit = call.max_tokens + get_thinking_allowance(call.model, call.conversation)
    fields: dict[str, Any] = {"max_output_tokens": limit, "store": False}
    if not reasoning and call.temperature is not None:
        fields["temperature"] = call.temperature
    if reasoning and call.conversation is None:
        fields["reasoning"] = {"effort": REASONING_EFFORT}
    if call.cache_key:
        fields["prompt_cache_key"] = call.cache_key
    if has_tools(read_client_members(call.conversation)):
        fields["tool_choice"] = "none"
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    if call.conversation is not None:
        input_json = b"[%b]" % join_messages(append_prompt(call.conversation, call.prompt))
        return continue_client_body(call.conversation, _ANSWER_MEMBERS, {"input": input_json}, own_members)
    fields = {"model": call.model, "instructions": call.system, "input": call.prompt}
    return json.dumps({**fields, **own_members}).encode()


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses a response of the Responses API.

    Raises:
        SummaryError: With the reason `garbage` if the body is not a response of the Responses API, or has the
            status `failed`.
    """
    payload = as_object(parse_json(body))
    output = payload.get("output")
    if not isinstance(output, list) or payload.get("status") == "failed":
        raise SummaryError("garbage")
    items = [as_object(each) for each in output]
    contents = [item.get("content") for item in items if item.get("type") == "message"]
    parts = [as_object(part) for content in contents if isinstance(content, list) for part in content]
    return build_summary_answer(
        _USAGE_FORMAT,
        payload,
        "".join(as_string(part.get("text")) for part in parts if part.get("type") == "output_text"),
        _get_finish_reason(payload),
        called_tools=any(get_item_kind(item) in OUTPUT_TYPES_BY_CALL for item in items),
        refused=any(part.get("type") == "refusal" for part in parts),
    )


def _get_finish_reason(payload: Mapping[str, object]) -> str:
    reason = as_object(payload.get("incomplete_details")).get("reason")
    status = payload.get("status")
    if isinstance(reason, str):
        return _FINISH_REASONS.get(reason, reason)
    return "stop" if status == "completed" else status if isinstance(status, str) else ""


# Types of the events that may come before the first event with a part of the reply.
_OPENING_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns whether the first bytes of a stream contain neither a part of the reply nor an error."""
    return has_only_events(seen, _OPENING_EVENTS)


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
    parse_uncounted=PARSER.parse_uncounted,
    estimate_nontext_tokens=PARSER.estimate_nontext_tokens,
    parse_message=PARSER.parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=join_messages,
    summary_call_format=SummaryCallFormat(
        "/responses", get_thinking_allowance, build_own_members, build_request_body, parse_answer
    ),
    usage_format=_USAGE_FORMAT,
    may_hold_back_stream=_may_hold_back_stream,
    encode_error=format_openai_error,
    search_tool=SEARCH_TOOL,
)
