"""Defines `CHAT`, the `Wire` of the Chat Completions format.

It also contains the functions with which this wire reads the token usage and makes summary calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.digest import DIGEST_VERSION
from compaction_proxy.core.errors import SummaryError, format_openai_error
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.wires.body import split_objects
from compaction_proxy.wires.chat.messages import PARSER, attach_parts, encode_message, shorten_message
from compaction_proxy.wires.chat.search_tool import SEARCH_TOOL, find_usage_holders, get_choice
from compaction_proxy.wires.json.values import JsonObject, as_object, as_string, parse_json
from compaction_proxy.wires.project_instructions import rejoin_divided_messages
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
from compaction_proxy.wires.usage import TokenUsage, UsageFormat, as_token_count, build_usage
from compaction_proxy.wires.wire import MemberNames, Wire

# The values of `reasoning_effort` that summary calls try, in this order. If a provider refuses one, later
# calls use the next one. No model accepts both `minimal` and `none`.
REASONING_EFFORTS: Final = ("minimal", "none", "low")
# A summary call that continues the client's conversation does not copy these members of the client's request.
# They affect only the response to that request, except for `messages`, which the call replaces.
_ANSWER_MEMBERS: Final = frozenset(
    {"stream", "stream_options", "n", "stop", "response_format", "max_tokens", "max_completion_tokens"}
    | {"logprobs", "top_logprobs", "logit_bias", "audio", "modalities", "prediction", "metadata", "store"}
    | {"tool_choice", "function_call", "temperature", "top_p", "frequency_penalty", "presence_penalty"}
    | {"web_search_options", "messages"}
)


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_object(value)
    counts = (
        as_object(usage.get("prompt_tokens_details")).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),  # DeepSeek
        usage.get("cached_tokens"),  # Kimi
    )
    cached = next((count for count in map(as_token_count, counts) if count is not None), 0)
    return build_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _find_other_usage(payload: JsonObject) -> TokenUsage | None:
    """Returns the usage in a response that has no member `usage`; None if it reports no usage.

    Groq reports the usage in the member `x_groq`. In streams, Kimi reports it in a choice.
    """
    return next(filter(None, (_parse_counts(each["usage"]) for each in find_usage_holders(payload))), None)


def _find_finish_reason(payload: JsonObject) -> str:
    return as_string(get_choice(payload).get("finish_reason"))


_USAGE_FORMAT: Final = UsageFormat(
    _parse_counts,
    _find_finish_reason,
    re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"'),
    find_other_usage=_find_other_usage,
)


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds those members of a summary call that not every provider accepts.

    Args:
        call: The summary call.
        refused: The results of `find_refused_member` for earlier calls to this provider. The function leaves
            out the members that they name. If these include `max_tokens` or `max_completion_tokens`, it sets
            the other of the two. For a refused value of `reasoning_effort`, it uses the next value.
    """
    client, reasoning = read_client_members(call.conversation), is_reasoning_model(call.model)
    limit = call.max_tokens + get_thinking_allowance(call.model, call.conversation)
    names = ["max_tokens", "max_completion_tokens"]
    if reasoning or "max_completion_tokens" in client:
        names.reverse()
    fields: dict[str, Any] = dict.fromkeys([name for name in names if name not in refused][:1], limit)
    if not reasoning and call.temperature is not None:
        fields["temperature"] = call.temperature
    if reasoning and call.conversation is None:
        efforts = [each for each in REASONING_EFFORTS if f"reasoning_effort={each}" not in refused]
        fields |= {"reasoning_effort": efforts[0]} if efforts else {}
    if call.cache_key:
        fields["prompt_cache_key"] = call.cache_key
    for offered, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if has_tools(client, offered):
            fields[choice] = "none"
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    if call.conversation is not None:
        pieces = [each.raw or encode_message(each) for each in append_prompt(call.conversation, call.prompt)]
        messages_json = b"[" + b",".join(pieces) + b"]"
        return continue_client_body(
            call.conversation, _ANSWER_MEMBERS, {"messages": messages_json}, own_members
        )
    messages = [{"role": "system", "content": call.system}, {"role": "user", "content": call.prompt}]
    return json.dumps({"model": call.model, "messages": messages, **own_members}).encode()


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses a chat completion.

    Raises:
        SummaryError: With the reason `garbage` if the body is not a chat completion.
    """
    completion = as_object(parse_json(body))
    message = get_choice(completion).get("message")
    if not isinstance(message, dict):
        raise SummaryError("garbage")
    return build_summary_answer(
        _USAGE_FORMAT,
        completion,
        _join_text(message.get("content")),
        _find_finish_reason(completion),
        called_tools=bool(message.get("tool_calls") or message.get("function_call")),
        refused=bool(message.get("refusal")),
    )


def _join_text(content: object) -> str:
    """Returns the text of a message's content, without the thinking that some models put into it."""
    if not isinstance(content, list):
        return as_string(content)
    parts = [part for part in map(as_object, content) if part.get("type") in {None, "text", "output_text"}]
    return "".join(as_string(part.get("text")) for part in parts)


def _never_skip(_: Mapping[str, bytes]) -> str:
    return ""


def _keep_elements_as_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Returns the elements unchanged, because every element is one message."""
    return elements


def _join_messages(messages: Sequence[Message]) -> bytes:
    return b",".join([each.raw or encode_message(each) for each in rejoin_divided_messages(messages)])


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns True only while no bytes of a stream have arrived.

    On this wire, even the first event of a stream is an error or a part of the reply.
    """
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
    split_message_list=split_objects,
    find_skip_reason=_never_skip,
    group_into_pieces=_keep_elements_as_pieces,
    parse_uncounted=PARSER.parse_uncounted,
    estimate_nontext_tokens=PARSER.estimate_nontext_tokens,
    parse_message=PARSER.parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=_join_messages,
    summary_call_format=SummaryCallFormat(
        "/chat/completions", get_thinking_allowance, build_own_members, build_request_body, parse_answer
    ),
    usage_format=_USAGE_FORMAT,
    may_hold_back_stream=_may_hold_back_stream,
    encode_error=format_openai_error,
    search_tool=SEARCH_TOOL,
)
