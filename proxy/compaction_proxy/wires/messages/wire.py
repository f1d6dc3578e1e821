"""Defines `MESSAGES`, the `Wire` of the Messages format.

It also contains the functions with which this wire reads the token usage and makes summary calls. A stream
reports its input tokens at the beginning and its output tokens at the end; some providers report both at the
end. `input_tokens` does not include tokens that the provider wrote to its cache or read from it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.digest import DIGEST_VERSION
from compaction_proxy.core.errors import ClientFacingError, SummaryError, UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.core.model_names import is_new_claude, normalize_model_name
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.body import decode_small_json, parse_body, splice_messages, split_objects
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.json.values import JsonObject, as_object, as_string, parse_json
from compaction_proxy.wires.messages.messages import (
    PARSER,
    PROVIDER_COMPACTS,
    adapt_for_provider,
    attach_parts,
    drop_thoughts,
    encode_message,
    group_into_pieces,
    join_messages,
    shorten_message,
)
from compaction_proxy.wires.messages.search_tool import SEARCH_TOOL
from compaction_proxy.wires.sse import has_only_events
from compaction_proxy.wires.summary_call import (
    SummaryCallFormat,
    build_summary_answer,
    continue_client_body,
    has_tools,
    read_client_members,
    read_client_object,
)
from compaction_proxy.wires.usage import (
    TokenUsage,
    UsageFormat,
    as_token_count,
    build_usage,
    iter_payloads_backwards,
)
from compaction_proxy.wires.wire import MemberNames, Wire

# Types of the events that may come before the first event with a part of the reply.
_OPENING_EVENTS: Final = frozenset({"message_start", "ping"})
# The header that Anthropic requires in every request.
_VERSION_HEADER: Final = {"anthropic-version": "2023-06-01"}
_ERROR_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Matches errors that say that thinking blocks are missing, or were changed, or follow other messages than
# when the model wrote them.
_THINKING_REFUSAL: Final = re.compile(
    rb"bound to a different conversation|Invalid `signature` in `thinking`"
    rb"|must start with a thinking block|`redacted_thinking` blocks in the latest assistant message"
)
_FIRST_SERVER_ERROR_STATUS: Final = 500
# The number of tokens for thinking that a summary call adds to its output limit, if the client has set no
# thinking budget. `CLIENT_ALLOWANCE_TOKENS` applies if the call continues a client's conversation and the
# client's request has the member `thinking`. The call keeps this member, because the prompt cache depends on
# it. Otherwise, `DEFAULT_ALLOWANCE_TOKENS` applies to new Claude models, and no tokens are added for other
# models.
DEFAULT_ALLOWANCE_TOKENS: Final = 2_000
CLIENT_ALLOWANCE_TOKENS: Final = 8_000

# A summary call that continues the client's conversation does not copy these members of the client's request.
# They affect only the response to that request, except for `messages`, which the call replaces.
_ANSWER_MEMBERS: Final = frozenset(
    {"stream", "stop_sequences", "max_tokens", "temperature", "top_p", "top_k", "tool_choice", "metadata"}
    | {"output_config", "output_format", "diagnostics", "messages"}
)
# Values of `thinking.type`, converted to strings, that mean that thinking is off. "None" means that the
# request does not set the type.
_NO_THINKING_TYPES: Final = frozenset({"None", "disabled"})
# Maps stop reasons of this wire to the finish reasons of the Chat Completions wire.
_FINISH_REASONS: Final = {"model_context_window_exceeded": "length"}

# The proxy keeps this many bytes from the beginning of a stream, to read the usage in its first event. This
# event is short.
_HEAD_BYTES: Final = 2_048
_USAGE_PATTERN: Final = re.compile(rb'"usage"\s*:\s*\{')


def _parse_counts(value: object) -> TokenUsage | None:
    usage = as_object(value)
    uncached = as_token_count(usage.get("input_tokens"))
    written = as_token_count(usage.get("cache_creation_input_tokens")) or 0
    cached = as_token_count(usage.get("cache_read_input_tokens")) or 0
    total = None if uncached is None else uncached + written + cached
    return build_usage(total, usage.get("output_tokens"), cached)


def _get_stop_reason(answer: JsonObject) -> str:
    return as_string(answer.get("stop_reason"))


def _parse_stream(head: bytes, rest: bytes) -> TokenUsage | None:
    """Returns the usage in a stream; None if there is no plausible usage.

    The counts in the last event that has usage replace those in the first event, except for zeros.

    Args:
        head: The first bytes of the stream.
        rest: The last lines of the stream.
    """
    first_event = next(
        (each for each in iter_payloads_backwards(head, _USAGE_PATTERN) if "message" in each), {}
    )
    last_event = next(iter_payloads_backwards(rest, _USAGE_PATTERN), {})
    first = as_object(as_object(first_event.get("message")).get("usage"))
    last = {name: count for name, count in as_object(last_event.get("usage")).items() if count}
    usage = _parse_counts({**first, **last})
    return usage and usage._replace(finish_reason=_get_stop_reason(as_object(last_event.get("delta"))))


_USAGE_FORMAT: Final = UsageFormat(
    _parse_counts, _get_stop_reason, _USAGE_PATTERN, parse_stream=_parse_stream, head_bytes=_HEAD_BYTES
)


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Returns how many tokens a model may use for thinking, in addition to its output limit.

    Args:
        model: The summary model.
        conversation: The client's conversation, if the summary call continues it.
    """
    thinking = read_client_object(conversation, "thinking")
    if thinking.get("type") == "disabled":
        return 0
    budget = thinking.get("budget_tokens")
    if type(budget) is int and budget > 0:
        return budget
    if thinking:
        return CLIENT_ALLOWANCE_TOKENS
    return DEFAULT_ALLOWANCE_TOKENS if is_new_claude(normalize_model_name(model)) else 0


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds the members of a summary call that some providers refuse.

    Args:
        call: The summary call.
        refused: The names of members that this provider has already refused. The result lacks them.
    """
    fields: dict[str, Any] = {}
    thinking_type = str(read_client_object(call.conversation, "thinking").get("type"))
    if call.temperature is not None and thinking_type in _NO_THINKING_TYPES:
        fields["temperature"] = call.temperature
    if has_tools(read_client_members(call.conversation)):
        fields["tool_choice"] = {"type": "none"}
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    limit = {"max_tokens": call.max_tokens + get_thinking_allowance(call.model, call.conversation)}
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, limit | dict(own_members))
    messages = [{"role": "user", "content": call.prompt}]
    fields = {"model": call.model, "system": call.system, "messages": messages}
    return json.dumps({**fields, **limit, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """Returns the client's body with the messages of `conversation` and the prompt as its messages.

    Leaves out the members in `_ANSWER_MEMBERS`, except for `effort` in `output_config`. Adds `own_members`.
    """
    own_list = group_into_pieces(split_elements(memoryview(read_client_members(conversation)["messages"])))
    messages: Sequence[Message] = conversation.messages
    if [each.raw for each in messages] != list(own_list):
        messages, members = adapt_for_provider(conversation.raw_body, messages)
        own_members = {**own_members, **{name: json.loads(raw) for name, raw in members.items()}}
    replaced = {"messages": b"[" + join_messages((*messages, Message(role="user", text=prompt))) + b"]"}
    effort = read_client_object(conversation, "output_config").get("effort")
    if isinstance(effort, str):
        replaced = {"output_config": json.dumps({"effort": effort}).encode(), **replaced}
    return continue_client_body(conversation, _ANSWER_MEMBERS, replaced, own_members)


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses a response of the Messages API.

    Raises:
        SummaryError: With the reason `garbage` if the body is not a response of the Messages API.
    """
    payload = as_object(parse_json(body))
    content = payload.get("content")
    if not isinstance(content, list):
        raise SummaryError("garbage")
    blocks, reason = [as_object(each) for each in content], _get_stop_reason(payload)
    return build_summary_answer(
        _USAGE_FORMAT,
        payload,
        "".join(as_string(each.get("text")) for each in blocks if each.get("type") == "text"),
        _FINISH_REASONS.get(reason, reason),
        called_tools=any(str(each.get("type")).endswith("tool_use") for each in blocks),
        refused=reason == "refusal",
    )


def _find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Returns why a request must stay unchanged; empty if it may change.

    The request must stay unchanged if the provider stores the conversation (`stateful`), or compacts it
    itself (`PROVIDER_COMPACTS`).
    """
    values = {name: decode_small_json(raw) for name, raw in indicators.items()}
    if values.get("thread"):
        return "stateful"
    edits = as_object(values.get("context_management")).get("edits")
    kinds = [str(as_object(each).get("type")) for each in (edits if isinstance(edits, list) else ())]
    compacts = values.get("compaction") or any(kind.startswith("compact") for kind in kinds)
    return PROVIDER_COMPACTS if compacts else ""


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns whether the first bytes of a stream contain neither a part of the reply nor an error."""
    return not seen.lstrip().startswith((b"{", b"[")) and has_only_events(seen, _OPENING_EVENTS)


def _encode_error(error: ClientFacingError) -> bytes:
    default_kind = "api_error" if error.status >= _FIRST_SERVER_ERROR_STATUS else "invalid_request_error"
    kind = _ERROR_KINDS.get(error.status, default_kind)
    fields = {"type": kind, "message": str(error)}
    return json.dumps({"type": "error", "error": fields, "request_id": None}).encode()


def _drop_refused_content(raw: bytes, refusal: bytes) -> bytes | None:
    """Returns the body without thinking if the provider has refused the thinking.

    Returns None if the error has another cause, or if the thinking cannot be removed.

    The provider refuses thinking that follows other messages than when the model wrote it. This happens if a
    compaction was in force when the model wrote it, and was later undone or has expired. The thinking then
    follows the client's own messages and no longer the compacted ones.

    Args:
        raw: The refused body.
        refusal: The body of the provider's error.
    """
    if _THINKING_REFUSAL.search(refusal) is None:
        return None
    try:
        body = parse_body(raw, MESSAGES)
        records = [PARSER.parse_message(each) for each in body.messages]
        adapted = drop_thoughts(raw, records)
        if adapted.messages is records:  # the list contains only thinking
            return None
        changed = splice_messages(body, adapted)
    except UnreadableBodyError:
        return None
    return changed if len(changed) < len(raw) else None


MESSAGES = Wire(
    name="messages",
    path_suffix=b"/v1/messages",
    digest_seed=DIGEST_VERSION + b"messages",
    member_names=MemberNames(
        messages="messages",
        output_limits=("max_tokens",),
        prompt_members=("system", "tools"),
        skip_indicators=("context_management", "compaction", "thread"),
        thinking_budgets=(("thinking", "budget_tokens"),),
    ),
    split_message_list=split_objects,
    find_skip_reason=_find_skip_reason,
    group_into_pieces=group_into_pieces,
    parse_uncounted=PARSER.parse_uncounted,
    estimate_nontext_tokens=PARSER.estimate_nontext_tokens,
    parse_message=PARSER.parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=join_messages,
    summary_call_format=SummaryCallFormat(
        "/messages",
        get_thinking_allowance,
        build_own_members,
        build_request_body,
        parse_answer,
        _VERSION_HEADER,
    ),
    usage_format=_USAGE_FORMAT,
    may_hold_back_stream=_may_hold_back_stream,
    encode_error=_encode_error,
    api_key_header=b"x-api-key",
    adapt_for_provider=adapt_for_provider,
    drop_refused_content=_drop_refused_content,
    search_tool=SEARCH_TOOL,
)
