"""Summary calls on the Responses wire: builds the request body and parses the answer.

The body of a call holds either instructions and an input that the proxy writes, or the client's conversation
followed by the prompt. In the second form, tools and other members that a provider puts before the input stay
the same byte for byte, so the provider's prompt cache still applies.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.chat.summary_call import ACKNOWLEDGEMENT, get_thinking_allowance
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.responses.items import OUTPUT_TYPES_BY_CALL
from compaction_proxy.wires.responses.messages import get_kind, join_messages
from compaction_proxy.wires.usage import as_mapping, build_usage, parse_json

# The lowest effort that all reasoning models accept: newer ones refuse `minimal`, and older ones `none`.
REASONING_EFFORT: Final = "low"

# Members of a client's request that affect only its answer or its stored state, and the input. A summary call
# that continues the client's conversation does not copy them.
_ANSWER_MEMBERS: Final = frozenset(
    {"stream", "stream_options", "max_output_tokens", "max_tool_calls", "text", "top_logprobs", "include"}
    | {"temperature", "top_p", "tool_choice", "metadata", "store", "background", "background_options"}
    | {"truncation", "input", "previous_response_id", "conversation", "context_management", "moderation"}
)
# Translates the reasons why an answer was cut off into the finish reasons that the proxy uses for all wires.
_FINISH_REASONS: Final[Mapping[str, str]] = {
    "max_output_tokens": "length",
    "content_filter": "content_filter",
}


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds the members of a summary call that some providers refuse.

    Args:
        call: The summary call.
        refused: The names of members that this provider has already refused. They are left out.
    """
    client = _read_client_members(call.conversation) if call.conversation else {}
    reasoning = get_thinking_allowance(call.model) > 0
    limit = call.max_tokens + get_thinking_allowance(call.model, call.conversation)
    fields: dict[str, Any] = {"max_output_tokens": limit, "store": False}
    if not reasoning and call.temperature is not None:
        fields["temperature"] = call.temperature
    if reasoning and call.conversation is None:
        fields["reasoning"] = {"effort": REASONING_EFFORT}
    if call.cache_key:
        fields["prompt_cache_key"] = call.cache_key
    if client.get("tools", b"[]").strip() not in {b"[]", b"null"}:
        fields["tool_choice"] = "none"
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, own_members)
    fields = {"model": call.model, "instructions": call.system, "input": call.prompt}
    return json.dumps({**fields, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """Returns the client's body with the prompt at the end of its input.

    The members in `_ANSWER_MEMBERS` are left out, and `own_members` are added.
    """
    messages = conversation.messages
    acknowledgements = (ACKNOWLEDGEMENT,) if messages and messages[-1].answered_call_ids else ()
    fields = {
        name: value
        for name, value in _read_client_members(conversation).items()
        if name not in _ANSWER_MEMBERS and name not in own_members
    }
    fields["input"] = b"[%b]" % join_messages(
        (*messages, *acknowledgements, Message(role="user", text=prompt))
    )
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _read_client_members(conversation: ContinuedConversation) -> dict[str, bytes]:
    raw = conversation.raw_body
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses an answer of the Responses API.

    Raises:
        SummaryError: `garbage`: the body is not an answer of the Responses API, or has the status `failed`.
    """
    payload = as_mapping(parse_json(body))
    output = payload.get("output")
    if not isinstance(output, list) or payload.get("status") == "failed":
        raise SummaryError("garbage")
    items = [as_mapping(each) for each in output]
    parts = [part for item in items if item.get("type") == "message" for part in _iter_parts(item)]
    usage = as_mapping(payload.get("usage"))
    cached = as_mapping(usage.get("input_tokens_details")).get("cached_tokens")
    counts = build_usage(usage.get("input_tokens"), usage.get("output_tokens"), cached)
    return SummaryAnswer(
        text="".join(_iter_texts(parts)),
        finish_reason=_get_finish_reason(payload),
        called_tools=any(get_kind(item) in OUTPUT_TYPES_BY_CALL for item in items),
        refused=any(part.get("type") == "refusal" for part in parts),
        prompt_tokens=counts.prompt_tokens if counts else 0,
        completion_tokens=counts.completion_tokens if counts else 0,
        cached_tokens=counts.cached_tokens if counts else 0,
    )


def _iter_parts(item: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    content = item.get("content")
    yield from map(as_mapping, content if isinstance(content, list) else ())


def _iter_texts(parts: Iterable[Mapping[str, object]]) -> Iterator[str]:
    for part in parts:
        text = part.get("text")
        if part.get("type") == "output_text" and isinstance(text, str):
            yield text


def _get_finish_reason(payload: Mapping[str, object]) -> str:
    reason = as_mapping(payload.get("incomplete_details")).get("reason")
    status = payload.get("status")
    if isinstance(reason, str):
        return _FINISH_REASONS.get(reason, reason)
    return "stop" if status == "completed" else status if isinstance(status, str) else ""
